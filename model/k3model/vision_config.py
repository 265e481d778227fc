"""The geometry of the vision tower and the projector, read from the ``vision_config`` block."""

from __future__ import annotations

from dataclasses import dataclass

from k3model.config_reading import FieldReader

# The released tower in words: each of these fields has one value.
_FIXED = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "activation_func": "gelu_pytorch_tanh",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "mlp_type": "mlp2",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """MoonViT3d and the patch-merging projector.

    Attributes:
        qkv_size: width of q, of k and of v: all heads together; need not equal ``hidden_size``.
        merge_kernel_size: patches (rows, columns) that become one token of the text decoder.
        max_frames: rows of the temporal position table, the longest clip the tower takes.
    """

    patch_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    qkv_size: int
    intermediate_size: int
    position_rows: int
    position_columns: int
    max_frames: int
    merge_kernel_size: tuple[int, int]
    text_hidden_size: int
    projector_norm_eps: float

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.qkv_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Channels of the patches of one token side by side."""
        return self.hidden_size * self.merge_kernel_size[0] * self.merge_kernel_size[1]


def read_vision(reader: FieldReader, text_hidden_size: int) -> tuple[VisionConfig, tuple[str, ...]]:
    """Read the block into a config and the names of its unknown keys; reasons collect in the reader."""
    reader.fixed(_FIXED)
    reader.ignored(("pad_token_id", "media_placeholder_token_id", "dtype", "torch_dtype"))
    kernel = reader.value("merge_kernel_size", [2, 2])
    if not (isinstance(kernel, list) and len(kernel) == 2 and all(type(side) is int and side > 0 for side in kernel)):
        reader.refuse(f"merge_kernel_size must be two integers above 0, got {kernel!r}")
        kernel = [2, 2]
    config = VisionConfig(
        patch_size=reader.integer("patch_size", 14),
        hidden_size=reader.integer("vt_hidden_size", 1024),
        num_hidden_layers=reader.integer("vt_num_hidden_layers", 27),
        num_heads=reader.integer("vt_num_attention_heads", 12),
        qkv_size=reader.integer("qkv_hidden_size", 1536),
        intermediate_size=reader.integer("vt_intermediate_size", 4096),
        position_rows=reader.integer("init_pos_emb_height", 64),
        position_columns=reader.integer("init_pos_emb_width", 64),
        max_frames=reader.integer("init_pos_emb_time", 4),
        merge_kernel_size=(kernel[0], kernel[1]),
        text_hidden_size=reader.integer("text_hidden_size", 7168),
        projector_norm_eps=reader.number("projector_ln_eps", 1e-5),
    )
    merged_from = config.hidden_size if reader.value("mm_hidden_size") is None else reader.integer("mm_hidden_size", 1)
    if merged_from != config.hidden_size:
        reader.refuse(f"mm_hidden_size {merged_from} differs from vt_hidden_size {config.hidden_size}")
    if config.text_hidden_size != text_hidden_size:
        reader.refuse(
            f"text_hidden_size {config.text_hidden_size} differs from text_config.hidden_size {text_hidden_size}"
        )
    if config.qkv_size % (4 * config.num_heads):
        reader.refuse(
            f"qkv_hidden_size {config.qkv_size} is not vt_num_attention_heads {config.num_heads} times a multiple "
            "of 4, which the two-dimensional rotation needs"
        )
    if config.hidden_size % 2:
        reader.refuse(f"vt_hidden_size {config.hidden_size} is odd; the time embedding needs sine and cosine halves")
    return config, reader.close()
