"""Run as a program by test_fuzz: scans mutations of one file and prints what came of them as JSON.

A process of its own, so that a crash inside torch or a runaway allocation is seen and does no other harm.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from firetower.core.errors import ScanError
from firetower.scan import scan

EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def mutate(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to four random edits, most of them within the header."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        reach = min(len(out), header_bytes if rng.random() < 0.8 else len(out)) or 1
        at, kind = rng.randrange(reach), rng.randrange(6)
        if kind == 0:
            out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ (1 << rng.randrange(8))])
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            size = rng.choice((2, 4, 8))
            value = rng.choice((*EXTREMES, rng.getrandbits(64))) & ((1 << 8 * size) - 1)
            out[at : at + size] = value.to_bytes(size, "little")
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randint(1, 40))
        elif kind == 4:
            del out[at : at + rng.randint(1, 40)]
        else:
            out[at : at + 8] = rng.randbytes(8)
    return bytes(out)


def main(original: str, header_bytes: int, count: int, seed: int) -> None:
    """Scan ``count`` mutations and print the tally, the slowest scan and the peak of resident memory."""
    source = Path(original)
    data, rng = source.read_bytes(), random.Random(seed)
    target = source.with_name(f"mutant{source.suffix}")
    tally, slowest, odd = Counter[str](), 0.0, []
    for i in range(count):
        target.write_bytes(mutate(data, header_bytes, rng))
        started = time.perf_counter()
        try:
            report = scan(target)
            outcome = "findings" if report.bad else "clean"
            messages = [f.message for f in report.findings]
        except ScanError as e:
            outcome, messages = "error", [str(e)]
        slowest = max(slowest, time.perf_counter() - started)
        tally[outcome] += 1
        odd += [f"{i}: {m!r}" for m in messages if "\n" in m or len(m) > 400 or not m.isprintable()]
    # not ru_maxrss, which a child takes over from the process that started it
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    print(json.dumps({"tally": tally, "slowest_s": slowest, "peak_bytes": peak, "odd": odd[:3]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
