"""Text that grows token by token: whole characters, stop strings that come in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firetower.engine.text import TextStream


class Bytes:
    """A token a byte; decoding replaces what is no whole character, as byte-level tokenizers do."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


@given(st.text(max_size=30), st.data())
def test_the_parts_are_the_whole_and_never_half_a_character(text, data):
    stream, ids = TextStream(Bytes()), Bytes().encode(text)
    parts = []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        parts.append(stream.push(ids[:count]))
        del ids[:count]
    parts.append(stream.finish())
    assert "".join(parts) == stream.text == text


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text, stops):
    stream = TextStream(Bytes(), stops)
    shown = ""
    for i, token in enumerate(Bytes().encode(text)):
        shown += stream.push([token])
        ended = any(stop in text[: i + 1] for stop in stops)
        assert stream.is_stopped == ended
        if ended:
            break
    shown += stream.finish()
    first_end = next((end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)), None)
    if first_end is None:
        assert shown == text
    else:
        assert shown == text[: min(text[:first_end].find(s) for s in stops if s in text[:first_end])]


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(Bytes(), ["STOP"])
    assert [stream.push([ord(c)]) for c in "aSTa"] == ["a", "", "", "STa"]
    assert [stream.push([ord(c)]) for c in "ST"] == ["", ""]
    assert stream.finish() == "ST"
    assert stream.text == "aSTaST"


def test_half_a_character_at_the_end_is_shown_as_what_it_is():
    stream = TextStream(Bytes())
    assert stream.push([0xE2]) == ""
    assert stream.push([0x82]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("stop", ["ab", "b"])
def test_nothing_comes_after_a_stop(stop):
    stream = TextStream(Bytes(), [stop])
    stream.push(list(b"xab"))
    assert stream.is_stopped
    assert stream.push(list(b"more")) == ""
    assert stream.finish() == ""
