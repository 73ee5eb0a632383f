"""The suffix drafter against a plain search, and when it turns itself off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.errors import ConfigError
from firetower.engine.drafts import DraftConfig, SuffixDrafter


def plain_search(tokens: list[int], longest: int, shortest: int, most: int) -> list[int]:
    """What followed the latest earlier place of the longest suffix, repeated where it reaches the end."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(most)]
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_drafts_are_those_of_a_plain_search(tokens, cut, most):
    drafter = SuffixDrafter(DraftConfig(longest=3, shortest=1), tokens[:cut])
    drafter.propose(most)
    drafter.extend(tokens[cut:])
    assert drafter.propose(most) == plain_search(tokens, 3, 1, most)


def test_a_repeating_text_is_copied_past_its_end():
    drafter = SuffixDrafter(DraftConfig(), [1, 2, 3, 1, 2, 3, 1, 2])
    assert drafter.propose(7) == [3, 1, 2, 3, 1, 2, 3]


def test_what_was_wrong_is_followed_by_shorter_drafts_and_what_was_right_by_longer_ones():
    drafter = SuffixDrafter(DraftConfig(), [1, 2] * 5)
    drafter.judge(7, 1)
    assert len(drafter.propose(7)) == 2
    drafter.judge(2, 2)
    assert len(drafter.propose(7)) == 7


def test_a_drafter_that_brings_too_little_turns_itself_off_and_tries_again_later_and_later():
    config = DraftConfig(trial_drafts=4, pause_tokens=10, least_accepted_frac=0.5)
    drafter = SuffixDrafter(config, [1, 2] * 5)
    pauses = []
    for _ in range(6):
        drafter.judge(4, 1)
        assert not drafter.is_on
        assert drafter.propose(4) == []
        count = 0
        while not drafter.is_on:
            drafter.extend([1])
            count += 1
        pauses.append(count)
    assert pauses == [10, 20, 40, 80, 160, 160]
    assert (drafter.num_drafted, drafter.num_accepted) == (24, 6)
    assert drafter.accepted_frac == 0.25


def test_a_drafter_that_finds_nothing_pauses_too():
    drafter = SuffixDrafter(DraftConfig(trial_misses=5, pause_tokens=3), [])
    states = []
    for token in range(20):
        drafter.extend([token])
        states.append(drafter.is_on)
        assert drafter.propose(4) == []
    assert states == [True] * 5 + [False] * 2 + [True] * 5 + [False] * 5 + [True] * 3


def test_a_drafter_that_does_well_stays_on():
    drafter = SuffixDrafter(DraftConfig(trial_drafts=4), [1, 2] * 5)
    for _ in range(20):
        drafter.judge(4, 3)
    assert drafter.is_on


@pytest.mark.parametrize(
    "options", [{"shortest": 0}, {"longest": 1}, {"least_accepted_frac": 1.5}, {"pause_tokens": 0}, {"trial_misses": 0}]
)
def test_other_settings_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        DraftConfig(**options)
