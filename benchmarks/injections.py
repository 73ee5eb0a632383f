"""Is the origin exactly right? Random faults in real and small models, judged by an independent full-tensor run.

Each injection breaks a weight, a buffer or cache, or writes a value between two taps; half of them are Inf or an
overflow, the others NaN with random payloads. The truth comes from a second run of the same model with the same fault
in which every module's ``forward`` is replaced by one that keeps whole tensors; NumPy then looks for the first bad
element in execution order. It shares no code with the watch and uses none of its hooks.

    python benchmarks/injections.py [--count N] [--seed S] [--hosts small|all]

Prints ``injections exact=200/200`` and one line for each miss; exits with 3 on a miss.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import firetower
from firetower.drills import hosts

_BITS = {
    torch.float32: (np.uint32, torch.int32),
    torch.float16: (np.uint16, torch.int16),
    torch.bfloat16: (np.uint16, torch.int16),
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the first bad value stands."""

    layer: int | None
    stage: str
    sequence: int | None
    row: int
    column: int
    bits: int


@dataclasses.dataclass
class Run:
    """One request: token ids [B, T], left-pad mask, decode steps, and which step is broken."""

    ids: Tensor
    mask: Tensor
    num_steps: int
    bad_step: int


class Truth:
    """Keeps whole tensors of every step by replacing ``forward`` of every module, and finds the first bad one."""

    def __init__(self, model: nn.Module) -> None:
        self.records: list[tuple[int | None, str, Tensor]] = []
        self.model = model
        self.saved: list[nn.Module] = []

    def __enter__(self) -> Truth:
        for path, module in self.model.named_modules():
            found = _LAYER.search(path)
            layer = int(found.group(1)) if found else None
            tail = path[found.end() :].lstrip(".") if found else path
            if found or tail == "lm_head":
                self._replace(module, layer, tail)
        return self

    def __exit__(self, *exc: object) -> None:
        for module in self.saved:
            del module.forward

    def _replace(self, module: nn.Module, layer: int | None, tail: str) -> None:
        forward = module.forward
        has_query_norm = any(n.endswith("self_attn.q_norm") for n, _ in self.model.named_modules())

        def recorded(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs.get("hidden_states")
            if tail == "":
                self.keep(layer, "input", x)
            if tail.endswith("down_proj"):
                self.keep(layer, "swiglu", x)
            out = forward(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            if tail == ("self_attn.q_norm" if has_query_norm else "self_attn.q_proj"):
                self.keep(layer, "query", first)
            if tail in ("self_attn", "linear_attn"):
                self._states(layer, kwargs, x.shape[1])
                self.keep(layer, "attention", first)
            for name, stage in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
                if tail.endswith(name):
                    self.keep(layer, stage, first)
            if tail == "mlp.shared_expert":
                self.keep(layer, "shared", first)
            if tail == "mlp.gate":
                for part in out:
                    if part.is_floating_point():
                        self.keep(layer, "router", part)
            if tail == "mlp.experts":
                self.keep(layer, "routed", first)
            if tail == "":
                self.keep(layer, "output", first)
            if tail == "lm_head":
                self.keep(None, "logits", first)
            return out

        module.forward = recorded
        self.saved.append(module)

    def _states(self, layer: int | None, kwargs: dict[str, Any], num_tokens: int) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is None or layer is None:
            return
        kept = cache.layers[layer]
        for stage, name in (("conv_state", "conv_states"), ("recurrent_state", "recurrent_states")):
            state = getattr(kept, name, None)
            for s in state.values() if isinstance(state, dict) else [state]:
                if s is not None:
                    self.keep(layer, stage, s)
        for name in ("keys", "values"):
            if getattr(kept, name, None) is not None:
                self.keep(layer, "kv", getattr(kept, name)[:, :, -num_tokens:])

    def keep(self, layer: int | None, stage: str, x: Tensor) -> None:
        self.records.append((layer, stage, x.detach().clone()))

    def first(self, run: Run, shape: tuple[int, int], past: int) -> Place | None:
        """The first bad element in a real row of this step's records."""
        pad = (run.mask == 0).numpy()
        pad = np.concatenate([pad, np.zeros((pad.shape[0], run.num_steps + 1), bool)], 1)[:, past : past + shape[1]]
        for layer, stage, x in self.records:
            place = _first_in(layer, stage, x, shape, pad)
            if place is not None:
                return place
        return None


def _first_in(layer: int | None, stage: str, x: Tensor, shape: tuple[int, int], pad: Any) -> Place | None:
    unsigned, signed = _BITS[x.dtype]
    values = x.contiguous().float().numpy() if x.dtype is torch.bfloat16 else x.contiguous().numpy()
    bits = x.contiguous().view(signed).numpy().view(unsigned)
    _, num_tokens = shape
    for index in map(tuple, np.argwhere(~np.isfinite(values))):
        if stage in ("conv_state", "recurrent_state"):
            sequence, token = index[0], None
        elif stage == "kv":
            sequence, token = index[0], index[2]
        elif x.ndim >= 3:
            sequence, token = index[0], index[1] + num_tokens - x.shape[1]
        else:
            sequence, token = index[0] // num_tokens, index[0] % num_tokens
        if token is not None and pad[sequence, token]:
            continue
        row = int(np.ravel_multi_index(index[:-1], x.shape[:-1]))
        return Place(layer, stage, int(sequence), row, int(index[-1]), int(bits[index]))
    return None


def bad_value(rng: np.random.Generator, dtype: torch.dtype, infinite: bool) -> Tensor:
    """One element: Inf of either sign, or a quiet NaN of random sign and payload."""
    if infinite:
        return torch.tensor([float(rng.choice([np.inf, -np.inf]))], dtype=dtype)
    if dtype is torch.float32:
        pattern = int(rng.integers(0x7FC00000, 0x80000000)) | (int(rng.integers(2)) << 31)
        return torch.tensor([pattern - (1 << 32 if pattern >> 31 else 0)], dtype=torch.int32).view(dtype)
    quiet = 0x7E00 if dtype is torch.float16 else 0x7FC0
    pattern = int(rng.integers(quiet, 0x8000)) | (int(rng.integers(2)) << 15)
    return torch.tensor([pattern - (1 << 16 if pattern >> 15 else 0)], dtype=torch.int16).view(dtype)


Fault = Callable[[nn.Module, Run], contextlib.AbstractContextManager[Callable[[int, Any], None]]]


def weight_fault(rng: np.random.Generator, model: nn.Module, infinite: bool) -> tuple[str, Fault]:
    """One element of a random parameter, or a whole output row scaled until its product overflows."""
    names = [n for n, p in model.named_parameters() if p.is_floating_point() and p.numel() > 1]
    name = names[rng.integers(len(names))]
    parameter = dict(model.named_parameters())[name]
    place = int(rng.integers(parameter.numel()))
    overflow = infinite and rng.random() < 0.5
    value = bad_value(rng, parameter.dtype, infinite)

    @contextlib.contextmanager
    def fault(model: nn.Module, run: Run) -> Iterator[Callable[[int, Any], None]]:
        flat = dict(model.named_parameters())[name].data.reshape(-1)
        old = flat.clone()

        def at(step: int, cache: Any) -> None:
            if step != run.bad_step:
                return
            if overflow:
                width = parameter.shape[-1]
                row = flat.view(-1, width)[place // width]
                row.fill_(torch.finfo(parameter.dtype).max)
            else:
                flat[place : place + 1] = value

        yield at
        flat.copy_(old)

    return f"weight {name}[{place}]{' overflow' if overflow else ''}", fault


def cache_fault(rng: np.random.Generator, model: nn.Module, infinite: bool) -> tuple[str, Fault]:
    """One element of what the cache holds, between two steps."""
    choice, where = int(rng.integers(1 << 30)), int(rng.integers(1 << 30))
    value = bad_value(rng, next(model.parameters()).dtype, infinite)

    @contextlib.contextmanager
    def fault(model: nn.Module, run: Run) -> Iterator[Callable[[int, Any], None]]:
        def at(step: int, cache: Any) -> None:
            if step != run.bad_step or cache is None:
                return
            layer = cache.layers[choice % len(cache.layers)]
            held = [getattr(layer, n, None) for n in ("keys", "values", "conv_states", "recurrent_states")]
            tensors = [t for h in held for t in (h.values() if isinstance(h, dict) else [h]) if t is not None]
            flat = tensors[where % len(tensors)].view(-1)
            flat[where % flat.numel()] = value.to(flat.dtype)[0]

        yield at

    return "cache", fault


def written_fault(rng: np.random.Generator, model: nn.Module, infinite: bool) -> tuple[str, Fault]:
    """A value written into what a module without a tap returns: norms, activations, projections, embeddings."""
    ends = ("layernorm", "norm", "act_fn", "q_proj", "v_proj", "o_proj", "in_proj_z", "in_proj_b", "conv1d",
            "out_proj", "embed_tokens", "rotary_emb", "shared_expert_gate", "q_norm", "k_norm")  # fmt: skip
    names = [n for n, _ in model.named_modules() if n.endswith(ends)]
    name, where = names[rng.integers(len(names))], int(rng.integers(1 << 30))
    value = bad_value(rng, next(model.parameters()).dtype, infinite)

    @contextlib.contextmanager
    def fault(model: nn.Module, run: Run) -> Iterator[Callable[[int, Any], None]]:
        module, now = model.get_submodule(name), {"step": -1}
        forward = module.forward

        def broken(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if now["step"] != run.bad_step:
                return out
            first = (out[0] if isinstance(out, tuple) else out).clone()
            first.view(-1)[where % first.numel()] = value.to(first.dtype)[0]
            return (first, *out[1:]) if isinstance(out, tuple) else first

        module.forward = broken

        def at(step: int, cache: Any) -> None:
            now["step"] = step

        yield at
        module.forward = forward
        del module.forward

    return f"written after {name}", fault


def run_steps(model: Any, run: Run, at: Callable[[int, Any], None], done: Callable[[int, int], bool]) -> None:
    """Prefill and greedy decode; stops as soon as ``done`` says so."""
    cache, token, past = None, run.ids, 0
    mask = run.mask
    with torch.no_grad():
        for step in range(run.num_steps):
            at(step, cache)
            kwargs = {} if cache is None else {_cache_name(model): cache}
            out = model(input_ids=token, attention_mask=mask, use_cache=True, **kwargs)
            if done(past, token.shape[1]):
                return
            past += token.shape[1]
            cache = getattr(out, "cache", None) or out.past_key_values
            token = out.logits[:, -1:].nan_to_num(0).argmax(-1)
            mask = torch.cat([mask, torch.ones_like(token)], 1)


def _cache_name(model: Any) -> str:
    import inspect

    return "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"


def judge(model: Any, rng: np.random.Generator, infinite: bool) -> tuple[str, Place | None, Place | None]:
    """Break one thing; returns what it was, the truth, and what the watch says."""
    batch, length = int(rng.integers(1, 4)), int(rng.integers(3, 12))
    ids = torch.from_numpy(rng.integers(5, model.config.vocab_size - 5, (batch, length)))
    mask = torch.ones_like(ids)
    if batch > 1 and rng.random() < 0.5:
        mask[0, : int(rng.integers(1, length - 1))] = 0
    run = Run(ids, mask, num_steps=4, bad_step=int(rng.integers(0, 3)))
    makers = (weight_fault, cache_fault, written_fault)
    make = makers[rng.integers(3)]
    if make is cache_fault:
        run.bad_step = max(1, run.bad_step)
    what, fault = make(rng, model, infinite)
    found: list[Place | None] = [None]
    with fault(model, run) as at, Truth(model) as truth:

        def done(past: int, num_tokens: int) -> bool:
            found[0] = truth.first(run, (batch, num_tokens), past)
            truth.records.clear()
            return found[0] is not None

        run_steps(model, run, at, done)
    with fault(model, run) as at, firetower.attach(model, store=False, on_fire="record") as watch:
        run_steps(model, run, at, lambda past, num_tokens: not watch.last.is_clean)
        seen = None
        if watch.fires:
            fire = watch.fires[0]
            seen = Place(fire.origin.layer, fire.origin.stage, fire.first.sequence, fire.first.row, fire.first.column,
                         fire.first.bits)  # fmt: skip
        if watch.failures:
            raise RuntimeError(watch.last_failure)
    return what, found[0], seen


def all_hosts(which: str) -> list[tuple[str, Any]]:
    """The models that faults are put into; fp16 and bf16 twins of the small ones make overflows."""
    found: list[tuple[str, Any]] = []
    for name in ("small_llama", "small_qwen3_next", "small_qwen35_moe"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found.append((f"{name} {dtype}", getattr(hosts, name)(dtype=dtype)))
    if which == "all":
        found += [("smollm2", hosts.load_smollm2()[0])] * 5
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", choices=["small", "all"], default="all")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    models = all_hosts(args.hosts)
    exact = fired = 0
    i = 0
    while i < args.count:
        name, model = models[int(rng.integers(len(models)))]
        what, truth, seen = judge(model, rng, infinite=i % 2 == 0)
        if truth is None and seen is None:
            continue  # the fault did no damage: nothing to judge, another is drawn
        i += 1
        fired += truth is not None
        if truth == seen:
            exact += 1
        else:
            print(f"miss {i}: {name}, {what}: truth {truth}, seen {seen}", file=sys.stderr)
    print(f"injections exact={exact}/{args.count} bar={args.count}/{args.count} hosts={args.hosts} seed={args.seed}")
    return 0 if exact == args.count else 3


if __name__ == "__main__":
    sys.exit(main())
