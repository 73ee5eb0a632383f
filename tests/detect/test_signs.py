"""Token ids, logprobs, empty answers, error texts; and what two signs make of each other."""

from __future__ import annotations

import math

import pytest

from firetower.core.errors import ConfigError
from firetower.detect import DetectConfig, Detector, Finding, FindingKind, Severity, StreamEvent, Usage
from firetower.detect.error_text import judge_error

K, S = FindingKind, Severity


def judge(*events: StreamEvent, config: DetectConfig | None = None) -> dict[FindingKind, Finding]:
    """Findings of one answer by kind."""
    detector = Detector(config)
    for event in events:
        detector.feed(event)
    detector.finish()
    found = {f.kind: f for f in detector.findings}
    assert len(found) == len(detector.findings)
    return found


TEXT = StreamEvent(text="a healthy beginning ")


def test_token_zero_in_a_row_warns_and_with_repetition_is_a_fire():
    assert judge(TEXT, StreamEvent(token_ids=(0,) * 15)) == {}
    found = judge(TEXT, StreamEvent(token_ids=(5, *(0,) * 16)))
    assert found[K.TOKEN_ZERO].severity is S.WARN
    assert (found[K.TOKEN_ZERO].position, found[K.TOKEN_ZERO].unit) == (1, "token")
    found = judge(TEXT, StreamEvent(token_ids=(0,) * 64))
    assert found[K.TOKEN_RUN].severity is S.FIRE
    assert "id 0" in found[K.TOKEN_RUN].reason


def test_another_token_in_a_row_warns_later_and_alone_is_a_fire_at_2048():
    assert judge(TEXT, StreamEvent(token_ids=(8191,) * 511)) == {}
    assert judge(TEXT, StreamEvent(token_ids=(8191,) * 512))[K.TOKEN_RUN].severity is S.WARN
    assert judge(TEXT, StreamEvent(token_ids=(8191,) * 2048))[K.TOKEN_RUN].severity is S.FIRE


def test_a_token_until_the_limit_is_a_fire():
    end = StreamEvent(finish_reason="length")
    assert judge(TEXT, StreamEvent(token_ids=(42,) * 64), end)[K.TOKEN_RUN].severity is S.FIRE
    assert judge(TEXT, StreamEvent(token_ids=(*(42,) * 64, 7)), end) == {}
    assert judge(TEXT, StreamEvent(token_ids=(42,) * 64), StreamEvent(finish_reason="stop")) == {}


def test_the_edge_of_the_vocabulary():
    config = DetectConfig(vocabulary_size=1000)
    found = judge(TEXT, StreamEvent(token_ids=(999,) * 8), config=config)
    assert found[K.TOKEN_EDGE].severity is S.WARN
    assert judge(TEXT, StreamEvent(token_ids=(999,) * 7), config=config) == {}
    for bad in (1000, -1, 2**31):
        found = judge(TEXT, StreamEvent(token_ids=(1, 2, bad, 3)), config=config)
        assert (found[K.TOKEN_EDGE].severity, found[K.TOKEN_EDGE].position) == (S.FIRE, 2)
    # without the size of the vocabulary only what no vocabulary has is known
    assert judge(TEXT, StreamEvent(token_ids=(1000,))) == {}
    assert judge(TEXT, StreamEvent(token_ids=(-1,)))[K.TOKEN_EDGE].severity is S.FIRE


@pytest.mark.parametrize(("value", "severity"), [(math.nan, S.FIRE), (math.inf, S.FIRE), (-math.inf, S.WARN)], ids=str)
def test_a_logprob_that_is_not_finite(value, severity):
    found = judge(TEXT, StreamEvent(logprobs=(-0.5, value, -0.1)))
    assert (found[K.LOGPROB_NONFINITE].severity, found[K.LOGPROB_NONFINITE].position) == (severity, 1)


def test_a_nan_after_minus_inf_is_the_one_that_is_told():
    found = judge(TEXT, StreamEvent(logprobs=(-math.inf, -1.0, math.nan)))
    assert (found[K.LOGPROB_NONFINITE].severity, found[K.LOGPROB_NONFINITE].position) == (S.FIRE, 2)


def test_a_nan_among_the_alternatives_is_a_fire_and_minus_inf_is_legal_there():
    bad = StreamEvent(logprobs=(-0.5,), top_logprobs=((-0.5, math.nan),))
    assert judge(TEXT, bad)[K.LOGPROB_NONFINITE].severity is S.FIRE
    banned = StreamEvent(logprobs=(-0.5,), top_logprobs=((-0.5, -math.inf),))
    assert judge(TEXT, banned) == {}


def test_a_null_logprob_warns_but_not_on_the_first_token_of_an_echo():
    assert judge(TEXT, StreamEvent(logprobs=(None, -1.0, -2.0))) == {}
    assert judge(TEXT, StreamEvent(logprobs=(None, None)))[K.LOGPROB_NULL].severity is S.WARN


def test_logprobs_at_minus_ln_v_are_flat():
    config = DetectConfig(vocabulary_size=151_936)
    v = -math.log(151_936)
    near = tuple(v + d for d in (0, 4e-4, -4e-4, 0, 0, 0, 0, 0))
    assert judge(TEXT, StreamEvent(logprobs=near), config=config)[K.LOGPROB_FLAT].severity is S.FIRE
    assert judge(TEXT, StreamEvent(logprobs=near[:7]), config=config) == {}
    # with the size unknown, any plausible one explains it
    found = judge(TEXT, StreamEvent(logprobs=(v,) * 8))
    assert found[K.LOGPROB_FLAT].severity is S.FIRE
    assert "151,936" in found[K.LOGPROB_FLAT].reason
    # with the size known, another value is not uniform
    assert judge(TEXT, StreamEvent(logprobs=(-8.0,) * 8), config=config) == {}


def test_logprobs_on_one_value_warn_and_certain_tokens_are_legal():
    assert judge(TEXT, StreamEvent(logprobs=(-2.5,) * 31)) == {}
    assert judge(TEXT, StreamEvent(logprobs=(-2.5,) * 32))[K.LOGPROB_FLAT].severity is S.WARN
    assert judge(TEXT, StreamEvent(logprobs=(0.0,) * 500)) == {}
    assert judge(TEXT, StreamEvent(logprobs=(-1e-6,) * 500)) == {}


def test_tied_alternatives_on_end_are_flat():
    tops = ((-3.2, -3.2, -3.2),) * 8
    chosen = tuple(-3.2 - i * 0.01 for i in range(8))
    found = judge(TEXT, StreamEvent(logprobs=chosen, top_logprobs=tops))
    assert found[K.LOGPROB_FLAT].severity is S.FIRE
    halves = ((-0.6931, -0.6931),) * 20
    assert judge(TEXT, StreamEvent(logprobs=(-0.6931,) * 20, top_logprobs=halves)) == {}


def test_a_logprob_above_zero_warns_and_rounding_does_not():
    assert judge(TEXT, StreamEvent(logprobs=(1e-7,))) == {}
    assert judge(TEXT, StreamEvent(logprobs=(0.5,)))[K.LOGPROB_ABOVE_ZERO].severity is S.WARN


def test_an_empty_answer():
    def empty(tokens=None, reason="stop", hidden=0, **config):
        usage = None if tokens is None else Usage(completion_tokens=tokens, reasoning_tokens=hidden)
        found = judge(StreamEvent(finish_reason=reason, usage=usage), config=DetectConfig(**config))
        return found[K.EMPTY].severity if found else None

    assert empty(16) is S.FIRE
    assert empty(16, "length") is S.FIRE
    assert empty(16, hides_reasoning=True) is S.WARN
    assert empty(None, "length") is S.WARN
    assert empty(7, "length") is S.WARN
    assert empty(1) is S.ADVISORY
    # all of it was hidden reasoning, and said so
    assert empty(500, "length", hidden=500) is None
    assert empty(500, "length", hidden=400) is S.FIRE


def test_reasoning_or_a_tool_call_is_not_empty():
    usage = Usage(completion_tokens=100)
    for field in ("reasoning", "tool_calls[0].name", "refusal"):
        assert judge(StreamEvent(field=field, text="x"), StreamEvent(finish_reason="length", usage=usage)) == {}


def test_tokens_over_all_choices_are_not_laid_to_one():
    detector = Detector()
    detector.feed(StreamEvent(choice=0, text="hello"))
    detector.feed(StreamEvent(choice=1, finish_reason="stop"))
    detector.feed(StreamEvent(usage=Usage(completion_tokens=50)))
    detector.finish()
    [finding] = detector.findings
    assert (finding.severity, finding.choice) == (S.ADVISORY, 1)


@pytest.mark.parametrize(
    "sign",
    [
        StreamEvent(logprobs=(-1.0, None)),
        StreamEvent(logprobs=(-11.93,) * 8),
        StreamEvent(token_ids=(0,) * 16),
        StreamEvent(token_ids=(-1,)),
    ],
    ids=["null", "flat", "zero", "outside"],
)
@pytest.mark.parametrize("sign_first", [True, False])
def test_a_second_sign_makes_repetition_a_fire(sign, sign_first):
    run = StreamEvent(text="!" * 40 + " ")
    alone = judge(run)
    assert alone == {}
    found = judge(sign, run) if sign_first else judge(run, sign)
    assert found[K.CHARACTER_RUN].severity is S.FIRE
    # in another choice it says nothing
    other = Detector()
    other.feed(sign)
    other.feed(StreamEvent(choice=1, text="!" * 40 + " "))
    other.finish()
    assert not any(f.kind is K.CHARACTER_RUN for f in other.findings)
    # and fill stays legal beside it
    assert K.CHARACTER_RUN not in judge(sign, StreamEvent(text="-" * 400 + " "))


FIRES = [
    "Out of range float values are not JSON compliant: nan",
    "Out of range float values are not JSON compliant",
    "probability tensor contains either `inf`, `nan` or element < 0",
    "RuntimeError: logits contain NaN",
    "NaN detected in logits of request 7",
    "found non-finite values in hidden states",
    "Unexpected token N in JSON at position 112",
    'Unexpected token \'N\', "..."logprob": NaN" is not valid JSON',
    "invalid character 'N' looking for beginning of value",
    "output tensor has NaN",
]
WARNS = [
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "Token id 151936 is out of vocabulary",
    "IndexError: index 50257 is out of bounds for dimension 0",
]
QUIET = [
    "Rate limit reached for gpt-x in organisation y",
    "This model's maximum context length is 4096 tokens",
    "invalid api key",
    "The model `nano-banana` does not exist",
    "informational: finance output is infinite fun",
    "",
]


@pytest.mark.parametrize("text", FIRES)
def test_errors_about_bad_numbers_are_fires(text):
    assert judge(StreamEvent(error=text))[K.ERROR_TEXT].severity is S.FIRE


@pytest.mark.parametrize("text", WARNS)
def test_errors_that_often_follow_warn(text):
    assert judge(StreamEvent(error=text))[K.ERROR_TEXT].severity is S.WARN


@pytest.mark.parametrize("text", QUIET)
def test_other_errors_are_advisories(text):
    assert judge_error(text) is None
    assert judge(StreamEvent(error=text))[K.ERROR_TEXT].severity is S.ADVISORY


def test_the_same_words_in_an_answer_are_no_finding():
    answer = " ".join(FIRES + WARNS)
    assert judge(StreamEvent(text=answer), StreamEvent(finish_reason="stop")) == {}


def test_an_error_explains_an_empty_answer():
    found = judge(StreamEvent(finish_reason="length"), StreamEvent(error="overloaded"))
    assert set(found) == {K.ERROR_TEXT}


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="run_warn=0"):
        DetectConfig(run_warn=0)
    with pytest.raises(ConfigError, match="vocabulary_size=1"):
        DetectConfig(vocabulary_size=1)


def test_more_choices_than_judged_are_said():
    detector = Detector()
    for i in range(200):
        detector.feed(StreamEvent(choice=i, text="x"))
    for i in range(100):
        detector.feed(StreamEvent(choice=0, field=f"tool_calls[{i}].arguments", text="y"))
    detector.finish()
    assert [f.kind for f in detector.findings] == [K.BROKEN_STREAM] * 2
