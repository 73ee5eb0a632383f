"""What an engine says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from firetower.engine.guard import Burn
from firetower.engine.invariants import InvariantRecord
from firetower.engine.prefix import PrefixStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Counts of one engine, since it was made.

    Attributes:
        num_queued, num_prefilling, num_running: requests now. num_submitted, num_ended: so far.
        num_steps, num_windows, num_tokens: steps launched, those that were windows, tokens of answers.
        num_chained: windows launched before the last one was read.
        num_pages, num_free_pages, num_slots, num_free_slots: of the pools.
        num_quarantined: pages and slots that could not be cleared; num_cleared: that were.
        num_fires, num_bad_steps, num_recovered: fires recorded, steps that burned a request, recoveries begun.
        num_pad_burns: bad values in rows that nobody owns; last_pad_burn: the last of them.
        open_breakers: origins at which nothing is recovered any more, with their fires.
        num_store_failures, store_error: fires that could not be stored, and what the last of them said.
        num_out_of_memory: launches that found no memory.
        num_draft_tokens, num_accepted_tokens: of requests that ended.
        memory_bytes: of pages and states. graph_bytes, num_graphs, graphs_left_out: CUDA graphs, and why not more.
        num_warnings, last_warning: invariants that were broken, and the last of them.
        prefix: of the prefix cache; None without one.
        signals: of the model.
        recorded_windows, recorder_bytes: of the flight recorder, and its memory. num_dumps, num_dumps_refused,
            num_dump_failures: written, not written for the quota, and not written for another reason.
        num_evidence_failures, evidence_error: fires whose evidence could not be gathered, and what the last failure
            said. evidence_s: that gathering it took in all, audit and copies to the host.
    """

    num_queued: int
    num_prefilling: int
    num_running: int
    num_submitted: int
    num_ended: int
    num_steps: int
    num_windows: int
    num_chained: int
    num_tokens: int
    num_pages: int
    num_free_pages: int
    num_slots: int
    num_free_slots: int
    num_quarantined: int
    num_cleared: int
    num_fires: int
    num_bad_steps: int
    num_recovered: int
    num_pad_burns: int
    last_pad_burn: Burn | None
    open_breakers: Mapping[str, int]
    num_store_failures: int
    store_error: str | None
    num_out_of_memory: int
    num_draft_tokens: int
    num_accepted_tokens: int
    memory_bytes: int
    graph_bytes: int
    num_graphs: int
    graphs_left_out: tuple[str, ...]
    num_warnings: int
    last_warning: InvariantRecord | None
    prefix: PrefixStatus | None
    signals: int
    recorded_windows: int = 0
    recorder_bytes: int = 0
    num_dumps: int = 0
    num_dumps_refused: int = 0
    num_dump_failures: int = 0
    num_evidence_failures: int = 0
    evidence_s: float = 0.0
    evidence_error: str | None = None
