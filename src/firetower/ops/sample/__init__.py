"""Sampler: penalties, bias, mask, temperature, top-k, top-p, min-p, and a token that depends on its own row alone.

A row that has no honest token gets -1 and an `Event` that says why; none of them is laundered into a token.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from firetower.core.errors import ConfigError
from firetower.ops.registry import REGISTRY, always, kernel, needs_triton
from firetower.ops.sample.params import (
    LOGIT_TYPES,
    MAX_VOCAB,
    SMALLEST_TEMPERATURE,
    Event,
    Sampled,
    SampleParams,
    check_keys,
    pack_mask,
    unpack_mask,
)
from firetower.ops.sample.philox import exponentials, random_words
from firetower.ops.sample.torch_path import kept, processed
from firetower.sensors.marks import Mark

__all__ = [
    "SMALLEST_TEMPERATURE",
    "Event",
    "SampleParams",
    "Sampled",
    "exponentials",
    "filtered_logits",
    "pack_mask",
    "random_words",
    "sample",
    "unpack_mask",
]

REGISTRY.register("sample", "triton", "firetower.ops.sample.kernels:sample", supports=needs_triton, devices=("cuda",))
REGISTRY.register("sample", "torch", "firetower.ops.sample.torch_path:sample", supports=always)

_DEFAULT = SampleParams()


def sample(
    logits: Tensor,
    params: SampleParams = _DEFAULT,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    row_ids: Tensor | None = None,
    num_logprobs: int | None = None,
    mark: Mark | None = None,
) -> Sampled:
    """Choose one token a row.

    In this order: repetition penalty, frequency and presence penalty, logit bias, allowed mask, temperature, top-k,
    top-p of what is left, min-p. Then the exponential race: the largest ``score / temperature - log(e)`` wins, with
    ``e`` from Philox 4x32-10 keyed by the row's seed and counted by (position, token). Equal scores: lowest index. A
    filter keeps or drops tokens of equal score together.

    Args:
        logits: fp32, fp16 or bf16 [N, V], V at most `MAX_VOCAB`, rows contiguous.
        params: one value a row of each parameter in use.
        seeds: int64 [N]; needed with a temperature.
        positions: int64 [N] of the token to come; needed with a temperature.
        row_ids: int32 or int64 [N]; negative for a pad, which gets token -1 and no event.
        num_logprobs: None: none; n: log-probability of the token, and the n most likely tokens with theirs.
        mark: signal of the logits as given, ``[N, V]``; -Inf is legal in it.

    Returns:
        Tokens, events and log-probabilities; no host sync.

    Raises:
        ConfigError: shapes, types or devices that do not fit; what can be wrong in a value is an event of its row.

    Numerics: scores in fp32. The row's maximum is taken off before the division by the temperature, and scores that
    penalties or bias push past the largest float stay there: no step makes an Inf or NaN of finite input. Top-p adds up
    fixed-point masses, exact in any order. Logits: a NaN or +Inf is an event of its row even where the token is masked;
    -Inf is a token that cannot be chosen. Parameters: NaN is the event ``BAD_PARAMETER``.
    """
    _check(logits, row_ids, num_logprobs)
    params.check(logits)
    if params.temperature is not None:
        check_keys(seeds, positions, logits)
    legal = None if mark is None else dataclasses.replace(mark, neg_inf_legal=True)
    found: Sampled = kernel("sample", logits)(logits, params, seeds, positions, row_ids, num_logprobs, legal)
    return found


def filtered_logits(logits: Tensor, params: SampleParams) -> Tensor:
    """The distribution that `sample` draws from, as scores before the temperature; plain PyTorch on any device.

    Args:
        logits: [N, V] as for `sample`.
        params: as for `sample`.

    Returns:
        fp32 [N, V]; -Inf where a token cannot be drawn. The softmax of it over the temperature is the distribution.

    Raises:
        ConfigError: as `sample`.
    """
    _check(logits, None, None)
    params.check(logits)
    scores = processed(logits, params)
    return scores.masked_fill(~kept(scores, params, logits), float("-inf"))


def _check(logits: Tensor, row_ids: Tensor | None, num_logprobs: int | None) -> None:
    if logits.ndim != 2 or logits.dtype not in LOGIT_TYPES or (logits.numel() and logits.stride(1) != 1):
        raise ConfigError(
            f"logits: {logits.dtype} {list(logits.shape)}: must be fp32, fp16 or bf16 [N, V], rows contiguous"
        )
    vocab = logits.shape[1]
    if not 1 <= vocab <= MAX_VOCAB:
        raise ConfigError(f"logits: V={vocab}: must be from 1 to {MAX_VOCAB}; cut the padding off the vocabulary")
    if row_ids is not None and row_ids.shape != logits.shape[:1]:
        raise ConfigError(f"row_ids: {list(row_ids.shape)}: must be [{len(logits)}], one for each row of the logits")
    if num_logprobs is not None and not 0 <= num_logprobs <= vocab:
        raise ConfigError(f"num_logprobs={num_logprobs}: must be from 0 to V={vocab}, or None")
