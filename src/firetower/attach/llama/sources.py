"""The state of an op's sources when it was found bad: tells a bad weight from a bad activation or state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from firetower.attach.llama.ggml import (
    FLOAT_TYPES,
    INTEGER_TYPES,
    VIEW_OPS,
    Ggml,
    GgmlTensor,
    bits_view,
    is_finite,
    name_of,
    summarise,
    widen,
)
from firetower.attach.llama.names import is_weight, strip
from firetower.attach.llama.weights import Operand, WeightReader
from firetower.core.records import BadValue, Status, TensorSummary

Role = Literal["weight", "state", "activation", "input"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """State of one source tensor of the first bad op.

    ``role`` is weight, state, activation or input; ``status`` is bad, clean or not covered; ``detail`` says
    what was looked at (a weight: the row this value was computed from) or why it could not be.
    """

    name: str
    role: Role
    type_name: str
    status: Status
    detail: str = ""
    summary: TensorSummary | None = None


class SourceReader:
    """Reads source tensors while the callback holds the graph still.

    Args:
        ggml: access to tensor memory and names.
        weights: reads rows of weights.
        states: for every tensor checked in this step, by address, whether it was bad.
    """

    def __init__(self, ggml: Ggml, weights: WeightReader, states: Mapping[int, bool]) -> None:
        self._ggml, self._weights, self._states = ggml, weights, states

    def base(self, address: int) -> int:
        """Follow views to the tensor that owns the values."""
        while address not in self._states:
            tensor = GgmlTensor.from_address(address)
            if not tensor.src[0] or self._ggml.op_name(address) not in VIEW_OPS:
                break
            address = tensor.src[0]
        return address

    def of(self, tensor: GgmlTensor, first: BadValue) -> tuple[Source, ...]:
        """The sources of ``tensor``, whose first bad element is ``first``."""
        return tuple(self._source(tensor, index, first) for index, s in enumerate(tensor.src) if s)

    def _source(self, consumer: GgmlTensor, index: int, first: BadValue) -> Source:
        address = consumer.src[index]
        base, tensor = self.base(address), GgmlTensor.from_address(address)
        owner = GgmlTensor.from_address(base)
        name = name_of(owner)
        type_name = self._ggml.type_name(tensor.type)
        if is_weight(name):
            operand = self._weights.operand(consumer, index, first, strip(name))
            return _weight_source(name, type_name, operand)
        computed = self._ggml.op_name(base) not in VIEW_OPS
        role: Role = "activation" if computed else "state" if name.startswith("cache_") else "input"
        if computed and base not in self._states:
            # not handed over at this level: its memory may hold a later tensor by now
            return Source(
                name=name,
                role=role,
                type_name=type_name,
                status=Status.NOT_COVERED,
                detail="not watched at this level",
            )
        return self._read_source(tensor, address, name, role, known_bad=self._states.get(base))

    def _read_source(
        self,
        tensor: GgmlTensor,
        address: int,
        name: str,
        role: Role,
        *,
        known_bad: bool | None,
    ) -> Source:
        kind, type_name = FLOAT_TYPES.get(tensor.type), self._ggml.type_name(tensor.type)
        if kind is None:
            integer = tensor.type in INTEGER_TYPES
            status, detail = (Status.CLEAN, "integers") if integer else (Status.NOT_COVERED, "quantised")
            return Source(name=name, role=role, type_name=type_name, status=status, detail=detail)
        bits = bits_view(tensor, address, self._ggml)
        legal = "mask" in name.lower()
        bad = not is_finite(bits, kind, allow_neg_inf=legal) if known_bad is None else known_bad
        # an op that works in place has overwritten its source by now: its state was recorded, its values are
        # gone
        in_place = known_bad is not None and bad != bool((~np.isfinite(widen(bits, kind))).any())
        return Source(
            name=name,
            role=role,
            type_name=type_name,
            status=Status.BAD if bad else Status.CLEAN,
            detail="overwritten in place" if in_place else "-inf is legal here" if legal else "",
            summary=None if in_place else summarise(name, widen(bits, kind), kind.name),
        )


def _weight_source(name: str, type_name: str, operand: Operand) -> Source:
    return Source(
        name=name,
        role="weight",
        type_name=type_name,
        status=operand.status,
        detail=operand.detail,
        summary=operand.summary,
    )
