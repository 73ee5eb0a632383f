"""`moe` on CUDA at the shapes of Q36: correct first, then times beside transformers' own block, then other tiles."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ops.common import copy_bandwidth, graph_ms, guarded, ratio_line, relative_error
from torch import Tensor

from firetower.ops import moe, overlap
from firetower.ops.moe import cases, kernels, planning, torch_path
from firetower.ops.moe.reference import route_reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]
BF16 = torch.bfloat16
SHAPE = cases.Q36
RULE = moe.RoutingRule(top_k=SHAPE.top_k)
MLP_BYTES = 3 * SHAPE.hidden * SHAPE.inner * 2

# tokens, phase, share of the peer's time that must be reached, multiple of the floor that is the goal
FIGURES = (
    (1, "window", 0.333, 2.0),
    (5, "window", 0.333, 2.0),
    (64, "window", 0.8, 1.25),
    (512, "prefill", 0.75, 1.25),
    (8192, "prefill", 0.5, 2.0),
)
FLOORS_US = {1: 12.0, 5: 50.0, 64: 340.0, 512: 370.0, 8192: 600.0}
BATCHES = {1: 8, 5: 8, 64: 4, 512: 2, 8192: 1}
"""Batches of different tokens in one graph, each with a routing of its own: the weights of the last one would still lie
in the cache for a repeat of itself."""

TRIALS_S = 40.0
"""Seconds after which no other tile is tried."""


def run(report: Report, quick: bool) -> None:
    """Every check and figure; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: two replays a figure and fewer repeats, to compile every kernel.
    """
    weights = random_weights()
    checks: dict[str, Callable[[], str]] = {
        "plan": check_plan,
        "route": check_route,
        **{
            f"block T={t} {phase}": lambda t=t, phase=phase: check_block(weights, t, phase)
            for t, phase, _, _ in FIGURES
        },
        "poisoned outputs": lambda: check_poison(weights),
        "repeats": lambda: check_repeats(weights, 3 if quick else 50),
        "row invariance": lambda: check_rows(weights),
        "overlap": lambda: check_overlap(weights, 5 if quick else 50),
        "wide blocks against narrow": lambda: compare_blocks(weights),
        "sensor words": lambda: check_words(weights),
    }
    for name, check in checks.items():
        guarded(report, name, lambda check=check, name=name: report(f"{name} ok {check()}"))
    reps = 2 if quick else 20
    copy = copy_bandwidth()
    guarded(report, "figures", lambda: figures(report, weights, reps))
    guarded(report, "sensors on and off", lambda: sensors_on_off(report, weights, reps))
    guarded(report, "steps", lambda: steps(report, weights, reps, copy))
    guarded(report, "tiles", lambda: tiles(report, weights, 2 if quick else 10))


def random_weights() -> moe.MoeWeights:
    """Weights of the block in bf16, made on the device."""
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*size: int) -> Tensor:
        x = torch.randn(size, generator=generator, device="cuda", dtype=BF16)
        return x.mul_(size[-1] ** -0.5)

    return moe.MoeWeights(
        router=make(SHAPE.num_experts, SHAPE.hidden),
        gate_up_proj=make(SHAPE.num_experts, 2 * SHAPE.inner, SHAPE.hidden),
        down_proj=make(SHAPE.num_experts, SHAPE.hidden, SHAPE.inner),
        shared=moe.SharedExpert(
            gate_up_proj=make(2 * SHAPE.shared_inner, SHAPE.hidden),
            down_proj=make(SHAPE.hidden, SHAPE.shared_inner),
            gate=make(1, SHAPE.hidden),
        ),
    )


def tokens(num_tokens: int, seed: int = 1) -> Tensor:
    """[T, H] of standard normal numbers: with a random router, experts are chosen uniformly."""
    return cases.normal((num_tokens, SHAPE.hidden), seed, BF16, "cuda")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def marks_of(num_tokens: int) -> tuple[Tensor, moe.MoeMarks, Tensor]:
    """(panel, a mark on every stage that is stored, row ids): what a watched run has on."""
    stages = ("logits", "router", "swiglu", "down", "output")
    panel = new_panel(len(stages), num_tokens, "cuda")
    given = {
        stage: Mark(panel=panel, slot=slot, num_signals=len(stages), num_rows=num_tokens)
        for slot, stage in enumerate(stages)
    }
    return panel, moe.MoeMarks(**given), torch.arange(num_tokens, dtype=torch.int32, device="cuda")


def truth(x: Tensor, weights: moe.MoeWeights, shares: Tensor, ids: Tensor) -> Tensor:
    """The block in fp64 for a given choice of experts, one expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    exact = x.double()

    def mlp(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (rows @ gate_up.double().T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ down.double().T

    for expert in ids.unique().tolist():
        at, slot = (ids == expert).nonzero(as_tuple=True)
        y = mlp(exact[at], weights.gate_up_proj[expert], weights.down_proj[expert])
        out.index_add_(0, at, shares[at, slot, None] * y)
    shared = weights.shared
    assert shared is not None
    assert shared.gate is not None
    gate = torch.sigmoid(exact @ shared.gate.double().T)
    return out + gate * mlp(exact, shared.gate_up_proj, shared.down_proj)


def check_plan() -> str:
    """The kernel's plan against PyTorch's, array by array, with pads and without."""
    for num_tokens in (1, 5, 16, 17, 64, 256, 300, 8192):
        for has_pads in (False, True):
            ids = cases.random_ids(num_tokens, SHAPE, num_tokens, "cuda")
            row_ids = torch.arange(num_tokens, device="cuda") % 7 - 1 if has_pads else None
            for block_m in (16, 128):
                got = moe.plan(ids, SHAPE.num_experts, block_m=block_m, has_shared=True, row_ids=row_ids)
                want = planning.new_plan(ids, SHAPE.num_experts, has_shared=True, block_m=block_m, has_rows=has_pads)
                torch_path.plan(ids, row_ids, into=want)
                for name in ("pair_ids", "block_experts", "expert_offsets", "totals", "row_ids"):
                    a, b = getattr(got, name), getattr(want, name)
                    assert a is b or torch.equal(a, b), f"T={num_tokens} block_m={block_m} pads={has_pads}: {name}"
            if num_tokens <= 300:
                assert moe.audit(got, ids, row_ids).is_clean, f"T={num_tokens}: audit"
    return ""


def check_route() -> str:
    """Ids and weights against the reference, degenerate rows among them."""
    worst = 0.0
    for scoring in ("softmax", "sigmoid"):
        for renormalise in (True, False):
            logits = cases.normal((12, SHAPE.num_experts), 3, device="cuda", scale=4.0)
            logits[1], logits[2], logits[3, 7] = float("-inf"), -110.0, float("nan")
            rule = moe.RoutingRule(top_k=SHAPE.top_k, scoring=scoring, renormalise=renormalise)
            shares, ids = moe.route(logits, rule)
            want, want_ids = route_reference(logits.double().cpu(), None, rule)
            assert torch.equal(ids.cpu(), want_ids), f"{scoring} {renormalise}: ids"
            assert shares[3].isnan().all(), "the row with a NaN"
            kept = [t for t in range(12) if t != 3]
            assert shares[kept].isfinite().all(), f"{scoring} {renormalise}: not finite"
            worst = max(worst, relative_error(want[kept], shares[kept].cpu()))
    assert worst < 1e-5, f"relative error {worst:.3g}"
    return f"error={worst:.2g}"


def check_block(weights: moe.MoeWeights, num_tokens: int, phase: str) -> str:
    """The block against fp64 for the experts it chose; logits and weights against fp64 too."""
    x = tokens(num_tokens)
    shared = weights.shared
    assert shared is not None
    logits = moe.logits(x, weights.router, shared.gate, phase=phase)
    assert shared.gate is not None
    exact = x.double() @ torch.cat([weights.router, shared.gate]).double().T
    logits_error = relative_error(exact, logits)
    _, ids = moe.route(logits[:, : SHAPE.num_experts], RULE)
    chosen = exact.gather(-1, ids.long())
    expected = truth(x, weights, torch.softmax(chosen, -1), ids)
    error = relative_error(expected, moe.moe(x, weights, RULE, phase=phase))
    assert logits_error < 1e-5, f"logits: relative error {logits_error:.3g}"
    assert error < cases.RTOL[BF16], f"relative error {error:.3g}"
    return f"error={error:.2g} logits={logits_error:.2g}"


def all_steps(x: Tensor, weights: moe.MoeWeights, phase: str, fill: float | None = None) -> dict[str, Any]:
    """Every step's output, written over ``fill`` where it is given."""
    shared = weights.shared
    assert shared is not None
    logits = moe.logits(x, weights.router, shared.gate, phase=phase)
    shares, ids = moe.route(logits[:, : SHAPE.num_experts], RULE)
    block_m = moe.block_rows(x, phase, ids.numel(), SHAPE.num_experts)
    plan = moe.plan(ids, SHAPE.num_experts, block_m=block_m, has_shared=True)

    def out(rows: int, width: int) -> Tensor | None:
        return None if fill is None else torch.full((rows, width), fill, dtype=BF16, device="cuda")

    act = moe.gate_up(x, weights.gate_up_proj, plan, shared=shared, out=out(plan.num_pairs, SHAPE.inner))
    rows = moe.down(act, weights.down_proj, plan, shared=shared, out=out(plan.num_pairs, SHAPE.hidden))
    gate = logits[:, SHAPE.num_experts]
    result = moe.combine(rows, shares, ids, plan, shared_logits=gate, out=out(x.shape[0], SHAPE.hidden))
    return {"plan": plan, "ids": ids, "shares": shares, "gate": gate, "act": act, "rows": rows, "out": result}


def check_poison(weights: moe.MoeWeights) -> str:
    """Two fillings of every output give the same bits, all finite: every element is written."""
    for num_tokens, phase in ((1, "window"), (64, "window"), (512, "prefill"), (4097, "prefill")):
        x = tokens(num_tokens)
        first, second = (all_steps(x, weights, phase, fill) for fill in (float("nan"), 1e4))
        for name in ("act", "rows", "out"):
            assert first[name].isfinite().all(), f"T={num_tokens}: {name} has rows that were not written"
            assert same(first[name], second[name]), f"T={num_tokens}: {name} depends on what stood there"
    return ""


def check_repeats(weights: moe.MoeWeights, repeats: int) -> str:
    """The same call many times."""
    for num_tokens, phase in ((64, "window"), (512, "prefill"), (8192, "prefill")):
        x = tokens(num_tokens)
        first = moe.moe(x, weights, RULE, phase=phase)
        count = repeats if num_tokens < 8192 else max(3, repeats // 5)
        for i in range(count):
            assert same(moe.moe(x, weights, RULE, phase=phase), first), f"T={num_tokens}: repeat {i}"
    return f"repeats={repeats}"


def check_rows(weights: moe.MoeWeights) -> str:
    """Rows alone, in windows of 1 to 8, in batches to 256, and among neighbours that crowd their experts."""
    x = tokens(256)
    whole = moe.moe(x, weights, RULE)
    for size, starts in ((1, (0, 1, 17, 63, 200, 255)), (2, (5,)), (3, (9,)), (5, (33, 251)), (8, (64,)), (64, (64,))):
        for start in starts:
            part = moe.moe(x[start : start + size].clone(), weights, RULE)
            assert same(part, whole[start : start + size]), f"rows {start} to {start + size}"
    crowded = x[17:18].repeat(64, 1)
    assert same(moe.moe(crowded, weights, RULE), whole[17:18].expand(64, -1)), "crowded"
    return ""


def check_overlap(weights: moe.MoeWeights, repeats: int) -> str:
    """Kernels that overlap, several blocks in one graph with other tokens each time, against kernels that do not."""
    for num_tokens in (1, 5, 16, 40):
        inputs = [torch.empty(num_tokens, SHAPE.hidden, dtype=BF16, device="cuda").normal_() for _ in range(8)]
        outs = [torch.empty_like(x) for x in inputs]
        pairs = list(zip(inputs, outs, strict=True))
        graph = torch.cuda.CUDAGraph()
        moe.moe(inputs[0], weights, RULE)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for x, y in pairs:
                moe.moe(x, weights, RULE, out=y)
        for i in range(repeats):
            for x in inputs:
                x.normal_()
            graph.replay()
            overlap.OVERLAPS = False
            try:
                for x, y in pairs:
                    assert same(y, moe.moe(x, weights, RULE)), f"T={num_tokens}: replay {i}"
            finally:
                overlap.OVERLAPS = True
    return f"replays={repeats}"


def compare_blocks(weights: moe.MoeWeights) -> str:
    """Whether rows have the same bits in blocks of 64 and of 128; not required, worth knowing."""
    x = tokens(512)
    ids = moe.route(moe.logits(x, weights.router), RULE)[1]
    acts = []
    for block_m in (16, 64, 128):
        plan = moe.plan(ids, SHAPE.num_experts, block_m=block_m, has_shared=True)
        acts.append(moe.gate_up(x, weights.gate_up_proj, plan, shared=weights.shared))
    return f"16 and 64: {same(acts[0], acts[1])}, 64 and 128: {same(acts[1], acts[2])}"


def check_words(weights: moe.MoeWeights) -> str:
    """Words of the kernels against `mark_rows` on what they stored; sensors change no bit."""
    for num_tokens, phase in ((20, "window"), (512, "prefill"), (2200, "prefill")):
        x = tokens(num_tokens)
        x[7, 100], x[11, 3], x[13, 0] = float("nan"), float("inf"), float("nan")
        panel, marks, row_ids = marks_of(num_tokens)
        row_ids[13] = -1
        off = moe.moe(x, weights, RULE, phase=phase, row_ids=row_ids)
        on = moe.moe(x, weights, RULE, phase=phase, row_ids=row_ids, marks=marks)
        assert same(on, off), f"T={num_tokens}: sensors change the output"
        expected, wanted, _ = marks_of(num_tokens)
        shared = weights.shared
        assert shared is not None
        logits = moe.logits(x, weights.router, shared.gate, phase=phase)
        shares, ids = moe.route(logits[:, : SHAPE.num_experts], RULE)
        block_m = moe.block_rows(x, phase, ids.numel(), SHAPE.num_experts)
        plan = moe.plan(ids, SHAPE.num_experts, block_m=block_m, has_shared=True, row_ids=row_ids)
        act = torch.zeros(plan.num_pairs, SHAPE.inner, dtype=BF16, device="cuda")
        rows = torch.zeros(plan.num_pairs, SHAPE.hidden, dtype=BF16, device="cuda")
        moe.gate_up(x, weights.gate_up_proj, plan, shared=shared, out=act)
        moe.down(act, weights.down_proj, plan, shared=shared, out=rows)
        stored = {
            "logits": (logits, row_ids),
            "router": (shares, row_ids),
            "swiglu": (act, plan.row_ids),
            "down": (rows, plan.row_ids),
            "output": (on, row_ids),
        }
        for stage, (x_stored, stage_rows) in stored.items():
            mark_rows(x_stored, dataclasses.replace(getattr(wanted, stage), row_ids=stage_rows))
        bad = (panel != expected).nonzero().flatten().tolist()
        assert not bad, f"T={num_tokens}: words {bad[:8]} of {panel.numel()} differ"
    return ""


class Peer:
    """transformers' own block on the same weights."""

    def __init__(self, weights: moe.MoeWeights) -> None:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

        self.config = Qwen3_5MoeTextConfig(
            hidden_size=SHAPE.hidden,
            num_experts=SHAPE.num_experts,
            num_experts_per_tok=SHAPE.top_k,
            moe_intermediate_size=SHAPE.inner,
            shared_expert_intermediate_size=SHAPE.shared_inner,
        )
        with torch.device("meta"):
            self.block = Qwen3_5MoeSparseMoeBlock(self.config)
        shared = weights.shared
        assert shared is not None
        gate, up = shared.gate_up_proj.chunk(2)
        given = {
            "gate.weight": weights.router,
            "experts.gate_up_proj": weights.gate_up_proj,
            "experts.down_proj": weights.down_proj,
            "shared_expert.gate_proj.weight": gate,
            "shared_expert.up_proj.weight": up,
            "shared_expert.down_proj.weight": shared.down_proj,
            "shared_expert_gate.weight": shared.gate,
        }
        for name, parameter in list(self.block.named_parameters()):
            assert parameter.shape == given[name].shape, f"{name}: {tuple(parameter.shape)}"
            module, _, last = name.rpartition(".")
            setattr(self.block.get_submodule(module), last, torch.nn.Parameter(given[name], requires_grad=False))

    def run(self, x: Tensor, implementation: str) -> Tensor:
        """The block's answer [T, H] with one of transformers' ways to run experts."""
        self.config._experts_implementation = implementation
        if hasattr(self.block.experts, "config"):
            self.block.experts.config._experts_implementation = implementation
        with torch.no_grad():
            answer = self.block(x[None])
        return (answer[0] if isinstance(answer, tuple) else answer)[0]


def figures(report: Report, weights: moe.MoeWeights, reps: int) -> None:
    """Ours, all sensors on, beside the faster of transformers' two."""
    peer = Peer(weights)
    for num_tokens, phase, bar, goal in FIGURES:
        batches = [tokens(num_tokens, 10 + i) for i in range(BATCHES[num_tokens])]
        own = own_ms(batches, weights, phase, reps)
        # batched_mm copies every chosen expert's weights: 25 GB at 512 tokens
        ways = ("batched_mm", "grouped_mm") if num_tokens <= 64 else ("grouped_mm",)
        peers: dict[str, float] = {}
        for way in ways:
            name = f"peer {way} T={num_tokens}"
            guarded(report, name, lambda b=batches, w=way, p=peers: p.update({w: peer_ms(peer, b, w, reps)}))
        report(f"peers T={num_tokens} " + " ".join(f"{way}={ms * 1e3:.1f}us" for way, ms in peers.items()))
        floor = FLOORS_US[num_tokens]
        tail = f"floor={floor:.0f}us own/floor={own * 1e3 / floor:.2f}"
        if not peers:
            report(f"moe T={num_tokens} own={own * 1e3:.1f}us no peer ran {tail}")
            continue
        best = min(peers, key=lambda way: peers[way])
        report(f"{ratio_line(f'moe T={num_tokens}', own, peers[best], best, bar, f'{goal}x floor')} {tail}")


def peer_ms(peer: Peer, batches: Sequence[Tensor], implementation: str, reps: int) -> float:
    """Milliseconds of one of transformers' blocks."""
    return graph_ms(lambda: [peer.run(x, implementation) for x in batches], reps) / len(batches)


def own_ms(
    batches: Sequence[Tensor], weights: moe.MoeWeights, phase: str, reps: int, *, is_watched: bool = True
) -> float:
    """Milliseconds of one block."""
    _, marks, row_ids = marks_of(batches[0].shape[0])

    def work() -> None:
        for x in batches:
            if is_watched:
                moe.moe(x, weights, RULE, phase=phase, row_ids=row_ids, marks=marks)
            else:
                moe.moe(x, weights, RULE, phase=phase, row_ids=row_ids)

    return graph_ms(work, reps) / len(batches)


def sensors_on_off(report: Report, weights: moe.MoeWeights, reps: int) -> None:
    """The whole block with five stages watched and with none."""
    for num_tokens, phase in ((1, "window"), (64, "window"), (8192, "prefill")):
        batches = [tokens(num_tokens, 10 + i) for i in range(BATCHES[num_tokens])]
        on, off = [], []
        for _ in range(3):
            on.append(own_ms(batches, weights, phase, reps))
            off.append(own_ms(batches, weights, phase, reps, is_watched=False))
        a, b = sorted(on)[1], sorted(off)[1]
        report(f"sensors T={num_tokens} on={a * 1e3:.2f}us off={b * 1e3:.2f}us ratio={a / b:.4f} bar=1.01")


def steps(report: Report, weights: moe.MoeWeights, reps: int, copy: float) -> None:
    """Each step alone, to see where the time goes; weights may come from the cache at T=1."""
    shared = weights.shared
    assert shared is not None
    for num_tokens, phase, _, _ in FIGURES:
        x = tokens(num_tokens, 10)
        done = all_steps(x, weights, phase)
        plan, ids, shares, gate = done["plan"], done["ids"], done["shares"], done["gate"]
        logits = moe.logits(x, weights.router, shared.gate, phase=phase)[:, : SHAPE.num_experts]
        works: dict[str, Callable[[], object]] = {
            "logits": lambda x=x, phase=phase: moe.logits(x, weights.router, shared.gate, phase=phase),
            "route": lambda logits=logits: moe.route(logits, RULE),
            "plan": lambda ids=ids, plan=plan: moe.plan(
                ids, SHAPE.num_experts, block_m=plan.block_m, has_shared=True, into=plan
            ),
            "gate_up": lambda x=x, plan=plan: moe.gate_up(x, weights.gate_up_proj, plan, shared=shared),
            "down": lambda d=done, plan=plan: moe.down(d["act"], weights.down_proj, plan, shared=shared),
            "combine": lambda d=done, s=shares, i=ids, p=plan, g=gate: moe.combine(d["rows"], s, i, p, shared_logits=g),
        }
        inner = 10 if num_tokens < 64 else 2
        times = {name: graph_ms(work, reps, inner) * 1e3 for name, work in works.items()}
        hit = ids.unique().numel() + 1
        read = hit * MLP_BYTES / ((times["gate_up"] + times["down"]) * 1e-6) / copy
        parts = " ".join(f"{name}={us:.1f}us" for name, us in times.items())
        report(f"steps T={num_tokens} {parts} experts={hit} weights_read={read:.2f} of copy")


def tiles(report: Report, weights: moe.MoeWeights, reps: int) -> None:
    """Other tiles than the table's, each product alone: what to put into the table next."""
    begin = time.perf_counter()
    tile = kernels.Tile
    trials = {
        ("gate_up", 16, (1, 5, 64)): (
            tile(block_n=32, block_k=128, num_stages=4, num_warps=4),
            tile(block_n=16, block_k=256, num_stages=4, num_warps=4),
            tile(block_n=32, block_k=256, num_stages=3, num_warps=4),
            tile(block_n=64, block_k=128, num_stages=3, num_warps=4),
            tile(block_n=32, block_k=128, num_stages=6, num_warps=4),
            tile(block_n=16, block_k=128, num_stages=5, num_warps=4),
            tile(block_n=32, block_k=64, num_stages=6, num_warps=2),
        ),
        ("down", 16, (1, 5, 64)): (
            tile(block_n=64, block_k=128, num_stages=3, num_warps=4),
            tile(block_n=32, block_k=128, num_stages=4, num_warps=4),
            tile(block_n=32, block_k=256, num_stages=3, num_warps=4),
            tile(block_n=128, block_k=128, num_stages=3, num_warps=4),
            tile(block_n=64, block_k=64, num_stages=5, num_warps=4),
            tile(block_n=64, block_k=256, num_stages=3, num_warps=4),
        ),
        ("gate_up", 64, (512,)): (
            tile(block_n=64, block_k=64, num_stages=4, num_warps=4),
            tile(block_n=64, block_k=128, num_stages=3, num_warps=4),
            tile(block_n=32, block_k=128, num_stages=4, num_warps=4),
            tile(block_n=128, block_k=64, num_stages=4, num_warps=8),
        ),
        ("down", 64, (512,)): (
            tile(block_n=128, block_k=64, num_stages=4, num_warps=4),
            tile(block_n=64, block_k=128, num_stages=3, num_warps=4),
            tile(block_n=128, block_k=128, num_stages=3, num_warps=4),
        ),
        ("gate_up", 128, (8192,)): (
            tile(block_n=128, block_k=64, num_stages=4, num_warps=8),
            tile(block_n=128, block_k=64, num_stages=3, num_warps=8),
            tile(block_n=64, block_k=64, num_stages=3, num_warps=8),
            tile(block_n=64, block_k=64, num_stages=4, num_warps=4),
        ),
        ("down", 128, (8192,)): (
            tile(block_n=256, block_k=64, num_stages=4, num_warps=8),
            tile(block_n=256, block_k=64, num_stages=3, num_warps=8),
            tile(block_n=128, block_k=64, num_stages=3, num_warps=8),
            tile(block_n=128, block_k=64, num_stages=4, num_warps=4),
        ),
    }
    for (part, block_m, lengths), candidates in trials.items():
        for candidate in candidates:
            if time.perf_counter() - begin > TRIALS_S:
                report(f"tiles: stopped after {TRIALS_S:.0f} s")
                return
            guarded(
                report,
                f"tile {part} {candidate}",
                lambda p=part, m=block_m, n=lengths, c=candidate: try_tile(report, weights, p, m, n, c, reps),
            )


def try_tile(
    report: Report,
    weights: moe.MoeWeights,
    part: str,
    block_m: int,
    lengths: Sequence[int],
    candidate: kernels.Tile,
    reps: int,
) -> None:
    """Time one tile at several lengths, batches of different tokens in a graph."""
    table = kernels.GATE_UP_TILES if part == "gate_up" else kernels.DOWN_TILES
    before = table[2, block_m]
    table[2, block_m] = candidate
    shared = weights.shared
    assert shared is not None
    try:
        times = []
        for num_tokens in lengths:
            phase = "window" if block_m == 16 else "prefill"
            prepared = [all_steps(tokens(num_tokens, 10 + i), weights, phase) for i in range(BATCHES[num_tokens])]
            batches = [tokens(num_tokens, 10 + i) for i in range(BATCHES[num_tokens])]

            def work(prepared: list[dict[str, Any]] = prepared, batches: list[Tensor] = batches) -> None:
                for x, done in zip(batches, prepared, strict=True):
                    if part == "gate_up":
                        moe.gate_up(x, weights.gate_up_proj, done["plan"], shared=shared, out=done["act"])
                    else:
                        moe.down(done["act"], weights.down_proj, done["plan"], shared=shared, out=done["rows"])

            times.append(f"T={num_tokens}: {graph_ms(work, reps) / len(batches) * 1e3:.1f}us")
        size = f"n={candidate.block_n} k={candidate.block_k} s={candidate.num_stages} w={candidate.num_warps}"
        report(f"tile {part} m={block_m} {size} {' '.join(times)}{' (table)' if candidate == before else ''}")
    finally:
        table[2, block_m] = before
