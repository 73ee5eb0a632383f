"""The families of causes, A to V, and the details within them: what each means, spoils and takes to cure.

Drawn from 172 public reports of LLM inference that went non-finite or degenerate, 63 of them on models with a
recurrent state. ``num_reports`` says how often a family was met there: a prior, never evidence.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from firetower.core.verdict import UNDECIDED, Retriable, Scope

NUM_REPORTS = 172
"""Public reports that the families were drawn from; some reports show two faults, or none of these alone."""

Role = Literal["ignition", "persistence", "aftermath"]
"""``ignition`` makes a first bad value, ``persistence`` keeps one alive, ``aftermath`` handles one badly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One class of causes. ``signature`` is what an observer sees of it."""

    letter: str
    name: str
    title: str
    num_reports: int
    meaning: str
    signature: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One cause within a family.

    ``title`` is a clause that can follow "because". ``refuter`` is the observation that would overturn it,
    ``cure`` the cheapest remedy.
    """

    family: str
    name: str
    title: str
    refuter: str
    cure: str
    scope: Scope
    retriable: Retriable
    role: Role = "ignition"

    @property
    def key(self) -> str:
        """``FAMILY/DETAIL``."""
        return f"{self.family}/{self.name}"


def _family(letter: str, name: str, num_reports: int, title: str, meaning: str, signature: str) -> Family:
    return Family(
        letter=letter,
        name=name,
        title=title,
        num_reports=num_reports,
        meaning=meaning,
        signature=signature,
    )


_FAMILIES = (
    _family("A", "overflow", 17, "activation overflow",
            "fp16 or bf16 overflow in an activation, product or accumulator",
            "first bad is an Inf, in an op whose inputs and weights are finite; few channels, the same ones "
            "across tokens; NaN at the next norm or residual"),
    _family("B", "scale", 8, "scale overflow",
            "a quantisation scale or sum overflows, is wrong or mis-calibrated",
            "whole blocks of 32, 64 or 128 values bad at once while the inputs are finite; or saturation "
            "without any NaN"),
    _family("C", "uninitialised", 11, "uninitialised read",
            "scratch, padding rows or fresh KV pages read before they were written",
            "NaN or absurd finite values that differ from run to run, with all declared inputs finite; the "
            "places lie beyond the valid length"),
    _family("D", "stale", 8, "stale graph buffer",
            "a CUDA-graph buffer or workspace holds an earlier step's rows, or moved",
            "eager or the exact bucket is clean, the padded bucket is bad; the bad value is one of an "
            "earlier step"),
    _family("E", "not-cleared", 11, "state not cleared",
            "recurrent or KV state outlives its request",
            "clean until one fire, then every request on that slot is bad from its first token"),
    _family("F", "wrong-state", 6, "wrong state",
            "another row's, position's or checkpoint's state",
            "plausible, then wrong; depends on lengths or co-batching; fp32 does not help"),
    _family("G", "empty-row", 6, "empty row",
            "softmax or split merge over nothing",
            "NaN first, without an Inf before it, in whole query rows; depends on shapes, deterministic"),
    _family("H", "zero-division", 4, "division by zero",
            "router renormalisation, norms, guards that multiply",
            "one token row, all of its routing weights NaN together; or a norm of a zero vector"),
    _family("I", "recurrence", 8, "recurrence numerics",
            "numerics of gated or linear attention",
            "in a linear-attention layer: Inf above the diagonal of a chunk, a state that grows, or quality "
            "that decays with every step"),
    _family("J", "race", 15, "race",
            "missing synchronisation",
            "same inputs, different outcome; serialising cures it, so may a probe"),
    _family("K", "wild-write", 4, "wild write",
            "out-of-bounds write, address wrap",
            "a weight or another request's buffer changes after load: a contiguous run, permanent"),
    _family("L", "expert-slot", 7, "expert slot",
            "expert cache, slot, offload",
            "routed-expert rows only; hit and miss rows differ; depends on the history of the cache, not on "
            "the seed"),
    _family("M", "bad-weight", 5, "bad weight",
            "file corrupt or truncated, NaN block scales",
            "the same output columns bad for every token that reaches the tensor, from the first request, "
            "on every device; even for zero inputs"),
    _family("N", "sampler", 8, "sampler or guard",
            "sampler, grammar mask or guard mishandles NaN or an empty row",
            "the token id is 0, the vocabulary size, a block's last lane; only that type of request"),
    _family("O", "compiler", 8, "compiler",
            "Inductor, Triton autotune, code generation",
            "eager and compiled differ on the same inputs, graphs and caches ruled out"),
    _family("P", "kernel", 15, "kernel",
            "a kernel is wrong for a shape or an architecture",
            "finite in, NaN or all zeros out of one op; not monotone in the sizes; another backend is right"),
    _family("Q", "verify", 9, "speculative verify",
            "the speculative verify path",
            "clean with drafts off; acceptance exactly 0 or 1, or normal while text loses tokens"),
    _family("R", "transfer", 5, "state transfer",
            "KV or state transfer and offload",
            "only after a transfer or a restore: cold is right, served from cache is not"),
    _family("S", "collective", 4, "collective",
            "all-reduce, expert-parallel combine",
            "one rank's part missing or doubled, finite; one rank alone is clean"),
    _family("T", "rope", 3, "positions",
            "RoPE tables, positions",
            "wrong from a certain position on; positions rounded by a narrow type"),
    _family("U", "hardware", 2, "hardware",
            "a single-bit difference on one device",
            "one device only, one bit off the stored weight, mostly finite"),
    _family(UNDECIDED, "undecided", 8, "undecided",
            "the evidence stops",
            "nothing that was seen tells the remaining causes apart"),
)  # fmt: skip

FAMILIES: dict[str, Family] = {f.letter: f for f in _FAMILIES}
"""Every family by its letter."""


def _detail(
    key: str,
    title: str,
    refuter: str,
    cure: str,
    scope: Scope,
    retriable: Retriable,
    role: Role = "ignition",
) -> Detail:
    family, name = key.split("/")
    return Detail(
        family=family,
        name=name,
        title=title,
        refuter=refuter,
        cure=cure,
        scope=scope,
        retriable=retriable,
        role=role,
    )


_DETAILS = (
    _detail("A/OVERFLOW_ACTIVATION", "a value left the range of its type",
            "the op recomputed in a wider type is not finite, or stays below the type's maximum",
            "compute or store this op in bfloat16 or float32", "request", "no"),
    _detail("A/UPSTREAM_INF", "a norm was given an Inf that something before it made",
            "the input of the norm is finite",
            "look at the op that writes the norm's input", "request", "no"),
    _detail("B/SCALE_OVERFLOW", "a field of a quantised block overflowed while the values fit",
            "the same block with a float32 field is still not finite",
            "saturate the field, or keep it in float32", "request", "no"),
    _detail("B/SCALE_MISCALIBRATED", "a fixed scale is too small for the values: they saturate",
            "the real values fit the range of the scale",
            "calibrate on real traffic, or compute the scale per step", "engine", "no"),
    _detail("C/UNINIT_READ", "memory that nobody wrote is read",
            "filling the unread places with two different finite values leaves the output as it was",
            "clear the buffer when it is allocated; exclude the places by selection, not by weight 0",
            "request", "yes"),
    _detail("C/PADS_IN_SHARED_SCALE", "unwritten pad rows take part in a reduction over real rows",
            "filling the pad rows with two different finite values leaves the real rows as they were",
            "reduce over the valid rows only, or zero the pads first", "request", "yes"),
    _detail("D/STALE_GRAPH_ROW", "a row of an earlier step is read in this one",
            "zeroing the rows beyond the valid ones before the step changes nothing",
            "zero the rows beyond the valid ones before each replay, or run eagerly", "engine", "yes"),
    _detail("D/BUFFER_OVERWRITTEN_BEFORE_USE", "a buffer is overwritten before its reader ran",
            "one buffer for each writer gives the same wrong result",
            "give each chunk its own buffer, or consume before the next write", "request", "no"),
    _detail("E/STATE_NOT_CLEARED", "a state was not cleared by assignment before a new request got it",
            "zeros assigned to the state, the same request is still bad",
            "assign zeros to the state at request start (a product with zero keeps NaN)", "slot", "no",
            "persistence"),
    _detail("E/STALE_STATE_FINITE", "a request started on the finite state of an earlier one",
            "the hash of the state at request start is that of a fresh state",
            "assign zeros to the state at request start", "slot", "yes", "persistence"),
    _detail("F/STATE_POSITION_MISMATCH", "the state belongs to another position than the request says",
            "the position tag equals the request's count of tokens",
            "store the position with the state and refuse a mismatch; recompute from the prompt",
            "prefix", "yes"),
    _detail("F/PAD_TOKENS_IN_STATE", "pad tokens were run through the recurrence",
            "the state counts as many tokens as there are valid ones",
            "mask decay and beta on pads, or do not pad recurrent layers", "request", "no"),
    _detail("F/ROW_STATE_SWAP", "rows were given each other's state",
            "each row's state carries the tag of the row's own request",
            "gather the states by the live rows' ids", "request", "yes"),
    _detail("G/FULLY_MASKED_ROW", "a softmax row has no key that it may look at",
            "the same row with one allowed key is still NaN",
            "answer 0 for a row without keys, or let a row see itself", "request", "no"),
    _detail("G/EMPTY_SPLIT_MERGE", "an empty split was merged as if it had keys",
            "the merge without the empty split is still NaN",
            "skip splits whose maximum is -inf", "request", "no"),
    _detail("G/OOB_SCORE_SETS_ROWMAX", "the maximum of a softmax row lies outside its valid keys",
            "the maximum of the row is attained at a valid key",
            "mask before taking the maximum", "request", "no"),
    _detail("H/ROUTER_RENORM_0_OVER_0", "the chosen routing weights sum to exactly 0",
            "the sum of the chosen weights is not 0",
            "renormalise from logits (softmax over the chosen), or add a floor", "request", "no"),
    _detail("H/NORM_EPSILON_LOST", "a norm's epsilon is 0 in its type and the vector is 0 too",
            "the epsilon as stored is not 0, or the vector is not 0",
            "compute the norm in float32", "request", "no"),
    _detail("H/DIVISION_BY_ZERO", "an op divides by an exact 0",
            "the divisor is not 0",
            "give the quotient a defined answer at 0", "request", "no"),
    _detail("I/EXP_BEFORE_MASK", "exp is taken of values that a mask discards afterwards",
            "the values that overflow are at places which the mask keeps",
            "mask first, then exp", "request", "no"),
    _detail("I/DECAY_GATE_INF_TIMES_0", "a decay gate multiplies exp(weight) = Inf by 0",
            "exp of the weight is finite",
            "compute the gate in the log domain; check the checkpoint's A_log", "request", "no"),
    _detail("I/DELTA_RULE_UNSTABLE", "the delta rule grows: beta times the squared key norm exceeds 2",
            "beta times the squared key norm is at most 2 at every step",
            "normalise the keys", "request", "no"),
    _detail("I/STATE_PRECISION", "the state's type cannot hold the decay: it rounds to 1",
            "the decay as stored differs from 1 wherever the gate is not 0",
            "keep state and decay in float32", "engine", "no"),
    _detail("J/RACE_OR_STALE_PAIR", "two operands of one op are of different steps",
            "the law holds for the operands as one step left them, or breaks for them too",
            "order the two writes before the read", "request", "yes"),
    _detail("J/RACE_SUSPECTED", "the same inputs end differently, and not so when serialised",
            "serial mode fails too",
            "serialise the two kernels until the missing wait is found", "request", "yes"),
    _detail("K/WEIGHT_MUTATED", "a weight was overwritten after load",
            "the weight's hash equals the one at load",
            "load the weights again; find the writer of the buffer that ends where the run begins",
            "engine", "no"),
    _detail("L/EXPERT_SLOT_MISMATCH", "a slot holds another expert than the map says",
            "the slot's hash is that of the expert in the map",
            "invalidate the slot, load the expert again", "engine", "yes"),
    _detail("L/EVICTED_IN_USE", "an expert was evicted inside the forward that needed it",
            "no expert needed by the forward is evicted in it",
            "protect the experts of the running forward from eviction", "request", "yes"),
    _detail("L/UNWRITTEN_DST_ROW", "a routed row's destination was never written",
            "poisoned destinations do not show in the output",
            "check that the destination plan covers every row", "request", "yes"),
    _detail("M/BAD_WEIGHT", "a weight is non-finite as loaded",
            "the weight is finite, or its op is finite for zero inputs",
            "download or convert the file again", "file", "no"),
    _detail("M/ZEROED", "a weight is all zeros as loaded",
            "the weight has a non-zero element",
            "download or convert the file again", "file", "no"),
    _detail("M/TRUNCATED", "the file is shorter than its header says",
            "the file has as many bytes as its header declares",
            "download the file again", "file", "no"),
    _detail("N/NAN_LAUNDERED", "a NaN row was turned into an ordinary token",
            "the logits of the row are finite",
            "raise on a non-finite row before sampling", "request", "unknown", "aftermath"),
    _detail("N/EMPTY_MASK", "a grammar mask allows no token at all",
            "the mask of the row allows a token",
            "raise on an empty mask; let end-of-sequence pass", "request", "no"),
    _detail("O/COMPARE_MASK_AS_FLOAT", "a comparison's all-ones mask is read as a float",
            "eager is bad too, or the bits are not all ones",
            "run this graph eagerly; compare as integers", "engine", "no"),
    _detail("O/COMPILED_DIFFERS", "compiled code differs from eager on the same inputs",
            "eager is bad too",
            "run this graph eagerly", "engine", "no"),
    _detail("P/ZERO_OUTPUT", "an op answers zeros for finite, non-zero operands",
            "the op recomputed by another backend is zero too",
            "use another backend for this shape", "request", "no"),
    _detail("P/KERNEL_WRONG", "an op is wrong for finite operands that another backend handles",
            "another backend gives the same bad result",
            "use another backend for this shape", "request", "no"),
    _detail("Q/STATE_KEPT_PAST_ACCEPTED", "the state was kept after drafts that were rejected",
            "the position tag equals the accepted count, or drafts off is wrong too",
            "commit the state of the last accepted token; drafts off until then", "request", "yes"),
    _detail("Q/STATE_READ_AT_WRONG_COLUMN", "the state of another column of the window was committed",
            "the position tag equals the accepted count, or drafts off is wrong too",
            "index the window's states by accepted - 1; drafts off until then", "request", "yes"),
    _detail("R/LAST_TOKEN_REAPPLIED", "a restored, complete state was fed its last token again",
            "the position tag after the restore equals the request's count of tokens",
            "start after the last token that the state holds", "prefix", "yes"),
    _detail("R/STATE_LOST_IN_TRANSFER", "a state arrived otherwise than it was sent",
            "the hash on arrival is the one at sending",
            "verify a hash on arrival; recompute from the prompt", "prefix", "yes"),
    _detail("S/PARTIAL_MISSING", "a collective left one rank's part out",
            "the result is the sum of all parts",
            "order the collective after its producers", "request", "yes"),
    _detail("S/PARTIAL_DOUBLED", "a collective took one rank's part twice",
            "the result is the sum of all parts",
            "reduce once", "request", "yes"),
    _detail("T/POSITION_ROUNDED", "positions are rounded by a type that cannot hold them",
            "the positions as used equal the exact ones",
            "compute positions and angles in float32", "request", "no"),
    _detail("U/SINGLE_BIT", "one bit of a stored weight differs, on this device only",
            "another device shows the same difference",
            "load again; test the device", "engine", "yes"),
)  # fmt: skip

DETAILS: dict[str, Detail] = {d.key: d for d in _DETAILS}
"""Every detail by ``FAMILY/DETAIL``."""


def share(letter: str) -> str:
    """How often a family was met in public: ``17 of 172 public reports``."""
    return f"{FAMILIES[letter].num_reports} of {NUM_REPORTS} public reports"
