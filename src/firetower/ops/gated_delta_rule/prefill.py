"""Whole prefills: our own chain of two parts, and two libraries that answer to a pin alone, as peers and oracles.

All take the same arguments: those of `firetower.ops.gated_delta_rule.gated_delta_rule`, with ``out`` and
``final_state`` to be written, and at least one token.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.gated_delta_rule.chunks import make_table
from firetower.ops.registry import Target, kernel
from firetower.sensors.marks import Mark, mark_rows

_HF_MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"


def own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_l2norm: bool,
    chunk_size: int,
    out: Tensor,
    final_state: Tensor | None,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    """The chain of ``gated_delta_rule.prepare`` and ``gated_delta_rule.scan``, each by the backend that can run it."""
    table = make_table(q.shape[0], q.shape[1], chunk_size, cu_seqlens)
    chunks = kernel("gated_delta_rule.prepare", q)(q, k, g, beta, table, scale=scale, use_l2norm=use_l2norm)
    kernel("gated_delta_rule.scan", v)(
        chunks, v, initial_state=initial_state, out=out, final_state=final_state, mark=mark, state_mark=state_mark
    )


def fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_l2norm: bool,
    chunk_size: int,
    out: Tensor,
    final_state: Tensor | None,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    """flash-linear-attention's ``chunk_gated_delta_rule`` @ 0.6.0; its numerics, which are not ours."""
    run = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    result, state = run(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=final_state is not None,
        use_qk_l2norm_in_kernel=use_l2norm, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip
    _keep(result, state, out, final_state, mark, state_mark)


def transformers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    use_l2norm: bool,
    chunk_size: int,
    out: Tensor,
    final_state: Tensor | None,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    """``torch_chunk_gated_delta_rule`` of transformers @ 5.17 to 5.24: differences of a cumulative sum.

    Raises:
        ConfigError: ``cu_seqlens`` or a scale of one's own, which it has no argument for.
    """
    if cu_seqlens is not None or scale != k.shape[3] ** -0.5:
        raise ConfigError(
            f"cu_seqlens, scale={scale}: transformers' function takes neither; unpin gated_delta_rule.prefill"
        )
    group = v.shape[2] // k.shape[2]
    # before 5.24 it repeats no heads by itself
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    run = importlib.import_module(_HF_MODULE).torch_chunk_gated_delta_rule
    result, state = run(
        q, k, v, g, beta, chunk_size=chunk_size, initial_state=initial_state, use_qk_l2norm_in_kernel=use_l2norm,
        output_final_state=final_state is not None,
    )  # fmt: skip
    _keep(result, state, out, final_state, mark, state_mark)


def _keep(
    result: Tensor,
    state: Any,
    out: Tensor,
    final_state: Tensor | None,
    mark: Mark | None,
    state_mark: Mark | None,
) -> None:
    out.copy_(result)
    mark_rows(out.flatten(0, 1).flatten(1), mark)
    if final_state is not None:
        final_state.copy_(state)
        mark_rows(final_state.flatten(1), state_mark)


def needs_fla(target: Target) -> str | None:
    """Supports of FLA's kernels."""
    if importlib.util.find_spec("fla") is None:
        return "fla is not installed: pip install fla-core"
    if target.device != "cuda":
        return f"FLA's chunked kernels compile for CUDA, this is {target.device}"
    return None


def needs_transformers(_: Target) -> str | None:
    """Supports of transformers' function."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'firetower[transformers]'"
    return None
