"""What a burned request leaves behind: pages and slot are cleared, looked at, and only then used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firetower.engine.pool import Pool
from firetower.models.state import ModelState, clear_pages, clear_slots, pages_clean, slots_clean


class Quarantine:
    """Clears what comes into it. What does not read as clean afterwards stays: memory that cannot be trusted.

    Attributes:
        num_cleared: pages and slots that came back.
    """

    def __init__(self, state: ModelState, pages: Pool, slots: Pool) -> None:
        self._state = state
        self._pages = pages
        self._slots = slots
        self.num_cleared = 0

    @property
    def num_kept(self) -> int:
        """Pages and slots that could not be cleared."""
        return len(self._pages.quarantined) + len(self._slots.quarantined)

    @torch.inference_mode()
    def clear(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Clear, verify and give back pages and slots that are in quarantine.

        Behind all steps that were launched before, in order of the stream. Waits for the device: only a fire pays.
        """
        device = self._state.side.device
        for indices, pool, clear, is_clean in (
            (pages, self._pages, clear_pages, pages_clean),
            (slots, self._slots, clear_slots, slots_clean),
        ):
            if not indices:
                continue
            at = torch.tensor(list(indices), dtype=torch.int64, device=device)
            clear(self._state, at)
            verdicts = is_clean(self._state, at).tolist()
            clean = [index for index, verdict in zip(indices, verdicts, strict=True) if verdict]
            pool.release_quarantined(clean)
            self.num_cleared += len(clean)
