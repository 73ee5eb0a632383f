"""Decisions about fires, with a clock of the test's own."""

from __future__ import annotations

import pytest

from firetower.core.errors import ConfigError
from firetower.core.records import Kind, Phase, Signal
from firetower.engine.guard import Burn
from firetower.engine.recovery import OnFire, Recovery, RecoveryConfig


def burn(layer: int = 0) -> Burn:
    return Burn(
        request="a", position=3, step=1, phase=Phase.DECODE, signal=Signal(stage="down", layer=layer), row=0, token=0,
        column=2, flat_index=2, shape=(1, 4), bits=0x7FC00000, kind=Kind.NAN, dtype="float32", is_own_bits=True,
        is_pad=False, backend="",
    )  # fmt: skip


@pytest.mark.parametrize("on_fire", list(OnFire))
def test_it_does_what_was_configured(on_fire):
    decision = Recovery(RecoveryConfig(on_fire=on_fire)).decide(burn(), num_recoveries=0, now=0.0)
    assert (decision.action, decision.reason) == (on_fire, None)


def test_a_request_is_recovered_so_often_and_no_more():
    recovery = Recovery(RecoveryConfig(on_fire=OnFire.HEAL, max_per_request=2))
    assert recovery.decide(burn(), num_recoveries=1, now=0).action is OnFire.HEAL
    decision = recovery.decide(burn(), num_recoveries=2, now=0)
    assert decision.action is OnFire.FAIL
    assert "2 recoveries of this request are the limit" in str(decision.reason)
    assert not decision.is_breaker_open


def test_recoveries_of_a_minute_are_bounded_and_the_minute_passes():
    recovery = Recovery(RecoveryConfig(on_fire=OnFire.RETRY, max_per_minute=2, breaker_fires=100))
    actions = [recovery.decide(burn(), num_recoveries=0, now=now).action for now in (0, 1, 2, 61)]
    assert actions == [OnFire.RETRY, OnFire.RETRY, OnFire.FAIL, OnFire.RETRY]
    assert recovery.num_recovered == 3


def test_the_breaker_opens_for_one_origin_and_closes_when_no_fire_comes():
    recovery = Recovery(RecoveryConfig(on_fire=OnFire.HEAL, breaker_fires=3, breaker_s=10))
    decisions = [recovery.decide(burn(), num_recoveries=0, now=now) for now in (0, 1, 2)]
    assert [d.is_breaker_open for d in decisions] == [False, False, True]
    assert decisions[2].action is OnFire.FAIL
    assert "3 fires at layer 0 down (nan) within 10 s" in str(decisions[2].reason)
    assert recovery.decide(burn(layer=1), num_recoveries=0, now=2).action is OnFire.HEAL
    assert recovery.open_breakers(2) == {"layer 0 down (nan)": 3}
    assert recovery.open_breakers(10.5) == {}
    assert recovery.decide(burn(), num_recoveries=0, now=20).action is OnFire.HEAL


def test_a_reset_closes_it():
    recovery = Recovery(RecoveryConfig(on_fire=OnFire.HEAL, breaker_fires=1))
    assert recovery.decide(burn(), num_recoveries=0, now=0).is_breaker_open
    recovery.reset()
    assert recovery.open_breakers(0) == {}


@pytest.mark.parametrize("name", ["max_per_request", "max_per_minute", "breaker_fires", "breaker_s"])
def test_limits_below_one_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        RecoveryConfig(**{name: 0})
