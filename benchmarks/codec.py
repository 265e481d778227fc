"""Times the MXFP4 codec on one thread against a copy of the same bytes; prints one JSON document.

Run from the repository root: ``python benchmarks/codec.py``. Rates count bf16 bytes: written when decoding, read when
encoding. The runs of all jobs are interleaved, so that a change of the machine's speed meets them all, and the
median counts; every buffer is touched before.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from k3convert.numerics.casts import bf16_to_float32, float32_to_bf16
from k3convert.numerics.digest import digest_hex
from k3convert.numerics.mxfp4_decode import decode
from k3convert.numerics.mxfp4_encode import ScaleRule, encode

ROWS, COLUMNS, NUM_EXPERTS = 3072, 3584, 4
NUM_RUNS = 9


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def main() -> None:
    random = np.random.default_rng(0)
    rows = ROWS * NUM_EXPERTS
    packed = random.integers(0, 256, (rows, COLUMNS // 2), dtype=np.uint8)
    scale = random.integers(117, 124, (rows, COLUMNS // 32), dtype=np.uint8)
    values = np.zeros((rows, COLUMNS), dtype=np.uint16)
    copied = np.zeros_like(values)
    packed_again, scale_again = np.zeros_like(packed), np.zeros_like(scale)

    first_decode_s = seconds(lambda: decode(packed[:1], scale[:1], values[:1]))
    first_encode_s = seconds(
        lambda: encode(values[:1], packed_again[:1], scale_again[:1], rule=ScaleRule.SOURCE, source_scale=scale[:1])
    )
    decode(packed, scale, values)
    nudged = np.empty(values.shape, dtype=np.float32)
    bf16_to_float32(values, nudged)
    nudged *= np.float32(1.01)
    trained = np.empty_like(values)
    float32_to_bf16(nudged, trained)
    del nudged

    def requantize(rule: ScaleRule) -> Callable[[], object]:
        source = scale if rule is ScaleRule.SOURCE else None
        return lambda: encode(trained, packed_again, scale_again, rule=rule, source_scale=source)

    jobs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copied, values),
        "decode": lambda: decode(packed, scale, copied),
        "encode unchanged": lambda: encode(
            values, packed_again, scale_again, rule=ScaleRule.COMPRESSED_TENSORS, source_scale=scale
        ),
        "encode changed, source's rule": requantize(ScaleRule.SOURCE),
        "encode by rule compressed-tensors": requantize(ScaleRule.COMPRESSED_TENSORS),
        "blake3": lambda: digest_hex(values.reshape(-1).view(np.uint8).data),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(NUM_RUNS):
        for name, job in jobs.items():
            times[name].append(seconds(job))
    rates = {name: values.nbytes / statistics.median(runs) / 1e9 for name, runs in times.items()}
    print(
        json.dumps(
            {
                "benchmark": "codec",
                "bf16_bytes": values.nbytes,
                "num_runs": NUM_RUNS,
                "threads": 1,
                "first_decode_s": round(first_decode_s, 3),
                "first_encode_s": round(first_encode_s, 3),
                "gb_per_s": {name: round(rate, 2) for name, rate in rates.items()},
                "decode_share_of_memcpy": round(rates["decode"] / rates["memcpy"], 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
