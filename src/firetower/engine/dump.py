"""Dumps of the flight recorder: what one holds, how it is written and read. Needs no torch.

A dump is a folder (0700) of two files (0600): ``dump.json`` has the plan, the reading and the audit, and
``tensors.safetensors`` the kept signals and states, raw bytes. It is written whole or not at all. No text and no token
ids are in it unless asked for; hidden states are, and text can be guessed from those.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from firetower.capture.files import PARTIAL_PREFIX, opened, read_small, write_folder
from firetower.capture.records import Environment
from firetower.capture.schema import dump_document, parse_document
from firetower.capture.tensors import RawTensor, TensorEntry, read_table, tensor_file_parts
from firetower.core.codec import build_record, decode, encode
from firetower.core.config import data_folder
from firetower.core.errors import CaptureError, ConfigError
from firetower.core.records import Phase, Reading, Status

if TYPE_CHECKING:
    import numpy as np

DUMP_SCHEMA = "firetower-dump-1"
"""First field of every ``dump.json``; another one is refused."""

DOCUMENT = "dump.json"
TENSORS = "tensors.safetensors"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditItem:
    """One thing that the state audit looked at.

    Attributes:
        what: ``weights``, ``recurrent``, ``conv`` or ``kv``.
        role: ``model``, ``burned`` or ``neighbour``. request: whose it is; None for weights.
        half: of a state: ``kept``, what the next step reads, or ``written`` by the step that burned and not committed;
            empty for others.
        status: clean, bad, or not covered. first: the first bad place in words. place: the same as numbers and names.
        reason: why it is not covered.
        is_older: of a bad one: whether it was there before the step that burned, so that the step may have read it.
    """

    what: str
    role: str
    request: str | None = None
    half: str = ""
    status: Status = Status.CLEAN
    first: str = ""
    place: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""
    is_older: bool = False

    @property
    def name(self) -> str:
        """What it is, in words: ``recurrent of request 7 (burned, kept half)``."""
        if self.request is None:
            return self.what
        half = f", {self.half} half" if self.half else ""
        return f"{self.what} of request {self.request} ({self.role}{half})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpRow:
    """One row of a step: its place in the plan, and what its random numbers are counted by.

    ``position`` is of the row's first token, ``accepted`` how many tokens of the window before count, ``token_ids``
    what it ran, kept only where content was asked for. ``pages`` are empty where the request had given them back.
    ``is_dead``: it had burned in the step before, which had not been read at launch; the device made it a pad.
    """

    request: str
    position: int
    num_real: int
    accepted: int
    slot: int
    seed: int
    pages: tuple[int, ...] = ()
    is_burned: bool = False
    is_dead: bool = False
    token_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpSignal:
    """One kept signal of a window: ``tensor`` is [tokens * rows_per_token, width], tokens in the order of the rows."""

    index: int
    name: str
    stage: str
    layer: int | None
    rows_per_token: int
    tensor: str
    is_neg_inf_legal: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpStep:
    """One step: ``num_rows`` rows of the bucket, pads included, of ``window`` tokens."""

    number: int
    phase: Phase
    num_rows: int
    window: int
    is_graphed: bool
    rows: tuple[DumpRow, ...]
    signals: tuple[DumpSignal, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpState:
    """One tensor of a burned request's state, both halves; ``side`` is the half that was kept."""

    request: str
    part: str
    side: int
    tensor: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What ``dump.json`` holds.

    Attributes:
        fire: id of the fire. created_at: when.
        model, device, environment: what ran, and its versions.
        step: the plan of the step that burned. reading: of its panel.
        windows: recorded, oldest first; with a window launched early also one behind the step that burned.
        states: of burned requests. audit: of states and weights.
        left_out: what there was no room for, and why.
    """

    fire: str
    created_at: str
    model: str
    device: str
    environment: Environment
    step: DumpStep
    reading: Reading
    windows: tuple[DumpStep, ...] = ()
    states: tuple[DumpState, ...] = ()
    audit: tuple[AuditItem, ...] = ()
    left_out: tuple[str, ...] = ()
    has_content: bool = False


def dumps_path() -> Path:
    """The usual folder of dumps: ``dumps`` in the data folder; not created here."""
    return data_folder() / "dumps"


class DumpFolder:
    """The dumps under one folder.

    Args:
        path: the folder; `dumps_path` where None. Made (0700) with the first dump.
        max_bytes: that all dumps may take together.
        max_per_minute: new ones of this process.

    Attributes:
        is_usual: whether it is `dumps_path`.
        num_written, num_refused, num_failed, last_error: counts, and what the last failure said.

    Raises:
        ConfigError: a negative limit.
    """

    def __init__(self, path: Path | str | None = None, *, max_bytes: int = 4 << 30, max_per_minute: int = 10) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_per_minute", max_per_minute)):
            if value < 0:
                raise ConfigError(f"{name}={value}: must not be negative")
        self.is_usual = path is None
        self.path = dumps_path() if path is None else Path(path).expanduser()
        self.max_bytes = max_bytes
        self.max_per_minute = max_per_minute
        self.num_written = self.num_refused = self.num_failed = 0
        self.last_error: str | None = None
        self._times: list[float] = []
        self._origins: set[str] = set()

    def why_not(self, origin: str) -> str | None:
        """Why a fire of this origin gets no dump now; None where it does."""
        if origin in self._origins:
            return "a fire of this origin has a dump already"
        newest = time.monotonic() - 60.0
        self._times = [t for t in self._times if t > newest]
        if len(self._times) >= self.max_per_minute:
            return f"{self.max_per_minute} dumps in a minute already"
        return None

    def room(self) -> int:
        """Bytes that are left of the quota."""
        return self.max_bytes - _size_of(self.path)

    def write(self, dump: Dump, tensors: Mapping[str, RawTensor], origin: str) -> Path:
        """Keep a dump, under the id of its fire.

        Raises:
            CaptureError: over the quota, or it cannot be written; nothing is left of it then.
        """
        parts = {DOCUMENT: [_document(dump)], TENSORS: list(tensor_file_parts(tensors))}
        size, room = sum(len(piece) for pieces in parts.values() for piece in pieces), self.room()
        if size > room:
            self.num_refused += 1
            raise CaptureError(f"dump: {size:,} bytes, {max(0, room):,} of {self.max_bytes:,} left; remove old dumps")
        target = self.path / dump.fire
        write_folder(target, parts.items())
        self._origins.add(origin)
        self._times.append(time.monotonic())
        self.num_written += 1
        return target

    def failed(self, error: Exception) -> str:
        """Count a dump that did not work; what to say of it."""
        self.num_failed += 1
        self.last_error = f"{type(error).__name__}: {error}"
        return self.last_error


def _size_of(folder: Path) -> int:
    """Bytes of all files of whole dumps."""
    total = 0
    for base, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(PARTIAL_PREFIX)]
        for name in files:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:
                # removed meanwhile
                continue
    return total


def _document(dump: Dump) -> bytes:
    return dump_document({"schema": DUMP_SCHEMA, **encode(dump)}, indent=1)


def read_dump(folder: Path | str) -> Dump:
    """Read the document of a dump.

    Raises:
        CaptureError: it is missing, damaged, or of another version.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CaptureError(f"dump={str(folder)!r}: is no folder; give the folder of a dump, or the id of its fire")
    data = parse_document(read_small(path, DOCUMENT), DOCUMENT)
    schema = data.pop("schema", None)
    if schema != DUMP_SCHEMA:
        raise CaptureError(f"schema={schema!r}: must be {DUMP_SCHEMA!r}; read it with the version that wrote it")
    try:
        return build_record(Dump, decode(data), "dump")
    except (ValueError, TypeError, KeyError) as e:
        raise CaptureError(f"file={DOCUMENT!r}: {e}; the dump is damaged") from e


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What some rows of a kept tensor hold.

    Attributes:
        dtype, shape: of the whole tensor. absmax: of the finite values. num_nan, num_inf: counts; a -Inf counts as Inf,
            whether it is legal there or not.
        first_bad: (row, column) of the tensor of the first value that is not legal, and its ``bits``.
    """

    dtype: str
    shape: tuple[int, ...]
    absmax: float
    num_nan: int
    num_inf: int
    first_bad: tuple[int, int] | None
    bits: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalFigures:
    """Figures of one signal in one window: of the tokens that requests own.

    Attributes:
        step: of the window. signal: which. figures: of its real rows.
        num_pad_bad: values of pads that are not finite: memory that nobody wrote, mostly.
        request, position: of the first bad value.
    """

    step: DumpStep
    signal: DumpSignal
    figures: Figures
    num_pad_bad: int
    request: str | None = None
    position: int | None = None


def read_signals(folder: Path | str, dump: Dump) -> Iterator[SignalFigures]:
    """Figures of every kept signal, windows and signals in their order; one tensor at a time in memory.

    Raises:
        CaptureError: a damaged file.
    """
    with opened(Path(folder), TENSORS) as (file, num_bytes):
        entries = {entry.name: entry for entry in read_table(file, num_bytes)}
        for step in dump.windows:
            for signal in step.signals:
                entry = entries.get(signal.tensor)
                num_rows = step.num_rows * step.window * signal.rows_per_token
                if entry is None or len(entry.shape) != 2 or entry.shape[0] != num_rows:
                    raise CaptureError(f"tensor={signal.tensor!r}: {DOCUMENT} and {TENSORS} disagree on it")
                yield _signal_figures(step, signal, _read(file, entry))


def _read(file: BinaryIO, entry: TensorEntry) -> RawTensor:
    file.seek(entry.start)
    return RawTensor(dtype=entry.dtype, shape=entry.shape, data=file.read(entry.stop - entry.start))


def _signal_figures(step: DumpStep, signal: DumpSignal, tensor: RawTensor) -> SignalFigures:
    per = signal.rows_per_token
    real = [
        (row * step.window + token) * per + i
        for row, one in enumerate(step.rows)
        if not one.is_dead
        for token in range(one.num_real)
        for i in range(per)
    ]
    legal = signal.is_neg_inf_legal
    mine = figures(tensor, real, is_neg_inf_legal=legal)
    pads = figures(tensor, sorted(set(range(tensor.shape[0])) - set(real)), is_neg_inf_legal=legal)
    request, position = None, None
    if mine.first_bad is not None:
        row, token = divmod(mine.first_bad[0] // per, step.window)
        request, position = step.rows[row].request, step.rows[row].position + token
    return SignalFigures(
        step=step, signal=signal, figures=mine, num_pad_bad=pads.num_nan + pads.num_inf, request=request,
        position=position,
    )  # fmt: skip


def figures(tensor: RawTensor, rows: Sequence[int], *, is_neg_inf_legal: bool = False) -> Figures:
    """Figures of some rows of a tensor of two dimensions, taken in the order that they are given in."""
    import numpy as np

    raw = tensor.to_array()[np.asarray(rows, dtype=np.int64)]
    values = _values(raw, tensor.dtype)
    nan, inf = np.isnan(values), np.isinf(values)
    bad = (nan | (inf & (values > 0) if is_neg_inf_legal else inf)).reshape(-1)
    finite = np.abs(values[~(nan | inf)])
    at = int(bad.argmax()) if bad.any() else -1
    row, column = divmod(at, tensor.shape[1]) if at >= 0 else (0, 0)
    return Figures(
        dtype=tensor.dtype,
        shape=tensor.shape,
        absmax=float(finite.max(initial=0.0)),
        num_nan=int(nan.sum()),
        num_inf=int(inf.sum()),
        first_bad=(rows[row], column) if at >= 0 else None,
        bits=raw.reshape(-1)[at : at + 1].tobytes()[::-1].hex() if at >= 0 else "",
    )


def _values(raw: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Numbers, of types that numpy lacks too."""
    import numpy as np

    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        raise CaptureError(f"dtype={dtype!r}: no signal or state has this type; the dump is damaged")
    return raw.astype(np.float64) if raw.dtype.kind != "f" else raw
