"""Puts an engine's parts together: the model and its tokenizer, the memory, the loop."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from firetower.core.errors import ConfigError, MissingExtraError
from firetower.engine.audit import Audit
from firetower.engine.buckets import buckets_up_to
from firetower.engine.config import EngineConfig
from firetower.engine.dump import DumpFolder
from firetower.engine.evidence import Evidence
from firetower.engine.firelog import FireLog
from firetower.engine.graphs import Graphs, Progress
from firetower.engine.guard import Guard
from firetower.engine.inject import Injector
from firetower.engine.isolate import Quarantine
from firetower.engine.loop import Loop
from firetower.engine.pool import Pool
from firetower.engine.prefix import PrefixCache
from firetower.engine.recorder import build_recorder
from firetower.engine.recovery import Recovery
from firetower.engine.runner import Runner
from firetower.engine.scheduler import Scheduler
from firetower.engine.status import Status
from firetower.engine.text import Tokenizer
from firetower.engine.tokenizer import load_tokenizer
from firetower.models.checkpoint import read_weights
from firetower.models.config import HybridConfig, read_config
from firetower.models.hybrid import HybridModel
from firetower.models.state import ModelState, bytes_of, new_state

CPU_MEMORY_BYTES = 2 << 30
"""For pages and states on the CPU, where nothing else is said."""

CUDA_MEMORY_FRAC = 0.85
"""Of what is free, less the graphs' budget."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """An engine's inside."""

    loop: Loop
    state: ModelState
    memory_bytes: int
    max_model_len: int
    evidence: Evidence

    def status(self, *, num_submitted: int) -> Status:
        """Counts of every part."""
        loop = self.loop
        scheduler, recovery, graphs = loop.scheduler, loop.burns.recovery, loop.runner.graphs.report
        failures, error = loop.burns.firelog.failures
        return Status(
            num_queued=len(scheduler.queue),
            num_prefilling=len(scheduler.prefilling),
            num_running=len(loop.rows),
            num_submitted=num_submitted,
            num_ended=loop.num_ended,
            num_steps=loop.num_steps,
            num_windows=loop.num_windows,
            num_chained=loop.num_chained,
            num_tokens=loop.num_tokens,
            num_pages=scheduler.pages.size,
            num_free_pages=scheduler.pages.num_free,
            num_slots=scheduler.slots.size,
            num_free_slots=scheduler.slots.num_free,
            num_quarantined=loop.quarantine.num_kept,
            num_cleared=loop.quarantine.num_cleared,
            num_fires=loop.burns.firelog.num_recorded,
            num_bad_steps=loop.num_bad_steps,
            num_recovered=recovery.num_recovered,
            num_pad_burns=loop.num_pad_burns,
            last_pad_burn=loop.last_pad_burn,
            open_breakers=recovery.open_breakers(time.monotonic()),
            num_store_failures=failures,
            store_error=error,
            num_out_of_memory=loop.num_out_of_memory,
            num_draft_tokens=loop.num_drafted,
            num_accepted_tokens=loop.num_accepted,
            memory_bytes=self.memory_bytes,
            graph_bytes=graphs.num_bytes,
            num_graphs=len(graphs.captured),
            graphs_left_out=tuple(f"{s.num_rows} x {s.window}: {why}" for s, why in graphs.left_out),
            num_warnings=loop.invariants.num_records,
            last_warning=next(reversed(loop.invariants.records), None),
            prefix=None if loop.prefix is None else loop.prefix.status(),
            signals=len(loop.guard.signals),
            **self.evidence.counts(),
        )


def resolve(
    model: HybridModel | Path | str, tokenizer: Tokenizer | None, *, device: torch.device | str | None,
    dtype: torch.dtype | None, progress: Progress | None, max_model_len: int | None = None,
) -> tuple[HybridModel, Tokenizer | None]:  # fmt: skip
    """The model itself, and its tokenizer, from what the user gave.

    Raises:
        ConfigError: a folder that holds no such model; device or type given for a model that is loaded already.
    """
    if isinstance(model, HybridModel):
        if device is not None or dtype is not None:
            raise ConfigError("device, dtype: are of a model that is loaded from a folder; this one is loaded already")
        return model, tokenizer
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model={str(model)!r}: is no folder; give the folder of a Transformers model")
    config = read_config(folder)
    at = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    kind = dtype if dtype is not None else torch.bfloat16 if at.type == "cuda" else torch.float32
    told = None if progress is None else lambda p: progress("load", p.done_bytes, p.total_bytes)
    weights = read_weights(folder, config, dtype=kind, device=at, progress=told)
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(folder)
        except MissingExtraError:
            # token ids do without; text prompts then say what is missing
            tokenizer = None
    return HybridModel(config, weights, num_positions=max_model_len), tokenizer


def build(model: HybridModel, config: EngineConfig) -> Parts:
    """Allocate state and put the loop together.

    Raises:
        ConfigError: options that do not fit the model or the memory.
    """
    device = model.device
    max_model_len = config.max_model_len if config.max_model_len is not None else model.config.max_position_embeddings
    if max_model_len > model.rope_table.num_positions:
        raise ConfigError(
            f"max_model_len={max_model_len}: the model has {model.rope_table.num_positions} positions; make it with a "
            "larger num_positions, or ask for less"
        )
    max_pages = -(-max_model_len // config.page_size)
    is_cuda = device.type == "cuda"
    overlap = is_cuda if config.overlap is None else config.overlap
    injector = Injector(model.signals, device) if config.inject else None
    # before the pages, which take what is free
    recorder = build_recorder(model, config, depth=int(overlap), injector=injector) if config.record_windows else None
    num_pages, memory = _num_pages(model, config, max_pages)
    # the largest bucket has to exist
    buckets_up_to(config.max_batch)
    state = new_state(
        model.config, num_pages=num_pages, num_slots=config.max_batch, page_size=config.page_size,
        kv_dtype=config.kv_dtype, dtype=model.dtype, device=device,
    )  # fmt: skip
    pages, slots = Pool(num_pages, "page"), Pool(config.max_batch, "slot")
    graphs = Graphs(device, budget_bytes=config.graph_bytes)
    model_name = config.name or _name_of(model.config)
    loop = Loop(
        config,
        runner=Runner(
            model, state, max_batch=config.max_batch, max_pages=max_pages, max_seq_len=max_model_len, graphs=graphs,
            injector=injector, recorder=recorder,
        ),
        guard=Guard(model.signals, device=device, dtype=model.dtype),
        scheduler=Scheduler(
            max_queue=config.max_queue, max_batch=config.max_batch, page_size=config.page_size, pages=pages,
            slots=slots, prefill_chunk=config.prefill_chunk or (8192 if is_cuda else 1024),
        ),
        quarantine=Quarantine(state, pages, slots),
        firelog=FireLog(config.store),
        recovery=Recovery(config.recovery),
        model_name=model_name,
        overlap=overlap,
    )  # fmt: skip
    # first of what hangs on the loop: it looks before anything is cleared
    evidence = Evidence(
        loop, audit=Audit(model, state) if config.audit else None, recorder=recorder,
        folder=None if recorder is None else DumpFolder(config.dumps, max_bytes=config.dump_bytes),
        model_name=model_name, with_content=config.record_content,
    )  # fmt: skip
    if config.prefix is not None:
        loop.use_prefix(
            PrefixCache(
                config.prefix, state=state, pages=pages, quarantine=loop.quarantine,
                prefill_chunk=loop.scheduler.prefill_chunk,
            )
        )  # fmt: skip
    return Parts(loop=loop, state=state, memory_bytes=memory, max_model_len=max_model_len, evidence=evidence)


def _num_pages(model: HybridModel, config: EngineConfig, max_pages: int) -> tuple[int, int]:
    """(pages, bytes of pages and states)."""

    def cost(num_pages: int) -> int:
        return bytes_of(
            model.config, num_pages=num_pages, num_slots=config.max_batch, page_size=config.page_size,
            kv_dtype=config.kv_dtype, dtype=model.dtype,
        ).total  # fmt: skip

    if config.num_pages is not None:
        return config.num_pages, cost(config.num_pages)
    budget = config.memory_bytes
    if budget is None and model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
        beside = (config.graph_bytes if config.graphs else 0) + (config.prefix.max_bytes if config.prefix else 0)
        budget = int(CUDA_MEMORY_FRAC * (free - beside))
    elif budget is None:
        budget = CPU_MEMORY_BYTES
    fixed, per_page = cost(1), cost(2) - cost(1)
    num_pages = min(config.max_batch * max_pages, 1 + (budget - fixed) // max(1, per_page))
    if num_pages < 1 or fixed > budget:
        raise ConfigError(
            f"memory_bytes={budget:,}: states of max_batch={config.max_batch} requests and one page take {fixed:,}; "
            "lower max_batch"
        )
    return int(num_pages), cost(int(num_pages))


def _name_of(config: HybridConfig) -> str:
    return f"{config.family} {config.num_layers} layers x {config.hidden_size}, {config.num_experts} experts"
