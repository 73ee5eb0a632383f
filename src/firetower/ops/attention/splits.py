"""Where a sequence is cut into parts that are summed apart: by absolute position, never by batch or window.

A *unit* is summed key tile after key tile; a *split* is the sum of its units, one after the other; an answer is the sum
of its splits, by one tree. That order is the same however many programs share the work: they write units where many are
needed to fill a device, and splits, of which there are fewer, where not.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """A rule of cutting, and how it is shared out.

    Attributes:
        unit_tokens: keys of a unit; a multiple of a key tile.
        units_per_split: units of a split.
        max_units: most units that one program writes apart; one that has more takes whole splits.
    """

    unit_tokens: int
    units_per_split: int
    max_units: int

    @property
    def split_tokens(self) -> int:
        """Keys of a split."""
        return self.unit_tokens * self.units_per_split

    def shares(self, num_tokens: int, num_programs: int) -> tuple[int, int]:
        """(keys of each program, keys of each part that it writes) for one sequence."""
        units = -(-num_tokens // self.unit_tokens)
        share = -(-units // num_programs)
        if share <= self.max_units:
            return share * self.unit_tokens, self.unit_tokens
        return -(-share // self.units_per_split) * self.split_tokens, self.split_tokens

    def max_parts(self, max_tokens: int, num_programs: int) -> int:
        """Most parts that a sequence of up to ``max_tokens`` has."""
        units = -(-max_tokens // self.unit_tokens)
        return max(min(units, self.max_units * num_programs), -(-max_tokens // self.split_tokens))
