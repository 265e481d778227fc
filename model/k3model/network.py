"""The whole network: text decoder, vision tower, projector and head under the names of the release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from k3kernels import OpsConfig, using
from k3model.config import KimiK3Config
from k3model.initialisation import initialise
from k3model.text.decoder import TextDecoder
from k3model.text.documents import Documents, find_documents
from k3model.text.language_head import HeadOutput, LanguageHead, shift_labels
from k3model.vision.placeholders import Expansion, expand
from k3model.vision.projector import Projector
from k3model.vision.tower import VisionTower, checked_grids, num_image_tokens


class K3Output(NamedTuple):
    """What a forward pass returns. A tuple, so that a sharding library finds the tensors in it.

    Attributes:
        logits: ``[B, expanded T, vocabulary]`` in the model's dtype, or None where ``with_logits`` was false.
        loss: float32, the mean over counted labels (zero where none is counted); None without labels.
        loss_sum: float32, the sum over counted labels, for one denominator over several batches or ranks.
        token_losses: float32 ``[B, expanded T]``, the terms of that sum, 0 where not counted; without gradient.
        num_labels: int64, how many labels were counted.
        stream: what the next pipeline stage goes on from, the running sum and then the finished blocks, each
            ``[B, expanded T, hidden]``, and everything else None; empty on the last stage.
    """

    logits: Tensor | None = None
    loss: Tensor | None = None
    loss_sum: Tensor | None = None
    token_losses: Tensor | None = None
    num_labels: Tensor | None = None
    stream: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Arrangement:
    """Where the tokens of a batch go, images included.

    Attributes:
        tokens: of a row, images expanded.
        documents: what belongs together.
        expansion: how images come in; None where there are none.
        shifted_labels: int64 ``[B, tokens]``, what each position predicts; None without labels.
    """

    tokens: int
    documents: Documents
    expansion: Expansion | None
    shifted_labels: Tensor | None


class LanguageModel(nn.Module):
    """The text decoder and its head."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        text = config.text
        self.model = TextDecoder(text)
        self.lm_head = LanguageHead(text.hidden_size, text.vocab_size, config.ignore_index)
        self.is_tied = text.tie_word_embeddings
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make embedding and head one parameter where the config says so; moving off ``meta`` takes them apart."""
        if self.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class KimiK3ForConditionalGeneration(nn.Module):
    """Kimi K3 as ordinary PyTorch.

    Args:
        config: geometry.
        ops: which implementation each op uses, as an ``OpsConfig`` or by field name; None keeps the config that is
            installed (eager without one). Handles are resolved here, once.

    Attributes:
        share_of_tokens: of ``[B, T, ...]``, the tokens that this process computes, as a parallel layout has it; None:
            all of them. Layers still get the documents of all tokens.
        without_images: what the embeddings of a batch without images pass through, where a parallel layout needs the
            vision parameters to get a gradient of zeros; None: nothing.
        is_first_stage: whether the embedding and the vision tower are here, and not on an earlier pipeline stage.
        is_last_stage: whether the last norm and the head are here.

    Raises:
        KeyError, RuntimeError: an implementation is unknown or not usable here.
    """

    def __init__(self, config: KimiK3Config, ops: OpsConfig | Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.config = config
        self.share_of_tokens: Callable[[Tensor], Tensor] | None = None
        self.without_images: Callable[[Tensor], Tensor] | None = None
        self.is_first_stage = self.is_last_stage = True
        chosen = ops if ops is None or isinstance(ops, OpsConfig) else OpsConfig.of(ops)
        with nullcontext() if chosen is None else using(chosen):
            self.language_model = LanguageModel(config)
            if config.vision is not None:
                self.vision_tower = VisionTower(config.vision)
                self.mm_projector = Projector(config.vision)

    @classmethod
    def empty(
        cls,
        config: KimiK3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        ops: OpsConfig | Mapping[str, str] | None = None,
    ) -> KimiK3ForConditionalGeneration:
        """A network whose weights hold whatever was in memory, for a caller that fills every one of them.

        Args:
            config: geometry.
            dtype: of all parameters but those that stay float32.
            device: where the weights go; nothing is allocated anywhere else.
            ops: as for the constructor.
        """
        with torch.device("meta"):
            network = cls(config, ops)
        network.to(dtype).to_empty(device=device)
        network.language_model.tie_weights()
        return network

    @classmethod
    def from_config(
        cls,
        config: KimiK3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        ops: OpsConfig | Mapping[str, str] | None = None,
    ) -> KimiK3ForConditionalGeneration:
        """A network with random weights, as for training from scratch; see ``k3model.initialisation``."""
        network = cls.empty(config, dtype=dtype, device=device, ops=ops)
        network.init_weights()
        return network

    def init_weights(self) -> None:
        """Fill every weight anew."""
        initialise(self, self.config.text.initializer_range)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Keep each decoder layer's input only, and recompute the rest in the backward pass."""
        self.language_model.model.activation_checkpointing = enabled

    def image_features(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Images to tokens of the text decoder: ``[tokens, hidden]``, in image order.

        Raises:
            ValueError: the network has no vision tower, or the grids do not fit.
        """
        if self.config.vision is None:
            raise ValueError("pixel_values were given, but the config has no vision_config")
        out: Tensor = self.mm_projector(self.vision_tower(pixel_values, grid_thws))
        return out

    def arrange(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Arrangement:
        """Work out where the tokens of a batch go. Reads no weight; arguments are those of ``forward``.

        Raises:
            ValueError: arguments that do not belong together; the message says which.
        """
        if (pixel_values is None) != (grid_thws is None):
            raise ValueError("pixel_values and grid_thws come together")
        if pixel_values is not None and grid_thws is not None and not len(grid_thws):
            num_placeholders = int((input_ids == self.config.media_placeholder_token_id).sum())
            if len(pixel_values) or num_placeholders:
                raise ValueError(
                    f"grid_thws holds no image, pixel_values {len(pixel_values)} patches, "
                    f"input_ids {num_placeholders} placeholders"
                )
            pixel_values = grid_thws = None  # a batch without images
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels must be {tuple(input_ids.shape)} like input_ids, got {tuple(labels.shape)}")
        # Checked before images come in, so that messages speak of what the caller gave.
        documents = find_documents(input_ids, attention_mask, cu_seqlens)
        expansion, tokens = None, input_ids.shape[1]
        if pixel_values is not None and grid_thws is not None:
            vision = self.config.vision
            if vision is None:
                raise ValueError("pixel_values were given, but the config has no vision_config")
            num_tokens = num_image_tokens(vision, checked_grids(vision, pixel_values, grid_thws))
            expansion = expand(
                input_ids, self.config.media_placeholder_token_id, num_tokens, attention_mask, cu_seqlens
            )
            tokens = expansion.length
            labels = None if labels is None else expansion.labels(labels, self.config.ignore_index)
            like = input_ids.new_empty(1).expand(expansion.batch, tokens)
            documents = find_documents(like, expansion.attention_mask, expansion.cu_seqlens)
        shifted = None if labels is None else shift_labels(labels, documents, self.config.ignore_index)
        return Arrangement(tokens, documents, expansion, shifted)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        with_logits: bool = True,
        stream: tuple[Tensor, ...] = (),
    ) -> K3Output:
        """Predict the next token at every position, or on a pipeline stage do its part of that.

        Args:
            input_ids: int64 ``[B, T]``. An image is one placeholder token, or its number of tokens in placeholders.
            attention_mask: ``[B, T]``, 0 for padding on the left or on the right.
            cu_seqlens: ``[N + 1]``, bounds of documents packed into one row (``B = 1``); nothing crosses them.
            pixel_values: ``[patches, 3, patch, patch]``; comes with ``grid_thws``.
            grid_thws: int64 ``[images, 3]``.
            labels: int64 ``[B, T]``, unshifted, as long as ``input_ids``; ``ignore_index`` is not counted.
            with_logits: false leaves ``logits`` None, so that a loss never needs all logits at once.
            stream: on a later pipeline stage, what the stage before has returned; every stage gets the same batch.

        Raises:
            ValueError: arguments that do not belong together; the message says which.
        """
        if bool(stream) == self.is_first_stage:
            raise ValueError("every pipeline stage but the first goes on from the stream of the one before")
        arranged = self.arrange(input_ids, attention_mask, cu_seqlens, pixel_values, grid_thws, labels)
        if self.is_first_stage:
            embeddings = self._embed(input_ids, arranged, pixel_values, grid_thws)
            stream = (embeddings if self.share_of_tokens is None else self.share_of_tokens(embeddings),)
        decoder = self.language_model.model
        if not self.is_last_stage:
            return K3Output(stream=decoder.run_layers(stream, arranged.documents))
        hidden = decoder(*stream, documents=arranged.documents)
        # Shifted before it is shared: the label of a share's last token is the next share's first.
        shifted = arranged.shifted_labels
        if shifted is not None and self.share_of_tokens is not None:
            shifted = self.share_of_tokens(shifted)
        head: HeadOutput = self.language_model.lm_head(hidden, shifted, with_logits=with_logits)
        loss = None
        if head.loss_sum is not None and head.num_labels is not None:
            loss = head.loss_sum / head.num_labels.clamp(min=1)
        return K3Output(head.logits, loss, head.loss_sum, head.token_losses, head.num_labels)

    def _embed(
        self, input_ids: Tensor, arranged: Arrangement, pixel_values: Tensor | None, grid_thws: Tensor | None
    ) -> Tensor:
        """Tokens and images in their places: ``[B, expanded T, hidden]``."""
        embeddings: Tensor = self.language_model.model.embed_tokens(input_ids)
        if arranged.expansion is None or pixel_values is None or grid_thws is None:
            return embeddings if self.without_images is None else self.without_images(embeddings)
        return arranged.expansion.embeddings(embeddings, self.image_features(pixel_values, grid_thws))
