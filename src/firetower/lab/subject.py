"""What the lab sees of whatever burned: a *Subject*, a public protocol with every part optional.

A part is one method of the classes below. It is missing where the subject has no such method (or an
attribute of that name that is None) or where it returns None: then every test that needs it is reported as
"not testable: <part>", and nothing is guessed. An empty tuple says something else: "I looked, there are
none", and that rules causes out. So a subject without a state returns ``()`` from `states`, and one that
cannot look at its states has no `states`.

Values are numpy arrays of the stored values, exactly; ``dtype`` names the stored type where numpy has none
(bfloat16 and float8 are widened to float32, which holds all of them). No torch is needed here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from firetower.core.records import Fire

Floats = npt.NDArray[Any]
"""A numpy array of numbers of any shape."""


class Switch(StrEnum):
    """One way to run the same request differently. Each run changes this one thing and nothing else."""

    EAGER = "eager"
    """Without graphs and without compilation."""
    EXACT_BUCKET = "exact bucket"
    """As compiled or captured, but for exactly this number of rows: no padding."""
    SERIAL = "serial"
    """One kernel at a time, each awaited."""
    ALONE = "alone"
    """No other request beside it."""
    COLD = "cold"
    """Computed from the prompt: no prefix cache, no transferred state."""
    DRAFTS_OFF = "drafts off"
    WORLD_SIZE_ONE = "world size 1"
    OTHER_BACKEND = "other backend"
    """Another kernel for the first bad op, the same type."""
    OTHER_DEVICE = "other device"
    FILL_A = "unread rows filled with 1"
    """Every place not written in this step (pad, masked, beyond the valid length) holds 1."""
    FILL_B = "unread rows filled with -3"
    ZERO_UNREAD = "unread rows zeroed"
    ZERO_INPUTS = "inputs zeroed"
    """The first bad op is given zeros for its activations; weights stay."""
    FRESH_STATE = "state assigned zeros"
    """Zeros (or the right expected state) are assigned to every state before the request."""
    RELOADED_WEIGHTS = "weights loaded again"
    ALL_MISS = "every expert a miss"
    """Every expert from its source, past the cache."""
    POISON_DESTINATIONS = "destinations poisoned"
    """Output rows of the experts hold `POISON` before the kernel runs."""


POISON = 12345.0
"""What `Switch.POISON_DESTINATIONS` writes; float16 and bfloat16 round it by less than 1 in 1,000."""

FILLS: Mapping[Switch, float] = {Switch.FILL_A: 1.0, Switch.FILL_B: -3.0, Switch.ZERO_UNREAD: 0.0}
"""What each filling switch writes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Array:
    """A named tensor with its values. ``dtype`` is the stored type (``float16``, ``bfloat16``, ``int64``)."""

    name: str
    values: Floats
    dtype: str = ""

    @property
    def type_name(self) -> str:
        """The stored type: ``dtype``, or numpy's where that is empty."""
        return self.dtype or str(self.values.dtype)

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers or bools."""
        return self.type_name.startswith(("int", "uint", "bool"))


def array(name: str, values: Any, dtype: str = "") -> Array:
    """Make an `Array` of anything numpy takes."""
    return Array(name=name, values=np.asarray(values), dtype=dtype)


def hash_of(values: Any) -> str:
    """Hash of an array's type, shape and bytes: equal for bit-equal arrays only."""
    a = np.ascontiguousarray(values)
    head = f"{a.dtype.str}{a.shape}".encode()
    return hashlib.blake2b(head + a.tobytes(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How to run the subject's request: under one ``switch`` or as it is served; ``number`` counts replays.

    A subject whose outcome depends on a seeded scheduler uses ``number`` as its seed.
    """

    switch: Switch | None = None
    number: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What one run gave.

    Attributes:
        outputs: what the request got (logits, hidden states), in a fixed order.
        origin: name of the first bad signal or op, None where none was seen.
        kind: its class: ``nan``, ``+inf``, ``-inf`` or "" for a finite fault.
        is_wrong: whether the subject itself knows the run to be wrong (a detector, a law, a comparison with
            a known answer); None where it cannot tell, and then non-finite outputs and the reference tell.
    """

    outputs: tuple[Array, ...] = ()
    origin: str | None = None
    kind: str = ""
    is_wrong: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """One weight. Hashes are `hash_of`, or any hash that is the same both times.

    ``at_load`` is its value when loaded, where that was kept. ``neighbour`` names what lies directly before
    it in memory. ``num_bytes`` and ``num_bytes_found`` are what the file's header declares and what is there.
    """

    name: str
    now: Array | None = None
    hash_now: str | None = None
    hash_at_load: str | None = None
    at_load: Array | None = None
    neighbour: str | None = None
    num_bytes: int | None = None
    num_bytes_found: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A speculative window that wrote a state: position of its first token, tokens in it, tokens accepted."""

    start: int
    num_tokens: int
    num_accepted: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """One state (recurrent, conv, KV) of one row, as it is when the request or step starts.

    Attributes:
        owner, expected_owner: the request whose state it is by its tag, and the row's request.
        position, expected_position: tokens in it by its tag, and tokens that the request says are in.
        epoch, expected_epoch: how often the slot was handed out, by the tag and by the pool.
        hash_now, expected_hash: of the content; expected is that of a fresh state for a new request, or what
            was noted when the state was stored or sent.
        value: the content. ``is_fresh_expected``: the request is new here, so the state must be a fresh one.
        written_by: what brought it here: ``reset``, ``prefill``, ``decode``, ``verify``, ``restore`` (from a
            cache) or ``transfer``; a state restored for this request keeps that mark in its first step.
        window: the window of a ``verify``.
    """

    name: str
    layer: int | None = None
    owner: str | None = None
    expected_owner: str | None = None
    position: int | None = None
    expected_position: int | None = None
    epoch: int | None = None
    expected_epoch: int | None = None
    hash_now: str | None = None
    expected_hash: str | None = None
    value: Array | None = None
    is_fresh_expected: bool = False
    written_by: str | None = None
    window: Window | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows (or slots of a page) of one buffer that the first bad op, or the step, reads.

    ``is_valid`` says which are real; ``is_read`` which are read at all, all of them when empty.
    ``written_at`` is the step that wrote each last, None for never. ``step`` is the present one.
    """

    name: str
    step: int
    is_valid: tuple[bool, ...]
    written_at: tuple[int | None, ...] = ()
    is_read: tuple[bool, ...] = ()
    values: Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One expert slot: what the map says is in it, and the hashes of content and source.

    ``known`` gives the source hash of every expert that the slot might hold by mistake.
    """

    slot: int
    expert: int
    hash_now: str | None = None
    source_hash: str | None = None
    known: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRow:
    """One routed row of the step: which expert, by which path, and whether its result is bad."""

    row: int
    expert: int
    path: Literal["hit", "miss"]
    is_bad: bool
    slot: int | None = None


EventKind = Literal["need", "load", "evict", "write", "read"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event, in the order in which it happened.

    ``what`` names a buffer or an expert. A ``need`` announces that the step will read it; ``evict`` takes it
    away, ``load`` brings it. ``version`` is what a ``write`` left, or what a ``read`` was meant to find.
    """

    kind: EventKind
    what: str
    step: int = 0
    version: int | None = None
    by: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """The first bad op, or one before or after it.

    Attributes:
        name: ``mul``, ``aten.mul.Tensor``, ``rms_norm``: the tests know usual names, overloads cut off.
        inputs: activations that it read, in order; masks and indices too. As they were before the op.
        outputs: what it stored.
        weights: weights and buffers that it read.
        producers: the ops that made its inputs, nearest first, then theirs.
        consumers: ops that read its output, in order.
        history_absmax: largest finite magnitude of this op's output in each earlier turn of a loop over time.
    """

    name: str
    module: str = ""
    source: str = ""
    inputs: tuple[Array, ...] = ()
    outputs: tuple[Array, ...] = ()
    weights: tuple[Array, ...] = ()
    producers: tuple[Op, ...] = ()
    consumers: tuple[Op, ...] = ()
    history_absmax: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantised:
    """One quantised tensor: its fields (``scale``, ``sum``, ``min``), one value a block, as stored.

    ``original`` are the values before, ``restored`` after dequantising; ``wide_fields`` the same fields in
    float32. ``max_code`` is the largest code. ``is_static``: the scale was fixed before the values were seen.
    ``first_position`` is the token position of the first block of the tensor, one block row a position.
    """

    name: str
    sink: Literal["activation", "kv", "weight"]
    block_size: int
    fields: tuple[Array, ...]
    wide_fields: tuple[Array, ...] = ()
    original: Array | None = None
    restored: Array | None = None
    max_code: float | None = None
    is_static: bool = False
    first_position: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """One part of a split softmax: row maximum, row sum and accumulator, before the merge."""

    row_max: Array
    row_sum: Array
    accumulator: Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recurrence:
    """The recurrence of one linear-attention head over time.

    ``log_decay`` [T] as computed in float32 or wider, ``decay`` [T] as used, in ``state_dtype``; ``keys``
    [T, D] and ``beta`` [T] as used; ``state_absmax`` [T].
    """

    name: str
    state_dtype: str
    log_decay: Array | None = None
    decay: Array | None = None
    keys: Array | None = None
    beta: Array | None = None
    state_absmax: Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Positions:
    """Token positions: the exact integers [T], and as the angles were computed from them."""

    exact: Array
    used: Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """One sampled row: logits [V] before the mask, ``allowed`` [V] bools of the grammar mask, the token."""

    row: int
    logits: Array
    token_id: int | None
    allowed: Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """One all-reduce or combine: the part of every rank, and what came out."""

    name: str
    parts: tuple[Array, ...]
    result: Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law that the values obey whatever the input, checked.

    ``worst`` is the worst value seen, ``limit`` what is allowed. ``holds_for_each_operand``: whether the
    law holds when all operands are taken from one and the same step. ``versions`` are the steps that
    the operands were written in.
    """

    name: str
    worst: float
    limit: float
    holds: bool
    holds_for_each_operand: bool | None = None
    versions: tuple[int, ...] = ()


class Subject(Protocol):
    """Anything that burned. ``name`` is for people; no test reads it. All other parts are optional."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...


class HasFire(Protocol):
    """``fire``: the stored incident."""

    @property
    def fire(self) -> Fire | None:
        """The incident, where one was recorded."""
        ...


class Runs(Protocol):
    """``run``: the request again. ``switches``: the ways to run it. ``reset``: back to before the request."""

    @property
    def clean_twin_bit_stable(self) -> bool | None:
        """Whether two clean runs give the same bits, so that replays may be compared by bits."""
        ...

    def run(self, request: Request) -> Outcome | None:
        """Run from the same starting point; raising is an outcome of the subject's own making: catch it."""
        ...

    def switches(self) -> Sequence[Switch] | None:
        """The switches that `run` understands."""
        ...

    def reset(self) -> None:
        """Put everything back to before the request."""
        ...


class HasWeights(Protocol):
    """``weights``: every weight, or those that the first bad op and its producers read."""

    def weights(self) -> Sequence[Weight] | None:
        """Now and at load."""
        ...


class HasStates(Protocol):
    """``states``: states at request start. ``recompute_rows``: the outputs with states in another order."""

    def states(self) -> Sequence[State] | None:
        """One record a state and row."""
        ...

    def recompute_rows(self, order: Sequence[int]) -> Array | None:
        """What `run` returns if row ``i`` is given state ``order[i]`` of `states`, computed afresh."""
        ...


class HasRows(Protocol):
    """``valid_rows``: which rows of which buffers are real, and when each was written."""

    def valid_rows(self) -> Sequence[Rows] | None:
        """Buffers that the step reads; ``()`` when every row of every buffer is written in this step."""
        ...


class HasSlots(Protocol):
    """``slots`` and ``routed_rows``: the expert cache and what went through it."""

    def slots(self) -> Sequence[Slot] | None:
        """Every slot that the step used."""
        ...

    def routed_rows(self) -> Sequence[RoutedRow] | None:
        """Every routed row of the step."""
        ...


class HasEvents(Protocol):
    """``events``: what happened in which order."""

    def events(self) -> Sequence[Event] | None:
        """Events of the step and those before it, oldest first."""
        ...


class HasFirstBadOp(Protocol):
    """``first_bad_op``: the op where it began. For a finite fault, the first op that is known to be wrong."""

    def first_bad_op(self) -> Op | None:
        """The op with its operands, and the ops around it."""
        ...


class HasReference(Protocol):
    """``reference``: recomputation in a wider type."""

    def reference(
        self, dtype: Literal["float32", "float64"], what: Literal["op", "chain", "outputs"]
    ) -> Sequence[Array] | None:
        """Outputs of the first bad op from its stored inputs (``op``), of the op with its producers
        recomputed too (``chain``), or what `run` returns, computed afresh and right (``outputs``)."""
        ...


class HasQuantised(Protocol):
    """``quantised``: quantised tensors of the step, fields and values."""

    def quantised(self) -> Sequence[Quantised] | None:
        """``()`` where nothing is quantised."""
        ...


class HasAttention(Protocol):
    """``splits``: parts of a split softmax before the merge."""

    def splits(self) -> Sequence[Split] | None:
        """``()`` where attention is not split."""
        ...


class HasRecurrence(Protocol):
    """``recurrences``: gates and keys of linear-attention heads."""

    def recurrences(self) -> Sequence[Recurrence] | None:
        """``()`` where the model has none."""
        ...


class HasPositions(Protocol):
    """``positions``: exact and as used."""

    def positions(self) -> Positions | None:
        """None where they cannot be seen."""
        ...


class HasSampler(Protocol):
    """``sampled``: the rows that were sampled."""

    def sampled(self) -> Sequence[Sampled] | None:
        """``()`` where nothing was sampled."""
        ...


class HasLaunderers(Protocol):
    """``launderers``: what made a bad value disappear."""

    def launderers(self) -> Sequence[str] | None:
        """Ops, in words, that a bad value went into and did not come out of."""
        ...


class HasCollectives(Protocol):
    """``collectives``: parts and results."""

    def collectives(self) -> Sequence[Collective] | None:
        """``()`` where one rank does it all."""
        ...


class HasLaws(Protocol):
    """``laws``: laws of the model that were checked."""

    def laws(self) -> Sequence[Law] | None:
        """Laws with what was seen."""
        ...


PARTS: tuple[str, ...] = (
    "fire", "run", "switches", "reset", "weights", "states", "recompute_rows", "valid_rows", "slots",
    "routed_rows", "events", "first_bad_op", "reference", "quantised", "splits", "recurrences", "positions",
    "sampled", "launderers", "collectives", "laws", "clean_twin_bit_stable",
)  # fmt: skip
"""Every part by name, for error messages and for "not testable"."""
