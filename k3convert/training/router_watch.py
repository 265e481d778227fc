"""What routers do during a step: how many tokens every expert got, and the margins that balancing needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3convert.training.quantile_balancing import NUM_BINS, Bins, balanced_bias, count_margins
from k3model.network import KimiK3ForConditionalGeneration
from k3model.text.router import Router


class RouterWatch:
    """Counts the routes of real tokens in forward passes; a recomputation in the backward pass is not counted again.

    Args:
        network: as it is laid out; ranks hold different tokens.
        pad_id: the token that padding consists of; None counts every token.
        balances: also collect the margins, and renew the bias with ``balance``.
    """

    def __init__(self, network: KimiK3ForConditionalGeneration, *, pad_id: int | None, balances: bool) -> None:
        self._network, self._pad_id = network, pad_id
        moe = network.config.text.moe
        self.num_experts = 0 if moe is None else moe.num_experts
        self.num_selected = 0 if moe is None else moe.num_experts_per_token
        layers = range(network.config.text.num_hidden_layers) if moe is not None else range(0)
        # Where every token goes to every expert there is nothing to balance.
        self._balances = balances and self.num_selected < self.num_experts
        # All layers on every rank, also those of other stages: counts are summed over all ranks.
        self.layers = [layer for layer in layers if network.config.text.is_moe(layer)]
        device = next(network.parameters()).device
        self._counts_LE = torch.zeros((len(self.layers), self.num_experts), dtype=torch.int64, device=device)
        self._routers: dict[int, Router] = {}
        self._margins: dict[int, Tensor] = {}
        self._is_real: Tensor | None = None
        network.register_forward_pre_hook(self._mark_padding, with_kwargs=True)
        for name, module in network.named_modules():
            if isinstance(module, Router):
                row = self.layers.index(int(name.split(".layers.")[1].split(".")[0]))
                self._routers[row] = module
                module.register_forward_hook(self._count(row))

    def take_counts(self) -> Tensor:
        """Tokens that every expert got since the last call, on all ranks: int64 ``[layers, experts]``. A collective."""
        counts_LE = self._counts_LE.clone()
        self._counts_LE.zero_()
        dist.all_reduce(counts_LE)
        return counts_LE

    @torch.no_grad()
    def balance(self) -> None:
        """Renew every router's bias from the margins since the last call. A collective."""
        if not self._balances:
            return
        shape = (self.num_experts, NUM_BINS)
        for row in range(len(self.layers)):
            counts_EB = self._margins.pop(row, self._counts_LE.new_zeros(shape))
            dist.all_reduce(counts_EB)
            router = self._routers.get(row)
            if router is not None and int(counts_EB[0].sum()):
                bias_E = router.e_score_correction_bias
                bias_E.copy_(balanced_bias(counts_EB, self.num_selected, Bins.around(bias_E)))

    def discard(self) -> None:
        """Forget what was counted: of a pass that was no step."""
        self._counts_LE.zero_()
        self._margins.clear()

    def _mark_padding(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._is_real = None
        if self._pad_id is not None:
            is_real_BT = input_ids != self._pad_id
            share = self._network.share_of_tokens
            self._is_real = (is_real_BT if share is None else share(is_real_BT)).flatten()

    def _count(self, row: int) -> Any:
        @torch.no_grad()
        def hook(router: Router, args: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
            if _is_recomputing():
                return
            ids_NK = output[0] if self._is_real is None else output[0][self._is_real]
            self._counts_LE[row] += torch.bincount(ids_NK.flatten(), minlength=self.num_experts)
            if self._balances:
                x_ND = args[0] if self._is_real is None else args[0][self._is_real]
                scores_NE = router.scores(x_ND)
                bins = Bins.around(router.e_score_correction_bias)
                found = count_margins(scores_NE, router.choice(scores_NE), self.num_selected, bins)
                self._margins[row] = self._margins[row] + found if row in self._margins else found

        return hook


def _is_recomputing() -> bool:
    """Whether a backward pass runs: a forward pass inside it is activation checkpointing's."""
    return torch._C._current_graph_task_id() != -1
