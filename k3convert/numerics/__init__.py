"""Bits: the MXFP4 codec, casts, digests; no names here."""
