"""Answer a prompt on the reference runtime, with every sensor on.

MODEL is the folder of a Qwen3-Next or Qwen3.5-MoE model of Transformers; without it the small model that comes with the
package answers. PROMPT is text, - for standard input, or token ids with --ids. The answer goes to stdout as it is
written, figures and fires to stderr.

Exit codes: 0 answered, 1 an error, 2 usage, 3 the request burned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firetower.cli.output import print_json, say
from firetower.core.errors import ConfigError

if TYPE_CHECKING:
    from firetower.engine.engine import Engine
    from firetower.engine.request import Completion, Delta, Sampling

DTYPES = ("float32", "bfloat16", "float16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``firetower run``."""
    parser.add_argument("words", nargs="+", metavar="[MODEL] PROMPT", help="folder of a model, then the prompt")
    what = parser.add_argument_group("what is asked")
    what.add_argument("--ids", action="store_true", help="PROMPT is token ids, with commas between")
    what.add_argument("--chat", action="store_true", help="PROMPT is a user's message: use the model's chat template")
    what.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of the answer (default: 128)")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    what.add_argument("--top-k", type=int, default=0, metavar="K", help="the K most likely; 0 is off (default)")
    what.add_argument("--top-p", type=float, default=1.0, metavar="P", help="share of probability kept (default: 1)")
    what.add_argument("--min-p", type=float, default=0.0, metavar="P", help="share of the likeliest (default: 0, off)")
    what.add_argument("--seed", type=int, metavar="S", help="of the random numbers (default: a new one, shown)")
    what.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")
    what.add_argument("--ignore-eos", action="store_true", help="go on past the model's own end")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--device", metavar="D", help="cpu or cuda (default: cuda where there is one)")
    how.add_argument("--dtype", choices=DTYPES, help="of the weights (default: float32 on the CPU, else bfloat16)")
    how.add_argument("--max-model-len", type=int, metavar="N", help="prompt and answer together")
    how.add_argument("--window", type=int, default=5, metavar="W", help="one token and W - 1 drafts; 1 drafts nothing")
    how.add_argument("--on-fire", choices=("fail", "retry", "heal"), default="fail", help="default: fail")
    how.add_argument("--no-graphs", action="store_true", help="do not capture CUDA graphs")
    how.add_argument("--store", metavar="PATH", help="the store of fires, instead of the usual one")
    how.add_argument("--no-store", action="store_true", help="do not store fires")
    parser.add_argument("--json", action="store_true", help="one JSON document, when the answer has ended")


def run(args: argparse.Namespace) -> int:
    """Load, answer, and return 3 for a fire."""
    from firetower.engine.engine import Engine

    folder, prompt = _model_and_prompt(args)
    sampling = _sampling(args)
    options = _options(args)
    with _progress() as progress:
        engine = Engine(folder, progress=progress, device=args.device, dtype=_dtype(args.dtype), **options)
    with engine:
        ids = _token_ids(engine, prompt, args)
        sequence = engine.submit(ids, sampling, request_id="run", sink=None if args.json else _print_delta(engine))
        while not sequence.is_done:
            engine.step()
        completion = engine.completion_of(sequence)
        if args.json:
            print_json({"completion": _plain(completion), "fires": list(engine.fires)})
        else:
            print(flush=True)
            _say_figures(engine, completion)
    if completion.error is not None:
        say(f"firetower: {completion.error}")
        return 3 if completion.finish_reason == "burned" else 1
    return 0


def _model_and_prompt(args: argparse.Namespace) -> tuple[Path, str]:
    words = args.words
    if len(words) > 2:
        raise ConfigError(f"words={len(words)}: must be a model and a prompt; put the prompt in quotes")
    prompt = sys.stdin.read() if words[-1] == "-" else words[-1]
    return (Path(words[0]) if len(words) == 2 else _small_model()), prompt


def _small_model() -> Path:
    """The folder of the model that comes with the package."""
    import firetower.models

    folder = Path(firetower.models.__path__[0]) / "small"
    if not (folder / "config.json").is_file():
        raise ConfigError("model: no small model comes with this installation; name a folder: run MODEL PROMPT")
    return folder


def _sampling(args: argparse.Namespace) -> Sampling:
    from firetower.engine.request import Sampling

    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_batch": 1,
        "max_model_len": args.max_model_len,
        "max_window": args.window,
        "graphs": not args.no_graphs,
        "on_fire": args.on_fire,
        "store": False if args.no_store else args.store,
    }


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def _token_ids(engine: Engine, prompt: str, args: argparse.Namespace) -> list[int]:
    if args.ids:
        try:
            return [int(part) for part in prompt.split(",")]
        except ValueError as e:
            raise ConfigError(f"prompt={prompt[:40]!r}: must be token ids with commas between: {e}") from e
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError("prompt: the model's folder has no tokenizer; pass token ids with --ids 1,2,3")
    if not args.chat:
        return tokenizer.encode(prompt)
    chat = getattr(tokenizer, "chat", None)
    if chat is None:
        raise ConfigError("--chat: this tokenizer knows no chat template; leave --chat out")
    ids: list[int] = chat([{"role": "user", "content": prompt}])
    return ids


def _print_delta(engine: Engine) -> Any:
    """Writes the answer as it comes: text, or token ids where there is no tokenizer."""
    has_text = engine.tokenizer is not None

    def write(delta: Delta) -> None:
        text = delta.text if has_text else "".join(f"{t} " for t in delta.token_ids)
        print(text or "", end="", flush=True)

    return write


def _say_figures(engine: Engine, completion: Completion) -> None:
    status = engine.status()
    first = completion.time_to_first_token_s
    seconds = completion.time_s - (first or 0.0)
    rate = (len(completion.token_ids) - 1) / seconds if seconds > 0 else 0.0
    drafts = ""
    if completion.num_draft_tokens:
        drafts = f", {completion.num_accepted_tokens} of {completion.num_draft_tokens} drafts accepted"
    wait = "" if first is None else f", first after {first:.2f} s"
    say(
        f"{completion.num_prompt_tokens} tokens read{wait}, {len(completion.token_ids)} written at {rate:.1f} tokens/s"
        f"{drafts}; ended by {completion.finish_reason}; seed {completion.seed}",
        f"{status.num_steps} steps, {status.signals} signals in each, {status.num_fires} fires",
    )


def _plain(completion: Completion) -> dict[str, Any]:
    import dataclasses

    fields = {f.name: getattr(completion, f.name) for f in dataclasses.fields(completion)}
    return {**fields, "error": None if completion.error is None else str(completion.error)}


class _progress:  # noqa: N801 - used as a function
    """A line on stderr while loading and capturing, where that is a terminal."""

    def __enter__(self) -> Any:
        self._shown = ""
        return self._show if sys.stderr.isatty() else None

    def _show(self, what: str, done: int, total: int) -> None:
        shown = f"{what} {100 * done // max(1, total)}%"
        if shown != self._shown:
            self._shown = shown
            print(f"\r{shown:<24}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(f"\r{'':<24}\r", end="", file=sys.stderr, flush=True)
