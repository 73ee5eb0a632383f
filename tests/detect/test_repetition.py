"""Repetition in text: what warns, what is a fire, and what stays silent."""

from __future__ import annotations

import base64
import json
import random

import pytest

from firetower.detect import DetectConfig, Detector, Finding, FindingKind, Severity, StreamEvent
from firetower.detect.text import is_data

PROSE = (
    "The tower stands where the ridge turns north; from its gallery a watcher sees four valleys. "
    "Smoke at dawn is mist until it moves against the wind.\n"
)


def judge(text: str, *, piece: int = 7, finish: str = "stop", config: DetectConfig | None = None) -> list[Finding]:
    """Findings of one text, streamed in pieces."""
    detector = Detector(config)
    for i in range(0, len(text), piece):
        detector.feed(StreamEvent(text=text[i : i + piece]))
    detector.feed(StreamEvent(finish_reason=finish))
    detector.finish()
    return detector.findings


@pytest.mark.parametrize("glyph", ["!", "/", "G", "@", "的", "�", "\x00", "🔥"], ids=ascii)
def test_a_glyph_until_the_token_limit_is_a_fire_whatever_it_is(glyph):
    [finding] = judge(PROSE + glyph * 400, finish="length")
    assert finding.severity is Severity.FIRE
    assert finding.kind is FindingKind.CHARACTER_RUN
    assert (finding.position, finding.count, finding.sample) == (len(PROSE), 400, glyph)


def test_one_glyph_with_spaces_until_the_limit_is_a_fire_and_words_are_not():
    [finding] = judge("G " * 400, finish="length")
    assert (finding.severity, finding.kind) == (Severity.FIRE, FindingKind.LOOP)
    [finding] = judge("G " * 400 + PROSE, finish="length")
    assert finding.severity is Severity.WARN
    [finding] = judge("the " * 600, finish="length")
    assert finding.severity is Severity.WARN


def test_repetition_alone_warns_and_says_why_it_does_not_prove():
    [finding] = judge("ok " + "!" * 200 + " and on it goes.")
    assert finding.severity is Severity.WARN
    assert (finding.position, finding.count, finding.field) == (3, 200, "content")
    assert "no proof" in finding.reason


@pytest.mark.parametrize("count", [2047, 2048, 2049])
def test_a_run_is_a_fire_from_2048_repeats_on(count):
    [finding] = judge("a" + "!" * count + "b", piece=64)
    assert finding.severity is (Severity.FIRE if count >= 2048 else Severity.WARN)
    assert finding.count == count


@pytest.mark.parametrize("count", [127, 128])
def test_a_run_warns_from_128_on(count):
    assert len(judge(PROSE + "!" * count + PROSE)) == (count >= 128)


@pytest.mark.parametrize("fill", ["=", "0", " ", "\n", "─", "A"], ids=ascii)
def test_fill_is_a_fire_at_2048_and_silent_below(fill):
    assert judge("x" + fill * 2047 + "y", finish="length") == []
    [finding] = judge("x" + fill * 2048 + "y")
    assert finding.severity is Severity.FIRE


def test_a_short_loop_is_a_fire_at_2048_repeats():
    [finding] = judge("la" * 2047 + "!")
    assert finding.severity is Severity.WARN
    [finding] = judge("la" * 2048 + "!")
    assert (finding.severity, finding.count) == (Severity.FIRE, 2048)


@pytest.mark.parametrize("period", [24, 100, 127, 128, 129, 500, 1000, 2048])
def test_a_passage_on_end_warns_with_its_place_and_count(period):
    rng = random.Random(period)
    passage = "".join(rng.choice("abcdefghij klmno") for _ in range(period))
    times = max(9, 2200 // period)
    [finding] = judge(PROSE + passage * times + "#end", piece=50)
    assert (finding.kind, finding.severity) == (FindingKind.LOOP, Severity.WARN)
    # the passage may happen to begin as the prose ends: then the loop is that much longer
    assert len(PROSE) - 2 <= finding.position <= len(PROSE)
    assert finding.count == times
    assert len(finding.sample) <= 80


def test_special_tokens_as_text_are_a_second_sign():
    for token in ("<unk>", "<|endoftext|>", "[PAD]"):
        [finding] = judge(PROSE + token * 150)
        assert (finding.kind, finding.severity) == (FindingKind.LOOP, Severity.FIRE)
        assert "special token" in finding.reason


def test_a_config_moves_the_limits():
    assert judge("abc" + "!" * 40 + "d") == []
    [finding] = judge("abc" + "!" * 40 + "d", config=DetectConfig(run_sign=8, run_warn=20, fire_repeats=40))
    assert finding.severity is Severity.FIRE


def test_each_field_and_choice_is_judged_by_itself():
    detector = Detector()
    for i in range(300):
        detector.feed(StreamEvent(choice=i % 2, field="reasoning" if i % 4 < 2 else "content", text="!"))
    detector.finish()
    # 75 each: together they would have warned
    assert detector.findings == []
    detector = Detector()
    for _ in range(200):
        detector.feed(StreamEvent(choice=3, field="tool_calls[0].arguments", text="!"))
    detector.finish()
    [finding] = detector.findings
    assert (finding.choice, finding.field) == (3, "tool_calls[0].arguments")


def test_feed_tells_each_finding_once_and_again_when_it_rises():
    detector = Detector()
    news = [f.severity for _ in range(3000) for f in detector.feed(StreamEvent(text="!"))]
    assert news == [Severity.WARN, Severity.FIRE]
    assert detector.is_fire
    assert detector.finish() == []
    assert detector.findings[0].count == 3000


CLEAN = {
    "markdown table": "| name | value | note |\n" + "|------|-------|------|\n" + "| --- | --- | --- |\n" * 40,
    "wide rule lines": ("=" * 200 + "\nTITLE\n" + "=" * 200 + "\n") * 3 + "-" * 1000,
    "json zeros": json.dumps({"mask": [0] * 1500, "w": [0.0] * 1000, "b": [False] * 800, "n": [None] * 600}),
    "matrix": "\n".join("[" + ", ".join("1.0" if i == j else "0.0" for j in range(40)) + "]" for i in range(40)),
    "base64 of zeros": base64.b64encode(bytes(1100) + bytes(range(256)) + bytes(700)).decode(),
    "hex dump": "\n".join(f"{i:08x}: " + "0000 " * 8 + "................" for i in range(0, 1600, 16)),
    "c array": "static const uint8_t t[] = {" + "0x00, " * 1000 + "};",
    "long whitespace": "a" + " " * 1500 + "b" + "\n" * 600 + "c" + "\t" * 900,
    "html table": "<table>" + "<tr>" + "<td></td>" * 500 + "</tr>" + "</table>",
    "csv": "a,b,c\n" + ",,,\n" * 500 + "N/A,N/A,N/A\n" * 100,
    "code": "".join(f"    if key == {i}:\n        return table[{i}]\n" for i in range(200)),
    "dots": "Chapter one" + "." * 300 + "12\n" + "Chapter two" + "." * 300 + "40\n",
    "song": ("When the night has fallen down\n" * 2 + "na na na na " * 8 + "\nhey\n\n") * 6,
    "refrain": "".join(
        f"Verse {i}: {word} walked along the shore and counted {i * 7} gulls.\nBlow the man down, bullies, "
        "blow the man down, to me way-hey, blow the man down.\n"
        for i, word in enumerate(("Anna", "Bert", "Cleo", "Dora", "Emil", "Fritz", "Gerd", "Hans") * 4)
    ),
    "bottles": "".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down, pass it around, "
        f"{n - 1} bottles of beer on the wall.\n"
        for n in range(99, 0, -1)
    ),
    "chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。哈哈哈哈哈哈哈哈！" * 5,
    "japanese": "".join(f"第{i}章　雨はまだ降っている。静かな町に鐘の音が響いた。\n" for i in range(120)),
    "laughter": "ha" * 60 + "!" * 30 + " oh " + "no" + "o" * 90,
    "separators": "*" * 80 + "\n" + "#" * 120 + "\n" + "_" * 100 + "\n" + "~" * 64,
    "box drawing": "┌" + "─" * 300 + "┐\n" + ("│" + " " * 300 + "│\n") * 5 + "└" + "─" * 300 + "┘",
    "long number": str(10**1500) + " " + "9" * 700,
    "diff": "".join(f"-    value = {i}\n+    value = {i + 1}\n" for i in range(150)),
}


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("name", CLEAN)
def test_legitimate_repetition_is_silent(name, finish):
    assert judge(CLEAN[name], finish=finish) == []


def test_a_clean_twin_turns_into_a_fire_when_the_glyph_takes_over():
    for text in CLEAN.values():
        found = judge(text + "!" * 300, finish="length")
        assert [f.severity for f in found] == [Severity.FIRE]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("0, ", True), (" 0,", True), ("rue, t", True), ("0x00, ", True), ("td></td><", True), ("N/A,", True),
     ("la ", False), ("!", False), ("unk><", False), ("// ", False), ("的", False), ("| --- ", True)],
)  # fmt: skip
def test_what_counts_as_data(unit, expected):
    assert is_data(unit) is expected


def test_many_warnings_do_not_hide_a_late_fire_and_memory_stays_bounded():
    text = "".join(chr(ord("a") + i % 26) * 140 + " " for i in range(100)) + "!" * 2048
    found = judge(text, piece=1000)
    assert sum(f.severity is Severity.WARN for f in found) == 16
    assert [f.sample for f in found if f.severity is Severity.FIRE] == ["!"]
