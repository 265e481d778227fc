"""Files, headers and entries of HF and DCP checkpoints; no K3 names here."""
