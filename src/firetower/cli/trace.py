"""Trace a model through a foreign runtime: the first bad tensor, its op, row, column and bits.

Runs MODEL.gguf in llama.cpp (pip install 'firetower[llama]') on a prompt, greedily, and checks its tensors
through llama.cpp's eval callback. Level filtered watches what leaves attention and every layer, the router
logits and the logits (about 1.2x the time a token). When one burns, the same tokens run again with every
tensor watched, to name the exact op and whether a weight, a state or the op itself is to blame. Level full
watches every tensor from the start.

The text goes to stdout as it is generated; a fire follows it, is stored, and the exit code is 3.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firetower.attach.llama import LlamaTrace
    from firetower.core.records import Fire

_RUNTIMES = ("llama",)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL.gguf", help="a GGUF file of a decoder-only model")
    parser.add_argument("--runtime", choices=_RUNTIMES, default="llama", help="what runs it (default: llama)")
    parser.add_argument(
        "-p",
        "--prompt",
        default="Why do lighthouses have keepers?",
        help="what to ask (default: a short question)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="give the prompt as it is, without the chat template"
    )
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=_positive,
        default=32,
        metavar="N",
        help="generate at most N tokens (default: 32)",
    )
    parser.add_argument(
        "--level",
        choices=("filtered", "full"),
        default="filtered",
        help="which tensors to check (default: filtered)",
    )
    parser.add_argument(
        "--no-rerun", action="store_true", help="after a fire at level filtered, do not run again"
    )
    run = parser.add_argument_group("how llama.cpp runs")
    run.add_argument(
        "--threads", type=_positive, metavar="N", help="threads (default: the usable CPUs, at most 8)"
    )
    run.add_argument(
        "--ubatch",
        type=_positive,
        default=512,
        metavar="N",
        help="prompt tokens computed at once (default: 512)",
    )
    run.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="layers on the GPU (default: 0)")
    run.add_argument(
        "--no-repack", action="store_true", help="keep weights in their plain layout (slower kernels)"
    )
    run.add_argument(
        "--flash-attn",
        choices=("auto", "on", "off"),
        default="auto",
        help="off: scores and softmax become ops of their own, visible at level full (default: auto)",
    )
    store = parser.add_argument_group("the fire")
    store.add_argument("--store", metavar="PATH", help="the store, instead of the usual one")
    store.add_argument("--no-store", action="store_true", help="do not keep the fire")
    store.add_argument("--with-content", action="store_true", help="with --json: with the private token ids")
    parser.add_argument("--json", action="store_true", help="machine-readable, on stdout")


def run(args: argparse.Namespace) -> int:
    """Trace; 0 when clean, 1 when firetower itself failed on a tensor, 3 on a fire."""
    from pathlib import Path

    from firetower.attach.llama.runtime import LlamaOptions, check_model_file, require_llama_cpp
    from firetower.attach.llama.worker import trace_in_child

    path = Path(args.model).expanduser()
    check_model_file(path)
    require_llama_cpp()
    options = LlamaOptions(
        num_threads=args.threads,
        ubatch_size=args.ubatch,
        num_gpu_layers=args.gpu_layers,
        repack=not args.no_repack,
        flash_attention=args.flash_attn,
        debug=args.debug,
    )
    result = trace_in_child(
        path,
        options=options,
        on_piece=None if args.json else _print_piece,
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        level=args.level,
        rerun=not args.no_rerun,
        raw=args.raw,
    )
    stored, problem = _store(args, result.fire)
    if args.json:
        _print_json(args, result, stored)
    else:
        _print(result)
    _talk(args, result, stored, problem)
    if result.fire:
        return 3
    # nothing bad was seen, but not everything was looked at: not for a script to take as clean
    return 1 if result.num_callback_errors else 0


def _store(args: argparse.Namespace, fire: Fire | None) -> tuple[bool, str | None]:
    """Keep the fire; a store that fails must not hide it, so the reason is returned, not raised."""
    if fire is None or args.no_store:
        return False, None
    from firetower.core.errors import FiretowerError
    from firetower.fires.store import Store

    try:
        with Store(args.store) as store:
            store.add(fire)
    except FiretowerError as e:
        return False, str(e)
    return True, None


def _print_piece(piece: str) -> None:
    sys.stdout.write(_safe(piece))
    sys.stdout.flush()


def _safe(text: str) -> str:
    # a model's text may hold anything: keep its lines, escape what a terminal would obey
    from firetower.fires.text import visible

    return "\n".join(visible(line) for line in text.split("\n"))


def _print(result: LlamaTrace) -> None:
    if result.text:
        print()
    if result.fire is None:
        return
    from firetower.fires.page import fire_page

    for line in ([""] if result.text else []) + fire_page(result.fire):
        print(line)


def _print_json(args: argparse.Namespace, result: LlamaTrace, stored: bool) -> None:
    from firetower.cli.output import print_json
    from firetower.core.codec import encode

    data: dict[str, Any] = encode(result)
    data["stored"] = stored
    if not args.with_content:
        del data["prompt_ids"], data["token_ids"]
        if data["fire"] is not None:
            data["fire"]["token_ids"] = None
    print_json(data)


def _talk(args: argparse.Namespace, result: LlamaTrace, stored: bool, problem: str | None) -> None:
    from firetower.cli.output import say

    say("", *_coverage(result))
    if result.raw_prompt and not args.raw:
        say("the model has no chat template that llama.cpp knows: the prompt was given as it is")
    if result.fire is None:
        return
    if problem is not None:
        say(f"the fire is not stored: {problem}")
    say(*_next(args, result.fire, stored))


def _coverage(result: LlamaTrace) -> list[str]:
    num_not_covered = sum(result.not_covered.values())
    state = "burnt" if result.fire else "incomplete" if result.num_callback_errors else "clean"
    speed = f", {result.decode_tokens_per_s:.1f} tokens/s" if result.decode_tokens_per_s else ""
    lines = [
        f"{state}: {result.num_checked:,} tensors checked in {result.num_steps} "
        f"step{'s' * (result.num_steps != 1)} at level {result.level}{speed} ({result.runtime})"
    ]
    if num_not_covered:
        types = ", ".join(f"{n:,} {name}" for name, n in sorted(result.not_covered.items()))
        lines.append(f"not covered: {num_not_covered:,} tensors of a type that cannot be checked ({types})")
    if not result.num_checked:
        lines.append(
            "nothing was checked: level filtered knows no tensor of this model by name; use --level full"
        )
    if result.num_callback_errors:
        lines.append(
            f"firetower failed on {result.num_callback_errors:,} tensors, which were not checked: "
            f"{result.first_callback_error}"
        )
    return lines


def _next(args: argparse.Namespace, fire: Fire, stored: bool) -> list[str]:
    from shlex import quote

    store = f" --store {quote(args.store)}" if args.store else ""
    lines = [f"firetower fires show {fire.id}{store}"] if stored else []
    if any(w.num_nonfinite for w in fire.weights):
        lines.append(f"firetower scan {quote(args.model)}")
    lines.append(f"firetower bits {fire.first.bits_hex} --dtype {fire.first.dtype}")
    return [f"{'next:' if i == 0 else '     '} {line}" for i, line in enumerate(lines)]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
