"""The report of a parity session: one document, and the files that are made of it."""
