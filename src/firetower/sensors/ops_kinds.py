"""What each ATen op does with values, as far as sensing needs to know: moves, writes, launders, allocates."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVERS = _words(
    """
    _conj_physical _copy_from _index_put_impl _reshape_alias _reshape_copy _to_copy _unsafe_index
    _unsafe_index_put _unsafe_view alias_copy amax amin aminmax as_strided_copy as_strided_scatter
    block_diag cat channel_shuffle clamp clamp_max clamp_min clone col2im complex concat concatenate
    constant_pad_nd copy cummax cummin diag diag_embed diagonal_copy diagonal_scatter embedding
    expand_copy fill flip fmax fmin full full_like gather im2col index index_copy index_fill index_put
    index_select kthvalue lift lift_fresh lift_fresh_copy masked_fill masked_scatter masked_select max
    maximum median min minimum mode msort nan_to_num nanmedian narrow_copy native_channel_shuffle
    new_full permute_copy pixel_shuffle pixel_unshuffle put reflection_pad1d reflection_pad2d
    reflection_pad3d relu repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    resolve_conj resolve_neg roll rot90 scalar_tensor scatter select_copy select_scatter slice_copy
    slice_scatter sort split_copy split_with_sizes_copy squeeze_copy stack t_copy take topk
    transpose_copy tril triu unbind_copy unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes
    unsqueeze_copy view_as_complex_copy view_as_real_copy view_copy where _foreach_clamp_max
    _foreach_clamp_min _foreach_copy _foreach_maximum _foreach_minimum
    """
)
"""Ops whose output elements are input elements or constants: they compute no new infinity."""

_BY_PLACE = _words(
    """
    _unsafe_index as_strided_copy diagonal_copy embedding gather im2col index index_select masked_select
    narrow_copy select_copy slice_copy split_copy split_with_sizes_copy take unbind_copy unfold_copy
    unsafe_chunk unsafe_split unsafe_split_with_sizes index_copy slice_scatter select_scatter
    diagonal_scatter as_strided_scatter scatter
    """
)
"""Movers that take or overwrite elements by place: a bad value that they leave behind was not read."""

_SIGN = frozenset(("abs", "neg", "_foreach_abs", "_foreach_neg"))
"""-Inf to +Inf without computing (``isfinite`` is made of ``abs``): stays harmless until used."""

_FILLS = frozenset(("_foreach_zero", "copy", "fill", "zero", "_foreach_copy"))
_RANDOM_FILLS = _words("bernoulli cauchy exponential geometric log_normal normal random uniform")
_INSPECTORS = _words(
    """
    _assert_async _local_scalar_dense equal isfinite isinf isnan isneginf isposinf isreal is_nonzero
    item _is_all_true _is_any_true _foreach_isinf signbit
    """
)
"""Ops that look for bad values or hand them to Python: their integer answer hides nothing."""

_LAUNDERERS = _words(
    """
    argmax argmin argsort bucketize clamp clamp_max clamp_min eq fmax fmin ge gt histc isin kthvalue le
    lt masked_fill max min median mode multinomial nan_to_num nanmedian nansum ne searchsorted sign sort
    topk tril triu where logical_and logical_not logical_or logical_xor nonzero unique2 _unique2 nanmean
    maximum minimum relu threshold hardtanh
    """
)
"""Ops known to make a bad value disappear: their inputs are read even when nothing bad was seen before."""

_ALLOCATORS = _words("empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided resize")
_SHAPE_ONLY = _words(
    """
    empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like
    randint_like randn_like zeros_like sym_numel sym_size sym_storage_offset sym_stride is_same_size
    _has_compatible_shallow_copy_type set_ set resize resize_as _nested_tensor_size
    """
)
_METADATA_ONLY = _words(
    """
    _conj as_strided_ conj detach_ lift_fresh rename_ requires_grad_ set_ squeeze_ swapaxes_ swapdims_ t_
    transpose_ unsqueeze_ _unsafe_view
    """
)
"""Packets that give a tensor another shape or storage and write no element, whatever their schema says."""

_FIRST_OUTPUT_ONLY = "_scaled_dot_product"
"""Fused attention: its further outputs (log-sum-exp, seeds) may be unwritten and feed the backward only."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpInfo:
    """What sensing needs to know of one overload; made once per overload.

    Attributes:
        name: ``aten.mul.Tensor``.
        root: ``mul``, also of ``mul_`` and ``mul.out``.
        is_view: returns a view and computes nothing.
        reinterprets: a view that reads the same bytes as another type.
        mutated: names of arguments written, in schema order; ``outs`` those of them that are ``out=``.
        overwrites: what it writes, it does not read.
        is_composite: made of other ops only; seen whole under ``inference_mode``.
        is_pointwise: output places correspond to input places by broadcasting.
    """

    name: str
    root: str
    arg_names: tuple[str, ...]
    mutated: tuple[str, ...]
    outs: tuple[str, ...]
    is_view: bool
    reinterprets: bool
    overwrites: bool
    is_mover: bool
    by_place: bool
    is_sign: bool
    is_pointwise: bool
    is_allocator: bool
    is_inspector: bool
    reads_values: bool
    launders: bool
    first_output_only: bool
    is_own: bool
    is_composite: bool


@cache
def op_info(func: Any) -> OpInfo:
    """Describe an ``OpOverload``, or a higher-order operator, which is taken as computing."""
    name = str(func)
    schema = getattr(func, "_schema", None)
    packet = getattr(getattr(func, "_overloadpacket", None), "__name__", name)
    root = packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet
    arguments = schema.arguments if schema is not None else ()
    mutated = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    outs = tuple(a.name for a in arguments if a.name in mutated and a.is_out)
    aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)
    is_view = (aliases and not mutated) or packet in _METADATA_ONLY
    reinterprets = name == "aten.view.dtype"
    tags = getattr(func, "tags", ())
    return OpInfo(
        name=name,
        root=root,
        arg_names=tuple(a.name for a in arguments),
        mutated=mutated,
        outs=outs,
        is_view=is_view and not reinterprets,
        reinterprets=reinterprets,
        overwrites=root in _FILLS or root in _RANDOM_FILLS,
        is_mover=root in _MOVERS,
        by_place=root in _BY_PLACE,
        is_sign=root in _SIGN,
        is_pointwise=torch.Tag.pointwise in tags or root == "_to_copy",
        is_allocator=root in _ALLOCATORS,
        is_inspector=root in _INSPECTORS,
        reads_values=root not in _SHAPE_ONLY and root not in _ALLOCATORS,
        launders=root in _LAUNDERERS,
        first_output_only=root.startswith(_FIRST_OUTPUT_ONLY),
        is_own=name.startswith("firetower"),
        is_composite=_is_composite(func),
    )


def run_composite(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite op through its C++ body, so that the ops inside are dispatched one by one.

    Not ``func.decompose``: that prefers Python decompositions, whose results can differ in the last bit. The
    keys that a dispatch mode runs without are restored: the body asks, for instance, whether a view of a
    weight requires grad, and picks another matrix product by the answer.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    keys = [k for k in _BODY_KEYS if excluded(k)]
    for key in keys:
        exclude(key, False)
    try:
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    finally:
        for key in keys:
            exclude(key, True)


_BODY_KEYS = tuple(
    getattr(torch._C.DispatchKey, name) for name in ("ADInplaceOrView", "Conjugate", "Negative", "ZeroTensor")
)


def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own_kernels = ("CPU", "CUDA", "CompositeExplicitAutograd")
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not any(  # type: ignore[no-untyped-call]
        has_kernel(func.name(), key) for key in own_kernels  # type: ignore[no-untyped-call]
    )
