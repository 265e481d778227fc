"""The text decoder, one file an idea."""
