from __future__ import annotations

from collections import Counter

import pytest
from small_model.corpus import SOURCES, Source, clean, documents, is_held_out
from small_model.html_text import text_of_html
from small_model.package import LICENCES
from small_model.prepare import definitions_of, words_of

LONG = "A paragraph that is long enough to be known again when it comes a second time, on another page."


def source(*pairs):
    return Source(package="p", licence="public domain", notice="", read=lambda root: iter(pairs))


def test_a_paragraph_is_kept_once(tmp_path):
    other = LONG.replace("A paragraph", "Another one") * 3
    found = dict(documents(source(("a", f"{LONG} {LONG}\n\n{LONG}"), ("b", f"{LONG}\n\n{other}")), tmp_path, Counter()))
    assert found == {"p/a": f"{LONG} {LONG}\n\n{LONG}", "p/b": other}


def test_what_comes_on_every_page_goes(tmp_path):
    pages = [(str(i), f"Home | Index\n\n{i} {LONG * 3}") for i in range(40)]
    texts = [t for _, t in documents(source(*pages), tmp_path, Counter())]
    assert sum("Home" in t for t in texts) == 30


def test_short_documents_are_left_out(tmp_path):
    assert list(documents(source(("a", "too short")), tmp_path, Counter())) == []


def test_one_document_in_twenty_is_held_out():
    assert 0.04 < sum(is_held_out(f"p/{i}") for i in range(5000)) / 5000 < 0.06


def test_no_source_is_under_a_copyleft():
    assert len({s.package for s in SOURCES}) == len(SOURCES) == 8
    for s in SOURCES:
        assert not any(word in s.licence for word in ("GPL", "GFDL", "CC-BY-SA")), s
        assert s.notice or "public domain" in s.licence, s


@pytest.mark.parametrize("words", ["under CC-BY-SA v4.0", "Attribution-ShareAlike", "GNU Free Documentation License"])
def test_a_document_under_a_share_alike_licence_is_refused(tmp_path, words):
    with pytest.raises(ValueError, match=r"p/a: says .*leave it out"):
        list(documents(source(("a", f"{LONG * 3}\n\nThe prose is {words}.")), tmp_path, Counter()))


def test_a_licence_that_asks_for_a_notice_has_its_text():
    assert {s.package for s in SOURCES if s.notice} == {f.stem for f in LICENCES.glob("*.txt")}


def test_typography_becomes_ascii():
    assert clean("“a” – b…  \n\n\n\n c\u00a0d ") == '"a" - b...\n\nc d'


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>one\n two<p>three", "one two\n\nthree"),
        ("<div class='a menu'>gone<p>gone</div>kept", "kept"),
        ("<nav><ul><li>gone</ul></nav><p>kept</p>", "kept"),
        ("<script>x < 1</script>a&amp;b<br>c", "a&b c"),
        ("<ul><li><p>a</p></li><li>b</li></ul>", "- a\n\n- b"),
        ("<pre>x =  1\n  y</pre>z", "x =  1\n  y\n\nz"),
        ("</div>stray<img class=menu>after", "strayafter"),
    ],
)
def test_html(page, text):
    assert clean(text_of_html(page)) == text


def test_words_are_counted():
    assert words_of(["abc ABC abc don't x1y", "abc de word"], minimum=3) == ["abc"]


def test_definitions():
    jargon = (
        "foo\n /foo/\n\n    [from {bar}] A word that is used as an example of a name for\n    absolutely anything.\n"
    )
    devil = "ABSURDITY, n.  A statement or belief manifestly inconsistent with one's own\nopinion, as people say."
    found = definitions_of([("dict-jargon/1", jargon), ("dict-devil/1", devil), ("rust-doc/x", jargon)])
    assert found == [
        ("foo", "[from bar] A word that is used as an example of a name for absolutely anything."),
        ("absurdity", "A statement or belief manifestly inconsistent with one's own opinion, as people say."),
    ]
