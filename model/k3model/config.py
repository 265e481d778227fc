"""The configuration of a whole K3 checkpoint, read from ``config.json`` without torch or transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from k3model.config_reading import ConfigError, FieldReader
from k3model.quantization_config import BLOCK_SIZE, QuantizationConfig, differences, read_quantization
from k3model.text_config import (
    KdaConfig,
    MlaConfig,
    MoeConfig,
    TextConfig,
    check_truncation,
    read_text,
    zero_based_kda_layers,
)
from k3model.vision_config import VisionConfig, read_vision

if TYPE_CHECKING:
    from k3model.census import TensorSpec

__all__ = [
    "ConfigError",
    "KdaConfig",
    "KimiK3Config",
    "MlaConfig",
    "MoeConfig",
    "QuantizationConfig",
    "TextConfig",
    "VisionConfig",
    "truncated_dict",
]

MODEL_TYPE = "kimi_k3"
TEXT_MODEL_TYPE = "kimi_linear"
DTYPES = ("bfloat16", "float32", "float16", "float64")
# Names of the text block that a file may repeat outside it, with the same value.
_REPEATED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size", "hidden_size")


@dataclass(frozen=True, slots=True)
class KimiK3Config:
    """Text decoder, vision tower, packing: everything that decides which tensors exist and what they compute.

    Attributes:
        vision: None for a network without vision.
        quantization: None where the file has no quantization block; the tensors decide what is packed.
        unknown_keys: keys of the file that nobody read, as dotted paths; harmless dump keys are left out.
    """

    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None
    media_placeholder_token_id: int
    ignore_index: int
    dtype: str
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    def is_kda(self, layer_index: int) -> bool:
        """Whether the 0-based layer is KDA (otherwise it is MLA)."""
        return self.text.is_kda(layer_index)

    def is_moe(self, layer_index: int) -> bool:
        """Whether the 0-based layer has experts (otherwise it is dense)."""
        return self.text.is_moe(layer_index)

    def with_num_layers(self, num_layers: int) -> Self:
        """The config of the first ``num_layers`` text layers; everything else stays.

        Raises:
            ValueError: ``num_layers`` is not in 1..num_hidden_layers.
        """
        return replace(self, text=self.text.with_num_layers(num_layers))

    def census(self, *, packed: bool = True) -> Iterator[TensorSpec]:
        """Every tensor of the checkpoint; see ``k3model.census.census``."""
        from k3model.census import census

        return census(self, packed=packed)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> KimiK3Config:
        """Read the object that ``config.json`` holds.

        Args:
            raw: the parsed file; absent fields take the one value that the released configuration class gives them.

        Raises:
            ConfigError: the file is of another model, misses or contradicts geometry, or spells it in another way;
                ``reasons`` has all of it.
        """
        reasons: list[str] = []
        reader = FieldReader(raw, "", reasons)
        _check_model_type(raw.get("model_type"), MODEL_TYPE, "model_type", reasons)
        text_block = reader.block("text_config")
        if text_block is None:
            reasons.append("text_config is missing: the text decoder has no description")
            _refuse_flat_fields(raw, reasons)
            raise ConfigError(reasons)
        text_reader = FieldReader(text_block, "text_config", reasons)
        _check_model_type(text_block.get("model_type"), TEXT_MODEL_TYPE, "text_config.model_type", reasons)
        text, unknown_text_keys = read_text(text_reader)
        _check_repeated(reader, text_block, reasons)
        vision, unknown_vision_keys = _read_vision_block(reader, text, reasons)
        quantization = _read_quantization_blocks(reader, text_block, text, reasons)
        reader.ignored(("image_placeholder", "use_unified_vision_chunk", "video_placeholder"))
        config = KimiK3Config(
            text=text,
            vision=vision,
            quantization=quantization,
            media_placeholder_token_id=_read_placeholder(reader, text, vision),
            ignore_index=reader.integer("ignore_index", -100, minimum=-(2**31)),
            dtype=_read_dtype(reader, text_block),
            unknown_keys=reader.close() + unknown_text_keys + unknown_vision_keys,
        )
        if reasons:
            raise ConfigError(reasons)
        return config


def _check_model_type(found: object, wanted: str, where: str, reasons: list[str]) -> None:
    if found != wanted:
        reasons.append(f"{where} must be {wanted!r}, got {found!r}")


def _refuse_flat_fields(raw: Mapping[str, Any], reasons: list[str]) -> None:
    """A dict without blocks is another tool's spelling: say what its fields would be called, and what they break."""
    text, _ = read_text(FieldReader(raw, "(top level)", reasons))
    zero_based_kda_layers(FieldReader(raw, "(top level)", reasons), text.num_hidden_layers)


def _check_repeated(reader: FieldReader, text_block: Mapping[str, Any], reasons: list[str]) -> None:
    for name in _REPEATED_FIELDS:
        if name not in reader.raw:
            continue
        outer = reader.value(name)
        if name in text_block and text_block[name] != outer:
            reasons.append(f"{name} is {outer!r} at the top and {text_block[name]!r} in text_config")


def _read_vision_block(
    reader: FieldReader, text: TextConfig, reasons: list[str]
) -> tuple[VisionConfig | None, tuple[str, ...]]:
    block = reader.block("vision_config")
    if block is None:
        return None, ()
    inner = block.get("media_placeholder_token_id")
    if inner is not None and inner != reader.value("media_placeholder_token_id", inner):
        reasons.append(
            f"media_placeholder_token_id is {reader.value('media_placeholder_token_id')!r} at the top and {inner!r} "
            "in vision_config"
        )
    return read_vision(FieldReader(block, "vision_config", reasons), text.hidden_size)


def _read_placeholder(reader: FieldReader, text: TextConfig, vision: VisionConfig | None) -> int:
    token_id = reader.integer("media_placeholder_token_id", 163605, minimum=0)
    if vision is not None and token_id >= text.vocab_size:
        reader.reasons.append(
            f"media_placeholder_token_id {token_id} is outside the vocabulary of {text.vocab_size}, and there is a "
            "vision tower"
        )
    return token_id


def _read_dtype(reader: FieldReader, text_block: Mapping[str, Any]) -> str:
    """The dtype of the weights; older files call it ``torch_dtype``, some say it in the text block alone."""
    found = reader.value("dtype") or reader.value("torch_dtype") or text_block.get("dtype") or DTYPES[0]
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        reader.reasons.append(f"dtype must be one of {', '.join(DTYPES)}, got {found!r}")
    return name


def _read_quantization_blocks(
    reader: FieldReader, text_block: Mapping[str, Any], text: TextConfig, reasons: list[str]
) -> QuantizationConfig | None:
    """The block may stand at the top, in ``text_config``, or in both if they agree."""
    inner_block = FieldReader(text_block, "text_config", reasons).block("quantization_config")
    outer_block = reader.block("quantization_config")
    inner = inner_block and read_quantization(inner_block, "text_config.quantization_config", reasons)
    outer = outer_block and read_quantization(outer_block, "quantization_config", reasons)
    if inner and outer and (disagreements := differences(outer, inner)):
        reasons.append(f"quantization_config at the top contradicts the one in text_config: {', '.join(disagreements)}")
    found = inner or outer or None
    if found and text.moe:
        for name, size in (
            ("the experts' input", text.expert_input_size),
            ("moe_intermediate_size", text.moe.intermediate_size),
        ):
            if size % BLOCK_SIZE:
                reasons.append(f"{name} is {size}, no multiple of the quantization group size {BLOCK_SIZE}")
    return found


def truncated_dict(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The raw ``config.json`` object cut to its first ``num_layers`` text layers.

    Only ``num_hidden_layers`` and the two 1-based layer lists change; every other key and the order of keys stay.

    Raises:
        ValueError: ``num_layers`` is not in 1..num_hidden_layers.
        ConfigError: ``raw`` is no K3 config.
    """
    check_truncation(num_layers, KimiK3Config.from_dict(raw).text.num_hidden_layers)
    text: dict[str, Any] = dict(raw["text_config"])
    text["num_hidden_layers"] = num_layers
    if text.get("linear_attn_config") is not None:
        lists = dict(text["linear_attn_config"])
        for name in ("kda_layers", "full_attn_layers"):
            lists[name] = [layer for layer in lists[name] if layer <= num_layers]
        text["linear_attn_config"] = lists
    return {key: text if key == "text_config" else value for key, value in raw.items()}
