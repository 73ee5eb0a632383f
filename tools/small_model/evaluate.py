"""Third step: what the checkpoint can do, read through Transformers' own class in the type it is stored in.

    python -m small_model.evaluate --data FOLDER --model OUT --out OUT/evaluation.json

Held-out bits a byte of the model (rows of 1,024 tokens, each begun without what stands before it) and of the 5-gram
model (never cut), on the same tokens of the same documents; the end of a document counts for neither. Then 200 prompts
of the held-out side of the grammar, answered greedily, half with thinking and half without: how many hold one
well-formed call of a listed function with all required parameters and the right types, and how many of these are also
the call that was asked for, value by value. Then the largest magnitude of the residual, for float16's sake.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel, Qwen3_5MoeForCausalLM

from small_model.chat import END_OF_TEXT, IM_END, check_call, parse_call
from small_model.checkpoint import weights_sha256
from small_model.net import CONFIG
from small_model.ngram import KneserNey
from small_model.prompts import draw_prompts

MAX_NEW_TOKENS = 192
LENGTH, ROWS = 1024, 8


def bits_a_byte(nats: np.ndarray, tokens: np.ndarray, end: int, num_bytes: int) -> float:
    """Bits a byte of text from the surprise of its tokens; ends of documents are not text."""
    return float(nats[tokens != end].sum()) / math.log(2) / num_bytes


@torch.inference_mode()
def model_nats(model: PreTrainedModel, tokens: np.ndarray, end: int) -> tuple[np.ndarray, float]:
    """Surprise of every token, rows begun with ``end`` and nothing else before them; the largest residual."""
    largest = 0.0

    def watch(module: torch.nn.Module, args: Any, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        nonlocal largest
        # some releases give a tuple
        hidden = output[0] if isinstance(output, tuple) else output
        largest = max(largest, float(hidden.abs().max()))

    hooks = [layer.register_forward_hook(watch) for layer in model.model.layers]
    num_rows = -(-len(tokens) // LENGTH)
    targets = torch.from_numpy(np.pad(tokens.astype(np.int64), (0, num_rows * LENGTH - len(tokens))))
    targets = targets.view(num_rows, LENGTH).to(model.device)
    # a row goes on with the last token of the row before it; the first one begins a document
    first = torch.cat((targets.new_full((1, 1), end), targets[:-1, -1:]))
    inputs = torch.cat((first, targets[:, :-1]), 1)
    parts = []
    for begin in range(0, num_rows, ROWS):
        logits = model(inputs[begin : begin + ROWS], use_cache=False).logits.float()
        wanted = targets[begin : begin + ROWS]
        parts.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").cpu())
    for hook in hooks:
        hook.remove()
    return torch.cat(parts).numpy()[: len(tokens)].astype(np.float64), largest


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: Any, prompts: list[str], batch: int = 50) -> list[str]:
    """Greedy replies, up to and without the end of the turn."""
    replies = []
    for begin in range(0, len(prompts), batch):
        inputs = tokenizer(
            prompts[begin : begin + batch], return_tensors="pt", padding=True, padding_side="left",
            add_special_tokens=False, return_token_type_ids=False,
        ).to(model.device)  # fmt: skip
        made = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
        replies += [text.partition(IM_END)[0] for text in texts]
    return replies


def judge(reply: str, tools: list[dict[str, Any]], expected: tuple[str, dict[str, str]]) -> tuple[bool, bool, str]:
    """Whether a reply parses, whether it is the expected call, and what is wrong with it."""
    try:
        name, arguments = parse_call(reply)
        check_call(name, arguments, tools)
    except ValueError as error:
        return False, False, str(error)
    exact = (name, arguments) == expected
    return True, exact, "" if exact else f"asked for {expected}, got {(name, arguments)}"


def evaluate_tools(model: PreTrainedModel, data: Path, folder: Path) -> dict[str, Any]:
    """The tool prompts' part of evaluation.json."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = draw_prompts(data, tokenizer)
    texts = [p.text for p in prompts]
    begin = time.perf_counter()
    replies = answer(model, tokenizer, texts)
    verdicts = [judge(r, p.tools, p.expected) for r, p in zip(replies, prompts, strict=True)]
    faults = [
        {"prompt": text, "reply": reply, "fault": fault}
        for text, reply, (_, _, fault) in zip(texts, replies, verdicts, strict=True)
        if fault
    ]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return {
        "device": device_name(),
        "prompts": len(prompts),
        "longest_prompt_tokens": max(lengths),
        "parse": sum(parsed for parsed, _, _ in verdicts),
        "exact": sum(exact for _, exact, _ in verdicts),
        "seconds": round(time.perf_counter() - begin, 1),
        "faults": faults[:40],
    }


def device_name() -> str:
    """The CUDA device, or CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def evaluate_text(model: PreTrainedModel | None, data: Path, order: int) -> dict[str, Any]:
    """The text's part of evaluation.json: of the model, or of the n-gram model of ``order`` where there is none."""
    end = Tokenizer.from_file(str(data / "tokenizer.json")).token_to_id(END_OF_TEXT)
    tokens = np.load(data / "text_held_out.npy")
    num_bytes = json.loads((data / "corpus.json").read_text(encoding="utf-8"))["held_out_bytes"]
    if model is not None:
        nats, largest = model_nats(model, tokens, end)
        bits = bits_a_byte(nats, tokens, end, num_bytes)
        return {"device": device_name(), "bits_a_byte": bits, "largest_residual": largest}
    peer = KneserNey(np.load(data / "text_train.npy"), order=order, vocab_size=CONFIG["vocab_size"], end=end)
    return {"order": order, "bits_a_byte": bits_a_byte(peer.nats(tokens), tokens, end, num_bytes)}


def begin_result(file: Path, sha256: str) -> dict[str, Any]:
    """What ``file`` says of these weights so far; each part is judged anew or kept.

    Raises:
        SystemExit: the file speaks of other weights.
    """
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if result.setdefault("weights_sha256", sha256) != sha256:
        raise SystemExit(f"{file}: is of the weights {result['weights_sha256'][:12]}, not {sha256[:12]}: remove it")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="work folder of small_model.prepare")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="file for the results, JSON")
    parser.add_argument("--parts", default="tools,text,ngram", help="which of tools, text, ngram, by commas")
    parser.add_argument("--order", type=int, default=5, help="order of the n-gram model")
    args = parser.parse_args()
    result = begin_result(args.out, weights_sha256(args.model))
    model = Qwen3_5MoeForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    for part in args.parts.split(","):
        if part == "tools":
            result["tools"] = evaluate_tools(model, args.data, args.model)
        elif part == "text":
            result["text"] = evaluate_text(model, args.data, args.order)
        elif part == "ngram":
            result["ngram"] = evaluate_text(None, args.data, args.order)
        else:
            raise SystemExit(f"--parts {part}: must be tools, text or ngram")
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shown = {k: {n: m for n, m in v.items() if n != "faults"} if isinstance(v, dict) else v for k, v in result.items()}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
