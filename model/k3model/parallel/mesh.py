"""The axes of a layout as device meshes and process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from k3model.parallel.layout import Layout


class UnitMeshes(NamedTuple):
    """Over which ranks FSDP units lie, one axis each; all of experts come from one mesh, as FSDP2 wants it.

    Attributes:
        dense: the ranks that share a unit's parameters.
        experts: the ranks that share the same experts.
        ep: the ranks that divide the experts.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands in a layout, and whom it talks to.

    Attributes:
        layout: the degrees.
        dense: axes ``pp, dp, cp, sp``.
        expert: axes ``pp, ep_fsdp, ep``: the same ranks in the same order, counted again for the experts.
        data: one axis ``data`` over ``dp * cp * sp``: the ranks that hold the same layers and different tokens.
        back: one axis ``pp_back``: the ranks of ``pp`` again, in a group of their own for what travels backward.
    """

    layout: Layout
    dense: DeviceMesh
    expert: DeviceMesh
    data: DeviceMesh
    back: DeviceMesh

    @classmethod
    def build(cls, layout: Layout, device_type: str) -> Mesh:
        """Make all groups of a layout. A collective over all ranks of the initialised process group.

        Raises:
            ValueError: the process group has another number of ranks, or ``ep`` does not divide those of a stage.
        """
        if dist.get_world_size() != layout.world_size:
            raise ValueError(f"{layout} needs {layout.world_size} ranks, there are {dist.get_world_size()}")
        ranks = torch.arange(layout.world_size)
        dense = ranks.view(layout.pp, layout.dp, layout.cp, layout.sp)
        expert = ranks.view(layout.pp, layout.ep_fsdp, layout.ep)
        stage = ranks.view(layout.pp, layout.ranks_per_stage)
        by_stage = DeviceMesh(device_type, stage, mesh_dim_names=("pp_back", "data"))
        return cls(
            layout,
            dense=DeviceMesh(device_type, dense, mesh_dim_names=("pp", "dp", "cp", "sp")),
            expert=DeviceMesh(device_type, expert, mesh_dim_names=("pp", "ep_fsdp", "ep")),
            data=by_stage["data"],
            back=by_stage["pp_back"],
        )

    @cached_property
    def shared_units(self) -> UnitMeshes:
        """Units whose parameters the ranks of a stage share."""
        return UnitMeshes(self.data, self.expert["ep_fsdp"], self.expert["ep"])

    @cached_property
    def units_of_one_rank(self) -> UnitMeshes:
        """Units that share nothing, for what FSDP2 does beside sharding. The first use is a collective of all ranks."""
        ranks = torch.arange(self.layout.world_size).view(-1, 1, self.layout.ep)
        mesh = DeviceMesh(self.dense.device_type, ranks, mesh_dim_names=("rest", "alone", "ep"))
        return UnitMeshes(mesh["alone"], mesh["alone"], mesh["ep"])

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along an axis of ``dense`` or ``expert``, ``data`` or ``pp_back``."""
        if axis in ("data", "pp_back"):
            return (self.data if axis == "data" else self.back).get_group()
        mesh = self.expert if axis in ("ep", "ep_fsdp") else self.dense
        return mesh.get_group(axis)

    def place(self, axis: str) -> int:
        """This rank's number along an axis."""
        return dist.get_rank(self.group(axis))
