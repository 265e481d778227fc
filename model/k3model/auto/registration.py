"""Tell transformers' Auto classes about K3."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from k3model.auto.configuration import KimiK3AutoConfig, KimiK3TextAutoConfig
from k3model.auto.modeling import KimiK3AutoModel
from k3model.auto.processing import KimiK3Processor
from k3model.auto.tokenization import TikTokenTokenizer


def register() -> None:
    """Register K3's classes; again changes nothing.

    ``kimi_linear`` is the ``model_type`` of K3's text block and of an older family whose class transformers may have.
    From here on it means K3, and configs of the older family are handed to the library's own class.
    """
    for config in (KimiK3AutoConfig, KimiK3TextAutoConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto_model in (AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText):
            auto_model.register(config, KimiK3AutoModel, exist_ok=True)
        AutoTokenizer.register(config, tokenizer_class=TikTokenTokenizer, exist_ok=True)
        AutoProcessor.register(config, KimiK3Processor, exist_ok=True)
