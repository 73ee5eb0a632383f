"""Progress of a campaign in one line: tries, fires, interval, rate, end time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from firetower.lab import stats
from firetower.lab.replay.records import TryEnd
from firetower.lab.stats.text import count, interval, percent, share

if TYPE_CHECKING:
    from firetower.lab.replay.campaign import OpenCampaign

_EVERY_S = 15.0


class Progress:
    """Writes the line: over itself on a terminal, else after each fire and every 15 seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._started = time.monotonic()
        self._before: int | None = None
        self._last: tuple[float, int, str] = (self._started, 0, "")

    def __call__(self, campaign: OpenCampaign, in_flight: int) -> None:
        """Show how far it is."""
        state = campaign.state
        if self._before is None:
            self._before = len(state.counted)
        fires = sum(t.end is TryEnd.FIRE for t in state.counted.values())
        now = time.monotonic()
        shown_at, shown_fires, shown = self._last
        if not self._is_terminal and fires == shown_fires and now - shown_at < _EVERY_S:
            return
        made = len(state.counted) - self._before
        line = progress_line(campaign, fires, in_flight, made=made, seconds=now - self._started)
        if line == shown:
            return
        self._last = (now, fires, line)
        self._out.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        self._out.flush()

    def clear(self) -> None:
        """Make room for other lines."""
        if self._is_terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()


def progress_line(campaign: OpenCampaign, fires: int, in_flight: int, *, made: int, seconds: float) -> str:
    """``12 of 40 tries, 1 fire (95% .002-.385), 3.1 tries/min, ends about 14:32, 1 under way``."""
    tries, total = len(campaign.state.counted), len(campaign.design.plan)
    parts = [f"{tries:,} of {count(total, 'try')}, {count(fires, 'fire')}"]
    if tries:
        make = stats.anytime_rate if campaign.settings.watching else stats.rate
        found = make(fires, tries, confidence=campaign.settings.confidence)
        kind = " at any look" if campaign.settings.watching else ""
        parts[0] += f" ({share(found.rate)}, {percent(found.confidence)} {interval(found.lower, found.upper)}{kind})"
    if made and seconds > 0:
        per_s = made / seconds
        parts.append(f"{per_s:.3g} tries/s" if per_s >= 1 else f"{60 * per_s:.3g} tries/min")
        parts.append(f"ends about {_clock((total - tries) / per_s)}")
    if in_flight:
        parts.append(f"{in_flight} under way")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    at = time.localtime(time.time() + min(seconds, 1e9))
    return time.strftime("%H:%M:%S" if seconds < 3600 else "%H:%M" if seconds < 86400 else "%Y-%m-%d %H:%M", at)
