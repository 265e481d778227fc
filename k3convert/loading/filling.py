"""A checkpoint into the tensors of a network, whole ones or this rank's parts of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from k3convert.errors import CensusMismatch
from k3convert.loading.checked_source import CheckedSource
from k3convert.loading.tensor_reader import CHUNK_BYTES, TensorReader
from k3convert.mapping.k3 import K3
from k3convert.planning.inventory import TIED


@torch.no_grad()
def fill(state: Mapping[str, Tensor], source: CheckedSource, *, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Read every tensor of a state in place.

    Args:
        state: parameters and buffers by FQN, all of the network's or those of one pipeline stage; of a DTensor only
            this rank's part is read.
        source: the checkpoint.
        chunk_bytes: the most that is held at once; a tensor that is cut along another dim than its first is held whole.

    Returns:
        How many released tensors were read; a packed pair is one.

    Raises:
        BadInput: one of its kinds.
    """
    reader = TensorReader(source.checkpoint, chunk_bytes)
    used: set[str] = set()
    try:
        for fqn, tensor in state.items():
            local, offsets = local_part(tensor)
            shape = tuple(tensor.shape)
            if K3.is_stack(fqn):
                for position in range(local.shape[0]):
                    name = K3.to_hf(fqn, offsets[0] + position)
                    _read_part(reader, name, local[position], offsets[1:], shape[1:])
                    used.add(name)
                continue
            name = K3.to_hf(fqn)
            if name in TIED and source.config.text.tie_word_embeddings:
                used |= _fill_tied(reader, source, local, offsets, shape)
                continue
            _read_part(reader, name, local, offsets, shape)
            used.add(name)
    finally:
        reader.close()
    return len(used)


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and where in the whole it begins."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offsets)


def _read_part(reader: TensorReader, name: str, out: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Fill ``out`` with the box of a tensor of ``shape`` that begins at ``offsets``."""
    if not out.numel():
        return
    if tuple(out.shape) == shape:
        reader.read_into(name, out)
    elif tuple(out.shape[1:]) == shape[1:] and reader.num_rows(name) == shape[0]:
        reader.read_rows_into(name, offsets[0], out)
    else:
        whole = torch.empty(shape, dtype=out.dtype)
        reader.read_into(name, whole)
        out.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, out.shape, strict=True))])


def _fill_tied(
    reader: TensorReader, source: CheckedSource, local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> set[str]:
    """Fill the one tensor that is embedding and head; a file may hold it under either name, or twice and equal."""
    present = [name for name in TIED if name in source.tensors]
    for number, name in enumerate(present):
        earlier = local.clone() if number else None
        _read_part(reader, name, local, offsets, shape)
        if earlier is not None and not torch.equal(earlier, local):
            raise CensusMismatch(
                f"tie_word_embeddings is true, but {present[0]} and {name} differ",
                hint="one of the two is wrong; nothing here can tell which",
            )
    return set(present)
