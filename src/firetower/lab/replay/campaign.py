"""A replay campaign from settings to result: `open_campaign`, then `run`, then the file that reports read."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from firetower.capture import Capture, read_capture
from firetower.capture.folder import digest_of
from firetower.core.codec import encode
from firetower.core.config import data_folder
from firetower.core.errors import ReplayError
from firetower.core.records import new_fire_id, utc_now
from firetower.lab.replay.arms import Arm
from firetower.lab.replay.canary import CanaryProbe
from firetower.lab.replay.child import ChildPlace
from firetower.lab.replay.journal import Journal, plain
from firetower.lab.replay.places import LocalPlace, Place, ServerPlace
from firetower.lab.replay.plan import make_plan
from firetower.lab.replay.records import Campaign, CampaignEnd, Isolation
from firetower.lab.replay.request import RequestMaker
from firetower.lab.replay.run import CampaignRunner
from firetower.lab.replay.seats import Options, Seat
from firetower.lab.replay.settings import CampaignSettings
from firetower.lab.replay.state import CampaignState
from firetower.lab.replay.summary import Design, arms_differ, counted_tries, summarize
from firetower.lab.replay.targets import TargetKind

Tick = Callable[["OpenCampaign", int], None]


def campaigns_path() -> Path:
    """The usual folder of campaigns: ``campaigns`` in the data folder; not created here."""
    return data_folder() / "campaigns"


class OpenCampaign:
    """A campaign whose journal is open: new, or gone on with. Made by `open_campaign`.

    Attributes:
        settings, design, state: what it is, its plan, and what its tries add up to.
        resumed: attempts that were in the journal already.
        num_images: image parts that were taken out of the request.
    """

    def __init__(self, capture: Capture, settings: CampaignSettings, journal: Journal, maker: RequestMaker) -> None:
        self.settings = settings
        self.journal = journal
        self.num_images = maker.num_images
        self._capture = capture
        self._maker = maker
        self.design = Design(
            plan=make_plan([a.name for a in settings.arms], settings.tries, settings.seed),
            arms=settings.arms,
            confidence=settings.confidence,
            watching=settings.watching,
            isolation=settings.how_isolated,
            concurrency=settings.concurrency,
            exclude_rate=settings.exclude_rate,
        )
        self.state = CampaignState(settings.max_attempts)
        self.state.take_all(journal.events)
        self.resumed = len(self.state.tries())

    @property
    def is_finished(self) -> bool:
        """Whether it ended for good: nothing is left to make."""
        final = (CampaignEnd.PLANNED, CampaignEnd.EARLY)
        return self.state.ended in final

    @property
    def max_tokens(self) -> int | None:
        """Limit of the answers before arms, where there is one."""
        return self._maker.max_tokens

    def run(self, *, tick: Tick | None = None, say: Callable[[str], None] | None = None) -> Campaign:
        """Make the tries that are still to make, and sum up.

        Args:
            tick: called about four times a second with this campaign and the number of tries under way.
            say: told of failures, in words that may hold content.

        Raises:
            ReplayError: the target cannot be used, or the journal cannot be written.
        """
        if self.journal.events:
            self.state.take(self.journal.add("session", at=utc_now()))
        with contextlib.ExitStack() as stack:
            seats = self._seats(stack)
            runner = CampaignRunner(
                plan=self.design.plan,
                arms={a.name: a for a in self.settings.arms},
                seats=seats,
                maker=self._maker,
                journal=self.journal,
                state=self.state,
                options=Options(
                    concurrency=self.settings.concurrency,
                    isolation=self.settings.how_isolated,
                    recover_wait_s=self.settings.recover_wait_s,
                    stop=self._should_stop if self.settings.watching else None,
                    tick=lambda in_flight: None if tick is None else tick(self, in_flight),
                    say=say or (lambda text: None),
                ),
            )
            runner.run()
        return self.result()

    def result(self) -> Campaign:
        """The campaign as far as it came."""
        s, head = self.settings, self.journal.head
        ended = CampaignEnd(self.state.ended or CampaignEnd.INTERRUPTED)
        arms, comparisons, sentences = summarize(self.design, self.state, ended)
        return Campaign(
            id=head["id"],
            created_at=head["created_at"],
            ended_at=self.state.last_at or head["created_at"],
            capture=self._capture.id,
            capture_digest=head["capture_digest"],
            model=self._capture.model.name,
            target=s.target.text,
            target_kind=s.target.kind,
            planned=s.tries,
            concurrency=s.concurrency,
            isolation=s.how_isolated,
            seed_mode=s.seed_mode,
            seed=s.seed,
            watching=s.watching,
            ended=ended,
            arms=arms,
            tries=self.state.tries(),
            comparisons=comparisons,
            canaries=tuple(self.state.canaries),
            sentences=sentences,
            settings=s.shown_edits(),
            exclude_rate=s.exclude_rate,
            environment=head.get("environment", {}),
        )

    def close(self) -> None:
        """Let go of the journal."""
        self.journal.close()

    def _should_stop(self) -> bool:
        wanted = self.settings.stop_after_fires
        if wanted is not None:
            tries = counted_tries(self.design, self.state)
            return sum(t.end == "fire" for own in tries.values() for t in own) >= wanted
        return len(self.design.arms) > 1 and arms_differ(self.design, self.state)

    def _seats(self, stack: contextlib.ExitStack) -> dict[str, Sequence[Seat]]:
        """Places for every arm; arms that need the same kind of process share them."""
        groups: dict[str, Sequence[Seat]] = {}
        make = _maker_of_places(self.settings, stack)
        found = {}
        for arm in self.settings.arms:
            key = repr((arm.url, sorted(arm.variables.items())))
            if key not in groups:
                probe = self._probe(arm)
                groups[key] = [Seat(place=place, probe=probe) for place in make(arm)]
            found[arm.name] = groups[key]
        return found

    def _probe(self, arm: Arm) -> CanaryProbe:
        request = self._maker.request_for(dataclasses.replace(arm, fields={}), 0, 1)
        kind = "completions" if self.settings.target.kind is TargetKind.MODEL else request.kind
        fields = {"model": request.body["model"]} if "model" in request.body else {}
        return CanaryProbe(kind=kind, fields=fields, path=request.path, timeout_s=min(120.0, request.timeout_s))


def open_campaign(
    folder: Path | str,
    settings: CampaignSettings,
    *,
    journal_path: Path | None = None,
    again: bool = False,
) -> OpenCampaign:
    """Open the campaign that these settings make of a capture: the one begun before, or a new one.

    Args:
        folder: of the capture.
        settings: see there.
        journal_path: instead of the usual place.
        again: start another one, beside those with the same settings: with the next seed that none has.

    Raises:
        CaptureError: the capture cannot be read.
        ReplayError: its request cannot be replayed, or the journal is another campaign's.
        MissingExtraError: scipy is missing.
    """
    capture = read_capture(folder, with_tensors=False)
    digest = digest_of(Path(folder))
    path = journal_path or _usual_path(capture, settings)
    while again and path.exists():
        if journal_path is not None:
            raise ReplayError(f"journal={str(path)!r}: exists; give another file for another campaign")
        settings = dataclasses.replace(settings, seed=settings.seed + 1)
        path = _usual_path(capture, settings)
    maker = RequestMaker(
        capture,
        settings.edits,
        seed_mode=settings.seed_mode,
        seed=settings.seed,
        timeout_s=settings.timeout_s,
        idle_s=settings.idle_s,
    )
    for arm in settings.arms:
        maker.request_for(arm, 0, 1)
    head = _head(capture, digest, settings)
    if path.exists():
        journal = Journal.reopen(path)
        _check_same(journal, head)
    else:
        journal = Journal.create(path, head)
    return OpenCampaign(capture, settings, journal, maker)


def _head(capture: Capture, digest: str, settings: CampaignSettings) -> dict[str, Any]:
    return {
        "id": new_fire_id(),
        "created_at": utc_now(),
        "capture": capture.id,
        "capture_digest": digest,
        "identity": settings.identity(),
        "environment": _environment(),
    }


def _check_same(journal: Journal, head: Mapping[str, Any]) -> None:
    """Refuse to mix tries of different campaigns in one journal."""
    for name in ("capture_digest", "identity"):
        old, new = journal.head.get(name), plain(encode(head[name]))
        if old != new:
            journal.close()
            what = next((k for k in new if old.get(k) != new[k]), name) if isinstance(old, dict) else "capture"
            raise ReplayError(f"journal={str(journal.path)!r}: is of a campaign with another {what}; give another file")


def _environment() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("firetower", "torch", "transformers", "scipy", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _usual_path(capture: Capture, settings: CampaignSettings) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", capture.id)[:80]
    return campaigns_path() / f"{name}-{settings.key}.jsonl"


def _maker_of_places(settings: CampaignSettings, stack: contextlib.ExitStack) -> Callable[[Arm], Iterator[Place]]:
    if settings.ray is not None:
        from firetower.lab.replay.cluster import RayCluster

        cluster = stack.enter_context(RayCluster(settings))
        return cluster.places
    return lambda arm: _places(settings, arm)


def _places(settings: CampaignSettings, arm: Arm) -> Iterator[Place]:
    s = settings
    if s.is_server:
        yield ServerPlace(s.make_client(arm), **s.server_options(arm))
    elif s.how_isolated is Isolation.NONE:
        yield LocalPlace(s.target)
    else:
        for _ in range(s.concurrency):
            yield ChildPlace(s.target, arm.variables, shows_output=s.shows_output)
