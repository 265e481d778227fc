"""One decoder layer: an attention and a feed-forward sublayer around the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from k3model.norms import RMSNorm
from k3model.text.documents import Documents
from k3model.text.kda_attention import KdaAttention
from k3model.text.mla_attention import MlaAttention
from k3model.text.mlp import Mlp
from k3model.text.moe import SparseMoe
from k3model.text.residual_mix import ResidualMix
from k3model.text_config import TextConfig


class DecoderLayer(nn.Module):
    """KDA or MLA, then experts or a dense block.

    With attention residuals the stream is a running sum (``prefix``) and a ``bank`` of the sums of finished blocks,
    the embedding first. Every ``attn_res_block_size`` layers the sum moves into the bank and starts anew with the
    attention's output. Each sublayer reads a mix of bank and sum; the very first reads the embedding as it is, so
    layer 0's ``self_attention_res_*`` parameters exist and get no gradient. Without attention residuals the bank
    stays empty and the layer is the usual pre-norm block.
    """

    def __init__(self, config: TextConfig, layer_index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer_index = layer_index
        self.block_size = config.attn_res_block_size
        self.self_attn = _attention(config, layer_index)
        if config.moe is not None and config.is_moe(layer_index):
            self.block_sparse_moe = SparseMoe(config, config.moe)
        else:
            self.mlp = Mlp(config, config.intermediate_size)
        self.is_moe = config.is_moe(layer_index)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if self.block_size is not None:
            self.self_attention_res_norm = RMSNorm(hidden, eps)
            self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False)
            self.mlp_res_norm = RMSNorm(hidden, eps)
            self.mlp_res_proj = nn.Linear(hidden, 1, bias=False)
            self.mix = ResidualMix()

    @property
    def feed_forward(self) -> SparseMoe | Mlp:
        """The experts or the dense block, whichever the layer has."""
        return self.block_sparse_moe if self.is_moe else self.mlp

    @property
    def starts_block(self) -> bool:
        """Whether the running sum moves into the bank before this layer."""
        return self.block_size is not None and self.layer_index % self.block_size == 0

    def forward(self, prefix: Tensor, *bank: Tensor, documents: Documents) -> tuple[Tensor, ...]:
        """Run the layer.

        Args:
            prefix: ``[B, T, hidden]``: the running sum, or the whole stream without attention residuals.
            bank: finished blocks, oldest first, each ``[B, T, hidden]``.
            documents: what belongs together.

        Returns:
            The new running sum, then the new bank.
        """
        if self.block_size is None:
            prefix = prefix + self.self_attn(self.input_layernorm(prefix), documents)
            return (prefix + self.feed_forward(self.post_attention_layernorm(prefix)),)
        x = self.mix(prefix, bank, self.self_attention_res_norm, self.self_attention_res_proj) if bank else prefix
        attended = self.self_attn(self.input_layernorm(x), documents)
        if self.starts_block:
            bank, prefix = (*bank, prefix), attended
        else:
            prefix = prefix + attended
        y = self.mix(prefix, bank, self.mlp_res_norm, self.mlp_res_proj)
        return prefix + self.feed_forward(self.post_attention_layernorm(y)), *bank


def _attention(config: TextConfig, layer_index: int) -> KdaAttention | MlaAttention:
    if config.is_kda(layer_index):
        if config.kda is None:
            raise ValueError(f"layer {layer_index} is KDA, but the config has no KDA geometry")
        return KdaAttention(config.kda, config.hidden_size, config.rms_norm_eps)
    if config.mla is None:
        raise ValueError(f"layer {layer_index} is MLA, but the config has no MLA geometry")
    return MlaAttention(config.mla, config.hidden_size)
