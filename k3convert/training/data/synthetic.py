"""Rows that a network learns in seconds: walks on a small random graph of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from k3convert.errors import UsageError
from k3convert.training.data.document import Document

NUM_WALKS = 4096


class Walks:
    """Every row walks along edges, each of a node's edges as likely as the others.

    Args:
        ordinary_ids: int64 ``[V]``, ids that may occur.
        num_tokens: how many of them are nodes.
        num_successors: edges that leave a node. The loss cannot fall below their number's logarithm.
        length: tokens of a row.
        seed: of the graph and of every walk.

    Raises:
        UsageError: more nodes than ids, or more edges than nodes.
    """

    def __init__(self, ordinary_ids: Tensor, *, num_tokens: int, num_successors: int, length: int, seed: int) -> None:
        if not num_successors <= num_tokens <= len(ordinary_ids):
            raise UsageError(
                f"data.num_successors {num_successors} <= data.num_tokens {num_tokens} <= {len(ordinary_ids)} ordinary "
                "tokens of the vocabulary does not hold"
            )
        self.length, self.seed = length, seed
        generator = torch.Generator().manual_seed(seed)
        self._ids_N = ordinary_ids[torch.randperm(len(ordinary_ids), generator=generator)[:num_tokens]]
        self._edges_NS = torch.stack(
            [torch.randperm(num_tokens, generator=generator)[:num_successors] for _ in range(num_tokens)]
        )

    def __len__(self) -> int:
        return NUM_WALKS

    def num_tokens(self, index: int) -> int:
        """Every row is full."""
        return self.length

    def document(self, index: int) -> Document:
        """One walk; every token of it is counted."""
        generator = torch.Generator().manual_seed((self.seed << 20) + index + 1)
        num_nodes, num_edges = self._edges_NS.shape
        node = int(torch.randint(num_nodes, (), generator=generator))
        choices = torch.randint(num_edges, (self.length,), generator=generator).tolist()
        edges = self._edges_NS.tolist()
        walk = []
        for choice in choices:
            walk.append(node)
            node = edges[node][choice]
        ids = self._ids_N[torch.tensor(walk)]
        return Document(ids, ids.clone())
