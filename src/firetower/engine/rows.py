"""The running sequences as columns of numbers, so that a step is packed without a loop over them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from firetower.engine.sequence import Sequence

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_INTS = ("slot", "position", "token", "accepted", "source", "remaining", "seed", "top_k", "is_special")
_FLOATS = ("temperature", "top_p", "min_p")


class RowTable:
    """Seats ``0 .. num - 1``, one a running sequence, without gaps: the last one moves into a seat that is left.

    What a row computes does not depend on its place, so moving changes no bit.

    Attributes:
        sequences: by seat.
        slot: of the state, and row of the block table.
        position: of the next certain token, the first that the next window runs.
        token: that token, where the host knows it. source: else the row of the last launched step that chooses it; -1
            where the host knows.
        accepted: tokens of the slot's pending window that count, for the next launch.
        remaining: tokens of the answer that are still to be launched for.
        seed, temperature, top_k, top_p, min_p: of the request.
        is_special: 1 where the sampler needs more than these columns, or is asked for log-probabilities.
    """

    slot: Ints
    position: Ints
    token: Ints
    accepted: Ints
    source: Ints
    remaining: Ints
    seed: Ints
    top_k: Ints
    is_special: Ints
    temperature: Floats
    top_p: Floats
    min_p: Floats

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        self._ints = np.zeros((len(_INTS), capacity), dtype=np.int64)
        self._floats = np.zeros((len(_FLOATS), capacity), dtype=np.float32)
        for i, name in enumerate(_INTS):
            setattr(self, name, self._ints[i])
        for i, name in enumerate(_FLOATS):
            setattr(self, name, self._floats[i])

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_free(self) -> int:
        """Seats that are left."""
        return self.capacity - len(self.sequences)

    @classmethod
    def of_one(cls, sequence: Sequence) -> RowTable:
        """A table of its own for one sequence, which keeps its seat elsewhere; without a token."""
        table = cls(1)
        table._add(sequence, 0)
        return table

    def seat(self, sequence: Sequence, token: int) -> None:
        """Seat a sequence whose prompt is done; ``token`` is the first of its answer."""
        sequence.seat = len(self.sequences)
        self._add(sequence, token)

    def _add(self, sequence: Sequence, token: int) -> None:
        at = len(self.sequences)
        sampling = sequence.request.sampling
        self.sequences.append(sequence)
        self.slot[at] = sequence.slot
        self.position[at] = len(sequence.prompt)
        self.token[at] = token
        self.accepted[at] = 0
        self.source[at] = -1
        self.remaining[at] = sampling.max_tokens - 1
        self.seed[at] = sequence.seed
        self.top_k[at] = sampling.top_k
        self.is_special[at] = sequence.own_past is not None or sampling.num_logprobs is not None
        self.temperature[at] = sampling.temperature
        self.top_p[at] = sampling.top_p
        self.min_p[at] = sampling.min_p

    def leave(self, sequence: Sequence) -> None:
        """Free a seat; the last one moves there."""
        at, last = sequence.seat, len(self.sequences) - 1
        assert self.sequences[at] is sequence
        moved = self.sequences.pop()
        if at != last:
            self.sequences[at] = moved
            moved.seat = at
            self._ints[:, at] = self._ints[:, last]
            self._floats[:, at] = self._floats[:, last]
        sequence.seat = -1

    def to_launch(self) -> Ints:
        """Seats that have tokens left to launch for, in order: int64 [n]."""
        return np.flatnonzero(self.remaining[: len(self.sequences)] > 0)
