"""Runs of the whole request: again and again, and once under each switch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firetower.core.errors import MissingExtraError
from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Cost, Fact, Run, Step, fact
from firetower.lab.subject import Outcome, Switch


def _replays(look: Look) -> Iterator[Fact]:
    outcomes = _outcomes(look, None)
    wrong = [look.is_wrong(o) for o in outcomes]
    if not outcomes or any(w is None for w in wrong):
        return
    num_wrong = sum(bool(w) for w in wrong)
    text = f"{num_wrong} of {len(wrong)} replays are wrong ({_rate(num_wrong, len(wrong))})"
    yield fact("wrong_sometimes", 0 < num_wrong < len(wrong), text)
    yield fact("wrong_always", num_wrong == len(wrong), text)
    if num_wrong:
        bad = [o for o, w in zip(outcomes, wrong, strict=True) if w]
        same = all((o.origin, o.kind) == (bad[0].origin, bad[0].kind) for o in bad)
        yield fact("same_origin", same, f"the origin is {'the same each time' if same else 'not the same each time'}")


def _outcomes(look: Look, switch: Switch | None) -> list[Outcome]:
    found = (look.outcome(switch, number) for number in range(look.num_replays))
    return [o for o in found if o is not None]


def _serial(look: Look) -> Iterator[Fact]:
    if not look.can(Switch.SERIAL):
        return
    wrong = [look.is_wrong(o) for o in _outcomes(look, Switch.SERIAL)]
    if not wrong or any(w is None for w in wrong):
        return
    num_wrong = sum(bool(w) for w in wrong)
    text = f"serialised, {num_wrong} of {len(wrong)} replays are wrong ({_rate(num_wrong, len(wrong))})"
    yield fact("serial_is_clean", num_wrong == 0, text)


def _rate(num_wrong: int, num_tries: int) -> str:
    """``rate 0.050, 95% 0.006 to 0.169``."""
    found = f"rate {num_wrong / num_tries:.3f}"
    try:
        from firetower.lab.stats import rate
    except MissingExtraError:
        return f"{found}; for its interval: pip install 'firetower[lab]'"
    r = rate(num_wrong, num_tries)
    return f"{found}, 95% {r.lower:.3f} to {r.upper:.3f}"


def _switched(switch: Switch, name: str) -> Run:
    def run(look: Look) -> Iterator[Fact]:
        cured = look.cures(switch)
        if cured is not None:
            yield fact(name, cured, f"{switch}: {'clean' if cured else 'still wrong'}")

    return run


def _switch_step(name: str, title: str, switch: Switch, fact_name: str, command: str) -> Step:
    return Step(
        name=name,
        title=title,
        cost=Cost.RUN,
        needs=("run", "switches"),
        facts=(fact_name,),
        command=command,
        run=_switched(switch, fact_name),
    )


REPLAY_STEPS: Sequence[Step] = (
    Step(
        name="replays",
        title="does every replay end the same?",
        cost=Cost.REPLAY,
        needs=("run",),
        facts=("wrong_sometimes", "wrong_always", "same_origin"),
        command="firetower replay CAPTURE --tries 40",
        run=_replays,
    ),
    Step(
        name="serial",
        title="is it clean when serialised?",
        cost=Cost.REPLAY,
        needs=("run", "switches"),
        facts=("serial_is_clean",),
        command="CUDA_LAUNCH_BLOCKING=1 firetower replay CAPTURE --tries 40",
        run=_serial,
    ),
)

SWITCH_STEPS: Sequence[Step] = (
    _switch_step("eager", "is eager clean?", Switch.EAGER, "eager_cures", "run with graphs and compilation off"),
    _switch_step("exact-bucket", "is the exact bucket clean?", Switch.EXACT_BUCKET, "exact_bucket_cures",
                 "run with a graph of exactly this batch size"),
    _switch_step("alone", "is the request clean alone?", Switch.ALONE, "alone_cures", "send the request alone"),
    _switch_step("cold", "is it clean without cache and transfer?", Switch.COLD, "cold_cures",
                 "clear the prefix cache and send the same request"),
    _switch_step("other-backend", "is another backend clean?", Switch.OTHER_BACKEND, "other_backend_cures",
                 "run the op with another backend"),
    _switch_step("drafts-off", "is it clean with drafts off?", Switch.DRAFTS_OFF, "drafts_off_cures",
                 "run with speculation off"),
    _switch_step("world-size-one", "is one rank alone clean?", Switch.WORLD_SIZE_ONE, "one_rank_cures",
                 "run with world size 1"),
    _switch_step("other-device", "is another device clean?", Switch.OTHER_DEVICE, "other_device_cures",
                 "run on another device"),
)  # fmt: skip
