"""Repetition in one growing text: a character in a row, and loops of any piece of up to 2,048 characters.

Text is judged in blocks at fixed places, so that how a stream was cut into pieces cannot change what is
found. The price is a delay of at most one block; the gain is a cost per block, not per character.
"""

from __future__ import annotations

import re

from firetower.detect.episode import FILL_CHARACTERS, Episode, Episodes
from firetower.detect.records import DetectConfig, FindingKind

BLOCK_CHARS = 128
MAX_PERIOD_CHARS = 2048
WINDOW_CHARS = MAX_PERIOD_CHARS + 2 * BLOCK_CHARS
SAMPLE_CHARS = 80
MIN_SIGN_REPEATS = 4
MIN_WARN_REPEATS = 8

SHORT_PERIOD_CHARS = 16
SHORT_WARN_REPEATS = 128
"""Loops of pieces this short, about a token each, warn at this many repeats."""

_SPECIAL = re.compile(r"(?:<(?:unk|pad|s|/s|bos|eos|mask|\|[^<>|]{1,40}\|)>|\[(?:PAD|UNK|MASK|CLS|SEP)\]|\ufffd)+")
_DATA_WORDS = re.compile(r"0[xX][0-9a-fA-F]+|true|false|null|NULL|None|nan|NaN|N/A|n/a|</?\w[^<>]{0,80}>|&nbsp;")
_DATA_CHARACTERS = FILL_CHARACTERS | set(",;:[](){}<>&$%^`'\"\\")


class TextStream:
    """One text of one choice. Feed it with `push`, end it with `finish`; `episodes` holds what repeats."""

    def __init__(self, config: DetectConfig) -> None:
        self.episodes = Episodes()
        self.num_chars = 0
        self._config = config
        self._pending: list[str] = []
        self._num_pending = 0
        self._window = ""
        self._inside = re.compile(rf"(.)\1{{{config.run_sign - 1},}}", re.DOTALL)
        self._run = Episode(kind=FindingKind.CHARACTER_RUN, start=0, count=0, sample="")
        self._loop: Episode | None = None
        self._loop_chars = 0

    def push(self, text: str) -> bool:
        """Take a piece; true when a stretch of `episodes` has risen."""
        self._pending.append(text)
        self._num_pending += len(text)
        if self._num_pending < BLOCK_CHARS:
            return False
        whole = "".join(self._pending)
        stop = len(whole) - len(whole) % BLOCK_CHARS
        for i in range(0, stop, BLOCK_CHARS):
            self._judge(whole[i : i + BLOCK_CHARS], search=True)
        self._pending = [whole[stop:]]
        self._num_pending = len(whole) - stop
        return self.episodes.take_risen()

    def finish(self) -> None:
        """Judge the rest, which is shorter than a block; stretches that reach the end stay open."""
        rest = "".join(self._pending)
        self._pending, self._num_pending = [], 0
        if rest:
            self._judge(rest, search=False)

    def _judge(self, block: str, *, search: bool) -> None:
        self._judge_runs(block)
        self._window = (self._window + block)[-WINDOW_CHARS:]
        self.num_chars += len(block)
        if self._loop is not None:
            self._extend_loop(block)
        elif search:
            self._find_loop(block)

    def _judge_runs(self, block: str) -> None:
        run, lead = self._run, 0
        if run.count:
            lead = len(block) - len(block.lstrip(run.sample))
            run.count += lead
            run.is_open = lead == len(block)
            self._rate_run(run)
            if run.is_open:
                return
        last = block[-1]
        tail = len(block) - len(block.rstrip(last))
        for inside in self._inside.finditer(block, lead, len(block) - tail):
            closed = self._new_run(self.num_chars + inside.start(), inside[1])
            closed.count, closed.is_open = len(inside[0]), False
            self._rate_run(closed)
        self._run = self._new_run(self.num_chars + len(block) - tail, last)
        self._run.count = tail
        self._rate_run(self._run)

    def _new_run(self, start: int, character: str) -> Episode:
        return Episode(
            kind=FindingKind.CHARACTER_RUN,
            start=start,
            count=0,
            sample=character,
            is_fill=character in FILL_CHARACTERS,
            is_special=character == "\ufffd",
            is_one_glyph=True,
        )

    def _rate_run(self, run: Episode) -> None:
        config = self._config
        if run.count < config.run_sign:
            return
        run.is_sign = not run.is_fill
        run.warns = not run.is_fill and run.count >= config.run_warn
        run.fires = run.count >= config.fire_repeats
        self.episodes.offer(run)

    def _find_loop(self, block: str) -> None:
        """Start a loop where the block just taken has been seen a period before, twice on end."""
        window = self._window
        at = window.rfind(block, 0, len(window) - 1)
        period = len(window) - len(block) - at
        if at < 0 or period > MAX_PERIOD_CHARS:
            return
        unit = window[-period:]
        if unit == unit[0] * period:
            return  # a run, judged as such
        length = period + _common_suffix(window[period:], window[:-period])
        self._loop = Episode(
            kind=FindingKind.LOOP,
            start=self.num_chars - length,
            count=length // period,
            sample=unit[:SAMPLE_CHARS],
            period=period,
            is_fill=is_data(unit),
            is_special=_SPECIAL.fullmatch(_from_special(unit)) is not None,
            is_one_glyph=len(set("".join(unit.split()))) == 1,
        )
        self._loop_chars = length
        self._rate_loop(self._loop)

    def _extend_loop(self, block: str) -> None:
        loop, window = self._loop, self._window
        assert loop is not None
        before = window[-loop.period - len(block) : -loop.period]
        same = len(block) if before == block else _common_prefix(before, block)
        self._loop_chars += same
        loop.count = self._loop_chars // loop.period
        loop.is_open = same == len(block)
        self._rate_loop(loop)
        if not loop.is_open:
            self._loop = None

    def _rate_loop(self, loop: Episode) -> None:
        config = self._config
        if self._loop_chars < config.loop_sign_chars or loop.count < MIN_SIGN_REPEATS:
            return
        loop.is_sign = not loop.is_fill
        is_short = loop.period <= SHORT_PERIOD_CHARS
        is_long = self._loop_chars >= config.loop_warn_chars and loop.count >= MIN_WARN_REPEATS
        loop.warns = (is_long or (is_short and loop.count >= SHORT_WARN_REPEATS)) and not loop.is_fill
        loop.fires = loop.count >= config.fire_repeats
        self.episodes.offer(loop)


def is_data(unit: str) -> bool:
    """Whether a repeated piece is of the kind that tables, arrays, hex and markup repeat on purpose."""
    whole = _from_special(unit)
    if _SPECIAL.fullmatch(whole):
        return False
    # the piece may start inside a word: turn it to start between words
    start = next((i for i, c in enumerate(whole) if c in _DATA_CHARACTERS and not c.isalnum()), 0)
    return _DATA_CHARACTERS.issuperset(_DATA_WORDS.sub("", whole[start:] + whole[:start]))


def _from_special(unit: str) -> str:
    """The unit turned so that it starts with an opening bracket: a loop may start inside ``<unk>``."""
    starts = [i for i in (unit.find("<"), unit.find("[")) if i >= 0]
    i = min(starts, default=0)
    return (unit[i:] + unit[:i]).strip()


def _common_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def _common_suffix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[-middle:] == b[-middle:] else (low, middle - 1)
    return low
