"""The text decoder: embedding, layers, the last mix and norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from k3model.norms import RMSNorm
from k3model.text.decoder_layer import DecoderLayer
from k3model.text.documents import Documents
from k3model.text.residual_mix import ResidualMix
from k3model.text_config import TextConfig


class TextDecoder(nn.Module):
    """Token embeddings to the hidden states that the language head reads.

    Attributes:
        activation_checkpointing: drop each layer's activations in the forward pass and recompute them in backward.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        # Keyed by number, so that a pipeline stage can drop layers and the rest keep their names.
        self.layers = nn.ModuleDict(
            {str(layer_index): DecoderLayer(config, layer_index) for layer_index in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixes_depth = config.attn_res_block_size is not None
        if self.mixes_depth:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
            self.mix = ResidualMix()
        self.activation_checkpointing = False

    def forward(self, prefix: Tensor, *bank: Tensor, documents: Documents) -> Tensor:
        """Run the layers that are here, then the last mix and norm.

        Args:
            prefix: ``[B, T, hidden]``: the embeddings, or the running sum that the stage before hands on.
            bank: finished blocks that come with it, each ``[B, T, hidden]``.
            documents: what belongs together.

        Returns:
            ``[B, T, hidden]``.
        """
        return self.finish(*self.run_layers((prefix, *bank), documents))

    def run_layers(self, stream: tuple[Tensor, ...], documents: Documents) -> tuple[Tensor, ...]:
        """Run the layers that are here on a running sum and its bank, as a pipeline stage would."""
        for layer in self.layers.values():
            if self.activation_checkpointing and torch.is_grad_enabled():
                stream = checkpoint(layer, *stream, documents=documents, use_reentrant=False)
            else:
                stream = layer(*stream, documents=documents)
        return stream

    def finish(self, prefix: Tensor, *bank: Tensor) -> Tensor:
        """Mix over depth once more, and normalise."""
        if self.mixes_depth:
            prefix = self.mix(prefix, bank, self.output_attn_res_norm, self.output_attn_res_proj)
        out: Tensor = self.norm(prefix)
        return out
