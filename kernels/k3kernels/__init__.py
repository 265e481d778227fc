"""The ops of Kimi K3: a registry and the implementations of each op."""
