"""The text the small model learns: documents of Debian packages that are in the public domain or under a permissive
licence, downloaded by ``apt-get download`` and unpacked without being installed.

Nothing under a copyleft or share-alike licence is taken, so that the weights carry notices to keep and no other duty.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from small_model.html_text import text_of_html

HELD_OUT_ONE_IN = 20
"""One document in so many is held out, picked by a hash of its name."""

_ASCII = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\u00a0": " ", "\u200b": "", "¶": ""}
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One body of text: the package, its licence in words, and how its documents are read.

    Attributes:
        package: Debian package that holds the text.
        licence: the licence of the text, as the package's copyright file states it.
        notice: the notice that has to go with copies; empty for public domain.
        read: takes the folder of unpacked packages, yields (name, text) of every document.
        needs: further packages to unpack, read for their programs alone.
    """

    package: str
    licence: str
    notice: str
    read: Callable[[Path], Iterator[tuple[str, str]]]
    needs: tuple[str, ...] = ()


def _html(folder: str, *patterns: str, without: str = "$^") -> Callable[[Path], Iterator[tuple[str, str]]]:
    def read(root: Path) -> Iterator[tuple[str, str]]:
        base = root / folder
        for pattern in patterns:
            for path in sorted(base.glob(pattern)):
                if re.search(without, path.name):
                    continue
                yield f"{pattern}:{path.relative_to(base)}", text_of_html(path.read_text("utf-8", errors="replace"))

    return read


def _rst(root: Path) -> Iterator[tuple[str, str]]:
    base = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(base.rglob("*.rst.txt")):
        # the list of every change since 3.0 is bug numbers, not prose
        if path.name != "changelog.rst.txt":
            yield str(path.relative_to(base)), path.read_text("utf-8")


def _dictionary(name: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    def read(root: Path) -> Iterator[tuple[str, str]]:
        text = gzip.decompress((root / f"usr/share/dictd/{name}.dict.dz").read_bytes()).decode("utf-8")
        # an entry begins at the left edge; 20 in one document
        entries = re.split(r"\n\n(?=\S)", text)
        for i in range(0, len(entries), 20):
            yield f"{name}:{i}", "\n\n".join(entries[i : i + 20])

    return read


def _bible(root: Path) -> Iterator[tuple[str, str]]:
    command = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "gen1:1-rev22:21"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    chapters: dict[str, list[str]] = {}
    for line in lines:
        place, _, verse = line.partition(" ")
        chapters.setdefault(place.partition(":")[0], []).append(verse)
    for chapter, verses in chapters.items():
        yield chapter, "\n".join(verses)


_RUST = "usr/share/doc/rust-doc/html"
# not embedded-book: its prose is under CC BY-SA 4.0, whatever the package's copyright file says of all of src/doc
_RUST_BOOKS = ("book", "reference", "nomicon", "rust-by-example", "edition-guide", "rustc", "rustdoc")

_SHARE_ALIKE = re.compile(r"CC[ -]BY-SA|Share-?Alike|GNU Free Documentation License", re.I)

SOURCES = (
    Source(
        package="python3.11-doc",
        licence="PSF License Version 2; examples also under Zero-Clause BSD",
        notice="Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved",
        read=_rst,
    ),
    Source(
        package="postgresql-doc-15",
        licence="PostgreSQL License",
        notice="Portions Copyright (c) 1996-2022, PostgreSQL Global Development Group\n"
        "Portions Copyright (c) 1994, The Regents of the University of California",
        read=_html("usr/share/doc/postgresql-doc-15/html", "*.html"),
    ),
    Source(
        package="sqlite3-doc",
        licence="public domain",
        notice="",
        read=_html(
            "usr/share/doc/sqlite3",
            *("*.html", "c3ref/*.html", "session/*.html"),
            # indexes, lists of identifiers, and the pages of c3ref once more in one
            without="crossref|^requirements|^matrix|^capi3ref|^keyword_index|^toc|^sitemap",
        ),
    ),
    Source(
        package="python-django-doc",
        licence="BSD-3-Clause",
        notice="Copyright (c) Django Software Foundation and individual contributors",
        read=_html(
            "usr/share/doc/python-django-doc/html",
            *(f"{part}/**/*.html" for part in ("faq", "howto", "internals", "intro", "misc", "ref", "topics")),
        ),
    ),
    Source(
        package="rust-doc",
        licence="MIT or Apache-2.0, at the reader's choice",
        notice="Copyright (c) 2006-2009 Graydon Hoare\n"
        "Copyright (c) 2009-2012 Mozilla Foundation\n"
        "Copyright (c) 2012-2017 The Rust Project Developers",
        read=_html(_RUST, *(f"{book}/*.html" for book in _RUST_BOOKS), "rust-by-example/*/*.html", "std/*/index.html"),
    ),
    Source(package="dict-jargon", licence="public domain (Jargon File 4.4.7)", notice="", read=_dictionary("jargon")),
    Source(
        package="dict-devil",
        licence="public domain (The Devil's Dictionary, Ambrose Bierce, 1911)",
        notice="",
        read=_dictionary("devil"),
    ),
    Source(
        package="bible-kjv-text",
        licence="public domain (King James Version, 1611)",
        notice="",
        read=_bible,
        # the text is packed; the program that unpacks it is run and not learned
        needs=("bible-kjv",),
    ),
)


def unpack(source: Source, folder: Path) -> Path:
    """Download the packages of ``source`` and unpack them into a folder of their own, once.

    Raises:
        subprocess.CalledProcessError: apt-get or dpkg-deb failed; their words are on stderr.
    """
    target = folder / source.package
    if not target.exists():
        partial = folder / f"{source.package}.partial"
        partial.mkdir(parents=True, exist_ok=True)
        for package in (source.package, *source.needs):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
            [archive] = folder.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", str(archive), str(partial)], check=True)
        partial.rename(target)
    return target


def clean(text: str) -> str:
    """Typographic quotes, dashes and spaces in ASCII, no trailing blanks, at most one empty line in a row."""
    text = text.translate(_ASCII)
    text = re.sub(r"[ \t]+\n", "\n", text)
    # what is left of blanks between two tags
    text = re.sub(r"\n\n (?=\S)", "\n\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_held_out(name: str) -> bool:
    """Whether the document of this name is held out: a property of the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def documents(source: Source, root: Path, seen: Counter[bytes]) -> Iterator[tuple[str, str]]:
    """(name, text) of every document of ``source``, without paragraphs that came before.

    Args:
        source: the body of text.
        root: folder of its unpacked packages.
        seen: how often each paragraph was met so far, by its hash, over all sources; added to.

    Raises:
        ValueError: a document speaks of a share-alike licence: somebody has to read what it says before it is learned.
    """
    for name, raw in source.read(root):
        if (match := _SHARE_ALIKE.search(raw)) is not None:
            raise ValueError(f"{source.package}/{name}: says {match[0]!r}: read it, then leave it out of its Source")
        kept = []
        for paragraph in clean(raw).split("\n\n"):
            digest = hashlib.sha256(paragraph.encode()).digest()[:16]
            # a heading may come again; what comes on every page is a menu
            if seen[digest] < (1 if len(paragraph) >= 80 else 30):
                kept.append(paragraph)
            seen[digest] += 1
        text = "\n\n".join(kept)
        if len(text) >= 200:
            yield f"{source.package}/{name}", text
