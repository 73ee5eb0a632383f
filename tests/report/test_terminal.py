"""The same on the terminal."""

from __future__ import annotations

from firetower.lab.across import across
from firetower.report import FireView, analysis_lines, campaign_lines, fire_lines, fires_lines


def test_one_fire(view):
    lines = fire_lines(view)
    text = "\n".join(lines)
    assert lines[0] == "NaN first at layer 12 down (model.layers.12.mlp.down_proj)"
    [row] = [line for line in lines if line.startswith("     12 ")]
    assert row.split() == ["12", ".", ".", ".", "*1", "2", "."]
    assert "refuted if: the weight is finite" in text
    assert "rival K/WEIGHT_MUTATED, open" in text
    assert "777001" not in text
    assert "secret" not in text
    assert "777001" in "\n".join(fire_lines(view, with_content=True))


def test_all_fires(make_fire):
    fires = [make_fire(), make_fire()]
    lines = fires_lines([FireView(fire=f) for f in fires], across(fires))
    assert lines[0] == "2 fires"
    assert "      2  NaN first at layer 12 down (SmolLM2-135M-Instruct)" in lines
    assert any(line.startswith("Hypotheses x evidence") for line in lines)


def test_the_table_has_a_sign_for_each_observation(make_fire):
    analysis = across([make_fire() for _ in range(4)])
    lines = analysis_lines(analysis)
    [row] = [line for line in lines if line.startswith("  M ")]
    signs = row.split("  favoured")[0].split("  open")[0].split("  weakened")[0].split()[1:]
    assert len(signs) == len(analysis.observations)
    assert set(signs) <= {"+", "-", "x", "."}


def test_a_campaign(campaign):
    text = "\n".join(campaign_lines(campaign))
    assert "base (as captured): 6 fires in 40 tries" in text
    assert "eager (eager=true)" in text
