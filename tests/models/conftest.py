"""Tiny hybrid models of Transformers, saved once, and a driver that runs ours over pages and slots."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firetower.drills import hosts
from firetower.models.batch import WindowBatch, new_prefill_batch, new_window_batch
from firetower.models.checkpoint import read_weights
from firetower.models.config import HybridConfig, read_config
from firetower.models.hybrid import HybridModel
from firetower.models.state import ModelState, commit, new_state

FAMILIES = {"qwen3_5_moe": hosts.small_qwen35_moe, "qwen3_next": hosts.small_qwen3_next}
TINY = {"hidden_size": 64, "vocab_size": 160, "num_experts": 8, "moe_intermediate_size": 32}
PAGE = 64


@dataclasses.dataclass(frozen=True)
class Saved:
    """A Transformers model and the folder that holds it."""

    host: Any
    folder: Path

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] of one sequence."""
        with torch.inference_mode(), quiet():
            return self.host(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    def load(self, **options: Any) -> HybridModel:
        """Our model from the folder."""
        config = read_config(self.folder)
        return HybridModel(config, read_weights(self.folder, config), **options)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Transformers warns of kernels that are not installed and of names that it is about to drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(family: str, folder: Path, *, shard_bytes: int | None = None, **config: Any) -> Saved:
    """A tiny model with every weight random, those that start neutral too, saved to ``folder``."""
    with quiet():
        host = FAMILIES[family](seed=3, **(TINY | config))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for x in host.parameters():
                if x.ndim == 1:
                    x.add_(torch.randn(x.shape, generator=generator) * 0.1)
        host.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return Saved(host, folder)


class Driver:
    """Runs sequences on a model: each has the slot and the pages of its number."""

    def __init__(
        self, model: HybridModel, *, sequences: int = 4, pages: int = 4, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.max_pages = pages
        self.state: ModelState = new_state(
            model.config,
            num_pages=sequences * pages + 1,
            num_slots=sequences + 1,
            kv_dtype=kv_dtype,
            dtype=model.dtype,
            device=model.device,
        )
        self.lengths = [0] * sequences
        self.accepted = [0] * sequences

    def pages(self, i: int) -> list[int]:
        """Pages of a sequence, not in order."""
        own = range(1 + i * self.max_pages, 1 + (i + 1) * self.max_pages)
        return [*own][::-1]

    def place(self, i: int, position: int) -> int:
        """Slot of a token in the pages."""
        return self.pages(i)[position // PAGE] * PAGE + position % PAGE

    def prefill(
        self,
        prompts: dict[int, Sequence[int]],
        *,
        panel: Tensor | None = None,
        keep: Any = None,
        all_logits: bool = True,
    ) -> Tensor:
        """The next tokens of some sequences in one call."""
        batch = new_prefill_batch(
            [list(p) for p in prompts.values()],
            block_tables=[self.pages(i) for i in prompts],
            state_slots=[i + 1 for i in prompts],
            page_size=PAGE,
            prefix_lens=[self.lengths[i] for i in prompts],
            device=self.model.device,
        )
        with torch.inference_mode():
            out = self.model.prefill(batch, self.state, panel, keep, all_logits=all_logits)
        for i, prompt in prompts.items():
            self.lengths[i] += len(prompt)
            self.accepted[i] = 0
        return out

    def batch(self, rows: Sequence[tuple[int, Sequence[int]] | None], window: int) -> WindowBatch:
        """A step: for each row a sequence and its tokens, or None for a pad row."""
        limit = self.max_pages * PAGE
        made = new_window_batch(len(rows), window, self.max_pages, max_seq_len=limit, device=self.model.device)
        for n, row in enumerate(rows):
            if row is None:
                continue
            i, tokens = row
            count, start = len(tokens), self.lengths[i]
            made.token_ids[n, :count] = torch.tensor(list(tokens))
            made.positions[n, :count] = torch.arange(start, start + count)
            made.row_ids.view(-1, window)[n, :count] = torch.arange(n * window, n * window + count)
            made.block_table[n] = torch.tensor(self.pages(i))
            made.seq_lens[n] = start + count
            made.slot_mapping[n, :count] = torch.tensor([self.place(i, p) for p in range(start, start + count)])
            made.state_slots[n] = i + 1
            made.num_accepted[n] = self.accepted[i]
        return made

    def step(
        self,
        rows: Sequence[tuple[int, Sequence[int]] | None],
        window: int | None = None,
        *,
        accept: Sequence[int] | None = None,
        panel: Tensor | None = None,
        keep: Any = None,
    ) -> list[Tensor]:
        """Run a window and commit it: logits [tokens, V] of each row that is no pad; ``accept`` tokens stay."""
        longest = max(len(row[1]) for row in rows if row is not None)
        batch = self.batch(rows, window or longest)
        with torch.inference_mode():
            out = self.model.window(batch, self.state, panel, keep).view(len(rows), batch.window, -1)
            commit(self.state, batch.state_slots)
        found = []
        for n, row in enumerate(rows):
            if row is None:
                continue
            kept = len(row[1]) if accept is None else accept[n]
            self.lengths[row[0]] += kept
            self.accepted[row[0]] = kept
            found.append(out[n, : len(row[1])].clone())
        return found


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Tiny models by family and overrides, each built once."""
    made: dict[str, Saved] = {}

    def get(family: str = "qwen3_5_moe", **config: Any) -> Saved:
        key = f"{family} {sorted(config.items())}"
        if key not in made:
            made[key] = build(family, tmp_path_factory.mktemp("model"), **config)
        return made[key]

    return get


@pytest.fixture(scope="session")
def saver() -> Callable[..., Saved]:
    """Builds a tiny model in a folder of the test's own."""
    return build


@pytest.fixture
def driver() -> type[Driver]:
    """The class of drivers."""
    return Driver


@pytest.fixture
def tiny_config(saved: Callable[..., Saved]) -> HybridConfig:
    """Configuration of the tiny Qwen3.5-MoE."""
    return read_config(saved().folder)


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    """Seeded random token ids."""

    def make(count: int, seed: int = 0, vocab: int = TINY["vocab_size"]) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make
