"""Replay a capture many times, in one or several arms: the rate of fires with its interval, and what it excludes.

CAPTURE is a capture's folder (see firetower capture). The target is a server that speaks OpenAI's HTTP API
(http://HOST:PORT; a key is taken from FIRETOWER_API_KEY), a model's folder for Transformers, run here under the
watch, or module:function. Every try is journalled: an interrupted campaign goes on with the same command.

Arms run interleaved in random order:  --arm base: --arm cold:temperature=0 --arm off:url=http://127.0.0.1:8001
A fire is what the watch says or, over HTTP, what the detectors say. After a fire, two short canary prompts tell
whether the process stayed poisoned; tries in a poisoned process do not count.

With --op, one op whose tensors the capture holds is run again as stored, in float32 and in float64.

Exit codes: 0 all tries clean, 3 a fire, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firetower.lab.replay.campaign import OpenCampaign
    from firetower.lab.replay.op import OpReplay
    from firetower.lab.replay.records import Campaign
    from firetower.lab.replay.settings import CampaignSettings

_MIN_SHOWING_TOKENS = 128


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capture", metavar="CAPTURE", help="folder of a capture")
    what = parser.add_argument_group("what is tried")
    what.add_argument("--target", metavar="URL|FOLDER|MODULE:FUNCTION", help="where to replay it")
    what.add_argument("--tries", type=int, default=40, metavar="N", help="tries of each arm (default: 40)")
    what.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME:SETTING=VALUE",
        help="repeatable: a field of the request by dotted path (JSON value; empty removes it), url, or env.VARIABLE; "
        "NAME: alone is the request as captured",
    )
    what.add_argument("--max-tokens", type=int, metavar="M", help="limit of the answers instead of the captured one")
    what.add_argument(
        "--seed",
        choices=("captured", "fresh", "fixed"),
        default="captured",
        help="fresh: another seed for each try; fixed: the captured one or 0 (default: as the request has it)",
    )
    what.add_argument("--strip-images", action="store_true", help="take images out of the messages")
    what.add_argument("--model", metavar="NAME", help="model to ask for instead of the captured one")
    what.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="repeatable: a field of every request"
    )
    how = parser.add_argument_group("how tries are kept apart")
    how.add_argument(
        "--isolate-tries",
        choices=("process", "restart", "none"),
        help="process: one try a process; restart: a new process after a fire; none (default: none for a server, "
        "else restart)",
    )
    how.add_argument("--restart-command", metavar="COMMAND", help="shell command that restarts the server and returns")
    how.add_argument("--concurrency", type=int, default=1, metavar="N", help="tries at once (default: 1)")
    how.add_argument("--timeout", type=float, default=3600, metavar="S", help="for an answer (default: 3600)")
    how.add_argument("--idle-timeout", type=float, default=600, metavar="S", help="without a byte (default: 600)")
    how.add_argument("--recover-wait", type=float, default=30, metavar="S", help="for a silent target (default: 30)")
    how.add_argument(
        "--restart-wait", type=float, default=600, metavar="S", help="for a restarted server (default: 600)"
    )
    how.add_argument("--attempts", type=int, default=3, metavar="N", help="for a try without an answer (default: 3)")
    how.add_argument(
        "--count-errors", action="store_true", help="a 5xx, or an answer that breaks off, is a fire (default: is not)"
    )
    how.add_argument("--read-all", action="store_true", help="read a burned answer to its end")
    how.add_argument("--ca-file", metavar="FILE", help="certificates to trust")
    how.add_argument("--ray", metavar="ADDRESS", help="make the tries on the workers of a Ray cluster")
    _configure_model(parser)
    _configure_result(parser)


def _configure_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("a model's folder as target")
    model.add_argument(
        "--device", default="auto", metavar="D", help="cpu, cuda, ... (default: a GPU where there is one)"
    )
    model.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    model.add_argument("--level", choices=("logits", "layers", "ops"), default="layers", help="of the watch")
    model.add_argument("--store", metavar="PATH", help="the store of fires, instead of the usual one")
    model.add_argument("--no-store", action="store_true", help="do not store fires")
    model.add_argument("--op", action="store_true", help="run the op that the capture describes; needs no --target")


def _configure_result(parser: argparse.ArgumentParser) -> None:
    result = parser.add_argument_group("the result")
    result.add_argument("--watch", action="store_true", help="figures that hold at any look; may end early")
    result.add_argument("--stop-after-fires", type=int, metavar="K", help="with --watch: end at K fires")
    result.add_argument("--exclude-rate", metavar="P", help="rate that clean tries are to exclude: 0.05 or 1/18")
    result.add_argument("--confidence", type=float, default=0.95, metavar="C", help="(default: 0.95)")
    result.add_argument("--order-seed", type=int, default=0, metavar="N", help="of order and fresh seeds (default: 0)")
    result.add_argument("--resume", action="store_true", help="go on with a campaign; an error where there is none")
    result.add_argument("--again", action="store_true", help="another campaign beside the one with these settings")
    result.add_argument("--journal", metavar="FILE", help="journal, instead of the usual place")
    result.add_argument("-o", "--output", metavar="FILE", help="the campaign's file (default: beside the journal)")
    result.add_argument("--force", action="store_true", help="replace an existing --output")
    result.add_argument(
        "--record", metavar="FOLDER", help="of a redacted capture: write it there with whether it still fires"
    )
    result.add_argument("--json", action="store_true", help="the campaign as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Replay; 0 clean, 3 with a fire, 130 interrupted."""
    if args.op:
        return _run_op(args)
    settings = _settings(args)
    from pathlib import Path

    from firetower.lab.replay.campaign import open_campaign

    journal = Path(args.journal).expanduser() if args.journal else None
    opened = open_campaign(Path(args.capture).expanduser(), settings, journal_path=journal, again=args.again)
    try:
        output = _output(args, opened)
        campaign = _make(args, opened)
        return _finish(args, opened, campaign, output)
    finally:
        opened.close()


def _settings(args: argparse.Namespace) -> CampaignSettings:
    """Everything asked for, checked before anything is touched."""
    from firetower.core.errors import ReplayError
    from firetower.lab.replay.arms import parse_arms, parse_fields
    from firetower.lab.replay.records import Isolation, SeedMode
    from firetower.lab.replay.request import Edits
    from firetower.lab.replay.settings import CampaignSettings
    from firetower.lab.replay.targets import parse_target

    if not args.target:
        raise ReplayError("target: missing; give --target URL, FOLDER or MODULE:FUNCTION (or --op)")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ReplayError(f"max_tokens={args.max_tokens}: must be at least 1")
    store = "" if args.no_store else args.store
    target = parse_target(args.target, device=args.device, dtype=args.dtype, level=args.level, store=store)
    return CampaignSettings(
        target=target,
        tries=args.tries,
        arms=parse_arms(args.arm),
        edits=Edits(
            max_tokens=args.max_tokens,
            model=args.model,
            strip_images=args.strip_images,
            fields=parse_fields(args.set),
        ),
        seed_mode=SeedMode("as captured" if args.seed == "captured" else args.seed),
        seed=args.order_seed,
        isolation=Isolation(args.isolate_tries) if args.isolate_tries else None,
        concurrency=args.concurrency,
        confidence=args.confidence,
        exclude_rate=_rate(args.exclude_rate),
        watching=args.watch,
        stop_after_fires=args.stop_after_fires,
        counts_errors=args.count_errors,
        max_attempts=args.attempts,
        timeout_s=args.timeout,
        idle_s=args.idle_timeout,
        recover_wait_s=args.recover_wait,
        restart_wait_s=args.restart_wait,
        restart_command=args.restart_command,
        ca_file=args.ca_file,
        reads_all=args.read_all,
        ray=args.ray,
        shows_output=args.debug,
    )


def _rate(text: str | None) -> float | None:
    """``0.05`` or ``1/18``."""
    from firetower.core.errors import ReplayError

    if text is None:
        return None
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value < 1:
        raise ReplayError(f"exclude_rate={text}: must lie between 0 and 1, such as 0.05 or 1/18")
    return value


def _output(args: argparse.Namespace, opened: OpenCampaign) -> str:
    """Where the campaign's file goes; refused now rather than after hours."""
    import os

    from firetower.core.errors import ReplayError

    if args.resume and not opened.journal.events:
        opened.journal.path.unlink()
        raise ReplayError("resume: no campaign of this capture with these settings was begun; leave --resume out")
    if args.output is None:
        return str(opened.journal.path.with_suffix(".json"))
    if os.path.lexists(args.output) and not args.force:
        raise ReplayError(f"output={args.output!r}: exists; choose another name, or replace it with --force")
    return str(args.output)


def _make(args: argparse.Namespace, opened: OpenCampaign) -> Campaign:
    """Make the tries, or show a campaign that is finished."""
    from firetower.cli.output import say
    from firetower.lab.replay.progress import Progress

    if opened.is_finished:
        say("This campaign is finished; --again makes another one.")
        return opened.result()
    _introduce(args, opened)
    progress = Progress(sys.stderr)

    def tell(text: str) -> None:
        progress.clear()
        say(f"  {text}")

    try:
        return opened.run(tick=progress, say=tell)
    finally:
        progress.clear()


def _introduce(args: argparse.Namespace, opened: OpenCampaign) -> None:
    from firetower.cli.output import say
    from firetower.lab.replay.client import KEY_VARIABLE, parse_url

    settings = opened.settings
    arms = ", ".join(a.name for a in settings.arms)
    say(f"{len(opened.design.plan):,} tries in {len(settings.arms)} arm{'s'[: len(settings.arms) > 1]} ({arms})")
    if args.again:
        say(f"Another campaign, with --order-seed {settings.seed}; that option goes on with it.")
    if opened.resumed:
        say(f"Going on: {len(opened.state.counted):,} tries count already.")
    if args.strip_images:
        say(f"Took {opened.num_images} images out of the request.")
    limit = opened.max_tokens
    if settings.is_server and limit is not None and limit < _MIN_SHOWING_TOKENS:
        say(
            f"Note: answers of {limit} tokens are too short for text alone to show a fire; ask for logprobs: "
            "--set logprobs=true"
        )
    import os

    targets = [settings.target.text, *(a.url for a in settings.arms if a.url)] if settings.is_server else []
    for url in targets:
        endpoint = parse_url(url)
        if os.environ.get(KEY_VARIABLE) and endpoint.scheme == "http" and not endpoint.is_local:
            say(f"Warning: {KEY_VARIABLE} goes to {endpoint.host} in the clear; use https.")


def _finish(args: argparse.Namespace, opened: OpenCampaign, campaign: Campaign, output: str) -> int:
    from pathlib import Path

    from firetower.cli.output import say
    from firetower.lab.replay.records import CampaignEnd
    from firetower.lab.replay.schema import campaign_to_dict, write_campaign

    write_campaign(campaign, Path(output))
    if args.json:
        import json

        print(json.dumps(campaign_to_dict(campaign), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _print(campaign)
    say(f"Wrote {output}")
    if campaign.ended is CampaignEnd.INTERRUPTED:
        return 130
    if args.record:
        _record(args, campaign)
    fires = list(dict.fromkeys(t.fire for t in campaign.tries if t.fire))
    if fires:
        say(f"next: firetower fires show {fires[-1]}")
    say(f"{'      ' if fires else 'next: '}firetower report {output} -o report.html")
    if campaign.saw_fire:
        return 3
    return 1 if campaign.ended in (CampaignEnd.FAILING, CampaignEnd.POISONED) else 0


def _print(campaign: Campaign) -> None:
    from firetower.cli.output import print_table
    from firetower.lab.stats.text import interval, percent, share

    rows = []
    for arm in campaign.arms:
        r = arm.rate
        rows.append(
            (
                arm.name,
                f"{r.tries:,}" if r else "0",
                f"{r.fires:,}" if r else "0",
                share(r.rate) if r else "",
                interval(r.lower, r.upper) if r else "",
                f"{arm.num_dependent:,}",
                f"{arm.num_lost:,}",
            )
        )
    confidence = next((a.rate.confidence for a in campaign.arms if a.rate), 0.95)
    columns = ("arm", "tries", "fires", "rate", percent(confidence), "set aside", "lost")
    print_table(columns, rows, right=columns[1:])
    for sentence in campaign.sentences:
        print(sentence)
    _print_fires(campaign)


def _print_fires(campaign: Campaign) -> None:
    """The first fires, one a line: where, and what was seen."""
    from firetower.lab.replay.records import TryEnd

    fires = [t for t in campaign.tries if t.end is TryEnd.FIRE]
    if fires:
        print()
    for t in fires[:5]:
        seen = f"{t.origin}, bits {t.bits}" if t.origin else next((s.reason for s in t.signs), t.detail)
        place = "" if t.ignition is None else f", token {t.ignition:,}"
        print(f"fire in try {t.number + 1} ({t.arm}{place}): {seen}")
    if len(fires) > 5:
        print(f"and {len(fires) - 5:,} more; all are in the campaign's file")


def _record(args: argparse.Namespace, campaign: Campaign) -> None:
    from firetower.capture import record_measurement
    from firetower.cli.output import say

    record_measurement(args.capture, args.record, campaign.num_fires > 0)
    say(f"Wrote {args.record}: the redacted capture {'still fires' if campaign.num_fires else 'did not fire'}")


def _run_op(args: argparse.Namespace) -> int:
    from pathlib import Path

    from firetower.capture import read_capture
    from firetower.cli.output import print_json
    from firetower.lab.replay.op import replay_op

    capture = read_capture(Path(args.capture).expanduser())
    found = replay_op(capture, tries=args.tries, device="cpu" if args.device == "auto" else args.device)
    if args.json:
        print_json(found)
    else:
        _print_op(found)
    return 3 if found.is_bad else 0


def _print_op(found: OpReplay) -> None:
    from firetower.cli.output import print_table

    rows = []
    for r in found.runs:
        if r.error:
            rows.append((r.dtype, "", "", "", "", "", r.error))
            continue
        first = "" if r.first_index is None else f"index {r.first_index:,}, bits {r.first_bits}"
        absmax = "" if r.absmax is None else f"{r.absmax:.6g}"
        infinite = r.num_pos_inf + r.num_neg_inf
        rows.append((r.dtype, r.output_dtype, str(list(r.shape)), f"{r.num_nan:,}", f"{infinite:,}", absmax, first))
    print_table(
        ("inputs", "output", "shape", "NaN", "Inf", "absmax", "first bad"), rows, right=("NaN", "Inf", "absmax")
    )
    for sentence in found.sentences:
        print(sentence)
