"""Names and shapes of K3 tensors on disk, as tables of invertible rules; no values, no paths."""

from k3convert.mapping.k3 import K3, PROFILES
from k3convert.mapping.rules import Profile, Rename, Slot, Stack

__all__ = ["K3", "PROFILES", "Profile", "Rename", "Slot", "Stack"]
