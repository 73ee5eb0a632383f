"""Engines over tiny random hybrid models on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from firetower.engine.engine import Engine
from firetower.models.config import FULL, LINEAR, HybridConfig
from firetower.models.hybrid import HybridModel
from firetower.models.weights import random_weights

VOCAB = 97


def tiny_config(**overrides: Any) -> HybridConfig:
    """Two DeltaNet layers and one of attention, of odd sizes."""
    sizes: dict[str, Any] = {
        "family": "qwen3_5_moe",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 3,
        "layer_types": (LINEAR, FULL, LINEAR),
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "num_k_heads": 1,
        "num_v_heads": 2,
        "head_k_dim": 16,
        "head_v_dim": 16,
        "num_experts": 8,
        "top_k": 2,
        "moe_width": 16,
        "shared_width": 16,
        "max_position_embeddings": 1024,
    }
    return HybridConfig(**(sizes | overrides))


def tiny_model(seed: int = 0, *, layer_scale: float = 12.0, **overrides: Any) -> HybridModel:
    """Random weights, large enough that tokens depend on what came before.

    With a small ``layer_scale`` a token depends on the last one alone, nearly: the answer soon goes in a circle.
    """
    config = tiny_config(**overrides)
    weights = random_weights(config, torch.float32, "cpu", seed)
    for name, x in weights.named_tensors():
        if x.ndim >= 2:
            x.mul_(layer_scale if "layers" in name else 12.0)
    return HybridModel(config, weights)


@pytest.fixture(scope="session")
def model() -> HybridModel:
    """The tiny model that most tests share; nobody writes its weights."""
    return tiny_model()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., HybridModel]:
    """Makes other tiny models: ``tiny(seed, layer_scale=..., vocab_size=...)``."""
    return tiny_model


@pytest.fixture
def engine(model: HybridModel) -> Iterator[Callable[..., Engine]]:
    """Makes engines with small limits; closes them."""
    made: list[Engine] = []

    def make(own: HybridModel | None = None, **options: Any) -> Engine:
        options = {"max_batch": 8, "max_model_len": 256, "prefill_chunk": 64, "store": False} | options
        made.append(Engine(own or model, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Seeded random token ids."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    return make


class Faults:
    """Runs requests on an engine with the fault node, and writes bad values into chosen steps.

    Attributes:
        shapes: (rows, columns) of every stored signal, of the step that ran last.
        per_token: rows a token of every stored signal.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.injector is not None
        self.engine, self.node = engine, engine.injector
        self.shapes: dict[int, tuple[int, int]] = {}
        self.per_token: dict[int, int] = {}
        keep = self.node.keep

        def noting(signal: int, x: torch.Tensor) -> None:
            self.shapes[signal] = (x.shape[0], x.shape[1])
            assert self.node._row_ids is not None
            self.per_token[signal] = max(1, x.shape[0] // self.node._row_ids.numel())
            keep(signal, x)

        self.node.keep = noting  # type: ignore[method-assign]

    def submit(self, prompts: list[list[int]], sampling: Any) -> list[Any]:
        """Queue requests."""
        return [self.engine.submit(p, sampling) for p in prompts]

    def until_decoding(self, sequences: list[Any], extra_steps: int = 0) -> None:
        """Step until every prompt is read, and some windows more."""
        while any(s.stage in ("queued", "prefill") for s in sequences):
            self.engine.step()
        for _ in range(extra_steps):
            self.engine.step()

    def step_with(self, *places: Any) -> None:
        """One step with bad values in it."""
        self.node.arm(places)
        self.engine.step()
        self.node.disarm()

    def finish(self, sequences: list[Any]) -> list[Any]:
        """Step to the end: completions."""
        while not all(s.is_done for s in sequences):
            self.engine.step()
        while self.engine.step():
            pass
        return [self.engine.completion_of(s) for s in sequences]

    def signal(self, stage: str, layer: int | None = None) -> int:
        """Index of a signal."""
        signals = enumerate(self.engine.model.signals)
        return next(i for i, s in signals if s.stage == stage and (layer is None or s.layer == layer))


@pytest.fixture
def faults(engine: Callable[..., Engine]) -> Callable[..., Faults]:
    """``faults(max_batch=..., ...)``: an engine with the fault node, in the hands of `Faults`."""

    def make(**options: Any) -> Faults:
        return Faults(engine(inject=True, **options))

    return make
