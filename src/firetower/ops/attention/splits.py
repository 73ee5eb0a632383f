"""Where a sequence is cut into splits that are summed apart: by absolute position, never by batch or length.

The first `region` tokens are cut evenly and finely, so that a short sequence fills a device; every doubling beyond has
the same number of splits, so that a long one does not spend its bandwidth on partial sums.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """A rule of cutting.

    Attributes:
        base_tokens: size of a split in the first region.
        num_base: splits of the first region.
        per_octave: splits of each doubling beyond it; must divide the region.
    """

    base_tokens: int
    num_base: int
    per_octave: int

    @property
    def region(self) -> int:
        """Tokens of the first region."""
        return self.base_tokens * self.num_base

    def index(self, position: int) -> int:
        """The split that a position is in."""
        if position < self.region:
            return position // self.base_tokens
        octave = (position // self.region).bit_length() - 1
        begin = self.region << octave
        return self.num_base + octave * self.per_octave + (position - begin) // self._size(octave)

    def bounds(self, index: int) -> tuple[int, int]:
        """First position of a split, and its number of tokens."""
        if index < self.num_base:
            return index * self.base_tokens, self.base_tokens
        octave, rest = divmod(index - self.num_base, self.per_octave)
        return (self.region << octave) + rest * self._size(octave), self._size(octave)

    def count(self, num_tokens: int) -> int:
        """Splits of a sequence."""
        return self.index(num_tokens - 1) + 1 if num_tokens > 0 else 0

    def _size(self, octave: int) -> int:
        return (self.region // self.per_octave) << octave
