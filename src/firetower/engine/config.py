"""Options of an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch

from firetower.core.errors import ConfigError
from firetower.engine.buckets import BUCKETS, MAX_WINDOW
from firetower.engine.drafts import DraftConfig
from firetower.engine.invariants import InvariantConfig
from firetower.engine.prefix import PrefixConfig
from firetower.engine.recovery import OnFire, RecoveryConfig
from firetower.fires.store import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        max_batch: requests that run at once, up to 256.
        max_model_len: longest prompt and answer together; None: what the model was made for.
        memory_bytes: for pages and states; None: on CUDA 85% of what is free less the graphs' budget, else 2 GiB.
        num_pages: pages of the cache; None: as many as every row could need, or as there is memory for.
        page_size: tokens of a page, a multiple of 64. kv_dtype: of keys and values; None: the model's.
        max_window: one certain token and its drafts, 1 to 8; 1 drafts nothing. max_window_rows: bound on rows
            times window.
        drafts: when to draft.
        prefill_chunk: tokens of a prompt that run at once; None: 8192 on CUDA, 1024 else. It decides
            bits of prompts longer than it.
        prefix: keep what was read for requests that begin with the same tokens; None: keep nothing.
        max_queue: requests that may wait.
        graphs: capture windows as CUDA graphs. graph_bytes: memory that they may hold.
        overlap: launch the next window before the last one is read; None: on CUDA.
        recovery: what to do about fires; ``on_fire`` alone may be given instead.
        invariants: when to warn of what stays as it is for too long.
        store: where fires go: None the default store, a path, a `Store`, or False for memory only.
        name: what fires call the model; None: its class and sizes.
        inject: make every step with the fault node, for tests and drills.
        audit: look at states, pages and weights on a fire.
        record_windows: windows whose signals stay on the device and are dumped on a fire; 0 for no recorder.
            record_stages: stages that are kept; None: all that can be. record_content: whether dumps have token ids.
        dumps: folder of dumps; None: ``dumps`` in the data folder. dump_bytes: that all of them may take.
    """

    max_batch: int = 32
    max_model_len: int | None = None
    memory_bytes: int | None = None
    num_pages: int | None = None
    page_size: int = 64
    kv_dtype: torch.dtype | None = None
    max_window: int = 5
    max_window_rows: int = 64
    drafts: DraftConfig = dataclasses.field(default_factory=DraftConfig)
    prefill_chunk: int | None = None
    prefix: PrefixConfig | None = None
    max_queue: int = 1024
    graphs: bool = True
    graph_bytes: int = 2 << 30
    overlap: bool | None = None
    recovery: RecoveryConfig = dataclasses.field(default_factory=RecoveryConfig)
    invariants: InvariantConfig = dataclasses.field(default_factory=InvariantConfig)
    store: Store | str | Path | Literal[False] | None = None
    name: str | None = None
    inject: bool = False
    audit: bool = True
    record_windows: int = 0
    record_stages: tuple[str, ...] | None = None
    record_content: bool = False
    dumps: str | Path | None = None
    dump_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        rules = (
            ("max_batch", 1 <= self.max_batch <= BUCKETS[-1], f"must be from 1 to {BUCKETS[-1]}"),
            ("max_window", 1 <= self.max_window <= MAX_WINDOW, f"must be from 1 to {MAX_WINDOW}; 1 drafts nothing"),
            ("page_size", self.page_size >= 64 and self.page_size % 64 == 0, "must be a multiple of 64"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "must be at least 2"),
            ("num_pages", self.num_pages is None or self.num_pages >= 1, "must be at least 1"),
            ("memory_bytes", self.memory_bytes is None or self.memory_bytes > 0, "must be above 0"),
            ("max_window_rows", self.max_window_rows >= 1, "must be at least 1"),
            ("max_queue", self.max_queue >= 1, "must be at least 1"),
            ("graph_bytes", self.graph_bytes >= 0, "must be 0 or more"),
            ("record_windows", 0 <= self.record_windows <= 1024, "must be from 0 to 1024; 0 records nothing"),
            ("record_stages", self.record_stages != (), "must name a stage, or be None for all"),
            ("dump_bytes", self.dump_bytes >= 0, "must be 0 or more"),
        )
        for name, is_fine, rule in rules:
            if not is_fine:
                raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """From options by name; ``on_fire`` is that of `RecoveryConfig`.

        Raises:
            ConfigError: an option that does not exist, or a value that is not served.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(options.keys() - known - {"on_fire"})
        if unknown:
            raise ConfigError(f"{unknown[0]}: no such option of the engine; known: {', '.join(sorted(known))}, on_fire")
        if "on_fire" in options:
            on_fire = options.pop("on_fire")
            if on_fire not in list(OnFire):
                raise ConfigError(f"on_fire={on_fire!r}: must be one of {', '.join(OnFire)}")
            recovery = options.get("recovery", RecoveryConfig())
            options["recovery"] = dataclasses.replace(recovery, on_fire=OnFire(on_fire))
        return cls(**options)
