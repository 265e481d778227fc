"""Training runs of minutes: recipes, data, the loop, its checkpoints and its verdict."""
