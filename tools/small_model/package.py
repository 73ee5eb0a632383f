"""Last step: a checkpoint with its figures into the package, licence notes and the tests' prompts beside it.

    python -m small_model.package --data FOLDER --model OUT

OUT is what ``train`` wrote and ``evaluate`` judged. It is refused where training.json or evaluation.json is of other
weights, and where a figure misses its bar. Rewritten as a whole: the folder of the small model in the package, but for
its ``__init__.py``, and the prompts in the folder of the tests. ``--correction`` says what was found out about the text
after the run; it goes into training.json and LICENSES.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from small_model.checkpoint import WEIGHTS, weights_sha256
from small_model.prompts import draw_prompts, write_prompts

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "firetower" / "models" / "small"
PROMPTS = ROOT / "tests" / "small_model" / "tool_prompts.jsonl"
LICENCES = Path(__file__).parent / "licences"
"""For each package whose text is under a licence, the licence word for word, as the package has it."""

MODEL_FILES = (WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PARSE_BAR = 0.95
BYTES_BAR = 12_000_000

_HEAD = """# What the small model read

`{weights}` and `tokenizer.json` were made from the texts below and from synthetic conversations. The texts
were taken from Debian packages, brought into plain ASCII, cleared of menus and of paragraphs that come twice, and cut
into tokens; that is the summary of changes that some of the licences ask for. `evaluation.json` quotes words of them.

| package | text | bytes | licence |
| --- | --- | --- | --- |
"""


def check_figures(folder: Path) -> None:
    """Hold the two records of a checkpoint to its weights and to the bars.

    Raises:
        SystemExit: says which record or figure is at fault.
    """
    sha256 = weights_sha256(folder)
    training, evaluation = (_read(folder / f"{name}.json") for name in ("training", "evaluation"))
    for name, record in (("training", training), ("evaluation", evaluation)):
        if record.get("weights_sha256") != sha256:
            raise SystemExit(f"{name}.json: weights_sha256={record.get('weights_sha256')}: must be {sha256}")
    if absent := {"tools", "text", "ngram"} - set(evaluation):
        raise SystemExit(f"evaluation.json: has no {', '.join(sorted(absent))}; run small_model.evaluate")
    parse_frac = evaluation["tools"]["parse"] / evaluation["tools"]["prompts"]
    if parse_frac < PARSE_BAR:
        raise SystemExit(f"tools: {parse_frac:.3f} of the prompts parse: must be at least {PARSE_BAR}")
    ours, peers = evaluation["text"]["bits_a_byte"], evaluation["ngram"]["bits_a_byte"]
    if ours >= peers:
        raise SystemExit(f"text: {ours:.4f} bits a byte: must be below the n-gram model's {peers:.4f}")


def licence_notes(training: Mapping[str, Any]) -> str:
    """LICENSES.md from the record of a training run: a table of sources, then each notice with its licence in full."""
    sources = training["corpus"]["sources"]
    rows, notices = "", ""
    for source in sources:
        rows += f"| `{source['package']}` | `{source['file']}` | {source['bytes']:,} | {source['licence']} |\n"
        if source["notice"]:
            text = (LICENCES / f"{source['package']}.txt").read_text(encoding="utf-8")
            notices += f"\n## {source['package']}\n\n```\n{source['notice']}\n\n{text}```\n"
    corrections = "".join(f"\n{text}\n" for text in training.get("corrections", ()))
    return (
        _HEAD.format(weights=WEIGHTS)
        + rows
        + "\nBytes are of the text after cleaning, held-out documents included; the packages' hashes are in "
        "`training.json`.\n" + (f"\n## Found after the run\n{corrections}" if corrections else "") + notices
    )


def write_package(model: Path, target: Path, corrections: list[str]) -> int:
    """Put a checkpoint and its records into ``target``; their bytes.

    Raises:
        SystemExit: more than the bar.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.is_file() and old.name != "__init__.py":
            old.unlink()
    for name in (*MODEL_FILES, "evaluation.json"):
        shutil.copyfile(model / name, target / name)
        (target / name).chmod(0o644)
    training = _read(model / "training.json")
    if corrections:
        training["corrections"] = corrections
    (target / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    (target / "LICENSES.md").write_text(licence_notes(training), encoding="utf-8")
    num_bytes = sum(f.stat().st_size for f in target.iterdir() if f.is_file())
    if num_bytes > BYTES_BAR:
        raise SystemExit(f"{target}: {num_bytes} bytes: must be at most {BYTES_BAR}")
    return num_bytes


def _read(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="work folder of small_model.prepare")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=PACKAGE, help="folder in the package")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="file for the tool prompts")
    parser.add_argument("--correction", action="append", default=[], help="what was found out about the text since")
    args = parser.parse_args()
    check_figures(args.model)
    num_bytes = write_package(args.model, args.out, args.correction)
    write_prompts(draw_prompts(args.data, AutoTokenizer.from_pretrained(args.model)), args.prompts)
    print(f"Wrote {args.out} ({num_bytes} bytes) and {args.prompts}")


if __name__ == "__main__":
    main()
