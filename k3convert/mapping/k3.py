"""Profile ``k3``: HF names, with each layer's experts stacked into one tensor per matrix.

The names are those of the native network's parameters. A packed stack is ``[E, out, in/2]`` U8 with scales
``[E, out, in/32]`` U8, a decoded one ``[E, out, in]``.
"""

from __future__ import annotations

from k3convert.mapping.rules import Profile, Rename, Stack

_EXPERTS = "language_model.model.layers.{n}.block_sparse_moe.experts"
_ATTENTION = "language_model.model.layers.{n}.self_attn"

K3 = Profile(
    name="k3",
    rules=(
        Stack(_EXPERTS + ".{e}.{w}.weight_packed", _EXPERTS + ".{w}.weight_packed"),
        Stack(_EXPERTS + ".{e}.{w}.weight_scale", _EXPERTS + ".{w}.weight_scale"),
        Stack(_EXPERTS + ".{e}.{w}.weight", _EXPERTS + ".{w}"),
    ),
    holders=(
        Rename(_ATTENTION + ".A_log", _ATTENTION + ".decay.A_log"),
        Rename(_ATTENTION + ".dt_bias", _ATTENTION + ".decay.dt_bias"),
    ),
)

PROFILES = {profile.name: profile for profile in (K3,)}

PACKED_SUFFIX = ".weight_packed"
SCALE_SUFFIX = ".weight_scale"
PLAIN_SUFFIX = ".weight"
EXPERTS_PART = ".block_sparse_moe.experts."
