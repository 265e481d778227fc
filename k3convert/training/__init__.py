"""A short training run that proves a set-up: recipe, data, steps, checkpoints, verdict."""
