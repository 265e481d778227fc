"""Where every chunk goes: file and offset of each DCP entry, fixed by the plan alone."""

from __future__ import annotations

from k3convert.checkpoint.dcp_blob import BlobFrame, blob_frame
from k3convert.checkpoint.dcp_metadata import DcpChunk
from k3convert.checkpoint.dtypes import num_bytes
from k3convert.planning.plan import DestinationFile

DEFAULT_CHUNK_BYTES = 160 << 20
MIN_CHUNK_BYTES = 1 << 10
MAX_CHUNK_BYTES = 2 << 30
FILE_BYTES = 8 << 30


class FileLayout:
    """Places entries one after another in files ``__0_K.distcp``; a new file for each group and after 8 GiB."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def start_group(self) -> None:
        """Begin a new file, unless the current one is empty."""
        if not self._sizes or self._sizes[-1]:
            self._sizes.append(0)

    def start_tensor(self) -> None:
        """Begin a new file if the current one is full; what is placed until the next call shares one file."""
        if not self._sizes or self._sizes[-1] >= FILE_BYTES:
            self._sizes.append(0)

    def place(self, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[DcpChunk, int, BlobFrame]:
        """The next chunk, the number of its file, and its framing."""
        frame = blob_frame(dtype, sizes)
        length = len(frame.prefix) + num_bytes(dtype, sizes) + len(frame.suffix)
        number = len(self._sizes) - 1
        chunk = DcpChunk(offsets, sizes, file_name(number), self._sizes[-1], length)
        self._sizes[-1] += length
        return chunk, number, frame

    def files(self) -> tuple[DestinationFile, ...]:
        """All files with their final sizes, in bytes."""
        return tuple(DestinationFile(file_name(number), size) for number, size in enumerate(self._sizes) if size)


def file_name(number: int) -> str:
    """The name of the K-th data file, as one rank of torch would call it."""
    return f"__0_{number}.distcp"


def row_runs(dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> list[tuple[int, int]]:
    """Cut dim 0 into runs ``(first, count)`` of at most ``chunk_bytes``, at least one row each."""
    if not shape or not shape[0] or num_bytes(dtype, shape) <= chunk_bytes:
        return [(0, shape[0] if shape else 1)]
    row = num_bytes(dtype, (1, *shape[1:]))
    rows = max(1, chunk_bytes // max(1, row))
    return [(first, min(rows, shape[0] - first)) for first in range(0, shape[0], rows)]


def experts_per_chunk(num_experts: int, matrix_bytes: int, chunk_bytes: int) -> int:
    """The largest divisor of the number of experts whose matrices fit a chunk; at least 1.

    A divisor, so that chunks line up with the expert ranges of an EP degree.
    """
    divisors = (run for run in range(1, num_experts + 1) if num_experts % run == 0)
    return max(run for run in divisors if run == 1 or run * matrix_bytes <= chunk_bytes)
