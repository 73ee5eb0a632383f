"""The table of families: complete, and consistent with the reports it was drawn from."""

from __future__ import annotations

import pytest

from firetower.core.families import DETAILS, FAMILIES, NUM_REPORTS, share


def test_the_letters_run_from_a_to_v():
    assert list(FAMILIES) == [chr(c) for c in range(ord("A"), ord("V") + 1)]


def test_the_counts_are_those_of_the_reports():
    counts = "17 8 11 8 11 6 6 4 8 15 4 7 5 8 8 15 9 5 4 3 2 8"
    assert [f.num_reports for f in FAMILIES.values()] == [int(n) for n in counts.split()]
    assert sum(f.num_reports for f in FAMILIES.values()) == NUM_REPORTS


def test_a_share_says_of_how_many():
    assert share("A") == "17 of 172 public reports"


@pytest.mark.parametrize("detail", DETAILS.values(), ids=lambda d: d.key)
def test_every_detail_says_what_to_do_and_what_would_refute_it(detail):
    assert detail.key == f"{detail.family}/{detail.name}"
    assert detail.name == detail.name.upper()
    assert detail.family in FAMILIES
    for text in (detail.title, detail.refuter, detail.cure):
        assert text
        assert not text.endswith(".")


def test_names_of_details_are_unique():
    assert len({d.name for d in DETAILS.values()}) == len(DETAILS)
