"""Pools against a plain model: nothing is given twice, nothing is lost, quarantine holds until it is cleared."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from firetower.core.errors import ConfigError
from firetower.engine.pool import Pool

SIZE = 9


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, beside sets that say what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(SIZE, "page")
        self.holders: dict[int, int] = {}
        self.quarantined: set[int] = set()
        self.suspect: set[int] = set()

    @rule(count=st.integers(0, SIZE))
    def take(self, count: int) -> None:
        free = set(range(SIZE)) - set(self.holders) - self.quarantined
        if count > len(free):
            with pytest.raises(ConfigError):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert taken == sorted(free)[:count]
        self.holders |= dict.fromkeys(taken, 1)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holders:
            page = data.draw(st.sampled_from(sorted(self.holders)))
            self.pool.share([page])
            self.holders[page] += 1

    @rule(data=st.data(), is_burned=st.booleans())
    def give_back(self, data: st.DataObject, is_burned: bool) -> None:
        if not self.holders:
            return
        page = data.draw(st.sampled_from(sorted(self.holders)))
        out = self.pool.give_back([page], is_burned=is_burned)
        self.holders[page] -= 1
        if is_burned:
            self.suspect.add(page)
        if self.holders[page] == 0:
            del self.holders[page]
            # one holder that burned is enough, whoever lets go last
            if page in self.suspect:
                self.suspect.remove(page)
                self.quarantined.add(page)
        assert out == ([page] if page in self.quarantined else [])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.quarantined:
            page = data.draw(st.sampled_from(sorted(self.quarantined)))
            self.pool.release_quarantined([page])
            self.quarantined.remove(page)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.num_held == len(self.holders)
        assert self.pool.quarantined == self.quarantined
        assert self.pool.num_free == SIZE - len(self.holders) - len(self.quarantined)
        assert [self.pool.holders(i) for i in range(SIZE)] == [self.holders.get(i, 0) for i in range(SIZE)]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.give_back([3]), "page=3: nobody holds it"),
        (lambda p: p.share([SIZE]), f"page={SIZE}: nobody holds it"),
        (lambda p: p.release_quarantined([0]), "page=0: is not in quarantine"),
        (lambda p: p.take(SIZE + 1), f"count={SIZE + 1}: must be from 0 to the {SIZE} pages"),
    ],
    ids=["give back", "share", "release", "take"],
)
def test_what_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call(Pool(SIZE, "page"))


def test_an_empty_pool_is_refused():
    with pytest.raises(ConfigError, match="num_slots=0"):
        Pool(0, "slot")
