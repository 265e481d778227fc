"""The version of the tool, as recorded in manifests and reports."""

__version__ = "0.1.0"
