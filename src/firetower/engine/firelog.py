"""From a burn to a stored fire: kept in memory always, in the store where there is one, repeats counted."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from firetower.core.records import Fire, Outcome, Reading, Status, new_fire_id, utc_now
from firetower.engine.guard import Burn
from firetower.fires.safe import SafeStore
from firetower.fires.store import Store

MAX_BAD_SIGNALS = 64
"""How many bad signals of one step a fire lists."""

MAX_FIRES = 1024
"""Fires kept in memory; older ones are in the store alone."""


def build_fire(
    burn: Burn, reading: Reading, *, model: str, device: torch.device, outcome: Outcome, token_ids: tuple[int, ...],
    notes: tuple[str, ...] = (), extra: Mapping[str, Any] | None = None,
) -> Fire:  # fmt: skip
    """The fire of one burned request.

    Args:
        burn: what burned it.
        reading: of the step.
        model: what to call the model. device: where it runs.
        outcome: what is done about it.
        token_ids: prompt and answer so far; private content.
        notes: findings in words.
        extra: more for the record, plain values.
    """
    logits = [s for s in reading.signals if s.signal.stage == "logits"]
    if not burn.is_own_bits:
        notes = (*notes, "the panel keeps bits of a signal's first bad row: those shown are not of this row")
    if reading.pad_before_real:
        notes = (*notes, "a pad row was bad before any real row: a shared scale, tile or mask may have leaked it")
    return Fire(
        id=new_fire_id(),
        created_at=utc_now(),
        source="engine",
        runtime=f"firetower, torch {torch.__version__}, Python {platform.python_version()}",
        model=model,
        device=device_name(device),
        phase=burn.phase,
        step=burn.step,
        origin=burn.signal,
        first=burn.first,
        outcome=outcome,
        request=burn.request,
        bad_signals=reading.bad[:MAX_BAD_SIGNALS],
        burned=tuple(row for row in reading.burned if row.sequence == burn.row),
        coverage=reading.coverage,
        pad_before_real=reading.pad_before_real,
        laundered=bool(reading.bad) and bool(logits) and all(s.status is Status.CLEAN for s in logits),
        notes=notes,
        token_ids=token_ids,
        extra={"backend": burn.backend, "own_bits": burn.is_own_bits, **(extra or {})},
    )


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


class FireLog:
    """Fires of one engine; a store that fails is counted and never stops a step.

    Args:
        store: the default store (None), a path, a `Store`, or False for memory only.

    Attributes:
        fires: the latest, oldest first.
        witnesses: called with every fire before it is kept, and the id that it will be known by; return it with what
            they have to say.
    """

    def __init__(self, store: Store | str | Path | Literal[False] | None) -> None:
        self.fires: list[Fire] = []
        self.store = None if store is False else SafeStore(store)
        self.num_recorded = 0
        self.witnesses: list[Callable[[Fire, str], Fire]] = []

    def record(self, fire: Fire) -> Fire:
        """Keep a fire.

        A fire of an origin that is known is counted there, and returned under the id of the first.
        """
        self.num_recorded += 1
        for witness in self.witnesses:
            fire = witness(fire, next((f.id for f in self.fires if f.merge_key == fire.merge_key), fire.id))
        for i, known in enumerate(self.fires):
            if known.merge_key == fire.merge_key:
                self.fires[i] = dataclasses.replace(known, count=known.count + 1)
                if self.store is not None:
                    self.store.bump(known.id)
                return dataclasses.replace(fire, id=known.id, count=known.count + 1)
        self.fires.append(fire)
        del self.fires[:-MAX_FIRES]
        if self.store is not None:
            self.store.add(fire)
        return fire

    @property
    def failures(self) -> tuple[int, str | None]:
        """(fires that could not be stored, what the last of them said)."""
        return (0, None) if self.store is None else (self.store.failures, self.store.last_error)

    def close(self) -> None:
        """Let the store go."""
        if self.store is not None:
            self.store.close()
