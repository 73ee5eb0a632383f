"""The PTX texts on an emulator: every byte, every shift, against plain integers."""

from __future__ import annotations

import functools
import re
from itertools import chain

import pytest

from firetower.ops.quant import assembly
from firetower.ops.quant.kinds import IQ4_VALUES

LOW = 0xFFFFFFFF


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def permute(a: int, b: int, selector: int) -> int:
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    assert all(n < 8 for n in nibbles), "the sign mode is not used"
    return int.from_bytes(bytes(source[n] for n in nibbles), "little")


def sum_of_products(is_a_signed: bool, is_b_signed: bool, a: int, b: int, total: int) -> int:
    pairs = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    found = total + sum((signed(p) if is_a_signed else p) * (signed(q) if is_b_signed else q) for p, q in pairs)
    return found & LOW


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & LOW,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permute,
    **{
        f"dp4a.{a}.{b}": functools.partial(sum_of_products, a == "s32", b == "s32")
        for a in ("s32", "u32")
        for b in ("s32", "u32")
    },
}


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the text; only what the texts use is known."""
    registers = dict(inputs)

    def value(name: str) -> int:
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


WORDS = [[b, b ^ 0x5A, 255 - b, b * 7 & 255] for b in range(256)]


def word(bytes_: list[int]) -> int:
    return int.from_bytes(bytes(bytes_), "little")


@pytest.mark.parametrize("mask", [None, 0x0F0F0F0F, 0xF0F0F0F0], ids=["all", "low", "high"])
@pytest.mark.parametrize("x", ["s32", "u32"])
@pytest.mark.parametrize("codes", ["s32", "u32"])
def test_dot_of_sixteen(codes, x, mask):
    text = assembly.dot(codes, x, mask)
    byte_mask = 255 if mask is None else mask & 255
    for at in range(0, 256, 4):
        left, right = WORDS[at : at + 4], WORDS[255 - at : 251 - at if at < 252 else None : -1]
        given = {f"${1 + i}": word(w) for i, w in enumerate(left)} | {f"${5 + i}": word(w) for i, w in enumerate(right)}
        expected = -1234
        for p, q in zip(chain.from_iterable(left), chain.from_iterable(right), strict=True):
            code = p & byte_mask
            expected += (signed(code) if codes == "s32" else code) * (signed(q) if x == "s32" else q)
        assert run(text, given | {"$9": -1234 & LOW})["$0"] == expected & LOW


def test_lookup_of_four_codes():
    text = assembly.lookup(IQ4_VALUES)
    for bytes_ in WORDS:
        codes = [b & 15 for b in bytes_]
        found = run(text, {"$1": word(codes)})["$0"].to_bytes(4, "little")
        assert [b - 256 if b > 127 else b for b in found] == [IQ4_VALUES[c] for c in codes]
