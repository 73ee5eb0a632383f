"""The first look at a file, a server or a model: cheap checks, one finding each, and the command to run next."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firetower.core.errors import FiretowerError, ReplayError

if TYPE_CHECKING:
    from firetower.lab.replay.canary import CanaryProbe
    from firetower.lab.replay.client import Client
    from firetower.lab.replay.judge import Result
    from firetower.scan import ScanReport

LONG_PROMPT = "Write a long story about a lighthouse keeper. Do not stop early."
"""What the longer answer is about: it must not end before the detectors have something to judge."""

MAX_SHOWN = 5
"""Findings of one check that are shown."""


class Look(StrEnum):
    """What one check came to."""

    FIRE = "fire"
    WARN = "warn"
    CLEAN = "clean"
    UNKNOWN = "unknown"


class Kind(StrEnum):
    """What is looked at."""

    FILE = "file"
    SERVER = "server"
    MODEL = "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: its name, what it came to, what was seen, and at most `MAX_SHOWN` details."""

    name: str
    look: Look
    said: str
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """The whole first look.

    Attributes:
        target: as given. kind: what it was taken for.
        checks: in the order in which they ran.
        finding: the result in a sentence.
        next_command: what to run next; may hold words in capitals to be replaced.
        fire: id of the stored fire, where the watch saw one.
    """

    target: str
    kind: Kind
    checks: tuple[Check, ...]
    finding: str
    next_command: str
    fire: str | None = None

    @property
    def is_fire(self) -> bool:
        """Whether any check found a fire."""
        return any(c.look is Look.FIRE for c in self.checks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriageSettings:
    """How to look.

    Attributes:
        model: name to ask a server for; by default the first that it lists.
        max_tokens: of the longer answer. timeout_s: for each answer.
        store: where fires of a watched model go; None for the usual store, "" for nowhere.
        ca_file: certificates to trust, instead of the system's.
    """

    model: str | None = None
    max_tokens: int = 128
    timeout_s: float = 120.0
    store: str | None = None
    ca_file: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ReplayError(f"max_tokens={self.max_tokens}: must be at least 1")


def triage(target: str, settings: TriageSettings | None = None) -> Triage:
    """Look at a server's URL, a weight file, or the folder of a Transformers model.

    A file is scanned. Of a server, two short prompts and one longer answer go through the detectors. A folder with a
    ``config.json`` is scanned and, if its weights are sound, generates a few tokens under the watch.

    Raises:
        FiretowerError: none of the three, or a file that cannot be scanned.
    """
    settings = settings or TriageSettings()
    if "://" in target:
        return _server(target, settings)
    path = Path(target).expanduser()
    if not path.exists():
        raise ReplayError(f"target={target[:200]!r}: must be a URL (http://HOST:PORT), or a file or folder that exists")
    if path.is_dir() and (path / "config.json").is_file():
        return _model(target, path, settings)
    return _file(target, path)


def _file(target: str, path: Path) -> Triage:
    check, report = _scan(path)
    command = _after_scan(target, path, check, report)
    finding = {
        Look.FIRE: "The weights are bad as they stand in the file: no engine can run this soundly.",
        Look.CLEAN: "The weights are sound as they stand in the file; what burns is made at run time.",
    }.get(check.look, "The file could not be read in full: nothing unread is called clean.")
    return Triage(target=target, kind=Kind.FILE, checks=(check,), finding=finding, next_command=command)


def _scan(path: Path) -> tuple[Check, ScanReport]:
    from firetower.scan import scan

    report = scan(path)
    num_files = len(report.files)
    what = f"{num_files} file{'s' * (num_files != 1)}, {sum(f.num_tensors for f in report.files):,} tensors"
    if report.bad:
        details = tuple(_weight(f) for f in report.bad[:MAX_SHOWN])
        said = f"{len(report.bad)} bad finding{'s' * (len(report.bad) != 1)} in {what}"
        return Check(name="scan", look=Look.FIRE, said=said, details=details), report
    if report.errors:
        details = tuple(f"{Path(f.file).name}: {f.error}" for f in report.errors[:MAX_SHOWN])
        return Check(
            name="scan", look=Look.UNKNOWN, said=f"not all of {what} could be scanned", details=details
        ), report
    return Check(name="scan", look=Look.CLEAN, said=f"{what}: no bad weight"), report


def _weight(finding: Any) -> str:
    place = f"{finding.tensor}: " if finding.tensor else ""
    bits = f" (bits {finding.bits} {finding.dtype})" if finding.bits else ""
    return f"{finding.problem}: {place}{finding.message}{bits}"


def _after_scan(target: str, path: Path, check: Check, report: ScanReport) -> str:
    quoted = shlex.quote(target)
    if check.look is Look.FIRE:
        bits = next((f for f in report.bad if f.kind is not None and f.bits), None)
        return f"firetower bits {bits.bits} --dtype {bits.dtype}" if bits else f"firetower scan {quoted}"
    if check.look is Look.UNKNOWN:
        return f"firetower scan {quoted}"
    if path.suffix == ".gguf":
        return f"firetower trace {quoted}"
    if path.is_file() and (path.parent / "config.json").is_file():
        return f"firetower triage {shlex.quote(str(path.parent))}"
    return "firetower triage URL (of a server that runs it)"


def _server(target: str, settings: TriageSettings) -> Triage:
    from firetower.lab.replay.canary import CanaryProbe
    from firetower.lab.replay.client import Client, parse_url

    client = Client(parse_url(target), ca_file=settings.ca_file)
    name, listed = _model_name(client, settings)
    fields = {"model": name} if name else {}
    probe = CanaryProbe(kind="chat.completions", fields=fields, timeout_s=settings.timeout_s)
    checks = [listed, _canary(probe, client)]
    if checks[-1].look is not Look.UNKNOWN:
        checks.append(_long_answer(client, fields, settings))
    quoted = shlex.quote(target)
    burns = [c.name for c in checks if c.look is Look.FIRE]
    if checks[1].look is Look.UNKNOWN:
        finding, command = "The server gave no answer that can be judged.", f"firetower triage {quoted}"
    elif burns == ["canary"] or len(burns) == 2:
        finding = "The server burns on short, plain prompts: it is poisoned, or its model is bad."
        command = f"restart the server, then: firetower triage {quoted}; if it burns again: firetower scan MODEL_FILE"
    elif burns:
        finding = "Short prompts are well and a longer answer burns: the process is alive, the request burns."
        command = f"firetower replay CAPTURE --target {quoted} --tries 40"
    else:
        finding = "Nothing burned in three requests: that excludes a poisoned process, not a rare fire."
        command = f"firetower replay CAPTURE --target {quoted} --tries 40"
    return Triage(target=target, kind=Kind.SERVER, checks=tuple(checks), finding=finding, next_command=command)


def _model_name(client: Client, settings: TriageSettings) -> tuple[str | None, Check]:
    answer = client.get(client.endpoint.path_for("completions", "").removesuffix("/completions") + "/models")
    data = answer[1].get("data") if answer is not None and isinstance(answer[1], dict) else None
    names = (
        [m["id"] for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]
        if isinstance(data, list)
        else []
    )
    if answer is None:
        return settings.model, Check(name="models", look=Look.UNKNOWN, said="the server did not answer")
    chosen = settings.model or (names[0] if names else None)
    if not names:
        said = "the server lists no model" + ("" if chosen else "; give --model NAME if it wants one")
        return chosen, Check(name="models", look=Look.UNKNOWN, said=said)
    said = f"the server lists {', '.join(names[:MAX_SHOWN])}"
    if chosen not in names:
        return chosen, Check(name="models", look=Look.WARN, said=f"{said}; {chosen} is not among them")
    return chosen, Check(name="models", look=Look.CLEAN, said=said)


def _canary(probe: CanaryProbe, client: Client) -> Check:
    seen = probe.look(client.send)
    if not seen.prompts:
        details = tuple(filter(None, (seen.fatal, seen.message)))
        return Check(name="canary", look=Look.UNKNOWN, said=f"no prompt was answered: {seen.detail}", details=details)
    if seen.burned:
        said = f"{seen.burned} of {seen.prompts} short prompts burned"
        return Check(name="canary", look=Look.FIRE, said=said, details=(seen.detail,))
    said = f"{seen.prompts} short prompts are answered well"
    return Check(name="canary", look=Look.CLEAN, said=said, details=(seen.detail,) if seen.detail else ())


def _long_answer(client: Client, fields: dict[str, Any], settings: TriageSettings) -> Check:
    from firetower.lab.replay.request import ReplayRequest

    body = fields | {
        "messages": [{"role": "user", "content": LONG_PROMPT}],
        "max_tokens": settings.max_tokens,
        "temperature": 0,
        "stream": True,
    }
    request = ReplayRequest(kind="chat.completions", body=body, timeout_s=settings.timeout_s, idle_s=settings.timeout_s)
    return _judged("longer answer", client.send(request))


def _judged(name: str, result: Result) -> Check:
    details = tuple(f"{s.severity}: {s.reason}" for s in result.signs[:MAX_SHOWN])
    if result.end == "fire":
        where = f"non-finite first at {result.origin}" if result.origin else "the detectors say fire"
        return Check(name=name, look=Look.FIRE, said=where, details=details)
    if result.end == "lost":
        more = tuple(filter(None, (result.fatal, result.message)))
        return Check(
            name=name, look=Look.UNKNOWN, said=f"no answer to judge: {result.detail}", details=(*details, *more)
        )
    tokens = f"{result.num_tokens} tokens" if result.num_tokens is not None else "the answer"
    if any(s.severity == "warn" for s in result.signs):
        return Check(name=name, look=Look.WARN, said=f"{tokens} with a warning sign", details=details)
    return Check(name=name, look=Look.CLEAN, said=f"{tokens} without a sign", details=details)


def _model(target: str, path: Path, settings: TriageSettings) -> Triage:
    check, report = _scan_folder(path)
    quoted = shlex.quote(target)
    if check.look is Look.FIRE and report is not None:
        return Triage(
            target=target,
            kind=Kind.MODEL,
            checks=(check,),
            finding="The weights are bad as they stand in the files: nothing was run.",
            next_command=_after_scan(target, path, check, report),
        )
    watched, fire = _watched(path, settings)
    if watched.look is Look.FIRE:
        finding = f"The weights are sound and the model burns: {watched.said}."
        store = f" --store {shlex.quote(settings.store)}" if settings.store else ""
        command = (
            f"firetower diagnose {fire}{store}" if fire else f"firetower replay CAPTURE --target {quoted} --tries 40"
        )
    elif watched.look is Look.UNKNOWN:
        finding, command = "The model could not be run here.", f"firetower scan {quoted}"
    else:
        finding = "The weights are sound and a short run is finite: that does not exclude a rare fire."
        command = f"firetower replay CAPTURE --target {quoted} --tries 40"
    return Triage(
        target=target, kind=Kind.MODEL, checks=(check, watched), finding=finding, next_command=command, fire=fire
    )


def _scan_folder(path: Path) -> tuple[Check, ScanReport | None]:
    try:
        return _scan(path)
    except FiretowerError as e:
        # a folder may hold a configuration and no weights that scan knows; the run says the rest
        return Check(name="scan", look=Look.UNKNOWN, said=str(e)), None


def _watched(path: Path, settings: TriageSettings) -> tuple[Check, str | None]:
    from firetower.lab.replay.model import ModelRunner
    from firetower.lab.replay.targets import TargetKind, TargetSpec

    spec = TargetSpec(kind=TargetKind.MODEL, text=str(path.absolute()), store=settings.store)
    try:
        runner = ModelRunner(spec)
    except FiretowerError as e:
        return Check(name="watched run", look=Look.UNKNOWN, said=str(e)), None
    try:
        for result in _runs(runner.run, settings):
            if result.end != "clean":
                return _judged("watched run", result), result.fire
    finally:
        runner.close()
    said = f"{result.num_tokens} tokens, every watched signal finite"
    return Check(name="watched run", look=Look.CLEAN, said=said), None


def _runs(run: Callable[[Any], Result], settings: TriageSettings) -> Iterator[Result]:
    from firetower.lab.replay.request import ReplayRequest

    body = {"prompt": LONG_PROMPT, "max_tokens": min(settings.max_tokens, 32), "do_sample": False}
    yield run(ReplayRequest(kind="completions", body=body, seed=0, is_canary=True))
