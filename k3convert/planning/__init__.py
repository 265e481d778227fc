"""From tensors found to a frozen plan of destination byte ranges."""
