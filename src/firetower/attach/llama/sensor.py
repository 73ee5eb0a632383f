"""The eval callback: decides which tensors llama.cpp hands over, checks them, remembers what was bad.

llama.cpp asks for every node of its graph (``ask`` true: is this one wanted?) and then hands over the wanted
ones, computed. Nothing here may raise into C: an error is counted, the first one kept, and inference goes on.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter
from collections.abc import Callable
from ctypes import string_at
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from firetower.attach.llama.ggml import (
    FLOAT_TYPES,
    INTEGER_TYPES,
    NAME_OFFSET,
    VIEW_OPS,
    Ggml,
    GgmlTensor,
    bits_view,
    first_bad,
    is_finite,
    name_of,
    offset_of,
    summarise,
    widen,
)
from firetower.attach.llama.names import Place, place
from firetower.attach.llama.sources import Source, SourceReader
from firetower.attach.llama.weights import WeightReader
from firetower.core.records import BadValue, Legal, Phase, Signal, SignalReading, Status, TensorSummary

Level = Literal["off", "filtered", "full"]
FILTERED = (b"l_out-", b"attn_out-", b"linear_attn_out-", b"ffn_moe_logits-", b"result_output")
"""Name prefixes wanted at level filtered: what leaves attention and the layer, router and output logits.

A router launders: an expert whose logit is -Inf is just not chosen. Each wanted tensor cuts llama.cpp's
graph: more of them would cost more and, before the rerun, tell little more.
"""
MAX_BAD_SIGNALS = 64
_PREFIX_BYTES = max(map(len, FILTERED))
_OP_END, _DATA_OFFSET = offset_of("op_params"), offset_of("data")
_HEADER_BYTES = _DATA_OFFSET + ctypes.sizeof(ctypes.c_void_p)
_MAX_WINDOWS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What llama.cpp is about to compute: tokens from ``first_position`` on, logits for the last."""

    index: int
    phase: Phase
    first_position: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTensor:
    """One checked tensor, as ``on_tensor`` gets it: llama.cpp's name, its op, its place, and what was found.

    ``first`` is the first bad element, None when clean. ``type_name`` is ggml's name of the type.
    """

    name: str
    op: str
    place: Place
    type_name: str
    shape: tuple[int, ...]
    step: Step
    first: BadValue | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """The first bad tensor of a step, with everything read while its memory was still there."""

    checked: CheckedTensor
    sources: tuple[Source, ...]
    output: TensorSummary
    device: str

    @property
    def first(self) -> BadValue:
        """Its first bad element."""
        assert self.checked.first is not None
        return self.checked.first


class EvalSensor:
    """Holds the `callback` for ``cb_eval``; `begin_step` comes before each decode, `burn` and counters after.

    Args:
        ggml: access to tensor memory and names.
        weights: reads operands out of quantised weights.
        on_tensor: called with every checked tensor; an error in it is counted like any other.

    Attributes:
        level: ``off``, ``filtered`` or ``full``; may change between steps.
        num_checked: float tensors checked in all steps so far.
        not_covered: number of wanted tensors whose type cannot be checked, by type.
        num_integer: integer tensors, which cannot be non-finite.
        num_errors: Python errors inside the callback; ``first_error`` is the first in words.
        burn: the first bad tensor so far, or None.
        bad_signals: bad tensors of the burnt step in execution order, at most `MAX_BAD_SIGNALS` of
            ``num_bad``.
        logits_bad: whether the logits of the burnt step were bad; None when they were not seen.
        interrupt: a KeyboardInterrupt or SystemExit caught inside, to be raised again outside C.
    """

    def __init__(
        self,
        ggml: Ggml,
        weights: WeightReader,
        *,
        level: Level = "filtered",
        on_tensor: Callable[[CheckedTensor], None] | None = None,
    ) -> None:
        self._ggml, self._on_tensor = ggml, on_tensor
        self.level: Level = level
        self.num_checked = self.num_integer = self.num_errors = self.num_bad = 0
        self.not_covered: Counter[str] = Counter()
        self.first_error: str | None = None
        self.interrupt: BaseException | None = None
        self.burn: Burn | None = None
        self.bad_signals: list[SignalReading] = []
        self.logits_bad: bool | None = None
        self._step = Step(index=0, phase=Phase.UNKNOWN, first_position=0, num_tokens=0)
        self._states: dict[int, bool] = {}
        self._sources = SourceReader(ggml, weights, self._states)
        self._neg_inf: set[int] = set()
        self._view_ops: dict[int, bool] = {}
        self._windows: dict[tuple[bytes, bytes], NDArray[Any]] = {}

    def begin_step(self, step: Step) -> None:
        """Say what the coming decode computes; forgets the tensors of the step before."""
        self._step = step
        self._states.clear()
        self._neg_inf.clear()

    def callback(self, address: int, ask: bool, user_data: object = None) -> bool:
        """The callback. Returns whether the tensor is wanted (``ask``), or whether to go on computing."""
        # runs about a thousand times a token, nearly always to say no: at level filtered one read decides
        try:
            if ask:
                if self.level == "filtered":
                    return string_at(address + NAME_OFFSET, _PREFIX_BYTES).startswith(FILTERED)
                return self.level == "full" and self._computes(address)
            if not self._is_known_clean(address):
                self._check(address)
        except Exception as e:  # noqa: BLE001 - must not unwind through C; it is counted and reported
            self._count_error(e)
        except BaseException as e:  # noqa: BLE001 - Ctrl-C: stop computing; raised again after decode
            self.interrupt, self.level = e, "off"
            return False
        return not ask

    def _count_error(self, error: Exception) -> None:
        self.num_errors += 1
        if self.first_error is None:
            self.first_error = f"{type(error).__name__}: {error}"

    def _computes(self, address: int) -> bool:
        op = GgmlTensor.from_address(address).op
        is_view = self._view_ops.get(op)
        if is_view is None:
            is_view = self._view_ops[op] = self._ggml.op_name(address) in VIEW_OPS
        return not is_view

    def _is_known_clean(self, address: int) -> bool:
        """The quick way for a tensor that lies where one was checked before: one pass over its values."""
        if self.burn is not None or self._on_tensor is not None:
            return False
        header = string_at(address, _HEADER_BYTES)
        window = self._windows.get((header[:_OP_END], header[_DATA_OFFSET:]))
        if window is None or not np.isfinite(window).all():
            return False
        self.num_checked += 1
        self._states[address] = False
        return True

    def _keep_window(self, address: int, bits: NDArray[Any], float_dtype: str) -> None:
        # type, buffer, shape, strides, op and data say all that decides where the values are and how they are
        # read; the memory is only looked at when llama.cpp has just handed in a tensor that lies there
        if len(self._windows) >= _MAX_WINDOWS:
            self._windows.clear()
        header = string_at(address, _HEADER_BYTES)
        self._windows[header[:_OP_END], header[_DATA_OFFSET:]] = bits.view(float_dtype)

    def _check(self, address: int) -> None:
        tensor = GgmlTensor.from_address(address)
        kind = FLOAT_TYPES.get(tensor.type)
        if kind is None:
            self._count_unchecked(tensor)
            return
        bits, rows = self._written(tensor, address)
        clean = is_finite(bits, kind)
        if (
            not clean
            and (kind.exponent_mask | kind.sign_mask) in bits
            and self._may_hold_neg_inf(tensor, address)
        ):
            self._neg_inf.add(address)
            clean = is_finite(bits, kind, allow_neg_inf=True)
        self.num_checked += 1
        self._states[address] = not clean
        if clean and rows is None and kind.float_dtype is not None and self._ggml.is_host(tensor.buffer):
            self._keep_window(address, bits, kind.float_dtype)
        if not clean:
            self._record_bad(tensor, address, bits, rows)
        elif self._on_tensor is not None:
            self._on_tensor(self._describe(tensor, address, None))
        if tensor.name == b"result_output" and self.burn is not None and self.burn.checked.step == self._step:
            self.logits_bad = not clean

    def _count_unchecked(self, tensor: GgmlTensor) -> None:
        if tensor.type in INTEGER_TYPES:
            self.num_integer += 1
        else:
            self.not_covered[self._ggml.type_name(tensor.type)] += 1

    def _written(self, tensor: GgmlTensor, address: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        # SET_ROWS returns the whole cache; only the rows it wrote are this step's (and cheap enough)
        bits = bits_view(tensor, address, self._ggml)
        if bits.ndim != 2 or self._ggml.op_name(address) != "SET_ROWS" or not tensor.src[1]:
            return bits, None
        rows = bits_view(GgmlTensor.from_address(tensor.src[1]), tensor.src[1], self._ggml).ravel()
        return bits[rows], rows

    def _may_hold_neg_inf(self, tensor: GgmlTensor, address: int) -> bool:
        # masks and fills may; what only moves or adds to a legal -Inf may too, until NaN or +Inf comes of it
        if b"mask" in tensor.name.lower() or self._ggml.op_name(address) == "FILL":
            return True
        sources = [self._sources.base(s) for s in tensor.src if s]
        return any(s in self._neg_inf or b"mask" in GgmlTensor.from_address(s).name.lower() for s in sources)

    def _record_bad(
        self, tensor: GgmlTensor, address: int, bits: NDArray[Any], rows: NDArray[Any] | None
    ) -> None:
        kind = FLOAT_TYPES[tensor.type]
        first = first_bad(bits, kind, allow_neg_inf=address in self._neg_inf)
        assert first is not None
        token = self._token_of(tensor, first, address)
        if rows is not None:
            row = int(rows[first.row])
            columns = bits.shape[-1]
            token = first.row if len(rows) == self._step.num_tokens else None
            first = dataclasses.replace(
                first, row=row, flat_index=row * columns + first.column, shape=(int(tensor.ne[1]), columns)
            )
        position = None if token is None else self._step.first_position + token
        first = dataclasses.replace(first, token=token, position=position)
        checked = self._describe(tensor, address, first)
        self.num_bad += 1
        if len(self.bad_signals) < MAX_BAD_SIGNALS:
            self.bad_signals.append(SignalReading(signal=signal_of(checked), status=Status.BAD, first=first))
        if self.burn is None:
            self.burn = Burn(
                checked=checked,
                sources=self._read_sources(tensor, first),
                output=summarise(checked.name, widen(bits, kind), kind.name),
                device=self._ggml.buffer_name(tensor.buffer),
            )
        if self._on_tensor is not None:
            self._on_tensor(checked)

    def _read_sources(self, tensor: GgmlTensor, first: BadValue) -> tuple[Source, ...]:
        try:
            return self._sources.of(tensor, first)
        except Exception as e:  # noqa: BLE001 - a source that cannot be read must not lose the fire itself
            self._count_error(e)
            return ()

    def _describe(self, tensor: GgmlTensor, address: int, first: BadValue | None) -> CheckedTensor:
        name, op = name_of(tensor), self._ggml.op_name(address)
        names = [name_of(GgmlTensor.from_address(s)) for s in tensor.src if s]
        return CheckedTensor(
            name=name,
            op=op,
            place=place(name, op, names),
            type_name=self._ggml.type_name(tensor.type),
            shape=tuple(int(n) for n in reversed(tensor.ne)),
            step=self._step,
            first=first,
        )

    def _token_of(self, tensor: GgmlTensor, first: BadValue, address: int) -> int | None:
        """Index of the bad row's token in this step, or None where the shape leaves it open."""
        ne, n = [int(x) for x in tensor.ne], self._step.num_tokens
        if n == 1:
            return 0
        index = np.unravel_index(first.flat_index, first.shape)[::-1]
        axes = [axis for axis in range(1, len(index)) if ne[axis] == n]
        if len(axes) > 1 and self._ggml.op_name(address) in {"FLASH_ATTN_EXT", "ROPE"}:
            axes = [axis for axis in axes if axis == 2]  # (head_dim, heads, tokens)
        if len(axes) > 1 and tensor.name.startswith(b"kq"):
            axes = [axis for axis in axes if axis == 1]  # (keys, tokens, heads)
        if len(axes) == 1:
            return int(index[axes[0]])
        # past the last layer's attention only the row that makes logits is left: the last token's
        return n - 1 if not axes and ne[1:] == [1, 1, 1] else None


def signal_of(checked: CheckedTensor) -> Signal:
    """The signal of design.md: its module is the weight's name where a weight takes part."""
    where = checked.place
    legal = Legal.NEG_INF if "mask" in checked.name.lower() else Legal.FINITE
    return Signal(stage=where.stage, layer=where.layer, module=where.module, op=checked.op, legal=legal)
