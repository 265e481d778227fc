"""The data of a recipe, read with the tokenizer and the image processor of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from k3convert.errors import UsageError
from k3convert.training.checkpoint_files import folder_of
from k3convert.training.data.conversations import Conversations
from k3convert.training.data.document import Source
from k3convert.training.data.synthetic import Walks
from k3convert.training.data.text_lines import TextLines
from k3convert.training.recipe import Recipe, SyntheticData, TextData
from k3model.config import KimiK3Config
from k3model.tokenizer import RANKS_FILE, KimiTokenizer
from k3model.vision.image_settings import read_image_processor


def open_source(recipe: Recipe, config: KimiK3Config, checkpoint: Path) -> Source:
    """The documents that a recipe trains on.

    Raises:
        UsageError: a file is missing, or the checkpoint has no tokenizer or no vision tower.
        BadInput: records are wrong.
    """
    data = recipe.data
    if isinstance(data, SyntheticData):
        return Walks(
            ordinary_ids(config),
            num_tokens=data.num_tokens,
            num_successors=data.num_successors,
            length=recipe.batch.sequence_length,
            seed=data.seed,
        )
    assets = folder_of(RANKS_FILE, checkpoint)
    if not (assets / RANKS_FILE).is_file():
        raise UsageError(f"{checkpoint} has no {RANKS_FILE}: nothing can turn the data's text into tokens")
    tokenizer = KimiTokenizer.from_folder(assets)
    path = recipe.data_path()
    if isinstance(data, TextData):
        return TextLines(path, tokenizer, counts_context=data.loss_on == "all", limit=data.limit)
    if config.vision is None:
        raise UsageError("the data are conversations with images, but the checkpoint's config has no vision_config")
    processor = read_image_processor(assets)
    if data.max_image_patches is not None:
        processor = replace(processor, max_patches=min(processor.max_patches, data.max_image_patches))
    images = path.parent if data.images is None else Path(data.images)
    return Conversations(path, images, tokenizer, processor, thinking=data.thinking, limit=data.limit)


def ordinary_ids(config: KimiK3Config) -> Tensor:
    """Every id but the special ones that the config names: int64."""
    text = config.text
    special = {config.media_placeholder_token_id, text.pad_token_id, text.bos_token_id, text.eos_token_id}
    return torch.tensor([token_id for token_id in range(text.vocab_size) if token_id not in special])
