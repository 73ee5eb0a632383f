"""PTX that the kernels use on CUDA: wide loads, byte permutes, sums of integer products, a code book's lookup.

The interpreter, which knows no PTX, gets the same values by arithmetic. Tests run the texts on an emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LOAD_16 = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
"""The 16 bytes at an address that is a multiple of 16: four words."""

LOAD_8 = "ld.global.v2.b32 {$0, $1}, [$2];"
"""The 8 bytes at an address that is a multiple of 8: two words."""

PERMUTE = "prmt.b32 $0, $1, $2, $3;"
"""$0: four of the eight bytes of $1 and $2, chosen by the nibbles of $3, each below 8."""

PREFETCH = (
    "{\n.reg .pred p;\n.reg .b32 t;\nmov.u32 t, %tid.x;\nsetp.eq.u32 p, t, 0;\n"
    "@p cp.async.bulk.prefetch.L2.global [$1], $2;\nmov.b32 $0, 0;\n}"
)
"""Asks for $2 bytes from $1 on, both multiples of 16, to be brought into the L2 cache; a value is not changed by it."""

DOT_CONSTRAINTS = ",".join(["=r"] + ["r"] * 9)
"""Registers of `dot`."""


def _block(lines: Sequence[str]) -> str:
    return "{\n.reg .b32 t<6>;\n" + "\n".join(lines) + "\n}"


def dot(codes: str, x: str, mask: int | None = None) -> str:
    """$0: the products of the sixteen bytes of $1 to $4 with those of $5 to $8, added to $9.

    Args:
        codes: ``s32`` where the bytes of $1 to $4 are signed, else ``u32``.
        x: the same of $5 to $8.
        mask: which bits of $1 to $4 count; None: all.
    """
    lines, total = [], "$9"
    for i in range(4):
        word = f"${1 + i}"
        if mask is not None:
            lines.append(f"and.b32 t0, {word}, {hex(mask)};")
            word = "t0"
        target = "$0" if i == 3 else f"t{1 + i % 2}"
        lines.append(f"dp4a.{codes}.{x} {target}, {word}, ${5 + i}, {total};")
        total = target
    return _block(lines)


def lookup(values: Sequence[int]) -> str:
    """$0: the signed bytes that the four codes in the low nibbles of $1 stand for; its high nibbles are 0."""
    assert len(values) == 16
    words = _in_words(v & 255 for v in values)
    return _block(
        [
            # the four codes side by side, in the lowest 16 bits
            "shr.u32 t0, $1, 4;",
            "or.b32 t0, t0, $1;",
            "prmt.b32 t0, t0, 0, 0x4420;",
            "and.b32 t1, t0, 0x7777;",
            "shr.u32 t2, t0, 1;",
            "lop3.b32 t2, t2, 0x4444, 0x3210, 0xEA;",
            f"mov.b32 t3, {words[0]};",
            f"prmt.b32 t3, t3, {words[1]}, t1;",
            f"mov.b32 t4, {words[2]};",
            f"prmt.b32 t4, t4, {words[3]}, t1;",
            "prmt.b32 $0, t3, t4, t2;",
        ]
    )


def _in_words(values: Iterable[int]) -> list[str]:
    data = bytes(values)
    return [hex(int.from_bytes(data[at : at + 4], "little")) for at in range(0, len(data), 4)]
