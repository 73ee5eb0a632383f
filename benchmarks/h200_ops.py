"""The op library on a CUDA device: every kernel against its reference first, then beside its peer in the same run.

Each section of `benchmarks/ops` runs in a process of its own, so that one that fails leaves the others their figures.
First all of them side by side, to compile every kernel on many cores (their times mean nothing and are not printed);
then one after another, with the device to themselves.

    python benchmarks/h200_ops.py [--only moe,linear] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
SECTIONS = ("norm", "linear", "attention", "moe", "gdn_prefill", "gdn_window", "quant", "sample")


def run_section(name: str, *, quick: bool) -> None:
    """Run one section in this process."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
    module = importlib.import_module(f"ops.{name}")
    begin = time.perf_counter()
    try:
        module.run(lambda line: print(f"[{name}] {line}", flush=True), quick)
    except Exception:  # noqa: BLE001 - a section that breaks is a line of the report
        print(f"[{name}] FAILED section: {traceback.format_exc()[-1500:]}", flush=True)
    print(f"[{name}] done in {time.perf_counter() - begin:.0f} s", flush=True)


def command_of(name: str, *, quick: bool) -> list[str]:
    """The command that runs one section in a process of its own."""
    return [sys.executable, __file__, "--section", name, *(["--quick"] if quick else [])]


def compile_all(names: list[str], limit_s: float, log: Path | None) -> None:
    """Run every section at once, for the kernels they leave in Triton's cache; prints only what failed.

    Args:
        names: sections.
        limit_s: seconds for all of them.
        log: folder for what each printed, or None.
    """
    begin = time.perf_counter()
    running = {
        name: subprocess.Popen(
            command_of(name, quick=True), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in names
    }
    for name, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(1.0, limit_s - (time.perf_counter() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            print(f"[{name}] compiling was cut off at {limit_s:.0f} s", flush=True)
        if log is not None:
            (log / f"{name}.txt").write_text(said, encoding="utf-8")
        for line in said.splitlines():
            if "FAILED" in line:
                print(f"(side by side) {line}", flush=True)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--no-warm-up", action="store_true", help="do not compile everything side by side first")
    parser.add_argument("--checks-only", action="store_true", help="stop after that: checks, no times")
    parser.add_argument("--log", type=Path, help="folder for what the sections print side by side")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one section may take")
    args = parser.parse_args()
    if args.section:
        run_section(args.section, quick=args.quick)
        return
    names = args.only.split(",")
    if not args.no_warm_up:
        compile_all(names, args.limit, args.log)
    if args.checks_only:
        return
    for name in names:
        try:
            subprocess.run(command_of(name, quick=args.quick), timeout=args.limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"[{name}] FAILED section: over {args.limit:.0f} s", flush=True)


if __name__ == "__main__":
    main()
