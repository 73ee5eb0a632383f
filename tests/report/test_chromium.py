"""Pages in a real browser: rendered light, dark, narrow and printed, with the script running and its policy kept."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from firetower.core.records import Signal
from firetower.lab.across import across
from firetower.report import FireView, campaign_html, fire_html, fires_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]


def chromium(tmp_path: Path, page: str, *arguments: str) -> str:
    """Run the browser on a page with a profile of its own; returns its stdout."""
    assert CHROMIUM is not None
    source = tmp_path / "page.html"
    source.write_text(page, encoding="ascii", errors="xmlcharrefreplace")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments, source.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Content Security Policy" not in done.stderr
    return done.stdout


def shot(tmp_path: Path, page: str, *arguments: str, width: int = 1200, height: int = 1600) -> tuple[int, int, bytes]:
    """(width, height, first pixel) of a screenshot."""
    target = tmp_path / "shot.png"
    chromium(tmp_path, page, f"--window-size={width},{height}", f"--screenshot={target}", *arguments)
    data = target.read_bytes()
    size = struct.unpack(">II", data[16:24])
    packed, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    # the first pixel of the first row is stored as it is under every filter
    return size[0], size[1], zlib.decompress(packed)[1:4]


def test_light_and_dark_differ_and_are_what_they_say(tmp_path, view):
    page = fire_html(view)
    _, _, light = shot(tmp_path, page)
    _, _, dark = shot(tmp_path, page, "--force-dark-mode")
    assert min(light) > 230
    assert max(dark) < 60


def test_the_script_runs_under_the_policy_and_hostile_names_do_not(tmp_path, make_fire):
    bad = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    fires = [make_fire(model=bad, origin=Signal(stage=bad, layer=2), notes=(bad,)) for _ in range(3)]
    page = fires_html([FireView(fire=f) for f in fires], analysis=across(fires), store=bad)
    dom = chromium(tmp_path, page, "--dump-dom")
    assert 'class="js"' in dom, "our script did not run: its hash is not the policy's"
    assert "<title>Fires</title>" in dom
    assert "<img" not in dom


def test_a_script_that_is_not_ours_is_refused(tmp_path, view):
    page = fire_html(view).replace("<h1>", "<script>document.title='pwned'</script><h1>")
    assert CHROMIUM is not None
    source = tmp_path / "page.html"
    source.write_text(page, encoding="ascii", errors="xmlcharrefreplace")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", source.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<title>pwned" not in dom
    assert 'class="js"' in dom


def test_a_narrow_page_is_no_wider_than_its_window(tmp_path, view):
    width, _, _ = shot(tmp_path, fire_html(view), width=500, height=900)
    assert width == 500


def test_print_has_everything_also_what_is_folded(tmp_path, view, campaign, make_fire):
    if shutil.which("pdftotext") is None:
        pytest.skip("needs pdftotext (apt-get install poppler-utils)")
    fires = [make_fire() for _ in range(3)]
    pages = {
        "fire": (fire_html(view), ("NaN first at layer 12 down", "Rivals", "Environment")),
        "fires": (
            fires_html([FireView(fire=f) for f in fires], analysis=across(fires)),
            ("Each hypothesis in words", "recompute the first"),
        ),
        "campaign": (campaign_html(campaign), ("The arms differ", "share of tries still clean")),
    }
    for name, (page, wanted) in pages.items():
        pdf = tmp_path / f"{name}.pdf"
        chromium(tmp_path, page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
        text = subprocess.run(["pdftotext", "-layout", pdf, "-"], capture_output=True, text=True, check=True).stdout
        flat = " ".join(text.split())
        assert all(" ".join(w.split()) in flat for w in wanted), (name, wanted)
