"""The census: every tensor a checkpoint of a given config holds, from tables of name templates.

Names are the released ones, under the root ``language_model.`` for the text decoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from k3model.config import KimiK3Config
from k3model.quantization_config import BLOCK_SIZE
from k3model.text_config import KdaConfig, MlaConfig, MoeConfig, TextConfig
from k3model.vision_config import VisionConfig

TEXT_ROOT = "language_model."
A_LOG_PADDING = 128
DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
COMPONENTS = ("routed_experts", "trunk", "embed", "lm_head", "final_norm", "projector", "vision")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: HF name.
        dtype: safetensors code: ``BF16``, ``F32`` or ``U8``.
        shapes: accepted shapes; the first is what the release stores.
        component: one of ``COMPONENTS``.
        layer_index: 0-based text layer, or vision block, or None outside layers.
        expert_index: 0-based routed expert, or None.
    """

    name: str
    dtype: str
    shapes: tuple[Shape, ...]
    component: str
    layer_index: int | None
    expert_index: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored form, which has the first shape."""
        return prod(self.shapes[0]) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Template:
    """The part of a spec that does not depend on the layer or the expert."""

    suffix: str
    shapes: tuple[Shape, ...]
    dtype: str = "BF16"


def census(config: KimiK3Config, *, packed: bool = True) -> Iterator[TensorSpec]:
    """Yield every tensor in the release's order of shards: layers, then the rest of the text, projector, vision.

    Args:
        config: decides which tensors exist and their shapes.
        packed: experts as MXFP4 pairs of ``weight_packed`` and ``weight_scale``; otherwise one BF16 ``weight`` each.
    """
    text = config.text
    for layer_index in range(text.num_hidden_layers):
        yield from _layer(text, layer_index, packed)
    root = f"{TEXT_ROOT}model."
    hidden = text.hidden_size
    vocabulary = ((text.vocab_size, hidden),)
    yield TensorSpec(f"{root}embed_tokens.weight", "BF16", vocabulary, "embed", None, None)
    yield TensorSpec(f"{root}norm.weight", "BF16", ((hidden,),), "final_norm", None, None)
    if not text.tie_word_embeddings:
        yield TensorSpec(f"{TEXT_ROOT}lm_head.weight", "BF16", vocabulary, "lm_head", None, None)
    if text.attn_res_block_size is not None:
        for template in _residual_mix(text, "output_attn_res"):
            yield TensorSpec(root + template.suffix, template.dtype, template.shapes, "final_norm", None, None)
    if config.vision is not None:
        yield from _vision(config.vision)


def _layer(text: TextConfig, layer_index: int, packed: bool) -> Iterator[TensorSpec]:
    prefix = f"{TEXT_ROOT}model.layers.{layer_index}."
    for template in _trunk(text, layer_index):
        yield TensorSpec(prefix + template.suffix, template.dtype, template.shapes, "trunk", layer_index, None)
    if not (text.moe and text.is_moe(layer_index)):
        return
    templates = [
        (template.suffix, template.dtype, template.shapes) for template in _expert(text, text.moe, packed=packed)
    ]
    for expert_index in range(text.moe.num_experts):
        expert_prefix = f"{prefix}block_sparse_moe.experts.{expert_index}."
        for suffix, dtype, shapes in templates:
            yield TensorSpec(expert_prefix + suffix, dtype, shapes, "routed_experts", layer_index, expert_index)


def _trunk(text: TextConfig, layer_index: int) -> Iterator[_Template]:
    hidden = text.hidden_size
    if text.kda and text.is_kda(layer_index):
        yield from _kda(text.kda, hidden)
    elif text.mla:
        yield from _mla(text.mla, hidden)
    if text.moe and text.is_moe(layer_index):
        yield from _moe(text.moe, hidden)
    else:
        yield from _mlp("mlp", hidden, text.intermediate_size)
    yield _Template("input_layernorm.weight", ((hidden,),))
    yield _Template("post_attention_layernorm.weight", ((hidden,),))
    if text.attn_res_block_size is not None:
        yield from _residual_mix(text, "self_attention_res")
        yield from _residual_mix(text, "mlp_res")


def _residual_mix(text: TextConfig, name: str) -> Iterator[_Template]:
    yield _Template(f"{name}_norm.weight", ((text.hidden_size,),))
    yield _Template(f"{name}_proj.weight", ((1, text.hidden_size),))


def padded_num_heads(num_heads: int) -> int:
    """Length of ``A_log`` on disk: the heads rounded up to a multiple of 128, the tail zero."""
    return -(-num_heads // A_LOG_PADDING) * A_LOG_PADDING


def _kda(kda: KdaConfig, hidden: int) -> Iterator[_Template]:
    width, head_dim, kernel = kda.width, kda.head_dim, kda.conv_kernel_size
    for letter in "qkv":
        yield _Template(f"self_attn.{letter}_proj.weight", ((width, hidden),))
    for letter in "qkv":
        # the release has the middle dim; other writers drop it or put it last, the bytes being the same
        shapes = ((width, 1, kernel), (width, kernel), (width, kernel, 1))
        yield _Template(f"self_attn.{letter}_conv1d.weight", shapes, "F32")
    a_log_shapes = dict.fromkeys(((padded_num_heads(kda.num_heads),), (kda.num_heads,)))
    yield _Template("self_attn.A_log", tuple(a_log_shapes), "F32")
    yield _Template("self_attn.dt_bias", ((width,),), "F32")
    yield _Template("self_attn.f_a_proj.weight", ((head_dim, hidden),))
    yield _Template("self_attn.f_b_proj.weight", ((width, head_dim),))
    yield _Template("self_attn.b_proj.weight", ((kda.num_heads, hidden),))
    if kda.use_full_rank_gate:
        yield _Template("self_attn.g_proj.weight", ((width, hidden),))
    else:
        yield _Template("self_attn.g_a_proj.weight", ((head_dim, hidden),))
        yield _Template("self_attn.g_b_proj.weight", ((width, head_dim),))
    yield _Template("self_attn.o_norm.weight", ((head_dim,),), "F32")
    yield _Template("self_attn.o_proj.weight", ((hidden, width),))


def _mla(mla: MlaConfig, hidden: int) -> Iterator[_Template]:
    value_width = mla.num_heads * mla.v_head_dim
    yield _Template("self_attn.q_a_proj.weight", ((mla.q_lora_rank, hidden),))
    yield _Template("self_attn.q_a_layernorm.weight", ((mla.q_lora_rank,),))
    yield _Template("self_attn.q_b_proj.weight", ((mla.num_heads * mla.qk_head_dim, mla.q_lora_rank),))
    yield _Template("self_attn.kv_a_proj_with_mqa.weight", ((mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),))
    yield _Template("self_attn.kv_a_layernorm.weight", ((mla.kv_lora_rank,),))
    yield _Template(
        "self_attn.kv_b_proj.weight", ((mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),)
    )
    if mla.use_output_gate:
        yield _Template("self_attn.g_proj.weight", ((value_width, hidden),))
    yield _Template("self_attn.o_proj.weight", ((hidden, value_width),))


def _mlp(name: str, hidden: int, intermediate: int) -> Iterator[_Template]:
    yield _Template(f"{name}.gate_proj.weight", ((intermediate, hidden),))
    yield _Template(f"{name}.up_proj.weight", ((intermediate, hidden),))
    yield _Template(f"{name}.down_proj.weight", ((hidden, intermediate),))


def _moe(moe: MoeConfig, hidden: int) -> Iterator[_Template]:
    yield _Template("block_sparse_moe.gate.weight", ((moe.num_experts, hidden),))
    yield _Template("block_sparse_moe.gate.e_score_correction_bias", ((moe.num_experts,),), "F32")
    if moe.latent_size is not None:
        yield _Template("block_sparse_moe.routed_expert_down_proj.weight", ((moe.latent_size, hidden),))
        yield _Template("block_sparse_moe.routed_expert_up_proj.weight", ((hidden, moe.latent_size),))
        if moe.latent_norm:
            yield _Template("block_sparse_moe.routed_expert_norm.weight", ((moe.latent_size,),))
    if moe.num_shared_experts:
        # All shared experts are one MLP of their widths together.
        yield from _mlp("block_sparse_moe.shared_experts", hidden, moe.intermediate_size * moe.num_shared_experts)


def _expert(text: TextConfig, moe: MoeConfig, *, packed: bool) -> Iterator[_Template]:
    model_side, expert_side = text.expert_input_size, moe.intermediate_size
    for matrix, out_features, in_features in (
        ("w1", expert_side, model_side),
        ("w3", expert_side, model_side),
        ("w2", model_side, expert_side),
    ):
        if packed:
            yield _Template(f"{matrix}.weight_packed", ((out_features, in_features // 2),), "U8")
            yield _Template(f"{matrix}.weight_scale", ((out_features, in_features // BLOCK_SIZE),), "U8")
        else:
            yield _Template(f"{matrix}.weight", ((out_features, in_features),))


def _vision(vision: VisionConfig) -> Iterator[TensorSpec]:
    hidden, merged = vision.hidden_size, vision.merged_size
    projector: tuple[tuple[str, Shape], ...] = (
        ("proj.0.weight", (merged, merged)),
        ("proj.2.weight", (vision.text_hidden_size, merged)),
        ("post_norm.weight", (vision.text_hidden_size,)),
    )
    for suffix, shape in projector:
        yield TensorSpec(f"mm_projector.{suffix}", "BF16", (shape,), "projector", None, None)
    patch = (hidden, 3, vision.patch_size, vision.patch_size)
    grid = (vision.position_rows, vision.position_columns, hidden)
    yield TensorSpec("vision_tower.patch_embed.proj.weight", "BF16", (patch,), "vision", None, None)
    yield TensorSpec("vision_tower.patch_embed.pos_emb.weight", "BF16", (grid,), "vision", None, None)
    block: tuple[tuple[str, Shape], ...] = (
        ("norm0.weight", (hidden,)),
        ("norm1.weight", (hidden,)),
        ("wqkv.weight", (3 * vision.qkv_size, hidden)),
        ("wo.weight", (hidden, vision.qkv_size)),
        ("mlp.fc0.weight", (vision.intermediate_size, hidden)),
        ("mlp.fc1.weight", (hidden, vision.intermediate_size)),
    )
    for block_index in range(vision.num_hidden_layers):
        prefix = f"vision_tower.encoder.blocks.{block_index}."
        for suffix, shape in block:
            yield TensorSpec(prefix + suffix, "BF16", (shape,), "vision", block_index, None)
    yield TensorSpec("vision_tower.encoder.final_layernorm.weight", "BF16", ((hidden,),), "vision", None, None)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a census adds up to.

    Attributes:
        tensors: tensors of each component.
        stored_bytes: payload bytes of each component.
        packed_pairs: expert matrices stored as a packed tensor and its scales.
        packed_values: weights in packed tensors (two to a byte).
        plain_values: elements of every other tensor, padding included; scales are no values.
    """

    tensors: dict[str, int]
    stored_bytes: dict[str, int]
    packed_pairs: int
    packed_values: int
    plain_values: int

    @property
    def num_tensors(self) -> int:
        """Tensors of all components."""
        return sum(self.tensors.values())

    @property
    def total_bytes(self) -> int:
        """Payload of all components: the index's ``total_size``."""
        return sum(self.stored_bytes.values())


def tally(specs: Iterable[TensorSpec]) -> Tally:
    """Count tensors, bytes and values of a census."""
    tensors: Counter[str] = Counter()
    stored_bytes: Counter[str] = Counter()
    packed_pairs = packed_values = plain_values = 0
    for spec in specs:
        num_bytes = spec.num_bytes
        tensors[spec.component] += 1
        stored_bytes[spec.component] += num_bytes
        if spec.dtype != "U8":
            plain_values += num_bytes // DTYPE_BYTES[spec.dtype]
        elif spec.name.endswith("weight_packed"):
            packed_pairs += 1
            packed_values += 2 * num_bytes
    return Tally(dict(tensors), dict(stored_bytes), packed_pairs, packed_values, plain_values)
