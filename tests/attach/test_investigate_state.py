"""State before the second run: what is put back, what is refused before anything runs, what is noted."""

from __future__ import annotations

import collections
import functools
import inspect
import io
import itertools
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import firetower
from firetower.attach import state_tensors
from firetower.attach.state import CallState
from firetower.attach.state_tensors import TensorState
from firetower.core.errors import InvestigateError
from firetower.drills import hosts

COUNTER = {"calls": 0}
TOTAL = 0


def look(fn: Any, *args: Any, **kwargs: Any) -> firetower.Investigation:
    return firetower.investigate(fn, *args, firetower_store=False, firetower_verdict=False, **kwargs)


def burn(x: Tensor, when: bool) -> Tensor:
    """log 0 where ``when``: a second run from another state would be clean."""
    return (x * 0).log() if when else x


def assert_repeats(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    found = look(fn, *args, **kwargs)
    assert found.origin is not None, str(found)
    assert found.origin.op == "aten.log.default"


class TestRandomStreams:
    """Each stream decides whether the call burns; both runs must draw the same."""

    @pytest.mark.parametrize(
        "draw",
        [
            pytest.param(lambda: random.random(), id="python"),
            pytest.param(lambda: float(np.random.rand()), id="numpy"),
            pytest.param(lambda: torch.rand(()).item(), id="torch"),
        ],
    )
    def test_global(self, draw: Callable[[], float]) -> None:
        drawn: list[float] = []

        def fn(x: Tensor) -> Tensor:
            drawn.append(draw())
            return burn(x, True)

        kept = drawn
        assert_repeats(fn, torch.ones(2))
        assert len(kept) == 1  # the list is part of the state: the second run starts with it empty again
        follows = draw()
        assert follows != kept[0]

    def test_the_same_numbers_are_drawn(self, tmp_path: Path) -> None:
        log = tmp_path / "draws"

        def fn(x: Tensor) -> Tensor:
            with log.open("a") as f:
                f.write(f"{random.random()} {np.random.rand()} {torch.rand(()).item()}\n")
            return burn(x, True)

        look(fn, torch.ones(2))
        first, second = log.read_text().splitlines()
        assert first == second

    @pytest.mark.parametrize(
        ("source", "draw"),
        [
            pytest.param(torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item(), id="torch"),
            pytest.param(np.random.default_rng(1), lambda g: g.random(), id="numpy"),
            pytest.param(np.random.RandomState(1), lambda g: g.rand(), id="numpy old"),
            pytest.param(random.Random(1), lambda g: g.random(), id="python"),
        ],
    )
    def test_given(self, source: Any, draw: Callable[[Any], float], tmp_path: Path) -> None:
        log = tmp_path / "draws"

        def fn(g: Any, x: Tensor) -> Tensor:
            with log.open("a") as f:
                f.write(f"{draw(g)}\n")
            return burn(x, True)

        look(fn, source, torch.ones(2))
        first, second = log.read_text().splitlines()
        assert first == second


class Box:
    """An object with attributes and one with slots."""

    def __init__(self) -> None:
        self.calls = 0


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class TestObjects:
    """Burns in the first call only: found again only if the count is put back."""

    def test_closure_variable(self) -> None:
        calls = 0

        def fn(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return burn(x, calls == 1)

        assert_repeats(fn, torch.ones(2))
        assert calls == 1

    def test_global_variable(self) -> None:
        def fn(x: Tensor) -> Tensor:
            global TOTAL
            TOTAL += 1
            COUNTER["calls"] += 1
            return burn(x, TOTAL == 1 == COUNTER["calls"])

        assert_repeats(fn, torch.ones(2))
        assert (TOTAL, COUNTER) == (1, {"calls": 1})

    @pytest.mark.parametrize("make", [Box, Slotted])
    def test_attribute(self, make: Callable[[], Any]) -> None:
        def fn(box: Any, x: Tensor) -> Tensor:
            box.calls += 1
            return burn(x, box.calls == 1)

        assert_repeats(fn, make(), torch.ones(2))

    @pytest.mark.parametrize(
        ("thing", "add", "size"),
        [
            pytest.param([], lambda t: t.append(1), len, id="list"),
            pytest.param({}, lambda t: t.update({len(t): 1}), len, id="dict"),
            pytest.param(set(), lambda t: t.add(len(t)), len, id="set"),
            pytest.param(collections.deque(), lambda t: t.append(1), len, id="deque"),
            pytest.param(collections.OrderedDict(), lambda t: t.update({len(t): 1}), len, id="ordered"),
            pytest.param(bytearray(1), lambda t: t.__setitem__(0, t[0] + 1), lambda t: t[0], id="bytearray"),
            pytest.param(np.zeros(1), lambda t: t.__iadd__(1), lambda t: t[0], id="numpy"),
            pytest.param(torch.zeros(1), lambda t: t.add_(1), lambda t: t.item(), id="tensor"),
            pytest.param(torch.zeros(1).expand(3), lambda t: t[:1].add_(1), lambda t: t[2].item(), id="expanded"),
        ],
    )
    def test_container_in_an_argument(self, thing: Any, add: Callable[[Any], Any], size: Callable[[Any], int]) -> None:
        def fn(nested: Any, x: Tensor) -> Tensor:
            add(nested["deep"][0])
            return burn(x, size(nested["deep"][0]) == 1)

        assert_repeats(fn, {"deep": [thing]}, torch.ones(2))
        assert size(thing) == 1

    def test_bound_method_and_partial(self) -> None:
        class Engine:
            def __init__(self) -> None:
                self.step = 0

            def run(self, x: Tensor, scale: float) -> Tensor:
                self.step += 1
                return burn(x * scale, self.step == 1)

        assert_repeats(functools.partial(Engine().run, scale=2.0), torch.ones(2))

    def test_inference_tensor(self) -> None:
        with torch.inference_mode():
            count = torch.zeros(1)

        @torch.inference_mode()
        def fn(x: Tensor) -> Tensor:
            count.add_(1)
            return burn(x, count.item() == 1)

        assert_repeats(fn, torch.ones(2))


class TestModules:
    """Buffers, parameters, plain attributes and hooks of modules."""

    class Counts(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("buffer", torch.zeros(1))
            self.plain: Any = 0

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                if self.kind == "plain":
                    self.plain += 1
                    return burn(x, self.plain == 1)
                if self.kind == "swapped":
                    self.weight.data = self.weight.data + 1
                elif self.kind == "new tensor":
                    self.buffer = self.buffer + 1
                else:
                    getattr(self, self.kind).add_(1)
                return burn(x, self.weight.item() + self.buffer.item() == 1)

    @pytest.mark.parametrize("kind", ["weight", "buffer", "plain", "swapped", "new tensor"])
    def test_state_of_a_module(self, kind: str) -> None:
        assert_repeats(self.Counts(kind), torch.ones(2))

    def test_module_found_through_a_closure_is_watched(self) -> None:
        model = self.Counts("buffer")
        found = look(lambda x: model(x).sum(), torch.ones(2))
        assert found.first_run.num_modules == 1
        assert found.origin is not None
        assert found.origin.op == "aten.log.default"

    def test_a_hook_that_takes_itself_off_is_on_again(self) -> None:
        model = nn.Linear(2, 2)

        def once(_m: nn.Module, _a: object, out: Tensor) -> Tensor:
            handle.remove()
            return burn(out, True)

        handle = model.register_forward_hook(once)
        assert_repeats(model, torch.ones(1, 2))

    def test_an_iterator_in_a_module_is_a_note(self) -> None:
        model = nn.Linear(2, 2)
        model.numbers = itertools.count()  # type: ignore[assignment]
        with torch.no_grad():
            model.weight.fill_(torch.nan)
        found = look(model, torch.ones(1, 2))
        assert found.origin is not None
        assert any("numbers" in note and "itertools.count" in note for note in found.notes)


def named(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword for a cache: newer Transformers renamed it."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


class TestCaches:
    """A cache in the arguments has grown in the first run, and must be short again in the second."""

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_kv_cache(self, kind: str) -> None:
        model = hosts.small_llama()
        ids = torch.arange(5, 12)[None]
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            model(ids[:, :4], **named(model, cache))
            model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
            found = look(model, ids[:, 4:], **named(model, cache))
        assert found.origin is not None
        assert found.origin.module == "model.layers.1.mlp.up_proj"
        assert int(cache.get_seq_length()) == 7
        assert found.fire is not None
        assert found.fire.first.position == 4

    def test_recurrent_state(self) -> None:
        model = hosts.small_qwen35_moe()
        ids = torch.arange(5, 12)[None]
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :4], **named(model, cache))
            states = next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))
            before = states.recurrent_states
            before = {k: v.clone() for k, v in before.items()} if isinstance(before, dict) else before.clone()
            state = CallState(model, {"input_ids": ids[:, 4:], **named(model, cache)})
            model(ids[:, 4:], **named(model, cache))
            state.restore()
        after = states.recurrent_states
        pairs = [(before[k], after[k]) for k in before] if isinstance(before, dict) else [(before, after)]
        assert all(torch.equal(a, b) for a, b in pairs)
        assert int(cache.get_seq_length()) == 4

    def test_nan_in_a_callers_cache_is_named(self) -> None:
        model = hosts.small_llama()
        ids, cache = torch.arange(5, 12)[None], DynamicCache()
        with torch.no_grad():
            model(ids[:, :4], **named(model, cache))
            cache.layers[2].values[0, 1, 3, 4] = torch.nan
            found = look(model, ids[:, 4:], **named(model, cache))
        assert found.origin is not None
        (name,) = named(model, cache)
        assert found.culprit == f"input given by the caller: {name}.layers[2].values"


class TestRefused:
    """State that cannot be put back: an error that names it, before anything runs."""

    @pytest.mark.parametrize(
        ("make", "word"),
        [
            pytest.param(lambda: iter([1]), "iterator", id="iterator"),
            pytest.param(lambda: (i for i in [1]), "a generator", id="generator"),
            pytest.param(lambda: itertools.count(), "itertools.count", id="count"),
            pytest.param(lambda: io.StringIO("x"), "an open file", id="file"),
            pytest.param(lambda: queue.Queue(), "queue.Queue", id="queue"),
        ],
    )
    def test_argument(self, make: Callable[[], Any], word: str) -> None:
        ran = []

        def fn(x: Tensor, stream: Any) -> Tensor:
            ran.append(1)
            return x

        with pytest.raises(InvestigateError, match=f"argument stream.*{word}"):
            look(fn, torch.ones(1), make())
        with pytest.raises(InvestigateError, match=r"argument stream\['deep'\]\[0\]"):
            look(fn, torch.ones(1), stream={"deep": [make()]})
        assert ran == []

    def test_closure(self) -> None:
        numbers = iter([1, 2])
        with pytest.raises(InvestigateError, match="variable numbers of"):
            look(lambda x: x * next(numbers), torch.ones(1))

    def test_loggers_locks_and_streams_are_no_reason(self) -> None:
        import logging
        import sys
        import threading

        logger, lock = logging.getLogger("model"), threading.Lock()

        def fn(x: Tensor) -> Tensor:
            with lock:
                logger.debug("run")
                print("run", file=sys.stderr)
            return x

        assert not look(fn, torch.ones(1)).burned


class TestTensorState:
    """Copies within a budget, fingerprints beyond it."""

    def test_a_changed_tensor_beyond_the_budget_is_reported(self) -> None:
        small, large = torch.zeros(4), torch.zeros(4096)
        state = TensorState(max_copy_bytes=64)
        state.add(large, "argument large")
        state.add(small, "argument small")
        state.take()
        small.add_(1)
        assert state.restore() == []
        assert small.tolist() == [0, 0, 0, 0]
        large[4095] = 1
        assert state.restore() == ["argument large"]

    def test_investigate_refuses_to_answer_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(state_tensors.TensorState.__init__, "__defaults__", (64,))

        def fn(x: Tensor) -> Tensor:
            x.add_(1)
            return (x * 0).log()

        with pytest.raises(InvestigateError, match="argument x: changed in place"):
            look(fn, torch.zeros(4096))

    @given(st.lists(st.integers(0, 255), min_size=1, max_size=64), st.data())
    def test_fingerprint_sees_any_one_byte(self, raw: list[int], data: st.DataObject) -> None:
        x = torch.tensor(raw, dtype=torch.uint8)
        at = data.draw(st.integers(0, len(raw) - 1))
        y = x.clone()
        y[at] = (int(y[at]) + data.draw(st.integers(1, 255))) % 256
        assert state_tensors._fingerprint(x) != state_tensors._fingerprint(y)
        assert state_tensors._fingerprint(x) == state_tensors._fingerprint(x.clone())

    def test_nan_payloads_are_put_back_bit_for_bit(self) -> None:
        x = torch.tensor([0x7FD6E000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
        state = TensorState()
        state.add(x, "x")
        state.take()
        x.view(torch.int32)[0] = 0x7FC00001
        state.restore()
        assert x.view(torch.int32).tolist() == [0x7FD6E000, 0x7FC00000]
