"""The native Kimi K3 network."""
