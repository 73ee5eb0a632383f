"""Token ids of one choice: one id in a row, id 0, the edge of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from firetower.detect.episode import Episode, Episodes
from firetower.detect.records import DetectConfig, FindingKind


class TokenStream:
    """The token ids of one choice. ``outside`` is the first id that no vocabulary has: (position, id)."""

    def __init__(self, config: DetectConfig) -> None:
        self.episodes = Episodes()
        self.num_tokens = 0
        self.outside: tuple[int, int] | None = None
        self.num_outside = 0
        self._config = config
        self._limit = config.vocabulary_size if config.vocabulary_size is not None else 1 << 31
        self._last: int | None = None
        self._count = 0
        self._run: Episode | None = None
        self._edge: Episode | None = None
        # below this no rule looks at a run
        self._least = min(config.token_run_sign, config.token_zero_warn, config.edge_warn)

    def push(self, token_ids: Iterable[int]) -> bool:
        """Take ids in order; true when a stretch of `episodes` has risen, or an id was the first outside."""
        was_outside = self.outside
        for token in token_ids:
            if token == self._last:
                self._count += 1
            else:
                self._close()
                self._last, self._count = token, 1
                if not 0 <= token < self._limit:
                    self.outside = self.outside or (self.num_tokens, token)
            if not 0 <= token < self._limit:
                self.num_outside += 1
            self.num_tokens += 1
            if self._count >= self._least:
                self._rate()
        return self.episodes.take_risen() or self.outside is not was_outside

    def _close(self) -> None:
        for episode in (self._run, self._edge):
            if episode is not None:
                episode.is_open = False
        self._run = self._edge = None

    def _rate(self) -> None:
        config, count = self._config, self._count
        if self._run is None:
            self._run = self._new(FindingKind.TOKEN_RUN)
            if self._last == 0:
                self._edge = self._new(FindingKind.TOKEN_ZERO)
            elif self._last == self._limit - 1:
                self._edge = self._new(FindingKind.TOKEN_EDGE)
        run, edge = self._run, self._edge
        run.count = count
        if count >= config.token_run_sign:
            run.is_sign = True
            run.warns = count >= config.token_run_warn
            run.fires = count >= config.fire_repeats
            self.episodes.offer(run)
        if edge is not None:
            edge.count = count
            is_zero = edge.kind is FindingKind.TOKEN_ZERO
            edge.warns = count >= (config.token_zero_warn if is_zero else config.edge_warn)
            self.episodes.offer(edge)

    def _new(self, kind: FindingKind) -> Episode:
        start = self.num_tokens - self._count
        return Episode(kind=kind, start=start, count=self._count, sample=str(self._last))
