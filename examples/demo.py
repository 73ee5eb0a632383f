"""The main job, on a real model: a clean answer, a bad weight, an overflow, and the fires kept in the store.

Run by ``make demo``. Uses a store of its own (``FIRETOWER_STORE`` overrides), so that it never touches yours.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import firetower
from firetower.cli.main import main as firetower_cli
from firetower.core.config import data_folder
from firetower.core.records import Kind
from firetower.drills import hosts
from firetower.scan.gguf import block_location

PROMPT = "In two sentences: why do people keep a black box in an aeroplane?"
LAYER, ROW, BLOCK = 12, 113, 7
NAN_FP16 = (0x7E00).to_bytes(2, "little")


def title(text: str) -> None:
    """A heading on stdout, in order with what the commands print."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}\n{'-' * len(text)}", flush=True)


def command(*words: str) -> int:
    """Show a firetower command and run it as a user would."""
    print(f"$ firetower {' '.join(words)}", flush=True)
    return firetower_cli(list(words))


def chat(model: Any, tokenizer: Any, max_new_tokens: int = 60) -> tuple[str, float]:
    """The model's greedy answer to the prompt, and tokens a second."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    begin = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), len(new) / (time.perf_counter() - begin)


def clean_run(source: Path) -> None:
    """The real model answers under the watch."""
    title("1. SmolLM2-135M-Instruct answers with the watch on")
    print("loading ...", flush=True)
    model, tokenizer = hosts.load_smollm2(source)
    with firetower.attach(model, name="smollm2-135m-instruct-q4_1") as watch:
        text, rate = chat(model, tokenizer)
        ran, declared = watch.coverage()
    print(text)
    print(f"[{rate:.1f} tokens/s; {ran} of {declared} signals ran; {len(watch.fires)} fires]")


def bad_weight(source: Path, folder: Path) -> None:
    """One block scale is NaN: the scan names it, and the watch ends the same prompt with a clear error."""
    title(f"2. One Q4_1 block scale of layer {LAYER}'s ffn_down becomes NaN in a copy of the file")
    copy = folder / "smollm2-broken.gguf"
    shutil.copyfile(source, copy)
    offset, _ = block_location(copy, f"blk.{LAYER}.ffn_down.weight", ROW, BLOCK)
    with copy.open("r+b") as file:
        file.seek(offset)
        file.write(NAN_FP16)
    code = command("scan", str(copy))
    print(f"(exit code {code})\n\nthe same prompt under the watch; loading ...", flush=True)
    model, tokenizer = hosts.load_smollm2(copy, keep=False)
    try:
        with firetower.attach(model, name=copy.stem):
            text, _ = chat(model, tokenizer)
            print(text)
    except firetower.NonFiniteError as error:
        print(f"NonFiniteError: {error}")


def overflow() -> None:
    """An expert's activation product overflows in fp16; NaN shows later, the origin is the product."""
    title("3. A small random Qwen3.5-MoE in fp16: one expert's activation product overflows")
    model = hosts.small_qwen35_moe(dtype=torch.float16)
    model.set_experts_implementation("eager")
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[5] *= 400
    ids = torch.randint(5, 500, (1, 24), generator=torch.Generator().manual_seed(1))
    found = firetower.investigate(model, input_ids=ids)
    print(found)
    norm = next((e for e in found.propagators if "norm" in e.module and e.first.kind is Kind.NAN), None)
    if found.origin is not None and norm is not None:
        print(f"(a norm first shows NaN {norm.index - found.origin.index} ops later, at {norm.op} in {norm.module})")


def main() -> None:
    os.environ.setdefault("FIRETOWER_STORE", str(data_folder() / "demo.sqlite"))
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    source = hosts.smollm2_path()
    with tempfile.TemporaryDirectory() as folder:
        clean_run(source)
        bad_weight(source, Path(folder))
        overflow()
    title("4. The fires are kept")
    command("fires", "list")
    with firetower.Store() as store:
        newest = next(iter(store))
    command("fires", "show", newest.id)
    title("Next")
    print(f"export FIRETOWER_STORE={os.environ['FIRETOWER_STORE']}")
    print("firetower fires list --json        every fire as data")
    print(f"firetower fires show {newest.id}")
    print("firetower scan YOUR_MODEL          look for bad weights before serving")
    print("firetower drill --list             faults with known origins, to try the watch on")


if __name__ == "__main__":
    main()
