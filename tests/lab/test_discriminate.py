"""Single discriminating tests at their edges: what they must not conclude."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.core.families import FAMILIES
from firetower.lab.discriminate import STEPS
from firetower.lab.discriminate.causes import Cause
from firetower.lab.discriminate.look import Look
from firetower.lab.discriminate.step import Fact, fact
from firetower.lab.discriminate.values import raw_bits, relative_error, root, type_max
from firetower.lab.subject import (
    Collective,
    Event,
    Op,
    Outcome,
    Quantised,
    Request,
    Rows,
    Sampled,
    State,
    Switch,
    Weight,
    array,
    hash_of,
)
from firetower.lab.subjects.given import GivenSubject


def facts_of(step_name: str, **parts: Any) -> dict[str, Fact]:
    """The facts that one test establishes on a subject of these parts."""
    [step] = [s for s in STEPS if s.name == step_name]
    look = Look(GivenSubject(**parts), num_replays=20)
    assert all(look.has(p) for p in step.needs)
    found = {f.name: f for f in step.run(look)}
    assert set(found) <= set(step.facts)
    return found


def outcome(*values: float, **fields: Any) -> Outcome:
    return Outcome(outputs=(array("y", np.float32(values)),), **fields)


class TestValues:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("aten.mul.Tensor", "mul"), ("aten.add_.Tensor", "add"), ("exp", "exp"),
            ("aten._softmax.default", "softmax"),
            ("aten::mm", "mm"), ("np.matmul", "matmul"), ("aten._to_copy.default", "to_copy"),
        ],
    )  # fmt: skip
    def test_the_root_of_an_op_name(self, name, expected):
        assert root(Op(name=name)) == expected

    @given(st.integers(0, 2**32 - 1))
    def test_raw_bits_of_float32(self, bits):
        x = array("x", np.array([bits], np.uint32).view(np.float32))
        assert int(raw_bits(x)[0]) == bits

    @given(st.integers(0, 2**16 - 1))
    def test_raw_bits_of_bfloat16_widened_to_float32(self, bits):
        x = array("x", np.array([bits << 16], np.uint32).view(np.float32), "bfloat16")
        assert int(raw_bits(x)[0]) == bits

    def test_the_largest_value_is_that_of_the_stored_type(self):
        assert type_max(array("x", np.float16([1]))) == 65504
        assert type_max(array("x", np.float32([1]), "float8_e4m3fn")) == 448
        assert type_max(array("x", np.float32([1]), "bfloat16")) == pytest.approx(3.39e38, rel=1e-3)

    def test_a_place_finite_in_one_only_is_an_infinite_error(self):
        a, b = array("a", [1.0, np.inf]), array("b", [1.0, 2.0])
        assert relative_error(a, b) == float("inf")
        assert relative_error(a, a) == 0


class TestWeights:
    def test_scattered_changes_are_no_run(self):
        then = np.zeros(8, np.float32)
        now = then.copy()
        now[[1, 5]] = 1
        found = facts_of("weights-vs-load", weights=[Weight(name="w", now=array("w", now), at_load=array("w", then))])
        assert found["weight_changed"].holds
        assert not found["change_is_run"].holds
        assert not found["change_is_one_bit"].holds

    def test_hashes_alone_tell_that_and_not_where(self):
        found = facts_of("weights-vs-load", weights=[Weight(name="w", hash_now="a", hash_at_load="b")])
        assert set(found) == {"weight_changed"}

    def test_a_weight_without_hashes_leaves_it_unknown(self):
        known = Weight(name="v", hash_now="a", hash_at_load="a")
        assert facts_of("weights-vs-load", weights=[known, Weight(name="w")]) == {}

    def test_a_zero_bias_is_no_zeroed_weight(self):
        bias, matrix = array("b", np.zeros(4)), array("w", np.zeros((2, 2)))
        assert not facts_of("weights-sound", weights=[Weight(name="b", now=bias)])["weight_zeroed"].holds
        assert facts_of("weights-sound", weights=[Weight(name="w", now=matrix)])["weight_zeroed"].holds


class TestStates:
    def test_negative_zeros_are_fresh(self):
        value = np.full((2, 2), -0.0, np.float32)
        s = State(name="S", value=array("S", value), hash_now=hash_of(value),
                  expected_hash=hash_of(-value), is_fresh_expected=True)  # fmt: skip
        assert not facts_of("state-content", states=[s])["state_left_over"].holds

    def test_old_tags_on_a_fresh_state_prove_nothing(self):
        s = State(name="S", is_fresh_expected=True, owner="a", expected_owner="b", position=9, expected_position=0)
        found = facts_of("state-tags", states=[s])
        assert not found["state_position_wrong"].holds
        assert not found["rows_swapped"].holds

    def test_untagged_states_leave_it_unknown(self):
        assert facts_of("state-tags", states=[State(name="S")]) == {}

    def test_an_order_that_fits_no_better_is_no_swap(self):
        parts = {
            "states": [State(name="S"), State(name="T")],
            "run": lambda r: outcome(5, 5),
            "recompute_rows": lambda order: array("y", np.float32(order)),
        }
        assert not facts_of("state-order", **parts)["rows_swapped"].holds


class TestUnread:
    def test_an_outcome_that_differs_from_itself_says_nothing_about_fills(self):
        order = {switch: i for i, switch in enumerate((None, *Switch))}

        def run(request: Request) -> Outcome:
            return outcome(float(np.random.default_rng((request.number, order[request.switch])).random()))

        assert facts_of("two-fills", run=run, switches=[Switch.FILL_A, Switch.FILL_B]) == {}

    def test_runs_that_go_alike_whatever_the_content_are_not_told_by_it(self):
        """A schedule decides each run, and the same ones come with either fill."""

        def run(request: Request) -> Outcome:
            return outcome(float(np.random.default_rng(request.number).random()))

        assert not facts_of("two-fills", run=run, switches=[Switch.FILL_A, Switch.FILL_B])["fills_differ"].holds

    def test_places_that_are_read_without_harm_are_no_finding(self):
        """Pad rows of the output hold what is in the pads: the request is right all the same."""

        def run(request: Request) -> Outcome:
            return outcome({Switch.FILL_A: 1.0, Switch.FILL_B: -3.0}.get(request.switch, 7.0), is_wrong=False)

        assert facts_of("two-fills", run=run, switches=[Switch.FILL_A, Switch.FILL_B]) == {}

    def test_clean_pads_of_an_earlier_step_that_are_not_read(self):
        rows = Rows(name="b", step=2, is_valid=(True, False), written_at=(2, 1), is_read=(True, False))
        assert not facts_of("rows-written", valid_rows=[rows])["reads_stale_row"].holds

    def test_a_valid_row_written_earlier_is_no_stale_one(self):
        """A KV page: its rows are of earlier steps, and valid."""
        rows = Rows(name="kv", step=9, is_valid=(True, True), written_at=(3, 9))
        assert not facts_of("rows-written", valid_rows=[rows])["reads_stale_row"].holds

    def test_a_reduction_for_each_row_takes_in_no_pads(self):
        x = array("x", np.ones((4, 8)))
        per_row = Op(name="amax", inputs=(x,), outputs=(array("y", np.ones(4)),))
        whole = Op(name="amax", inputs=(x,), outputs=(array("y", np.ones(())),))
        rows = [Rows(name="b", step=0, is_valid=(True, True, True, False))]
        assert not facts_of("rows-reduced", valid_rows=rows, first_bad_op=per_row)["reduces_over_pads"].holds
        assert facts_of("rows-reduced", valid_rows=rows, first_bad_op=whole)["reduces_over_pads"].holds


class TestOps:
    def test_zeros_of_zero_operands_are_right(self):
        x, w = np.ones((2, 4)), np.zeros((4, 4))
        op = Op(name="mm", inputs=(array("x", x),), weights=(array("w", w),), outputs=(array("y", x @ w),))
        assert not facts_of("zero-output", first_bad_op=op)["zero_output"].holds

    def test_one_dead_row_of_a_product_is_found(self):
        x, w = np.ones((3, 4)), np.ones((4, 5))
        y = x @ w
        y[1] = 0
        op = Op(name="mm", inputs=(array("x", x),), weights=(array("w", w),), outputs=(array("y", y),))
        found = facts_of("zero-output", first_bad_op=op)["zero_output"]
        assert found.holds
        assert "row 1" in found.statement

    def test_a_row_with_one_key_is_not_masked_entirely(self):
        scores = np.float32([[-np.inf, 1], [-np.inf, -np.inf]])
        op = Op(name="softmax", inputs=(array("s", scores[:1]),), outputs=(array("p", scores[:1]),))
        assert not facts_of("masked-rows", first_bad_op=op)["row_all_neg_inf"].holds

    def test_a_row_of_values_that_is_all_minus_inf_is_no_masked_row(self):
        """Garbage in one slot of a V page burns every row of the output, not the slot's."""
        p, v = np.ones((2, 3)), np.float32([[1, 1], [-np.inf, -np.inf], [1, 1]])
        y = np.full((2, 2), np.nan)
        op = Op(name="matmul", inputs=(array("p", p), array("v", v)), outputs=(array("y", y),))
        assert not facts_of("masked-rows", first_bad_op=op)["row_all_neg_inf"].holds

    def test_zeros_that_no_operand_explains_leave_it_unknown(self):
        made = Op(name="new_zeros", inputs=(array("x", np.ones(4)),), outputs=(array("y", np.zeros(4)),))
        op = Op(name="rsqrt", inputs=made.outputs, outputs=(array("r", np.full(4, np.inf)),), producers=(made,))
        assert facts_of("zero-output", first_bad_op=op) == {}

    def test_integers_read_as_floats_are_no_rounded_positions(self):
        mask = np.array([[-1, 0]], np.int32)
        op = Op(name="aten.view.dtype", inputs=(array("m", mask),), outputs=(array("f", mask.view(np.float32)),))
        assert facts_of("angles", first_bad_op=op) == {}

    def test_an_exponential_that_is_infinite_where_it_is_used(self):
        e = np.full((2, 2), np.inf)
        op = Op(name="exp", inputs=(array("x", np.full((2, 2), 900.0)),), outputs=(array("e", e),))
        found = facts_of("exponential", first_bad_op=op)
        assert not found["inf_only_where_masked"].holds
        assert not found["exp_of_weight"].holds

    def test_ordinary_softmax_is_shifted_by_its_own_maximum(self):
        z = np.float32([[0, -3], [-1, 0]])
        op = Op(name="exp", inputs=(array("z", z),), outputs=(array("e", np.exp(z)),))
        assert not facts_of("row-maximum", first_bad_op=op)["rowmax_outside"].holds

    def test_growth_needs_turns_and_a_rate(self):
        slow = Op(name="add", history_absmax=(1.0, 1.1, 1.2, 1.1, 1.3))
        assert not facts_of("growth", first_bad_op=slow)["grows_with_time"].holds
        fast = Op(name="add", history_absmax=tuple(10.0**i for i in range(8)))
        assert facts_of("growth", first_bad_op=fast)["grows_with_time"].holds


class TestDeclared:
    def test_an_input_that_was_bad_already_is_no_overflow_of_the_scale(self):
        q = Quantised(
            name="k", sink="kv", block_size=2, fields=(array("scale", [np.inf]),), original=array("k", [np.inf, 1])
        )
        assert not facts_of("quantised-fields", quantised=[q])["quant_field_overflows"].holds

    def test_clipping_a_few_outliers_is_no_miscalibration(self):
        x = np.ones(100)
        x[:5] = 100
        q = Quantised(name="v", sink="kv", block_size=100, fields=(array("scale", [0.1]),), original=array("v", x),
                      max_code=127.0, is_static=True)  # fmt: skip
        assert not facts_of("saturation", quantised=[q])["scale_saturates"].holds

    def test_a_right_collective(self):
        parts = (array("p", np.ones(3)), array("q", np.full(3, 2.0)))
        c = Collective(name="c", parts=parts, result=array("s", np.full(3, 3.0)))
        assert not any(f.holds for f in facts_of("collectives", collectives=[c]).values())


class TestOrder:
    def test_an_eviction_after_the_read_is_fine(self):
        events = [Event(kind=k, what="expert 1", step=2) for k in ("need", "load", "read", "evict")]
        assert not facts_of("order-of-events", events=events)["evicted_in_use"].holds

    def test_an_eviction_in_another_step_is_fine(self):
        events = [Event(kind="evict", what="expert 1", step=1), Event(kind="need", what="expert 1", step=2)]
        assert not facts_of("order-of-events", events=events)["evicted_in_use"].holds


class TestSampler:
    def test_banned_logits_of_minus_inf_are_legal(self):
        row = Sampled(row=0, logits=array("l", [-np.inf, 1.0]), token_id=1)
        found = facts_of("sampler-row", sampled=[row])
        assert not found["nan_row_sampled"].holds
        assert found["logits_finite"].holds

    def test_a_row_that_raised_was_not_laundered(self):
        row = Sampled(row=0, logits=array("l", [np.nan, 1.0]), token_id=None)
        assert not facts_of("sampler-row", sampled=[row])["nan_row_sampled"].holds

    def test_a_bad_value_that_reaches_the_output_was_not_laundered(self):
        parts = {"launderers": ["where at a.py:1"], "run": lambda r: outcome(np.nan)}
        assert not facts_of("launderers", **parts)["value_laundered"].holds


class TestReplays:
    def test_the_rate_comes_with_its_interval(self):
        def run(request: Request) -> Outcome:
            return outcome(1.0, is_wrong=request.number == 3)

        found = facts_of("replays", run=run)
        assert found["wrong_sometimes"].holds
        # Clopper and Pearson for 1 of 20
        assert "1 of 20 replays are wrong (rate 0.050, 95% 0.001 to 0.249)" in found["wrong_sometimes"].statement

    def test_outcomes_that_nobody_can_judge_say_nothing(self):
        assert facts_of("replays", run=lambda r: outcome(1.0)) == {}


class TestLook:
    def test_finite_outputs_are_judged_by_the_reference(self):
        def reference(dtype: str, what: str) -> Any:
            return (array("y", np.float32([1, 1])),) if what == "outputs" else None

        look = Look(GivenSubject(run=lambda r: outcome(1, 1.5), reference=reference))
        assert look.is_wrong(look.outcome())
        near = Look(GivenSubject(run=lambda r: outcome(1, 1.001), reference=reference))
        assert near.is_wrong(near.outcome()) is False

    def test_without_a_reference_a_finite_run_is_not_judged(self):
        look = Look(GivenSubject(run=lambda r: outcome(1.0)))
        assert look.is_wrong(look.outcome()) is None

    def test_a_switch_cures_nothing_where_nothing_is_wrong(self):
        look = Look(GivenSubject(run=lambda r: outcome(1.0, is_wrong=False), switches=[Switch.EAGER]))
        assert look.cures(Switch.EAGER) is None

    def test_bits_are_compared_only_where_clean_runs_keep_them(self):
        a, b = outcome(1.0), outcome(1.0 + 1e-6)
        assert Look(GivenSubject(clean_twin_bit_stable=False)).same(a, b)
        assert not Look(GivenSubject(clean_twin_bit_stable=True)).same(a, b)


class TestCause:
    RULE = Cause(key="A/X", requires=("a", "b"), excludes=("c",), against=("d", "not e"))

    def known(self, **facts: bool) -> dict[str, Fact]:
        return {n: fact(n, holds, n) for n, holds in facts.items()}

    @pytest.mark.parametrize(
        ("facts", "standing"),
        [
            ({}, "open"),
            ({"a": True, "b": True}, "open"),
            ({"a": True, "b": True, "c": False}, "shown"),
            ({"a": True, "b": True, "c": True}, "excluded"),
            ({"a": False}, "excluded"),
            ({"a": True, "b": True, "c": False, "d": True}, "excluded"),
            ({"a": True, "b": True, "c": False, "d": False}, "shown"),
            ({"a": True, "b": True, "c": False, "e": False}, "excluded"),
            ({"a": True, "b": True, "c": False, "e": True}, "shown"),
        ],
    )
    def test_unknown_facts_neither_show_nor_exclude(self, facts, standing):
        assert self.RULE.standing(self.known(**facts)) == standing

    def test_what_is_missing_is_named(self):
        assert self.RULE.unknown(self.known(a=True)) == ["b", "c"]


def test_a_family_letter_stands_before_every_detail():
    from firetower.lab.discriminate.causes import CAUSES

    assert all(c.key[0] in FAMILIES and c.key[1] == "/" for c in CAUSES)
