"""Where in the network an element of a tensor is, in words: layer, module, token, head, channel, expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from k3convert.parity.measure import measure
from k3convert.parity.records import Entry, Kind
from k3model.config import KimiK3Config

_QUANTITIES = {
    Kind.INPUT: "input",
    Kind.INPUT_GRADIENT: "gradient of the input",
    Kind.OUTPUT: "output",
    Kind.OUTPUT_GRADIENT: "gradient of the output",
    Kind.PARAMETER_GRADIENT: "gradient of the parameter",
    Kind.LOGITS: "logits",
    Kind.TOKEN_LOSS: "loss of the token",
    Kind.LOSS: "loss",
    Kind.GRADIENT_NORM: "norm of all gradients",
    Kind.ROUTED_EXPERTS: "chosen experts",
    Kind.ROUTING_SCORES: "scores of the experts",
}
_PATCHES = ("vision_tower", "mm_projector")

# What the channels of a module's output are, by the module's own name; these of attention differ between its kinds.
_HIDDEN, _INNER, _LATENT = "hidden channel", "intermediate channel", "latent channel"
_KDA_CHANNEL, _KDA_HEAD, _LOW_RANK = "kda channel", "kda head", "low-rank channel"
_MLA_QUERY, _MLA_KEY_VALUE, _MLA_VALUE = "mla query", "mla key and value", "mla value"
_KEY_LATENT, _KEY_VALUE_LATENT, _QUERY_LATENT = "key latent", "key-value latent channel", "query latent channel"
_EXPERT, _SLOT, _TOKEN_ID, _TAP, _CHANNEL = "expert", "slot", "token id", "tap", "channel"
_ONE = ""  # a dim of one

_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "embed_tokens": (_HIDDEN,),
    "lm_head": (_TOKEN_ID,),
    "gate_proj": (_INNER,),
    "up_proj": (_INNER,),
    "down_proj": (_HIDDEN,),
    "gate": (_SLOT,),
    "experts": (_LATENT,),
    "routed_expert_down_proj": (_LATENT,),
    "routed_expert_norm": (_LATENT,),
    "routed_expert_up_proj": (_HIDDEN,),
    "self_attn": (_HIDDEN,),
    "o_proj": (_HIDDEN,),
    "mlp": (_HIDDEN,),
    "block_sparse_moe": (_HIDDEN,),
    "shared_experts": (_HIDDEN,),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
    "norm": (_HIDDEN,),
}
_KDA_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    **{f"{stream}_proj": (_KDA_CHANNEL,) for stream in ("q", "k", "v", "f_b", "g", "g_b")},
    **{f"{stream}_conv1d": (_KDA_CHANNEL,) for stream in ("q", "k", "v")},
    "f_a_proj": (_LOW_RANK,),
    "g_a_proj": (_LOW_RANK,),
    "b_proj": (_KDA_HEAD,),
    "decay": (_KDA_HEAD, _CHANNEL),
    "o_norm": (_KDA_HEAD, _CHANNEL),
}
_MLA_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "q_a_proj": (_QUERY_LATENT,),
    "q_a_layernorm": (_QUERY_LATENT,),
    "q_b_proj": (_MLA_QUERY,),
    "kv_a_proj_with_mqa": (_KEY_LATENT,),
    "kv_a_layernorm": (_KEY_VALUE_LATENT,),
    "kv_b_proj": (_MLA_KEY_VALUE,),
    "g_proj": (_MLA_VALUE,),
}
# What a weight reads, where that is not the hidden state; its rows are what its module's output is made of.
_READS = {
    "down_proj": _INNER,
    "routed_expert_up_proj": _LATENT,
    "f_b_proj": _LOW_RANK,
    "g_b_proj": _LOW_RANK,
    "q_b_proj": _QUERY_LATENT,
    "kv_b_proj": _KEY_VALUE_LATENT,
}
# Parameters that are no matrix of what is written and what is read, by their own name or their module's.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "w1": (_EXPERT, _INNER, _LATENT),
    "w3": (_EXPERT, _INNER, _LATENT),
    "w2": (_EXPERT, _LATENT, _INNER),
    "gate.weight": (_EXPERT, _HIDDEN),
    "A_log": (_KDA_HEAD,),
    "dt_bias": (_KDA_CHANNEL,),
    "q_conv1d.weight": (_KDA_CHANNEL, _ONE, _TAP),
    "k_conv1d.weight": (_KDA_CHANNEL, _ONE, _TAP),
    "v_conv1d.weight": (_KDA_CHANNEL, _ONE, _TAP),
    "o_norm.weight": (_CHANNEL,),
    "embed_tokens.weight": (_TOKEN_ID, _HIDDEN),
    "self_attention_res_proj.weight": (_ONE, _HIDDEN),
    "mlp_res_proj.weight": (_ONE, _HIDDEN),
    "output_attn_res_proj.weight": (_ONE, _HIDDEN),
}


@dataclass(frozen=True, slots=True)
class Place:
    """An element of a recorded tensor.

    Attributes:
        quantity: what the tensor is, in words.
        layer: of the text decoder, 0-based; None outside of it.
        layer_kind: ``KDA`` or ``MLA``; empty outside of the text decoder.
        module: FQN of the module or parameter.
        coordinates: by name, from the first dim to the last.
        impl: the ops of the module, as they ran.
    """

    quantity: str
    layer: int | None
    layer_kind: str
    module: str
    coordinates: tuple[tuple[str, int], ...]
    impl: str

    @property
    def where(self) -> str:
        """The coordinates in words."""
        return ", ".join(f"{name} {number}" for name, number in self.coordinates)

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer} ({self.layer_kind}), "
        module = f"{self.module}, " if self.module else ""
        impl = f" [{self.impl}]" if self.impl else ""
        return f"{layer}{module}{self.quantity}{': ' if self.coordinates else ''}{self.where}{impl}"


def place_of(entry: Entry, index: int | Sequence[int], config: KimiK3Config) -> Place:
    """Say where an element is.

    Args:
        entry: its tensor.
        index: flat, or one number a dim.
        config: of the network, for the sizes of heads.

    Raises:
        IndexError: there is no such element.
    """
    indices = _unflatten(index, entry.shape) if isinstance(index, int) else tuple(index)
    if len(indices) != len(entry.shape) or any(not 0 <= i < n for i, n in zip(indices, entry.shape, strict=True)):
        raise IndexError(f"{indices} is no element of {list(entry.shape)}")
    is_kda = entry.layer is not None and config.text.is_kda(entry.layer)
    dims = _dims(entry, is_kda)
    if len(dims) > len(indices):
        dims = ()
    dims += tuple(f"dim {number}" for number in range(len(dims), len(indices)))
    coordinates = [c for dim, i in zip(dims, indices, strict=True) for c in _split(dim, i, config)]
    return Place(
        quantity=_QUANTITIES[entry.kind],
        layer=entry.layer,
        layer_kind="" if entry.layer is None else "KDA" if is_kda else "MLA",
        module="" if entry.name == entry.kind else entry.name,
        coordinates=tuple(coordinates),
        impl=entry.impl,
    )


def describe_element(
    entry: Entry, index: int | Sequence[int], config: KimiK3Config, *, candidate: float, baseline: float
) -> str:
    """The place of an element, both its values, and how many units in the last place lie between them."""
    distance = ulps_between(candidate, baseline, getattr(torch, entry.dtype))
    apart = "of opposite sign or not finite" if distance is None else f"{distance:,} ULP apart"
    return f"{place_of(entry, index, config)}: {candidate:.9g}, and the baseline has {baseline:.9g} ({apart})"


def ulps_between(a: float, b: float, dtype: torch.dtype) -> int | None:
    """Units in the last place between two values of a dtype; None across zero and beside NaN and infinities."""
    first, second = (torch.tensor([value], dtype=torch.float64).to(dtype) for value in (a, b))
    found = measure(first, second, second).difference
    return None if found.num_sign_flips or not sum(found.ulp_counts) else found.max_ulp


def _dims(entry: Entry, is_kda: bool) -> tuple[str, ...]:
    """The name of every dim of a tensor; empty where no rule knows it."""
    parts = entry.name.partition("#")[0].split(".")
    if entry.kind is Kind.PARAMETER_GRADIENT:
        return _dims_of_parameter(parts, len(entry.shape), is_kda)
    if parts[0] in _PATCHES:
        return ("patch", *(f"dim {number}" for number in range(1, len(entry.shape))))
    token = ("row", "position")
    match entry.kind:
        case Kind.LOGITS:
            return (*token, _TOKEN_ID)
        case Kind.TOKEN_LOSS:
            return token
        case Kind.LOSS | Kind.GRADIENT_NORM:
            return ()
        case Kind.ROUTING_SCORES:
            return (*token, _EXPERT)
        case Kind.ROUTED_EXPERTS:
            return (*token, _SLOT)
        case Kind.INPUT | Kind.INPUT_GRADIENT:
            return (*token, _reads(parts[-1], is_kda))
    if parts[-1].isdigit():
        return (*token, _HIDDEN)
    return (*token, *_outputs(parts[-1], is_kda))


def _dims_of_parameter(parts: Sequence[str], num_dims: int, is_kda: bool) -> tuple[str, ...]:
    for name in (parts[-1], ".".join(parts[-2:])):
        if name in _PARAMETERS:
            return _PARAMETERS[name]
    if parts[0] in _PATCHES or len(parts) < 2:
        return ()
    written = _outputs(parts[-2], is_kda) or (_HIDDEN,)
    return written if num_dims == 1 else (*written, _reads(parts[-2], is_kda))


def _outputs(module: str, is_kda: bool) -> tuple[str, ...]:
    of_attention = _KDA_OUTPUTS if is_kda else _MLA_OUTPUTS
    return of_attention.get(module, _OUTPUTS.get(module, ()))


def _reads(module: str, is_kda: bool) -> str:
    if module == "o_proj":
        return _KDA_CHANNEL if is_kda else _MLA_VALUE
    return _READS.get(module, _HIDDEN)


def _split(dim: str, index: int, config: KimiK3Config) -> tuple[tuple[str, int], ...]:
    """An index in words; channels of all heads together become head and channel."""
    kda, mla = config.text.kda, config.text.mla
    if dim == _ONE:
        return ()
    if dim == _KDA_HEAD:
        return (("head", index),)
    if dim == _KDA_CHANNEL and kda is not None:
        return _head(index, kda.head_dim)
    if mla is None:
        return ((dim, index),)
    if dim == _MLA_QUERY:
        return _head(index, mla.qk_head_dim)
    if dim == _MLA_VALUE:
        return _head(index, mla.v_head_dim)
    if dim == _MLA_KEY_VALUE:
        head, place = divmod(index, mla.qk_nope_head_dim + mla.v_head_dim)
        is_key = place < mla.qk_nope_head_dim
        name = "key channel" if is_key else "value channel"
        return ("head", head), (name, place if is_key else place - mla.qk_nope_head_dim)
    if dim == _KEY_LATENT:
        is_latent = index < mla.kv_lora_rank
        return ((_KEY_VALUE_LATENT, index) if is_latent else ("shared key channel", index - mla.kv_lora_rank),)
    return ((dim, index),)


def _head(index: int, width: int) -> tuple[tuple[str, int], ...]:
    head, channel = divmod(index, width)
    return ("head", head), ("channel", channel)


def _unflatten(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    out: list[int] = []
    for size in reversed(shape):
        index, place = divmod(index, size) if size else (index, 0)
        out.append(place)
    if index:
        raise IndexError(f"the flat index is beyond the {list(shape)} elements")
    return tuple(reversed(out))
