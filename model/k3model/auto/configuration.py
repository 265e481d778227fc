"""Configs as transformers holds them: the fields of ``config.json`` as attributes, and a way to the native config."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from k3model.config import MODEL_TYPE, TEXT_MODEL_TYPE, KimiK3Config

# A text config of the same model_type that has none of these is of the older Kimi-Linear family.
_K3_FIELDS = ("attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta")
_LIBRARY_MODULE = "transformers.models.kimi_linear"


class KimiK3TextAutoConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is untyped
    """The ``text_config`` block; on its own, a K3 without vision."""

    model_type: ClassVar[str] = TEXT_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read K3's text config; the older family's goes to the library's own class.

        Raises:
            ValueError: it is the older family's, and this transformers has no class for it.
        """
        if any(name in config_dict for name in _K3_FIELDS):
            return super().from_dict(config_dict, **kwargs)
        if find_spec(_LIBRARY_MODULE) is None:
            raise ValueError(
                f"a {TEXT_MODEL_TYPE} config without {', '.join(_K3_FIELDS)} is not K3's, and this transformers has no "
                f"{_LIBRARY_MODULE}"
            )
        return import_module(_LIBRARY_MODULE).KimiLinearConfig.from_dict(config_dict, **kwargs)

    def native(self) -> KimiK3Config:
        """The checked config of a network without vision.

        Raises:
            ConfigError: with every reason.
        """
        return KimiK3Config.from_dict({"model_type": MODEL_TYPE, "text_config": self.to_dict()})


class KimiK3VisionAutoConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is untyped
    """The ``vision_config`` block."""

    model_type: ClassVar[str] = "kimi_k3_vision"


class KimiK3AutoConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is untyped
    """A whole ``config.json``."""

    model_type: ClassVar[str] = MODEL_TYPE
    sub_configs: ClassVar[dict[str, type]] = {
        "text_config": KimiK3TextAutoConfig,
        "vision_config": KimiK3VisionAutoConfig,
    }

    text_config: Any = None
    vision_config: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Turn the blocks into configs."""
        for name, kind in self.sub_configs.items():
            block = getattr(self, name)
            if isinstance(block, dict):
                setattr(self, name, kind(**{key: value for key, value in block.items() if key != "model_type"}))
        super().__post_init__(**kwargs)

    def native(self) -> KimiK3Config:
        """The checked config.

        Raises:
            ConfigError: with every reason.
        """
        return KimiK3Config.from_dict(self.to_dict())
