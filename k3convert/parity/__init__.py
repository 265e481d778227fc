"""Runs of the network under different implementations and layouts, and how far apart their tensors are."""
