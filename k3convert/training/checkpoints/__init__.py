"""Checkpoints of a training run: written whole or not at all, and read in place."""
