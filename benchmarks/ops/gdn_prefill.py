"""`gated_delta_rule` on CUDA at the shapes of Q36: correct first, then times beside FLA's chunked kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ops.common import graph_ms, guarded, ratio_line, relative_error
from torch import Tensor

from firetower.ops.gated_delta_rule import gated_delta_rule, kernels, scan_kernels
from firetower.ops.gated_delta_rule.cases import Inputs, make_inputs, with_gates
from firetower.ops.gated_delta_rule.chunks import make_table
from firetower.ops.gated_delta_rule.reference import gated_delta_rule_reference
from firetower.sensors.marks import Mark, mark_rows, new_panel

Report = Callable[[str], None]

Q36 = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
FEW = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
LENGTHS = (512, 2048, 8192, 32768, 131072)
BF16_RTOL, TF32X3_RTOL, TF32_RTOL = 8e-3, 1e-5, 1e-3
"""Of bfloat16, float32 and float16 inputs; each measured error is printed."""

TRIALS = (
    {"prepare_registers": 168},
    {"prepare_warps": 8},
    {"scan_stages": 2},
    {"scan_warps": 8},
    {"block_v": 64},
    {"block_v": 64, "scan_warps": 8},
)
"""Choices that are timed beside the chosen one."""


def run(report: Report, quick: bool) -> None:
    """Every check and figure; a check that fails is reported and the next one runs.

    Args:
        report: takes a line.
        quick: few repeats and sizes, to compile every kernel.
    """
    checks: dict[str, Callable[[], str]] = {
        "error": check_error,
        "types": check_types,
        "lengths": lambda: check_lengths((65,) if quick else (1, 2, 63, 64, 65, 1000, 4097)),
        "gates": check_gates,
        "sequences": check_sequences,
        "split": check_split,
        "poisoned": check_poison,
        "repeats": lambda: check_repeats(3 if quick else 50),
        "burned": check_burned,
        "words": check_words,
        "graph": check_graph,
    }
    for name, check in checks.items():
        guarded(report, f"gdn_prefill_{name}", lambda check=check, name=name: report(f"gdn_prefill_{name} {check()}"))
    lengths = LENGTHS[:1] if quick else LENGTHS
    guarded(report, "gdn_prefill times", lambda: report_times(report, lengths, 3 if quick else 20))
    guarded(report, "gdn_prefill parts", lambda: report_parts(report, 512 if quick else 8192))


def _run(x: Inputs, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, state = gated_delta_rule(*x.tokens, initial_state=x.initial_state, **kwargs)
    assert state is not None
    return out, state


def _inputs(seed: int, length: int, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Inputs:
    return make_inputs(seed, length=length, dtype=dtype, device="cuda", **{**FEW, **sizes})


def _errors(x: Inputs, rtol: float, **kwargs: Any) -> float:
    expected = gated_delta_rule_reference(*x.tokens, initial_state=x.initial_state, **kwargs)
    errors = [relative_error(e, a) for e, a in zip(expected, _run(x, **kwargs), strict=True)]
    assert max(errors) <= rtol, f"out and state are off by {errors}, allowed {rtol}"
    return max(errors)


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    bits = ([t.contiguous().view(torch.uint8) for t in pair] for pair in (a, b))
    return all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


def check_error() -> str:
    """Ours and FLA's error at T = 2048, all heads, of the same bfloat16 inputs."""
    x = make_inputs(0, length=2048, dtype=torch.bfloat16, device="cuda", **Q36)
    x = dataclasses.replace(x, beta=x.beta.bfloat16())
    truth, _ = gated_delta_rule_reference(*x.tokens)
    ours = relative_error(truth, gated_delta_rule(*x.tokens)[0])
    line = f"own={ours:.3e}"
    peer = _fla()
    if peer is not None:
        theirs = relative_error(truth, peer(x)[0])
        line += f" peer(fla)={theirs:.3e} {'met' if ours <= theirs else 'MISSED'}"
    assert ours <= BF16_RTOL, line
    return line


def check_types() -> str:
    """Float32 and float16 inputs."""
    return " ".join(
        f"{dtype}={_errors(_inputs(1, 130, dtype), rtol):.2e}"
        for dtype, rtol in ((torch.float32, TF32X3_RTOL), (torch.float16, TF32_RTOL))
    )


def check_lengths(lengths: tuple[int, ...]) -> str:
    """Lengths around a chunk's edges and those that nothing divides."""
    return " ".join(f"{length}:{_errors(_inputs(2, length), BF16_RTOL):.1e}" for length in lengths)


def check_gates() -> str:
    """Gates that factors and differences do not survive, and keys of any size."""
    x, errors = _inputs(3, 200), {}
    for gate in (0.0, -1.5, -1e4, -3e38, -float("inf")):
        errors[f"{gate:.2g}"] = _errors(with_gates(x, gate), BF16_RTOL)
    g = torch.full_like(x.g, -0.01)
    g[:, 10] = -1e6
    errors["reset"] = _errors(with_gates(x, g), BF16_RTOL)
    for size in (1e-30, 1e38):
        scaled = (t / t.abs().amax() * size for t in (x.q.float(), x.k.float()))
        errors[f"size {size:.0e}"] = _errors(dataclasses.replace(x, **_named("qk", scaled)), BF16_RTOL)
    return " ".join(f"{name}:{e:.1e}" for name, e in errors.items())


def _named(names: str, tensors: Iterator[Tensor]) -> dict[str, Tensor]:
    return {name: t.bfloat16() for name, t in zip(names, tensors, strict=True)}


def check_sequences() -> str:
    """Sequences one behind the other: the bits that each has alone; pads behind the last one."""
    x = make_inputs(4, length=320, num_states=4, dtype=torch.bfloat16, device="cuda", **FEW)
    edges = [0, 77, 77, 141, 300]
    cu_seqlens = torch.tensor(edges, dtype=torch.int32, device="cuda")
    out, state = _run(x, cu_seqlens=cu_seqlens)
    assert (out[:, 300:] == 0).all(), "pads are not zero"
    assert torch.equal(state[1], x.initial_state[1]), "a sequence of no tokens changed its state"
    for i in (0, 2, 3):
        alone = _part(x, slice(edges[i], edges[i + 1]), x.initial_state[i : i + 1])
        assert _same(_run(alone), (out[:, edges[i] : edges[i + 1]], state[i : i + 1])), f"sequence {i} is not as alone"
    return "same bits as alone"


def _part(x: Inputs, span: slice, state: Tensor) -> Inputs:
    tokens = {n: getattr(x, n)[:, span] for n in ("q", "k", "v", "g", "beta")}
    return dataclasses.replace(x, initial_state=state, **tokens)


def check_split() -> str:
    """Split at a multiple of the chunk: the same bits."""
    x = _inputs(5, 300)
    whole = _run(x)
    first, middle = _run(_part(x, slice(0, 192), x.initial_state))
    second, last = _run(_part(x, slice(192, None), middle))
    assert _same((torch.cat([first, second], 1), last), whole), "other bits"
    return "same bits"


@contextlib.contextmanager
def _unwritten(value: float) -> Iterator[None]:
    """Every `torch.empty` of the kernels' launchers is full of a value."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(value if tensor.dtype.is_floating_point else 0)

    torch.empty = filled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = empty  # type: ignore[assignment]


def check_poison() -> str:
    """Two fillings of outputs and workspaces: the same bits."""
    x = _inputs(6, 200)
    plain = _run(x)
    for value in (float("nan"), 1e30):
        with _unwritten(value):
            assert _same(_run(x), plain), f"other bits over {value}"
    assert all(t.isfinite().all() for t in plain)
    return "same bits over NaN and 1e30"


def check_repeats(repeats: int) -> str:
    """The same bits every time, all heads."""
    x = make_inputs(7, length=1000, dtype=torch.bfloat16, device="cuda", **Q36)
    first = _run(x)
    for _ in range(repeats):
        assert _same(_run(x), first), "other bits"
    return f"same bits {repeats} times"


def _marks(num_rows: int) -> tuple[Tensor, Mark, Mark]:
    panel = new_panel(2, num_rows, "cuda")
    ids = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    out, state = (Mark(panel=panel, slot=s, num_signals=2, num_rows=num_rows, row_ids=ids) for s in range(2))
    return panel, out, state


def _planted(x: Inputs, name: str, token: int) -> Inputs:
    tensor = getattr(x, name).clone()
    tensor[(0, token, 0) + (3,) * (tensor.ndim - 3)] = float("nan")
    return dataclasses.replace(x, **{name: tensor})


def check_burned() -> str:
    """A NaN in each input at token 100: named as that token; earlier tokens as they were."""
    x = with_gates(_inputs(8, 200), -0.05)
    clean, _ = _run(x)
    width = clean.shape[2] * clean.shape[3]
    for name in ("q", "k", "v", "g", "beta"):
        panel, mark, state_mark = _marks(200)
        out, state = _run(_planted(x, name, 100), mark=mark, state_mark=state_mark)
        token = (int(panel[0]) >> 32) // width
        assert token == 100, f"a NaN in {name} at 100 is put down to {token}"
        assert out[:, :100].isfinite().all(), f"a NaN in {name} reaches earlier tokens"
        assert relative_error(clean[:, :100], out[:, :100]) < 1e-3, f"a NaN in {name} changes earlier tokens"
        burned = int(state.isnan().sum()) // 128
        assert burned == {"q": 0, "v": 1, "k": 256, "g": 128, "beta": 128}[name], f"{name}: {burned} columns of states"
    return "token 100 named for q, k, v, g, beta"


def check_words() -> str:
    """The panel is that of `mark_rows`, and sensors change no bit, burned or not."""
    for x in (_inputs(9, 130), _planted(_inputs(9, 130), "v", 77), _planted(_inputs(9, 130), "k", 3)):
        panel, mark, state_mark = _marks(130)
        out, state = _run(x, mark=mark, state_mark=state_mark)
        assert _same((out, state), _run(x)), "sensors change bits"
        expected, mark, state_mark = _marks(130)
        mark_rows(out.flatten(0, 1).flatten(1), mark)
        mark_rows(state.flatten(1), state_mark)
        assert torch.equal(panel, expected), "other words"
    return "same words, same bits"


def check_graph() -> str:
    """A captured call gives the bits of an eager one, ``cu_seqlens`` included."""
    x = make_inputs(10, length=256, num_states=2, dtype=torch.bfloat16, device="cuda", **FEW)
    edges = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
    _run(x, cu_seqlens=edges)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _run(x, cu_seqlens=edges)
    edges.copy_(torch.tensor([0, 31, 250], dtype=torch.int32))
    graph.replay()
    assert _same(captured, _run(x, cu_seqlens=edges)), "other bits"
    return "same bits for other edges"


def _fla() -> Callable[[Inputs], tuple[Tensor, Tensor]] | None:
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    @torch.no_grad()
    def peer(x: Inputs) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = chunk_gated_delta_rule(
            *x.tokens, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return result

    return peer


def _large(length: int) -> Inputs:
    """Inputs made on the device, where the CPU would take long."""
    generator = torch.Generator("cuda").manual_seed(length)

    def normal(heads: int, *dims: int) -> Tensor:
        return torch.randn(1, length, heads, *dims, generator=generator, device="cuda", dtype=torch.bfloat16)

    gates = -torch.nn.functional.softplus(normal(32).float())
    tokens = {"q": normal(16, 128), "k": normal(16, 128), "v": normal(32, 128), "g": gates}
    return Inputs(**tokens, beta=normal(32).sigmoid(), initial_state=torch.zeros(1, 32, 128, 128, device="cuda"))


def report_times(report: Report, lengths: tuple[int, ...], reps: int) -> None:
    """Medians of graph replays, sensors on, beside FLA's in the same run."""
    try:
        peer = _fla()
    except ImportError as error:
        report(f"fla does not import: {error}")
        peer = None
    if peer is None:
        report("no peer: fla is not installed")
    for length in lengths:
        x = _large(length)
        _, mark, state_mark = _marks(length)
        own = graph_ms(lambda x=x, m=mark, s=state_mark: gated_delta_rule(*x.tokens, mark=m, state_mark=s), reps)
        silent = graph_ms(lambda x=x: gated_delta_rule(*x.tokens), reps)
        report(f"gdn_prefill_{length} own={own * 1e3:.1f}us sensors_on/off={own / silent:.4f}")
        if peer is None:
            continue
        begin = time.perf_counter()
        peer(x)
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        theirs = graph_ms(lambda x=x: peer(x), reps)
        line = ratio_line(f"gdn_prefill_{length}", own, theirs, "peer(fla)", 1.0, "0.5" if length >= 8192 else "-")
        report(f"{line} (fla's first call {first:.1f}s)")


def report_parts(report: Report, length: int) -> None:
    """Each part by itself, with the chosen tuning and with others."""
    x, chosen = _large(length), kernels.TUNING
    table = make_table(1, length, 64, None)
    out, state = torch.empty_like(x.v), torch.empty_like(x.initial_state)

    def prepare() -> Any:
        return kernels.prepare(x.q, x.k, x.g, x.beta, table, scale=128**-0.5, use_l2norm=True)

    chunks = prepare()

    def scan() -> None:
        scan_kernels.scan(chunks, x.v, initial_state=None, out=out, final_state=state, mark=None, state_mark=None)

    def line(name: str) -> str:
        times = [f"{run.__name__}={graph_ms(run) * 1e3:.1f}us" for run in (prepare, scan)]
        return " ".join([f"gdn_prefill_parts_{length}", name, *times])

    report(line("chosen"))
    for trial in TRIALS:
        kernels.TUNING = dataclasses.replace(chosen, **trial)
        try:
            guarded(report, f"trial {trial}", lambda trial=trial: report(line(str(trial))))
        finally:
            kernels.TUNING = chosen
