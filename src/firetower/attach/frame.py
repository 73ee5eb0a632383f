"""What a model's forward call says about its rows: how many sequences and tokens, which are pads, where they stand."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firetower.core.records import Phase
from firetower.sensors.check import Frame

_CACHES = ("past_key_values", "cache", "cache_params", "layer_past")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_ROWS = ("input_ids", "inputs_embeds")
_KEPT = (*_DECODER, *_ROWS, "attention_mask", "decoder_attention_mask", "position_ids")


@dataclasses.dataclass(slots=True)
class Call:
    """The arguments of one forward call, read only when something is bad.

    ``past`` is how many tokens the cache held when the call began; a tensor where the cache counts on its device.
    ``cache`` is a weak reference to the cache, None where there is none or it is of a kind that has no such references.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    past: int | Tensor = 0
    cache: weakref.ref[Any] | None = None

    @classmethod
    def begin(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = ()) -> Call:
        """Keep the call; the cache is asked now, since the call itself makes it grow.

        Args:
            args: what was passed by position.
            kwargs: what was passed by name.
            names: of the parameters, in order, so that what came by position is found by its name.
        """
        if args and names:
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
            args = args[len(names) :]
        return cls(args, kwargs, _past(kwargs), weak_reference(cache_of(kwargs)))

    def release(self, output: Any = None) -> None:
        """Let go of what the call was given (caches, embeddings, images); ids, masks and shapes stay readable.

        Args:
            output: of the call; names the cache where the call made it.
        """
        if self.cache is None:
            self.cache = weak_reference(_cache_in(output))
        tokens = self.tokens()
        kept = {n: self.kwargs[n] for n in _KEPT if isinstance(self.kwargs.get(n), Tensor)}
        rows = [n for n in (*_DECODER, *_ROWS) if n in kept]
        kept |= {n: _shape_of(kept[n]) for n in rows if not _is_ids(kept[n])}
        self.args = () if rows or tokens is None else (tokens if _is_ids(tokens) else _shape_of(tokens),)
        self.kwargs = kept

    @property
    def num_past(self) -> int:
        """Tokens in the cache when the call began; waits for the device where the cache counts there."""
        if not isinstance(self.past, int):
            self.past = int(self.past.max())
        return self.past

    def tokens(self, *, encoder: bool = False) -> Tensor | None:
        """The tensor that carries the rows: token ids [B, T], embeddings [B, T, H], or the first tensor given.

        Of an encoder-decoder's call these are the decoder's, unless ``encoder`` asks for the other side.
        """
        for name in (*_ROWS, *_DECODER) if encoder else (*_DECODER, *_ROWS):
            if isinstance(self.kwargs.get(name), Tensor):
                return self.kwargs[name]  # type: ignore[no-any-return]
        values = [*self.args, *self.kwargs.values()]
        return next((v for v in values if isinstance(v, Tensor) and v.ndim), None)

    def shape(self, *, encoder: bool = False) -> tuple[int, int]:
        """(sequences B, tokens T) of this call; a feature vector [B, F] or an image counts as one token."""
        x = self.tokens(encoder=encoder)
        if x is None:
            return 1, 1
        has_tokens = x.ndim == 3 or (x.ndim == 2 and _is_ids(x))
        return x.shape[0], x.shape[1] if has_tokens else 1

    def phase(self) -> Phase:
        """Prefill, or decode where one token follows others; a call without token ids is neither."""
        x = self.tokens()
        if x is None or x.ndim != (2 if _is_ids(x) else 3):
            return Phase.UNKNOWN
        return Phase.DECODE if x.shape[1] == 1 and self.num_past > 0 else Phase.PREFILL

    def token_ids(self, sequence: int | None) -> tuple[int, ...] | None:
        """The ids that this call fed to one sequence; private content."""
        ids = self.tokens()
        if sequence is None or ids is None or not _is_ids(ids) or ids.ndim != 2:
            return None
        return tuple(int(i) for i in ids[sequence].tolist())

    def pad(self, *, encoder: bool = False) -> Tensor | None:
        """[B, T] bool, True where a row is a pad; None when the call does not say."""
        mask, past = self._mask(encoder=encoder)
        num_sequences, num_tokens = self.shape(encoder=encoder)
        if mask is None or mask.shape[0] != num_sequences or mask.shape[1] < past + num_tokens:
            return None
        pad = mask[:, past : past + num_tokens] == 0
        # a mask that is added to scores has 0 where a row is real and large negative values elsewhere
        return pad & (mask >= 0).all() if mask.is_floating_point() else pad

    def _mask(self, *, encoder: bool) -> tuple[Tensor | None, int]:
        """The mask over this side's tokens, and how many of its columns stand for tokens in the cache."""
        is_decoder = not encoder and any(isinstance(self.kwargs.get(n), Tensor) for n in _DECODER)
        mask = self.kwargs.get("decoder_attention_mask" if is_decoder else "attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return None, 0
        return mask, 0 if encoder else self.num_past

    def frame(self, *, encoder: bool = False) -> Frame:
        """How this call's rows map to sequences, tokens and positions."""
        num_sequences, num_tokens = self.shape(encoder=encoder)
        return Frame(
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            pad=self.pad(encoder=encoder),
            positions=self._positions(encoder=encoder),
        )

    def _positions(self, *, encoder: bool) -> Tensor | None:
        num_sequences, num_tokens = self.shape(encoder=encoder)
        mask, past = self._mask(encoder=encoder)
        if mask is not None and self.pad(encoder=encoder) is not None:
            counted = (mask != 0).long().cumsum(-1) - 1
            return counted[:, past : past + num_tokens].clamp(min=0).cpu()
        given = self.kwargs.get("position_ids")
        if isinstance(given, Tensor) and given.ndim >= 2 and given.shape[-1] == num_tokens:
            return given.reshape(-1, given.shape[-2], num_tokens)[0].expand(num_sequences, num_tokens).cpu()
        if self.phase() is Phase.UNKNOWN:
            return None
        past = 0 if encoder else self.num_past
        return torch.arange(past, past + num_tokens).expand(num_sequences, num_tokens)


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache object among a call's keyword arguments, or None."""
    for name in _CACHES:
        if (cache := kwargs.get(name)) is not None:
            return cache
    return None


def weak_reference(value: Any) -> weakref.ref[Any] | None:
    """A weak reference, or None for nothing and for tuples and other kinds that have none."""
    try:
        return None if value is None else weakref.ref(value)
    except TypeError:
        return None


def _is_ids(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _shape_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, device="meta")


def _cache_in(output: Any) -> Any:
    if isinstance(output, tuple):
        return next((v for v in output if hasattr(v, "get_seq_length")), None)
    return next((c for n in _CACHES if (c := getattr(output, n, None)) is not None), None)


def _past(kwargs: Mapping[str, Any]) -> int | Tensor:
    cache = cache_of(kwargs)
    if cache is None:
        return 0
    if isinstance(cache, tuple | list):
        has_keys = cache and isinstance(cache[0], tuple | list) and cache[0] and isinstance(cache[0][0], Tensor)
        return int(cache[0][0].shape[-2]) if has_keys else 0
    try:
        length = cache.get_seq_length()
    except (AttributeError, ValueError):
        # linear attention alone counts no tokens; the mask spans the cached ones and ours
        mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
        if isinstance(mask, Tensor) and mask.ndim == 2 and isinstance(ids, Tensor):
            return max(0, mask.shape[1] - ids.shape[1])
        return 0
    # on a device, asking for the number would wait for it: keep a copy, read it only when something is bad
    return length.clone() if isinstance(length, Tensor) and not length.is_cpu else int(length)
