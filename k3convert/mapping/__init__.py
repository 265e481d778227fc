"""Names and shapes of K3 tensors on disk, as tables of invertible rules; no values, no paths."""
