"""The state audit on a fire: recurrent and convolution states, pages, and weights against what was loaded.

Each thing is clean or bad with its first bad place. Only what a step may read is looked at: pages up to the last token
that was written, pending columns up to those that count. A state is bad where it is not finite (a pending decay may be
-Inf); weights are bad where they differ from the load.

Legend: L layers of a kind, A attention layers, n pages, R pending columns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firetower.core.records import Status
from firetower.engine.dump import AuditItem
from firetower.models.config import HybridConfig
from firetower.models.hybrid import HybridModel
from firetower.models.state import ModelState
from firetower.ops.gated_delta_rule import MAX_WINDOW

BLOCK_WORDS = 1 << 14
"""Words of four bytes that share their sums."""

_WORDS_AT_ONCE = 1 << 23
_BYTES_AT_ONCE = 64 << 20
_PENDING = ("pending_k", "pending_v", "pending_g", "pending_beta")
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A request whose state is looked at.

    Attributes:
        request: id. role: ``burned`` or ``neighbour``.
        slot, pages: what it holds. num_tokens: that its pages have been written for.
        begin: first position that the step which burned wrote.
        num_kept: tokens of the pending window in the half that is kept that may count.
        num_written: the same of the other half; None for not looking at it.
        is_kept_older: whether the step that burned read the half that is kept and did not write it.
    """

    request: str
    role: str
    slot: int
    pages: tuple[int, ...]
    num_tokens: int
    begin: int
    num_kept: int = 0
    num_written: int | None = None
    is_kept_older: bool = False


class Audit:
    """Looks at what an engine holds; waits for the device, so only after a fire.

    Args:
        model: its weights are summed now: what they are compared with.
        state: of the engine.
        weights_every_s: a fire sooner after the last look at the weights does not look again, and says so.
        clock: seconds.

    Attributes:
        num_bytes: host memory of the sums.
    """

    def __init__(
        self, model: HybridModel, state: ModelState, *, weights_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._weights = model.weights
        self._state = state
        self._config = model.config
        self._every_s = weights_every_s
        self._clock = clock
        self._last: tuple[float, list[AuditItem]] | None = None
        with torch.inference_mode():
            self._sums = {name: block_sums(x).cpu() for name, x in self._weights.named_tensors()}
        self.num_bytes = sum(x.nbytes for x in self._sums.values())

    @torch.inference_mode()
    def weights(self) -> list[AuditItem]:
        """One item for each tensor that changed, or one clean item for all of them."""
        now = self._clock()
        if self._last is not None and now - self._last[0] < self._every_s:
            ago, found = now - self._last[0], self._last[1]
            num_bad = sum(item.status is Status.BAD for item in found)
            said = f"{num_bad} tensors were bad" if num_bad else "all were clean"
            reason = f"looked at {ago:.1f} s before: {said}"
            return [AuditItem(what="weights", role="model", status=Status.NOT_COVERED, reason=reason)]
        items = []
        for name, x in self._weights.named_tensors():
            then, sums = self._sums[name], block_sums(x).cpu()
            if not torch.equal(then, sums):
                items.append(_weight_item(name, x, then, sums))
        found = items or [AuditItem(what="weights", role="model")]
        self._last = (now, found)
        return found

    @torch.inference_mode()
    def holder(self, holder: Holder) -> list[AuditItem]:
        """Recurrent state, convolution and pages of one request."""
        if holder.slot < 0:
            reason = "it had given its slot and pages back"
            return [
                AuditItem(what=what, role=holder.role, request=holder.request, status=Status.NOT_COVERED, reason=reason)
                for what in ("recurrent", "conv", "kv")
            ]
        items = []
        if self._state.recurrent:
            side = int(self._state.side[holder.slot])
            halves = [("kept", side, holder.num_kept)]
            if holder.num_written is not None:
                halves.append(("written", 1 - side, holder.num_written))
            for half, at, count in halves:
                items.append(self._item(holder, "recurrent", half, self._recurrent(holder.slot, at, count)))
                items.append(self._item(holder, "conv", half, self._conv(holder.slot, at, count)))
        if self._state.kv and holder.num_tokens:
            items.append(self._item(holder, "kv", "", self._kv(holder)))
        return items

    def _item(self, holder: Holder, what: str, half: str, found: dict[str, Any] | None) -> AuditItem:
        if found is None:
            return AuditItem(what=what, role=holder.role, request=holder.request, half=half)
        # what a step wrote itself says nothing of what it was given
        is_older = found["position"] < holder.begin if what == "kv" else half == "kept" and holder.is_kept_older
        return AuditItem(
            what=what, role=holder.role, request=holder.request, half=half, status=Status.BAD, first=_words(found),
            place=found, is_older=is_older,
        )  # fmt: skip

    def _recurrent(self, slot: int, half: int, num_pending: int) -> dict[str, Any] | None:
        """First bad value of one half of a slot, layer by layer, the state before what is pending."""
        layers = linear_layers(self._config)
        slots = self._state.slots
        found = _first(slots["state"][:, half, slot], ("layer", "head", "key", "value"))
        if found is not None:
            return {**found, "layer": layers[found["layer"]], "part": "state"}
        for part in _PENDING:
            x = slots[part][:, half, slot, :num_pending]
            names = ("layer", "token", "head", "column")[: x.ndim]
            found = _first(x, names, is_neg_inf_legal=part == "pending_g")
            if found is not None:
                return {**found, "layer": layers[found["layer"]], "part": part}
        return None

    def _conv(self, slot: int, half: int, num_pending: int) -> dict[str, Any] | None:
        columns = self._state.conv_storage
        num_past = columns.shape[2] - MAX_WINDOW
        found = _first(columns[:, 2 * slot + half, : num_past + num_pending], ("layer", "tap", "channel"))
        return None if found is None else {**found, "layer": linear_layers(self._config)[found["layer"]]}

    def _kv(self, holder: Holder) -> dict[str, Any] | None:
        """First bad value in pages, by position, then layer; so much at a time that memory stays bounded."""
        state = self._state
        size = state.page_size
        used = holder.pages[: -(-holder.num_tokens // size)]
        bytes_per_page = max(1, state.pages[:, :, 0].nbytes)
        step = max(1, _BYTES_AT_ONCE // bytes_per_page)
        for begin in range(0, len(used), step):
            index = torch.tensor(used[begin : begin + step], dtype=torch.int64, device=state.side.device)
            num_tokens = min(holder.num_tokens - begin * size, len(index) * size)
            found = self._pages(index, num_tokens)
            if found is not None:
                position = begin * size + found.pop("token")
                layer = full_layers(self._config)[found["layer"]]
                found |= {"layer": layer, "position": position, "page": int(used[position // size])}
                found["part"] = ("key", "value")[found["part"]] + (" scale" if found.pop("is_scale") else "")
                return found
        return None

    def _pages(self, index: Tensor, num_tokens: int) -> dict[str, Any] | None:
        """The first bad one of values and scales in some pages."""
        state = self._state
        both = []
        if state.pages.dtype is not torch.int8:
            # 8-bit floats have no gather of their own on every device
            raw = state.pages.view(_INTS[state.pages.element_size()]).index_select(2, index)
            found = _first(_by_token(raw.view(state.pages.dtype), num_tokens), _KV_NAMES)
            both.append(None if found is None else {**found, "is_scale": False})
        if state.page_scales is not None:
            found = _first(_by_token(state.page_scales.index_select(2, index), num_tokens), _KV_NAMES[:4])
            both.append(None if found is None else {**found, "is_scale": True})
        return min((f for f in both if f is not None), key=lambda f: (f["token"], f["layer"]), default=None)


_KV_NAMES = ("token", "layer", "part", "head", "column")


def _by_token(x: Tensor, num_tokens: int) -> Tensor:
    """[A, 2, n, page_size, ...] to [num_tokens, A, 2, ...]; contiguous, so that the first is the earliest token."""
    order = (2, 3, 0, 1, *range(4, x.ndim))
    return x.permute(order).reshape(-1, *(x.shape[i] for i in order[2:]))[:num_tokens]


def linear_layers(config: HybridConfig) -> list[int]:
    """Layer numbers of DeltaNet layers, in the order of the states."""
    return list(config.linear_layers)


def full_layers(config: HybridConfig) -> list[int]:
    """Layer numbers of attention layers, in the order of the pages."""
    return list(config.full_layers)


def _first(x: Tensor, names: tuple[str, ...], *, is_neg_inf_legal: bool = False) -> dict[str, Any] | None:
    """Place and bits of the first bad element in row-major order, or None; one sync where all is well."""
    values = x.float() if x.element_size() == 1 else x
    bad = ~values.isfinite()
    if is_neg_inf_legal:
        bad &= values != -torch.inf
    if not bool(bad.any()):
        return None
    flat = int(bad.reshape(-1).to(torch.uint8).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)]
    value = x[tuple(place)]
    width = 8 * x.element_size()
    bits = int(value.reshape(1).view(_INTS[x.element_size()])) & ((1 << width) - 1)
    kind = "nan" if bool(values[tuple(place)].isnan()) else "+inf" if float(values[tuple(place)]) > 0 else "-inf"
    dtype = str(x.dtype).removeprefix("torch.")
    return {**dict(zip(names, place, strict=True)), "kind": kind, "bits": f"{bits:0{width // 4}x}", "dtype": dtype}


def _words(found: dict[str, Any]) -> str:
    """A place in words, what is largest first."""
    order = ("layer", "part", "position", "page", "token", "head", "tap", "key", "value", "channel", "column")
    where = ", ".join(f"{name} {found[name]}" for name in order if name in found)
    return f"{where}: {found['kind']}, bits {found['bits']} ({found['dtype']})"


# weights


def block_sums(x: Tensor) -> Tensor:
    """Two sums for each block of `BLOCK_WORDS` words of four bytes, in the order of memory: int64 [blocks, 2].

    The first is of the words, the second of each word times an odd number that counts its place: exact, nothing wraps.
    A change of one word changes the first sum by as much as the word, and the quotient of both changes is its odd
    number: the sums name the word. Several changes in one block may cancel; it is no proof against intent.
    """
    words = _as_words(x)
    odd = 2 * torch.arange(BLOCK_WORDS, device=x.device) + 1
    sums = []
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        piece = words[start : start + _WORDS_AT_ONCE].long()
        if piece.numel() % BLOCK_WORDS:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK_WORDS))
        piece = piece.view(-1, BLOCK_WORDS)
        sums.append(torch.stack((piece.sum(1), (piece * odd).sum(1)), 1))
    return torch.cat(sums)


def _as_words(x: Tensor) -> Tensor:
    """int32 words of a tensor in the order of memory; the last one is filled up with zero bytes."""
    raw = (x if x.is_contiguous() else x.t()).reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 4 or raw.numel() % 4:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).clone()
    return raw.view(torch.int32)


def _weight_item(name: str, x: Tensor, then: Tensor, now: Tensor) -> AuditItem:
    changed = (then != now).any(1).nonzero()[:, 0].tolist()
    block = changed[0]
    plain, weighed = (now[block] - then[block]).tolist()
    place: dict[str, Any] = {"tensor": name, "num_bad_blocks": len(changed)}
    word = _changed_word(plain, weighed)
    size = x.element_size()
    if word is not None:
        at = block * BLOCK_WORDS + word
        new = int(_as_words(x)[at])
        old = new - plain
        if -(1 << 31) <= old < 1 << 31 and 4 * at < x.nbytes:
            return _one_word(x, place, at, new & 0xFFFFFFFF, old & 0xFFFFFFFF)
    per_block = 4 * BLOCK_WORDS // size
    first, last = block * per_block, min((block + 1) * per_block, x.numel()) - 1
    begin, end = _coordinates(x, first), _coordinates(x, last)
    place |= {"begin": begin, "end": end}
    return AuditItem(
        what="weights", role="model", status=Status.BAD, place=place, is_older=True,
        first=f"{name}: several words differ from the load, the first between {begin} and {end}",
    )  # fmt: skip


def _changed_word(plain: int, weighed: int) -> int | None:
    """Place in its block of the one word that changed; None where it was not one."""
    if plain == 0 or weighed % plain:
        return None
    odd = weighed // plain
    return odd // 2 if odd % 2 and 0 < odd < 2 * BLOCK_WORDS else None


def _one_word(x: Tensor, place: dict[str, Any], at: int, new: int, old: int) -> AuditItem:
    """The first element that differs within one word, as it is and as it was."""
    size = x.element_size()
    if size > 4:
        low, width = 0, 32
    else:
        differing = ((new ^ old) & -(new ^ old)).bit_length() - 1
        width = 8 * size
        low = differing // width * width
    element = at * 4 // size + low // width if size <= 4 else at * 4 // size
    mask = (1 << width) - 1
    is_bits, was_bits = (f"{(w >> low) & mask:0{width // 4}x}" for w in (new, old))
    where = _coordinates(x, element)
    dtype = str(x.dtype).removeprefix("torch.")
    place |= {"element": where, "bits": is_bits, "bits_at_load": was_bits, "dtype": dtype}
    return AuditItem(
        what="weights", role="model", status=Status.BAD, place=place, is_older=True,
        first=f"{place['tensor']}{where}: bits {is_bits}, at load {was_bits} ({dtype})",
    )  # fmt: skip


def _coordinates(x: Tensor, flat: int) -> list[int]:
    """Indices of an element by its place in memory."""
    shape = x.shape if x.is_contiguous() else x.t().shape
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), shape)]
    return place if x.is_contiguous() else place[::-1]
