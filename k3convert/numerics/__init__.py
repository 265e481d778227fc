"""Bits: the MXFP4 codec, casts, differences and digests; no names here.

Importing this package imports nothing. The compiled kernels (``compiled_*.py``) are the only modules that import
numba, and each is imported by the first call that needs it.
"""
