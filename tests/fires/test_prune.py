"""Pruning takes what the rule names, oldest first, and a dry run says exactly that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from firetower.core.errors import ConfigError
from firetower.core.records import utc_now
from firetower.fires import PruneRule, Store


@pytest.fixture
def aged(store: Store, make_fire: Any) -> Store:
    """Five fires of 2020 and five of now, ids in the order of age."""
    store.add_many([make_fire(id=f"old-{i}", created_at=f"2020-01-0{i + 1}") for i in range(5)])
    store.add_many([make_fire(id=f"new-{i}", created_at=utc_now()) for i in range(5)])
    return store


def _ids(fires: Any) -> list[str]:
    return [fire.id for fire in fires]


OLD = [f"old-{i}" for i in range(5)]
NEW = [f"new-{i}" for i in range(5)]


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (PruneRule(older_than_s=3600), OLD),
        (PruneRule(keep=7), OLD[:3]),
        (PruneRule(keep=0), OLD + NEW),
        (PruneRule(keep=10), []),
        (PruneRule(older_than_s=3600, keep=4), [*OLD, "new-0"]),
        (PruneRule(max_bytes=1 << 30), []),
        (PruneRule(max_bytes=0), OLD + NEW),
    ],
    ids=["older", "keep", "keep none", "keep all", "older and keep", "fits", "never fits"],
)
def test_a_dry_run_says_what_a_prune_then_takes(aged: Store, rule: PruneRule, gone: list[str]) -> None:
    before = list(aged)
    assert _ids(aged.prune(rule, dry_run=True)) == gone
    assert list(aged) == before
    taken = aged.prune(rule)
    assert _ids(taken) == gone
    assert all(fire.token_ids is None for fire in taken)
    assert list(aged) == [fire for fire in before if fire.id not in gone]


def test_a_fire_that_still_happens_is_not_old(aged: Store) -> None:
    aged.bump("old-2")
    assert _ids(aged.prune(PruneRule(older_than_s=3600))) == ["old-0", "old-1", "old-3", "old-4"]


def test_content_only_leaves_the_fires(aged: Store) -> None:
    before = {fire.id: fire for fire in aged}
    rule = PruneRule(older_than_s=3600, content_only=True)
    assert _ids(aged.prune(rule)) == OLD
    assert {fire.id: fire for fire in aged} == {
        i: dataclasses.replace(fire, token_ids=None) if i in OLD else fire for i, fire in before.items()
    }
    assert aged.prune(rule) == ()


@pytest.mark.parametrize("max_bytes", [100_000, 150_000, 300_000])
def test_max_bytes_holds_for_the_files_and_takes_little_too_much(
    store: Store, path: Path, make_fire: Any, max_bytes: int
) -> None:
    fires = [make_fire(notes=("x" * 500,)) for _ in range(300)]
    store.add_many(fires)
    assert store.size_bytes() > 300_000
    taken = store.prune(PruneRule(max_bytes=max_bytes))
    assert (
        max_bytes - 3 * 4096
        <= sum(p.stat().st_size for p in (path, path.with_name(path.name + "-wal")))
        <= max_bytes
    )
    assert list(store) == fires[len(taken) :]
    assert store.size_bytes() <= max_bytes


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "needs at least one limit"),
        ({"keep": -1}, "keep=-1: must not be negative"),
        ({"older_than_s": -1.0}, "must not be negative"),
        ({"max_bytes": 5, "content_only": True}, "cannot be met by erasing token ids only"),
        ({"content_only": True}, "needs at least one limit"),
    ],
    ids=str,
)
def test_a_rule_without_sense_is_an_error(limits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PruneRule(**limits)
