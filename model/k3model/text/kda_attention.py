"""Kimi Delta Attention: a linear recurrence with a decay of its own for every channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from k3kernels import selected
from k3model.kept_dtype import KeptDtype
from k3model.text.decay_gate import ALL, DecayGate
from k3model.text.documents import Documents
from k3model.text_config import KdaConfig


class ShortConvolution(KeptDtype):
    """A causal depthwise convolution with SiLU, reset at document starts. The weight stays float32."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=torch.float32))
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)
        self.short_conv = selected("short_conv_implementation")

    def forward(
        self, x_BTC: Tensor, cu_seqlens: Tensor | None, history: Tensor | None = None, channels: slice = ALL
    ) -> Tensor:
        """``[B, T, C]`` to ``[B, T, C]``, in the dtype of ``x``.

        Args:
            x_BTC: some channels, or all of them.
            cu_seqlens: bounds of packed documents.
            history: ``[N, C, kernel - 1]``, the inputs before each document; None stands for zeros.
            channels: which channels these are.
        """
        out: Tensor = self.short_conv(x_BTC, self.weight[channels], history, cu_seqlens=cu_seqlens)[0]
        return out


class HeadNorm(KeptDtype):
    """RMSNorm of every head's output times a sigmoid gate, one weight for all heads. The weight stays float32."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=torch.float32))
        self.eps = eps
        self.gated_rms_norm = selected("gated_rms_norm_implementation")

    def forward(self, o_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
        """``[B, T, H, V]`` to ``[B, T, H, V]``, in the dtype of ``o``."""
        out: Tensor = self.gated_rms_norm(o_BTHV, gate_BTHV, self.weight, eps=self.eps)
        return out


class KdaStreams(NamedTuple):
    """What the recurrence reads of each token, before convolutions and activations.

    Attributes:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        z: ``[B, T, H, K]``, the decay's pre-activation without its bias.
        beta_logits: ``[B, T, H, 1]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    beta_logits: Tensor


class KdaInputs(NamedTuple):
    """What the recurrence reads of each token, after convolutions and activations.

    Attributes:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        g: ``[B, T, H, K]``, the natural logarithm of the decay.
        beta: ``[B, T, H]``, after its sigmoid.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class KdaAttention(nn.Module):
    """One KDA layer's attention.

    Per head, with a state ``S [K, V]`` and q, k normalised to length one:
    ``S <- diag(exp g) S``; ``S <- S + beta k (v - S^T k)^T``; ``o = S^T q / sqrt(K)``.

    Attributes:
        parallel_forward: how a parallel layout runs this layer on its share of the tokens; None: all tokens are here.

    Source: Kimi K3 report, section 2.1.1, equations 1 and 2.
    """

    def __init__(self, config: KdaConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.q_conv1d = ShortConvolution(width, config.conv_kernel_size)
        self.k_conv1d = ShortConvolution(width, config.conv_kernel_size)
        self.v_conv1d = ShortConvolution(width, config.conv_kernel_size)
        self.f_a_proj = nn.Linear(hidden_size, config.head_dim, bias=False)
        self.f_b_proj = nn.Linear(config.head_dim, width, bias=False)
        self.decay = DecayGate(config)
        self.b_proj = nn.Linear(hidden_size, config.num_heads, bias=False)
        self.full_rank_gate = config.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden_size, config.head_dim, bias=False)
            self.g_b_proj = nn.Linear(config.head_dim, width, bias=False)
        self.o_norm = HeadNorm(config.head_dim, eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.kda = selected("chunk_kda_implementation")
        self.parallel_forward: Callable[[KdaAttention, Tensor, Documents], Tensor] | None = None

    def forward(self, x_BTD: Tensor, documents: Documents) -> Tensor:
        """``[B, T, hidden]`` to ``[B, T, hidden]``; zero at padding.

        Padding is taken out before anything is projected: a recurrence has no mask to hide it with.
        """
        if self.parallel_forward is not None:
            return self.parallel_forward(self, x_BTD, documents)
        batch, tokens = x_BTD.shape[:2]
        x = documents.pack(x_BTD)
        return documents.unpack(self.output(self.mix(self.project(x), documents.cu_seqlens), x), batch, tokens)

    def project(self, x: Tensor) -> KdaStreams:
        """What the recurrence reads of each token, all heads: ``[B, T, hidden]`` to ``[B, T, H, ...]``."""
        return KdaStreams(
            q=self._heads(self.q_proj(x)),
            k=self._heads(self.k_proj(x)),
            v=self._heads(self.v_proj(x)),
            z=self._heads(self.f_b_proj(self.f_a_proj(x))),
            beta_logits=self.b_proj(x)[..., None],
        )

    def mix(self, streams: KdaStreams, cu_seqlens: Tensor | None, *, heads: slice = ALL) -> Tensor:
        """Convolutions and recurrence along whole documents, of some heads or all: ``[B, T, H, V]``."""
        return self.recur(self.prepare(streams, cu_seqlens, heads=heads), cu_seqlens)[0]

    def prepare(
        self, streams: KdaStreams, cu_seqlens: Tensor | None, history: Tensor | None = None, *, heads: slice = ALL
    ) -> KdaInputs:
        """Convolutions and activations of some heads or all.

        Args:
            streams: of these heads.
            cu_seqlens: bounds of packed documents.
            history: ``[N, 3 * H * K, kernel - 1]``, inputs of the three convolutions before each document, in the
                order q, k, v; None stands for zeros.
            heads: which heads these are.
        """
        channels = ALL if heads == ALL else slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        histories = (None,) * 3 if history is None else history.chunk(3, dim=1)
        q, k, v = (
            self._heads(convolution(stream.flatten(-2), cu_seqlens, own_history, channels))
            for convolution, stream, own_history in zip(
                (self.q_conv1d, self.k_conv1d, self.v_conv1d), streams[:3], histories, strict=True
            )
        )
        # Contiguous: elementwise functions of strided tensors may have other last bits, and a layout may hand on views.
        logits = streams.beta_logits[..., 0].contiguous()
        beta = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        return KdaInputs(q, k, v, self.decay(streams.z, heads), beta)

    def recur(
        self,
        inputs: KdaInputs,
        cu_seqlens: Tensor | None,
        state: Tensor | None = None,
        *,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence from a state ``[N, H, K, V]``; None stands for zeros.

        Returns:
            ``[B, T, H, V]``, and the state after each document where it was asked for.
        """
        o, final_state = self.kda(
            *inputs,
            state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            lower_bound=self.decay.lower_bound,
        )
        return o, final_state

    def output(self, o_BTHV: Tensor, x: Tensor) -> Tensor:
        """Norm and gate every head, and project back: ``[B, T, hidden]``."""
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        out: Tensor = self.o_proj(self.o_norm(o_BTHV, self._heads(gate)).flatten(-2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, T, H * K]`` to ``[B, T, H, K]``."""
        return torch.unflatten(x, -1, (-1, self.head_dim))
