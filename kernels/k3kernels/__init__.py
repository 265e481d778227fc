"""The ops of Kimi K3: a registry and the implementations of each op.

Importing this package imports no torch; an implementation is imported when it is resolved.
"""

from k3kernels.handle import K3Op
from k3kernels.op_table import Listing, listing
from k3kernels.registry import (
    Registry,
    list_available,
    list_entries,
    list_registered,
    register_op,
    resolve,
)
from k3kernels.requirement import (
    GpuKernelRequirement,
    MluKernelRequirement,
    NpuKernelRequirement,
    NvidiaGpuPlatform,
    RocmGpuPlatform,
)
from k3kernels.row import Row
from k3kernels.selection import OpsConfig, resolve_op_impl, selected, using

__all__ = [
    "GpuKernelRequirement",
    "K3Op",
    "Listing",
    "MluKernelRequirement",
    "NpuKernelRequirement",
    "NvidiaGpuPlatform",
    "OpsConfig",
    "Registry",
    "RocmGpuPlatform",
    "Row",
    "list_available",
    "list_entries",
    "list_registered",
    "listing",
    "register_op",
    "resolve",
    "resolve_op_impl",
    "selected",
    "using",
]
