"""What a sampler is asked and what it answers, row by row."""

from __future__ import annotations

import dataclasses
import enum

import torch
from torch import Tensor

from firetower.core.errors import ConfigError

MAX_VOCAB = 1 << 20
"""Most tokens of a row: the fixed-point masses of that many still add up inside an int64."""

SMALLEST_TEMPERATURE = 2.0**-126
"""Below it, where fp32 has no normal numbers left, a row is greedy."""

LOGIT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class Event(enum.IntEnum):
    """What became of a row; anything but ``OK`` gives token -1. The first that applies, in this order.

    Attributes:
        OK: a token, or a pad.
        ALL_NAN: a NaN and no finite logit beside it.
        NAN_BESIDE_FINITE: a NaN and at least one finite logit.
        POS_INF: no NaN, at least one +Inf.
        BAD_PARAMETER: a parameter of the row that is NaN or out of its range, or a NaN in its logit bias.
        EMPTY_MASK: nothing to choose from: every token is masked, banned by its bias, or has a logit of -Inf.
    """

    OK = 0
    ALL_NAN = 1
    NAN_BESIDE_FINITE = 2
    POS_INF = 3
    BAD_PARAMETER = 4
    EMPTY_MASK = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """Parameters of N rows, on the device of the logits; None switches one off for every row.

    Attributes:
        temperature: fp32 [N]; 0, and anything below `SMALLEST_TEMPERATURE`, is greedy. None: every row is greedy.
        top_k: int32 [N]; 0 or less is off.
        top_p: fp32 [N] in [0, 1]; 1 is off, 0 keeps the most likely.
        min_p: fp32 [N] in [0, 1]; 0 is off.
        repetition_penalty: fp32 [N], above 0; 1 is off. For tokens in ``token_counts`` or ``prompt_mask``.
        frequency_penalty: fp32 [N], finite; taken off once for each count.
        presence_penalty: fp32 [N], finite; taken off once where the count is not 0.
        token_counts: int32 [N, V]: how often each token was generated.
        prompt_mask: int32 [N, ceil(V / 32)]: tokens of the prompt, packed as by `pack_mask`.
        logit_bias: fp32 [N, V], added after the penalties. -Inf bans a token. +Inf counts as the largest float: such
            tokens share the whole probability. A token whose logit is -Inf stays banned.
        allowed_mask: int32 [N, ceil(V / 32)], packed as by `pack_mask`: tokens that may be chosen.
    """

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    repetition_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    token_counts: Tensor | None = None
    prompt_mask: Tensor | None = None
    logit_bias: Tensor | None = None
    allowed_mask: Tensor | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether a row may be cut by top-k, top-p or min-p."""
        return self.temperature is not None and any(p is not None for p in (self.top_k, self.top_p, self.min_p))

    def check(self, logits: Tensor) -> None:
        """Compare shapes, types and devices with logits ``[N, V]``; values are checked on the device, row by row.

        Raises:
            ConfigError: a field that does not fit, or penalties without what they count.
        """
        rows, vocab = logits.shape
        words = (rows, -(-vocab // 32))
        shapes = {
            "token_counts": (rows, vocab),
            "prompt_mask": words,
            "logit_bias": (rows, vocab),
            "allowed_mask": words,
        }
        integers = {"top_k", "token_counts", "prompt_mask", "allowed_mask"}
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if x is None:
                continue
            dtype = torch.int32 if field.name in integers else torch.float32
            _check(field.name, x, shapes.get(field.name, (rows,)), dtype, logits.device)
        if self.token_counts is None and (self.frequency_penalty is not None or self.presence_penalty is not None):
            raise ConfigError("token_counts=None: frequency and presence penalties count tokens; pass int32 [N, V]")
        if self.repetition_penalty is not None and self.token_counts is None and self.prompt_mask is None:
            raise ConfigError("repetition_penalty: needs token_counts or prompt_mask, which say what was there already")


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(x.shape) != shape or x.dtype is not dtype or x.device != device or not x.is_contiguous():
        raise ConfigError(
            f"{name}: {x.dtype} {list(x.shape)} on {x.device}: must be {dtype} {list(shape)} on {device}, contiguous; "
            f"use {name}.to({dtype}).contiguous()"
        )


def check_keys(seeds: Tensor | None, positions: Tensor | None, logits: Tensor) -> None:
    """Compare the keys of the random numbers with logits ``[N, V]``.

    Raises:
        ConfigError: one that is missing or does not fit.
    """
    for name, x in (("seeds", seeds), ("positions", positions)):
        if x is None:
            raise ConfigError(f"{name}=None: rows with a temperature draw random numbers; pass int64 [N]")
        _check(name, x, (logits.shape[0],), torch.int64, logits.device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Answer of `firetower.ops.sample.sample` for N rows.

    Attributes:
        tokens: int64 [N]; -1 for a row with an event and for a pad.
        events: int32 [N] of `Event`.
        logprobs: fp32 [N] of the tokens under the logits as given, before penalties, bias and temperature; -Inf where
            the token is -1. None where not asked for.
        top_ids: int64 [N, n], most likely first, equals by index; -1 where fewer tokens are possible.
        top_logprobs: fp32 [N, n] of ``top_ids``; -Inf where the id is -1.
    """

    tokens: Tensor
    events: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def pack_mask(mask: Tensor) -> Tensor:
    """Pack bool ``[N, V]`` into int32 ``[N, ceil(V / 32)]``: token v is bit ``v % 32`` of word ``v // 32``."""
    rows, vocab = mask.shape
    words = -(-vocab // 32)
    bits = torch.zeros(rows, words * 32, dtype=torch.int64, device=mask.device)
    bits[:, :vocab] = mask
    packed = (bits.view(rows, words, 32) << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack_mask(packed: Tensor, vocab: int) -> Tensor:
    """Undo `pack_mask`: bool ``[N, vocab]``."""
    bits = packed[..., None] >> torch.arange(32, dtype=torch.int32, device=packed.device) & 1
    return bits.view(len(packed), -1)[:, :vocab] != 0
