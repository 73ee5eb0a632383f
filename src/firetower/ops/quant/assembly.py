"""PTX that turns packed codes into floats: four bytes in, eight codes out, in two to four instructions a code.

A byte that a permute puts into the last bits of the float 2**23 makes the float 2**23 + byte; taking 2**23 off leaves
the byte, exact, without a conversion. The kernels use these texts on CUDA; the interpreter, which knows no PTX, gets
the same values by arithmetic. Tests run the texts on an emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CONSTRAINTS_1 = ",".join(["=r"] * 8 + ["r"])
"""Registers of `NIBBLES` and `TABLE`: eight answers, one word of four bytes."""

CONSTRAINTS_JOINED = ",".join(["=r"] * 8 + ["r"] * 6)
"""Registers of `joined`: eight answers, two words of four bytes, a shift for each byte."""

CONSTRAINTS_BYTES = ",".join(["=r"] * 4 + ["r"])
"""Registers of `BYTES`."""


def _block(lines: Sequence[str]) -> str:
    return "{\n.reg .b32 t<6>;\n" + "\n".join(lines) + "\n}"


def _from_byte(answer: int, word: str, byte: int, less: int) -> list[str]:
    """Byte ``byte`` of a word, as a float, less an integer."""
    return [
        f"prmt.b32 t5, {word}, 0x4B000000, {hex(0x7440 | byte)};",
        f"sub.f32 ${answer}, t5, 0f{0x4B000000 + less:08X};",
    ]


def joined(mask: int, high_shift: int, less: int) -> str:
    """Nibbles of $8 joined with bits of $9, each byte of it shifted right by its own of $10 to $13.

    Args:
        mask: the bits of a byte, after the shift and in their place above the nibble: 0x10 or 0x30.
        high_shift: how far left the bits for the high nibble must go into that place; for the low one 4.
        less: what is taken off a code.
    """
    lines = []
    for byte in range(4):
        lines += [
            f"shr.u32 t0, $9, ${10 + byte};",
            "shl.b32 t1, t0, 4;",
            f"and.b32 t1, t1, {hex(mask * 0x01010101)};",
            "lop3.b32 t2, $8, 0x0F0F0F0F, t1, 0xEA;",
            *_from_byte(byte, "t2", byte, less),
            f"shl.b32 t1, t0, {high_shift};",
            f"and.b32 t1, t1, {hex(mask * 0x01010101)};",
            "shr.u32 t3, $8, 4;",
            "lop3.b32 t2, t3, 0x0F0F0F0F, t1, 0xEA;",
            *_from_byte(4 + byte, "t2", byte, less),
        ]
    return _block(lines)


def table(values: Sequence[int]) -> str:
    """As `NIBBLES`, for codes that stand for sixteen signed bytes: byte permutes by three bits, then by the fourth."""
    assert len(values) == 16
    words = _in_words(v + 128 for v in values)
    lines = ["and.b32 t0, $8, 0x77777777;", "shr.u32 t1, $8, 1;", "lop3.b32 t1, t1, 0x44444444, 0x32103210, 0xEA;"]
    for half in range(2):
        lines += [
            f"mov.b32 t2, {words[0]};",
            f"prmt.b32 t2, t2, {words[1]}, t0;",
            f"mov.b32 t3, {words[2]};",
            f"prmt.b32 t3, t3, {words[3]}, t0;",
            "prmt.b32 t4, t2, t3, t1;",
            *(
                line
                for place in range(4)
                for line in _from_byte((4 * half + place) // 2 + 4 * (place % 2), "t4", place, 128)
            ),
            "shr.u32 t0, t0, 16;",
            "shr.u32 t1, t1, 16;",
        ]
    return _block(lines)


NIBBLES = _block(
    [
        "and.b32 t0, $8, 0x0F0F0F0F;",
        "shr.u32 t1, $8, 4;",
        "and.b32 t1, t1, 0x0F0F0F0F;",
        *(line for byte in range(4) for line in _from_byte(byte, "t0", byte, 0)),
        *(line for byte in range(4) for line in _from_byte(4 + byte, "t1", byte, 0)),
    ]
)
"""Codes of 4 bits: the low nibbles of the four bytes of $8 in $0 to $3, the high ones in $4 to $7."""

BYTES = _block(
    ["xor.b32 t0, $4, 0x80808080;", *(line for byte in range(4) for line in _from_byte(byte, "t0", byte, 128))]
)
"""Four signed bytes in $0 to $3, of the word $4."""

FIVE_BITS = joined(mask=0x10, high_shift=3, less=0)
"""Codes of Q5_K; the shift is twice the pair of sub-blocks."""

SIX_BITS = joined(mask=0x30, high_shift=0, less=32)
"""Codes of Q6_K, from -32 to 31; the shift is 0 or 2."""


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
