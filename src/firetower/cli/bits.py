"""Read the bits of a NaN, Inf or float: its class, whose arithmetic writes it, and what it cannot prove.

Give hexadecimal digits as a fire or a debugger shows them, several at once if you like. Without --dtype the
number of digits decides: 16 are float64, 8 are float32, 4 are read as float16 and as bfloat16, 2 as every
float8 type.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from firetower.cli.output import print_json
from firetower.core.facts import DEVICES

if TYPE_CHECKING:
    from firetower.core.bits import BitsReading


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``firetower bits``."""
    parser.add_argument(
        "bits", nargs="+", metavar="BITS", help="hexadecimal pattern, such as 7fd6e000 or 0x7fff"
    )
    parser.add_argument(
        "--dtype", help="type to read it as: float32, bf16, e4m3fn, ... (default: by number of digits)"
    )
    parser.add_argument("--device", choices=DEVICES, help="where it was found, when you know")
    parser.add_argument("--json", action="store_true", help="machine-readable readings on stdout")
    parser.epilog = "example: firetower bits 7fd6e000 7fffffff --device nvidia"


def run(args: argparse.Namespace) -> int:
    """Print one reading for each pattern and each type it may be read as."""
    from firetower.core.bits import read_text

    # all are read before anything is printed: a typo in the third must not leave half an answer on stdout
    readings = [reading for text in args.bits for reading in read_text(text, args.dtype, args.device)]
    if args.json:
        print_json([_plain(r) for r in readings])
    else:
        print("\n\n".join(_paragraph(r) for r in readings))
    return 0


def _plain(reading: BitsReading) -> dict[str, Any]:
    """The reading with patterns in hexadecimal: a 64-bit number does not survive every JSON reader."""
    data = {f.name: getattr(reading, f.name) for f in dataclasses.fields(reading)}
    data["bits"] = data.pop("bits_hex")
    data["payload"] = None if reading.payload is None else f"{reading.payload:x}"
    data["widenings"] = [
        {"dtype": w.dtype, "bits": w.bits_hex, "num_zero_bits": w.num_zero_bits, "rival": w.rival}
        for w in reading.widenings
    ]
    return data


def _paragraph(reading: BitsReading) -> str:
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 100
    first, *others = reading.sentences
    bullets = [textwrap.fill(s, width, initial_indent="  - ", subsequent_indent="    ") for s in others]
    return "\n".join([textwrap.fill(first, width), *bullets])
