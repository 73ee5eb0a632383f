"""Which facts make which cause: one explicit rule a cause, no weights and nothing learned.

A cause is *shown* when every fact that it ``requires`` holds, every fact that it ``excludes`` is known not to
hold, and none of ``against`` holds. A fact that no test could establish is unknown: it shows nothing and
excludes nothing, so a missing test can leave a cause open but cannot make another one right. A name with
"not " before it in ``against`` counts when the fact is known not to hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Literal

from firetower.lab.discriminate.step import Fact

Standing = Literal["shown", "open", "excluded"]

UPSTREAM = (
    "state_left_over", "state_nonfinite_at_start", "state_position_wrong", "rows_swapped", "slot_mismatch",
    "reads_stale_row", "evicted_in_use", "overwritten_before_use", "law_broken",
)  # fmt: skip
"""Facts that give an op wrong operands: no cause in the op itself is blamed where one of them holds."""


COMMON = frozenset(
    ("operands_finite", "wider_finite", "wide_field_finite", "logits_finite", "wrong_always", "after_verify",
     "after_transfer", "changed_weight_is_read", "weight_zeroed", "zero_denominator")
)  # fmt: skip
"""Facts that many causes share: alone they make no cause a candidate."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The rule of one detail (``core.families``); ``rank`` orders causes that are shown together.

    What lies further upstream has the lower rank: a bad weight before the overflow that it leads to.
    """

    key: str
    requires: tuple[str, ...]
    excludes: tuple[str, ...] = ()
    against: tuple[str, ...] = ()

    def standing(self, facts: Mapping[str, Fact]) -> Standing:
        """Shown, open or excluded by what is known."""
        if self.speaks_against(facts):
            return "excluded"
        required = all(n in facts and facts[n].holds for n in self.requires)
        excluded = all(n in facts and not facts[n].holds for n in self.excludes)
        return "shown" if required and excluded else "open"

    def speaks_against(self, facts: Mapping[str, Fact]) -> list[Fact]:
        """The facts that rule it out."""
        return [facts[n] for n, holds in _against(self) if n in facts and facts[n].holds is holds]

    def speaks_for(self, facts: Mapping[str, Fact]) -> list[Fact]:
        """The required facts that hold."""
        return [facts[n] for n in self.requires if n in facts and facts[n].holds]

    def is_candidate(self, facts: Mapping[str, Fact]) -> bool:
        """Whether something speaks for it that does not speak for everything."""
        return any(f.name not in COMMON for f in self.speaks_for(facts))

    def unknown(self, facts: Mapping[str, Fact]) -> list[str]:
        """Names of the facts that are still missing, required ones first."""
        return [n for n in (*self.requires, *self.excludes) if n not in facts]


@cache
def _against(cause: Cause) -> tuple[tuple[str, bool], ...]:
    """(fact, value) that rule a cause out."""
    return (
        *((n, False) for n in cause.requires),
        *((n, True) for n in cause.excludes),
        *((n.removeprefix("not "), not n.startswith("not ")) for n in cause.against),
    )


def _cause(key: str, requires: str, excludes: str = "", against: tuple[str, ...] = ()) -> Cause:
    return Cause(key=key, requires=tuple(requires.split()), excludes=tuple(excludes.split()), against=against)


CAUSES: tuple[Cause, ...] = (
    _cause("M/TRUNCATED", "weight_truncated"),
    _cause("K/WEIGHT_MUTATED", "weight_changed change_is_run changed_weight_is_read",
           against=("change_is_one_bit", "not reloading_cures")),
    _cause("U/SINGLE_BIT", "weight_changed change_is_one_bit changed_weight_is_read other_device_cures"),
    _cause("M/BAD_WEIGHT", "weight_nonfinite op_reads_bad_weight", "weight_changed",
           against=("not bad_for_zero_inputs",)),
    _cause("M/ZEROED", "weight_zeroed op_reads_zero_weight", "weight_changed"),
    _cause("E/STATE_NOT_CLEARED", "state_nonfinite_at_start fresh_state_cures"),
    _cause("E/STALE_STATE_FINITE", "state_left_over", "state_nonfinite_at_start",
           against=("not fresh_state_cures",)),
    _cause("Q/STATE_KEPT_PAST_ACCEPTED", "state_position_wrong after_verify whole_window_kept",
           against=("not drafts_off_cures", "after_transfer")),
    _cause("Q/STATE_READ_AT_WRONG_COLUMN", "state_position_wrong after_verify", "whole_window_kept",
           against=("not drafts_off_cures", "after_transfer")),
    _cause("R/LAST_TOKEN_REAPPLIED", "state_position_wrong after_transfer gap_is_one",
           against=("not cold_cures", "after_verify")),
    _cause("R/STATE_LOST_IN_TRANSFER", "state_altered after_transfer", "state_position_wrong",
           against=("not cold_cures",)),
    _cause("R/STATE_LOST_IN_TRANSFER", "state_position_wrong after_transfer", "gap_is_one",
           against=("not cold_cures", "after_verify")),
    _cause("F/PAD_TOKENS_IN_STATE", "state_position_wrong gap_is_pads", "after_verify after_transfer"),
    _cause("F/STATE_POSITION_MISMATCH", "state_position_wrong", "after_verify after_transfer gap_is_pads"),
    _cause("F/ROW_STATE_SWAP", "rows_swapped", against=("state_position_wrong",)),
    _cause("D/STALE_GRAPH_ROW", "reads_stale_row zeroing_cures", against=("wrong_sometimes",)),
    _cause("D/BUFFER_OVERWRITTEN_BEFORE_USE", "overwritten_before_use wrong_always"),
    _cause("C/PADS_IN_SHARED_SCALE", "fills_differ reduces_over_pads", "reads_stale_row"),
    _cause("C/UNINIT_READ", "fills_differ", "reads_stale_row reduces_over_pads"),
    _cause("C/UNINIT_READ", "reads_unwritten fills_differ", "reads_stale_row reduces_over_pads"),
    _cause("L/EVICTED_IN_USE", "evicted_in_use"),
    _cause("L/EXPERT_SLOT_MISMATCH", "slot_mismatch", "evicted_in_use", against=("not misses_cure",)),
    _cause("L/UNWRITTEN_DST_ROW", "destination_unwritten", "slot_mismatch"),
    _cause("J/RACE_OR_STALE_PAIR", "law_broken operands_lawful"),
    _cause("J/RACE_SUSPECTED", "wrong_sometimes serial_is_clean", "fills_differ"),
    _cause("T/POSITION_ROUNDED", "positions_wrong"),
    _cause("S/PARTIAL_MISSING", "part_missing", against=("not one_rank_cures",)),
    _cause("S/PARTIAL_DOUBLED", "part_doubled", against=("not one_rank_cures",)),
    _cause("B/SCALE_OVERFLOW", "quant_field_overflows wide_field_finite", against=("weight_changed",)),
    _cause("B/SCALE_MISCALIBRATED", "scale_saturates", "quant_field_overflows"),
    _cause("I/DECAY_GATE_INF_TIMES_0", "exp_of_weight inf_meets_zero", against=("weight_changed",)),
    _cause("I/EXP_BEFORE_MASK", "inf_only_where_masked", "exp_of_weight"),
    _cause("I/DELTA_RULE_UNSTABLE", "gain_over_two state_grows"),
    _cause("I/DELTA_RULE_UNSTABLE", "gain_over_two grows_with_time"),
    _cause("I/STATE_PRECISION", "decay_rounds_to_one", "state_grows",
           against=("state_left_over", "state_position_wrong", "rows_swapped")),
    _cause("G/EMPTY_SPLIT_MERGE", "empty_split"),
    _cause("G/FULLY_MASKED_ROW", "row_all_neg_inf", "empty_split"),
    _cause("G/OOB_SCORE_SETS_ROWMAX", "rowmax_outside", "row_all_neg_inf"),
    _cause("P/ZERO_OUTPUT", "zero_output", "op_reads_zero_weight",
           against=("destination_unwritten", "wrong_sometimes")),
    _cause("H/ROUTER_RENORM_0_OVER_0", "zero_denominator renormalises_gates",
           "rowmax_outside row_all_neg_inf zero_output op_reads_zero_weight", against=UPSTREAM),
    _cause("H/NORM_EPSILON_LOST", "zero_denominator epsilon_lost",
           "rowmax_outside row_all_neg_inf zero_output op_reads_zero_weight renormalises_gates", against=UPSTREAM),
    _cause("H/DIVISION_BY_ZERO", "zero_denominator operands_finite",
           "rowmax_outside row_all_neg_inf zero_output op_reads_zero_weight renormalises_gates "
           "epsilon_lost empty_split",
           against=(*UPSTREAM, "quant_field_overflows")),
    _cause("A/OVERFLOW_ACTIVATION", "first_is_inf operands_finite wider_finite wider_exceeds",
           "operands_absurd quant_field_overflows exp_of_weight inf_only_where_masked grows_with_time "
           "positions_wrong zero_denominator",
           against=(*UPSTREAM, "gain_over_two", "weight_changed", "fills_differ", "eager_cures")),
    _cause("A/UPSTREAM_INF", "inf_into_norm",
           "inf_maker_seen op_reads_bad_weight",
           against=(*UPSTREAM, "fills_differ", "reads_unwritten", "quant_field_overflows",
                    "weight_nonfinite")),
    _cause("O/COMPARE_MASK_AS_FLOAT", "eager_cures bits_all_ones",
           "exact_bucket_cures reads_stale_row fills_differ",
           against=("weight_nonfinite",)),
    _cause("O/COMPILED_DIFFERS", "eager_cures wrong_always",
           "exact_bucket_cures reads_stale_row fills_differ bits_all_ones zero_output"),
    _cause("P/KERNEL_WRONG", "operands_finite other_backend_cures wider_finite",
           "wider_exceeds zero_output fills_differ reads_stale_row quant_field_overflows row_all_neg_inf "
           "zero_denominator inf_only_where_masked eager_cures wrong_sometimes",
           against=UPSTREAM),
    _cause("N/EMPTY_MASK", "mask_is_empty logits_finite"),
    _cause("N/NAN_LAUNDERED", "nan_row_sampled"),
    _cause("N/NAN_LAUNDERED", "value_laundered"),
)  # fmt: skip
"""Every rule, furthest upstream first; a detail may have several."""
