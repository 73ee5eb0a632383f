"""The PTX texts on an emulator: every byte, every shift, against plain integers."""

from __future__ import annotations

import re
import struct

import pytest

from firetower.ops.quant import assembly
from firetower.ops.quant.kinds import IQ4_VALUES

LOW = 0xFFFFFFFF


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def as_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def permute(a: int, b: int, selector: int) -> int:
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    assert all(n < 8 for n in nibbles), "the sign mode is not used"
    return int.from_bytes(bytes(source[n] for n in nibbles), "little")


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & LOW,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "sub.f32": lambda a, b: as_bits(as_float(a) - as_float(b)),
}


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the text; only what the texts use is known."""
    registers = dict(inputs)

    def value(name: str) -> int:
        if name.startswith("0f"):
            return int(name[2:], 16)
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in text.strip("{}\n").splitlines():
        if line.startswith(".reg"):
            continue
        operation, rest = re.fullmatch(r"(\S+) (.*);", line).groups()
        target, *operands = rest.split(", ")
        if operation == "lop3.b32":
            *operands, table = operands
            assert table == "0xEA", "(a & b) | c"
            a, b, c = map(value, operands)
            registers[target] = a & b | c
        else:
            registers[target] = OPERATIONS[operation](*map(value, operands))
    return registers


def floats(registers: dict[str, int], num: int) -> list[float]:
    return [as_float(registers[f"${i}"]) for i in range(num)]


WORDS = [[b, b ^ 0x5A, 255 - b, b * 7 & 255] for b in range(256)]


def word(bytes_: list[int]) -> int:
    return int.from_bytes(bytes(bytes_), "little")


@pytest.mark.parametrize("bytes_", WORDS[::3] + WORDS[-1:], ids=str)
def test_four_bits(bytes_):
    found = floats(run(assembly.NIBBLES, {"$8": word(bytes_)}), 8)
    assert found == [b & 15 for b in bytes_] + [b >> 4 for b in bytes_]
    found = floats(run(assembly.table(IQ4_VALUES), {"$8": word(bytes_)}), 8)
    assert found == [IQ4_VALUES[b & 15] for b in bytes_] + [IQ4_VALUES[b >> 4] for b in bytes_]


def test_signed_bytes():
    for bytes_ in WORDS:
        found = floats(run(assembly.BYTES, {"$4": word(bytes_)}), 4)
        assert found == [b - 256 if b > 127 else b for b in bytes_]


@pytest.mark.parametrize("shifts", [[0, 0, 0, 0], [2, 2, 2, 2], [4, 4, 4, 4], [6, 6, 6, 6], [0, 2, 4, 6]], ids=str)
def test_five_bits(shifts):
    for bytes_, tops in zip(WORDS, reversed(WORDS), strict=True):
        given = {"$8": word(bytes_), "$9": word(tops)} | {f"${10 + i}": s for i, s in enumerate(shifts)}
        found = floats(run(assembly.FIVE_BITS, given), 8)
        low = [b & 15 | (t >> s & 1) << 4 for b, t, s in zip(bytes_, tops, shifts, strict=True)]
        high = [b >> 4 | (t >> s + 1 & 1) << 4 for b, t, s in zip(bytes_, tops, shifts, strict=True)]
        assert found == low + high


@pytest.mark.parametrize("shifts", [[0, 0, 0, 0], [2, 2, 2, 2], [0, 2, 2, 0]], ids=str)
def test_six_bits(shifts):
    for bytes_, tops in zip(WORDS, reversed(WORDS), strict=True):
        given = {"$8": word(bytes_), "$9": word(tops)} | {f"${10 + i}": s for i, s in enumerate(shifts)}
        found = floats(run(assembly.SIX_BITS, given), 8)
        low = [(b & 15 | (t >> s & 3) << 4) - 32 for b, t, s in zip(bytes_, tops, shifts, strict=True)]
        high = [(b >> 4 | (t >> s + 4 & 3) << 4) - 32 for b, t, s in zip(bytes_, tops, shifts, strict=True)]
        assert found == low + high


def test_lookup_of_four_codes():
    text = assembly.lookup(IQ4_VALUES)
    for bytes_ in WORDS:
        codes = [b & 15 for b in bytes_]
        found = run(text, {"$1": word(codes)})["$0"].to_bytes(4, "little")
        assert [b - 256 if b > 127 else b for b in found] == [IQ4_VALUES[c] for c in codes]
