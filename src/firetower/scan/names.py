"""What a tensor's name says: which expert it belongs to, whether it is a scale, what is normal for it."""

from __future__ import annotations

import re

_IN_NAME = re.compile(r"(?:^|\.)(?:experts\.|ffn_(?:gate|up|down)\.)(\d+)(?:\.|$)")
_STACKED = re.compile(r"(?:^|\.)(?:\w+_exps(?:\.|_|$)|experts\.\D)")
_SHARED = re.compile(r"shared_expert|_shexp")
_SCALE = re.compile(r"(?:^|[._])(?:scales?(?:_inv|_\d+)?|absmax)$")
_UNBOUNDED = re.compile(r"mask|rope_fre|rope_factors|freqs|running_(?:mean|var)|exp_avg")
_MX_SCALES = re.compile(r"_scales$")


def expert_of(name: str) -> int | None:
    """Index in a name such as ``mlp.experts.17.down_proj.weight`` or ``blk.3.ffn_down.17.weight``."""
    match = _IN_NAME.search(name)
    return int(match[1]) if match and len(match[1]) < 10 else None


def is_stacked(name: str, num_dims: int) -> bool:
    """Whether the first dimension is the expert: ``ffn_down_exps.weight``, ``mlp.experts.down_proj``."""
    return num_dims >= 2 and bool(_STACKED.search(name)) and not _SHARED.search(name)


def is_scale(name: str) -> bool:
    """Whether the tensor holds quantisation scales: ``weight_scale_inv``, ``weight_scale_2``, ``scales``."""
    return bool(_SCALE.search(name))


def mx_blocks_of(name: str) -> str | None:
    """For ``X_scales``, the ``X_blocks`` beside which a uint8 tensor holds E8M0 scales; else None."""
    return _MX_SCALES.sub("_blocks", name) if _MX_SCALES.search(name) else None


def may_hold_neg_inf(name: str) -> bool:
    """Mask buffers hold -Inf or the type's minimum on purpose."""
    return "mask" in name


def is_unbounded(name: str) -> bool:
    """Buffers, not weights, that may be huge: masks, rope frequencies (1e30 switches one off), statistics."""
    return bool(_UNBOUNDED.search(name))
