"""What a model's forward call says about its rows: how many sequences and tokens, which are pads, where they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from firetower.core.records import Phase
from firetower.sensors.check import Frame

_CACHES = ("past_key_values", "cache", "cache_params")


@dataclasses.dataclass(slots=True)
class Call:
    """The arguments of one forward call, read only when something is bad.

    ``past`` is how many tokens the cache held when the call began; a tensor where the cache counts on its device.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    past: int | Tensor = 0

    @classmethod
    def begin(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Keep the call; the cache is asked now, since the call itself makes it grow."""
        return cls(args, kwargs, _past(kwargs))

    @property
    def num_past(self) -> int:
        """Tokens in the cache when the call began; waits for the device where the cache counts there."""
        if not isinstance(self.past, int):
            self.past = int(self.past.max())
        return self.past

    def tokens(self) -> Tensor | None:
        """The tensor that carries the rows: token ids [B, T], embeddings [B, T, H], or the first tensor given."""
        for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
            if isinstance(self.kwargs.get(name), Tensor):
                return self.kwargs[name]  # type: ignore[no-any-return]
        values = [*self.args, *self.kwargs.values()]
        return next((v for v in values if isinstance(v, Tensor) and v.ndim), None)

    def shape(self) -> tuple[int, int]:
        """(sequences B, tokens T) of this call; a feature vector [B, F] counts as one token."""
        x = self.tokens()
        if x is None:
            return 1, 1
        has_tokens = x.ndim >= 3 or (x.ndim == 2 and not x.is_floating_point())
        return x.shape[0], x.shape[1] if has_tokens else 1

    def phase(self) -> Phase:
        """Prefill, or decode where one token follows others; a call without token ids is neither."""
        x = self.tokens()
        if x is None or x.ndim < (3 if x.is_floating_point() else 2):
            return Phase.UNKNOWN
        return Phase.DECODE if x.shape[1] == 1 and self.num_past > 0 else Phase.PREFILL

    def token_ids(self, sequence: int | None) -> tuple[int, ...] | None:
        """The ids that this call fed to one sequence; private content."""
        ids = self.kwargs.get("input_ids", self.args[0] if self.args else None)
        if sequence is None or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2:
            return None
        return tuple(int(i) for i in ids[sequence].tolist())

    def pad(self) -> Tensor | None:
        """[B, T] bool, True where a row is a pad; None when the call does not say."""
        mask = self.kwargs.get("attention_mask")
        num_sequences, num_tokens = self.shape()
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != num_sequences:
            return None
        if mask.shape[1] < self.num_past + num_tokens:
            return None
        return mask[:, self.num_past : self.num_past + num_tokens] == 0

    def frame(self) -> Frame:
        """How this call's rows map to sequences, tokens and positions."""
        num_sequences, num_tokens = self.shape()
        return Frame(
            num_sequences=num_sequences, num_tokens=num_tokens, pad=self.pad(), positions=self._positions()
        )

    def _positions(self) -> Tensor | None:
        num_sequences, num_tokens = self.shape()
        mask = self.kwargs.get("attention_mask")
        if self.pad() is not None:
            assert isinstance(mask, Tensor)
            counted = (mask != 0).long().cumsum(-1) - 1
            return counted[:, self.num_past : self.num_past + num_tokens].clamp(min=0).cpu()
        given = self.kwargs.get("position_ids")
        if isinstance(given, Tensor) and given.ndim >= 2 and given.shape[-1] == num_tokens:
            return given.reshape(-1, given.shape[-2], num_tokens)[0].expand(num_sequences, num_tokens).cpu()
        if self.phase() is Phase.UNKNOWN:
            return None
        return torch.arange(self.num_past, self.num_past + num_tokens).expand(num_sequences, num_tokens)


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache object among a call's keyword arguments, or None."""
    return next((kwargs[n] for n in _CACHES if kwargs.get(n) is not None), None)


def _past(kwargs: Mapping[str, Any]) -> int | Tensor:
    mask, cache = kwargs.get("attention_mask"), cache_of(kwargs)
    ids = kwargs.get("input_ids")
    if cache is None:
        return 0
    if isinstance(mask, Tensor) and mask.ndim == 2 and isinstance(ids, Tensor) and not _is_static(cache):
        return mask.shape[1] - ids.shape[1]
    if hasattr(cache, "get_seq_length"):
        length = cache.get_seq_length()
        # on a device, asking for the number would wait for it: keep a copy, read it only when something is bad
        return length.clone() if isinstance(length, Tensor) and not length.is_cpu else int(length)
    if isinstance(cache, tuple | list) and cache and isinstance(cache[0], tuple | list):
        return int(cache[0][0].shape[-2])
    return 0


def _is_static(cache: Any) -> bool:
    return bool(getattr(cache, "is_compileable", False))
