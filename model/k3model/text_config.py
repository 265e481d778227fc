"""The geometry of the text decoder, read from the ``text_config`` block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self

from k3model.config_reading import ConfigError, FieldReader

SCORE_FUNCTIONS = ("sigmoid", "softmax")
# The bound of the decay gate the chunked kernels can factor over 16 rows: exp(16 * 5) is finite in float32.
SMALLEST_GATE_LOWER_BOUND = -5.0
SHOWN_LAYERS = 100
_DROPOUT_FIELDS = ("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention.

    Attributes:
        gate_lower_bound: the bound of the sigmoid decay gate, or None for the softplus gate.
        use_full_rank_gate: one output-gate matrix (``g_proj``) instead of two low-rank ones.
    """

    num_heads: int
    head_dim: int
    conv_kernel_size: int
    use_full_rank_gate: bool
    gate_lower_bound: float | None

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Gated multi-head latent attention without positions."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    use_output_gate: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key; the ``rope`` part is there and is never rotated."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts and its router.

    Attributes:
        latent_size: width the routed experts see, or None for the hidden size.
        latent_norm: RMSNorm on the combined expert output; always false without a latent.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    latent_size: int | None
    latent_norm: bool
    score_function: str
    renormalize: bool
    routed_scaling_factor: float
    num_groups: int
    topk_group: int
    first_layer: int
    layer_freq: int


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text decoder. Layer numbers are 0-based here; the file's lists are 1-based.

    Attributes:
        kda_layers: 0-based indices of the KDA layers; every other layer is MLA.
        attn_res_block_size: layers a block of the attention residuals, or None for the usual residual stream.
        situ_linear_beta: bound of SiTU's linear branch, or None to leave that branch alone.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    initializer_range: float
    max_position_embeddings: int
    situ_beta: float
    situ_linear_beta: float | None
    attn_res_block_size: int | None
    kda_layers: frozenset[int]
    kda: KdaConfig | None
    mla: MlaConfig | None
    moe: MoeConfig | None
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    tie_word_embeddings: bool

    def is_kda(self, layer_index: int) -> bool:
        """Whether the 0-based layer is KDA (otherwise it is MLA)."""
        return layer_index in self.kda_layers

    def is_moe(self, layer_index: int) -> bool:
        """Whether the 0-based layer has experts (otherwise it is dense)."""
        moe = self.moe
        return moe is not None and layer_index >= moe.first_layer and layer_index % moe.layer_freq == 0

    @property
    def expert_input_size(self) -> int:
        """Width the routed experts read and write."""
        return (self.moe.latent_size if self.moe else None) or self.hidden_size

    def with_num_layers(self, num_layers: int) -> Self:
        """The config of the first ``num_layers`` layers.

        Raises:
            ValueError: ``num_layers`` is not in 1..num_hidden_layers.
        """
        check_truncation(num_layers, self.num_hidden_layers)
        kda_layers = frozenset(layer for layer in self.kda_layers if layer < num_layers)
        return replace(
            self,
            num_hidden_layers=num_layers,
            kda_layers=kda_layers,
            kda=self.kda if kda_layers else None,
            mla=self.mla if len(kda_layers) < num_layers else None,
        )

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> TextConfig:
        """Read a ``text_config`` block on its own.

        Raises:
            ConfigError: with every reason.
        """
        reasons: list[str] = []
        config, _ = read_text(FieldReader(raw, "text_config", reasons))
        if reasons:
            raise ConfigError(reasons)
        return config


def check_truncation(num_layers: int, num_hidden_layers: int) -> None:
    """Refuse a number of layers the network does not have.

    Raises:
        ValueError: ``num_layers`` is not in 1..num_hidden_layers.
    """
    if not 1 <= num_layers <= num_hidden_layers:
        raise ValueError(f"num_layers must be in 1..{num_hidden_layers}, got {num_layers}")


def read_text(reader: FieldReader) -> tuple[TextConfig, tuple[str, ...]]:
    """Read the block into a config and the names of its unknown keys; reasons collect in the reader."""
    num_hidden_layers = reader.integer("num_hidden_layers", 32)
    kda_layers, kda = _read_kda(reader, num_hidden_layers)
    vocab_size = reader.integer("vocab_size", 163840)
    hidden_size = reader.integer("hidden_size", 4096)
    tokens = {
        name: _token_id(reader, name, default, vocab_size)
        for name, default in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2))
    }
    # The format's default is "silu", which this network has no form of, so an absent hidden_act is refused as well.
    reader.choice("hidden_act", "silu", ("situ",))
    reader.nothing(("num_nextn_predict_layers",), "the checkpoint has no multi-token prediction layers")
    reader.nothing(_DROPOUT_FIELDS, "the network has no dropout")
    # Present in files of this family and without any effect here: nothing rotates, and each attention has its own dims.
    reader.ignored(("rope_theta", "rope_scaling", "rope_parameters", "head_dim"))
    reader.ignored(("dtype", "torch_dtype", "quantization_config"))
    config = TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size", 11008),
        num_hidden_layers=num_hidden_layers,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        initializer_range=reader.number("initializer_range", 0.02),
        max_position_embeddings=reader.integer("max_position_embeddings", 4096),
        situ_beta=reader.optional_number("activation_situ_beta") or 1.0,
        situ_linear_beta=reader.optional_number("activation_situ_linear_beta"),
        attn_res_block_size=reader.optional_integer("attn_res_block_size"),
        kda_layers=kda_layers,
        kda=kda,
        mla=_read_mla(reader, num_hidden_layers - len(kda_layers)),
        moe=_read_moe(reader),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        **tokens,
    )
    return config, reader.close()


def _token_id(reader: FieldReader, name: str, default: int, vocab_size: int) -> int | None:
    if name in reader.raw and reader.value(name) is None:
        return None
    token_id = reader.integer(name, default, minimum=0)
    if token_id >= vocab_size:
        reader.refuse(f"{name} {token_id} is outside the vocabulary of {vocab_size}")
    return token_id


def _read_kda(reader: FieldReader, num_hidden_layers: int) -> tuple[frozenset[int], KdaConfig | None]:
    block = reader.block("linear_attn_config")
    if block is None:
        return frozenset(), None
    inner = FieldReader(block, f"{reader.where}.linear_attn_config", reader.reasons)
    kda_layers = zero_based_kda_layers(inner, num_hidden_layers)
    because = f"{len(kda_layers)} layers are KDA"
    lower_bound = inner.value("gate_lower_bound")
    if lower_bound is not None and not (
        isinstance(lower_bound, int | float) and SMALLEST_GATE_LOWER_BOUND <= lower_bound < 0
    ):
        inner.refuse(f"gate_lower_bound must be null or in [{SMALLEST_GATE_LOWER_BOUND}, 0), got {lower_bound!r}")
        lower_bound = None
    kda = None
    if kda_layers:
        kda = KdaConfig(
            num_heads=inner.needed_integer("num_heads", because),
            head_dim=inner.needed_integer("head_dim", because),
            conv_kernel_size=inner.needed_integer("short_conv_kernel_size", because),
            use_full_rank_gate=inner.flag("use_full_rank_gate", False),
            gate_lower_bound=None if lower_bound is None else float(lower_bound),
        )
    inner.ignored(("num_heads", "head_dim", "short_conv_kernel_size", "use_full_rank_gate"))
    inner.close()
    return kda_layers, kda


def zero_based_kda_layers(reader: FieldReader, num_hidden_layers: int) -> frozenset[int]:
    """The 0-based KDA layers: the one place where the file's 1-based lists are converted."""
    lists = [reader.layer_list(name) for name in ("kda_layers", "full_attn_layers")]
    named = [layer for layers in lists for layer in layers or ()]
    outside = sorted({layer for layer in named if not 1 <= layer <= num_hidden_layers})
    if outside:
        reader.refuse(f"layers {outside} are outside 1..{num_hidden_layers}; the lists are 1-based")
    if repeated := sorted(layer for layer, count in Counter(named).items() if count > 1):
        reader.refuse(f"layers {repeated} are named twice in kda_layers and full_attn_layers")
    if None in lists:
        return frozenset()
    known = set(named)
    num_missing = num_hidden_layers - len(known.difference(outside))
    if num_missing:
        layers = (layer for layer in range(1, num_hidden_layers + 1) if layer not in known)
        more = f" and {num_missing - SHOWN_LAYERS} more" if num_missing > SHOWN_LAYERS else ""
        shown = list(islice(layers, min(num_missing, SHOWN_LAYERS)))
        reader.refuse(f"layers {shown}{more} are in neither kda_layers nor full_attn_layers")
    return frozenset(layer - 1 for layer in lists[0] or () if 1 <= layer <= num_hidden_layers)


def _read_mla(reader: FieldReader, num_mla_layers: int) -> MlaConfig | None:
    because = f"{num_mla_layers} layers are full attention"
    num_heads = reader.integer("num_attention_heads", 32)
    num_key_value_heads = reader.optional_integer("num_key_value_heads") or num_heads
    uses_no_positions = reader.flag("mla_use_nope", False)
    use_output_gate = reader.flag("mla_use_output_gate", False)
    dims = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if num_mla_layers <= 0:
        reader.ignored(dims)
        return None
    if num_key_value_heads != num_heads:
        reader.refuse(
            f"num_key_value_heads {num_key_value_heads} differs from num_attention_heads {num_heads}; "
            "latent attention has one key and value per head"
        )
    if not uses_no_positions:
        reader.refuse(f"mla_use_nope must be true: {because}, and rotary positions are not part of this network")
    sizes = {
        name: reader.needed_integer(name, because, minimum=0 if name == "qk_rope_head_dim" else 1) for name in dims
    }
    return MlaConfig(num_heads=num_heads, use_output_gate=use_output_gate, **sizes)


def _read_moe(reader: FieldReader) -> MoeConfig | None:
    num_experts = reader.optional_integer("num_experts", minimum=0)
    num_groups = reader.integer("num_expert_group", 1)
    topk_group = reader.integer("topk_group", 1)
    use_groups = reader.flag("use_grouped_topk", True)
    latent_size = reader.optional_integer("routed_expert_hidden_size")
    latent_norm = reader.flag("latent_moe_use_norm", False)
    num_shared_experts = reader.optional_integer("num_shared_experts", minimum=0)
    score_function = reader.choice("moe_router_activation_func", "sigmoid", SCORE_FUNCTIONS)
    renormalize = reader.flag("moe_renormalize", True)
    routed_scaling_factor = reader.number("routed_scaling_factor", 1.0)
    first_layer = reader.integer("first_k_dense_replace", 0, minimum=0)
    layer_freq = reader.integer("moe_layer_freq", 1)
    reader.fixed({"topk_method": "noaux_tc"})
    if not num_experts:
        reader.ignored(("num_experts_per_token", "moe_intermediate_size"))
        return None
    because = f"num_experts is {num_experts}"
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=reader.needed_integer("num_experts_per_token", because),
        intermediate_size=reader.needed_integer("moe_intermediate_size", because),
        latent_size=latent_size,
        latent_norm=latent_norm and latent_size is not None,
        num_groups=num_groups,
        topk_group=topk_group,
        num_shared_experts=num_shared_experts or 0,
        score_function=score_function,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        first_layer=first_layer,
        layer_freq=layer_freq,
    )
    _check_groups(reader, moe, use_groups)
    return moe


def _check_groups(reader: FieldReader, moe: MoeConfig, use_groups: bool) -> None:
    if moe.num_experts_per_token > moe.num_experts:
        reader.refuse(f"num_experts_per_token {moe.num_experts_per_token} exceeds num_experts {moe.num_experts}")
    if moe.topk_group > moe.num_groups:
        reader.refuse(f"topk_group {moe.topk_group} exceeds num_expert_group {moe.num_groups}")
    if moe.num_groups == 1:
        return
    if not use_groups:
        reader.refuse(f"use_grouped_topk is false, but num_expert_group is {moe.num_groups}")
    group_size, left_over = divmod(moe.num_experts, moe.num_groups)
    if left_over or group_size < 2:
        reader.refuse(f"num_experts {moe.num_experts} does not split into {moe.num_groups} groups of two or more")
    elif moe.topk_group * group_size < moe.num_experts_per_token:
        reader.refuse(
            f"topk_group {moe.topk_group} groups of {group_size} experts hold fewer than "
            f"num_experts_per_token {moe.num_experts_per_token}"
        )
