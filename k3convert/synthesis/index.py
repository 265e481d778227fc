"""``model.safetensors.index.json`` in the order of the release: shards shuffled, names backwards inside each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from k3convert.synthesis.random_stream import random_stream

INDEX_NAME = "model.safetensors.index.json"


def write_index(folder: Path, names_of_shard: Mapping[str, Sequence[str]], total_bytes: int, seed: int) -> None:
    """Write the index line by line: half a million names as one document would take hundreds of megabytes."""
    order = [str(shard) for shard in random_stream(seed, INDEX_NAME).permutation(sorted(names_of_shard))]
    separator = "\n"
    with open(folder / INDEX_NAME, "x", encoding="utf-8") as file:
        file.write(f'{{\n  "metadata": {{\n    "total_size": {total_bytes}\n  }},\n  "weight_map": {{')
        for shard in order:
            for name in reversed(names_of_shard[shard]):
                file.write(f"{separator}    {json.dumps(name)}: {json.dumps(shard)}")
                separator = ",\n"
        file.write("\n  }\n}")
