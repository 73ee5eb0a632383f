"""Stores over a fork: all of them pause and close their connections first.

SQLite keeps state of each open file in the process, which a child must not inherit, and a lock that another
thread holds would stay locked in the child for ever.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet


class Pausable(Protocol):
    """What holds a lock and maybe a connection."""

    def pause(self) -> None:
        """Wait for work in progress, keep new work out, close connections."""

    def resume(self) -> None:
        """Let work in again, in the thread that paused."""


_fork_lock = threading.Lock()
_outer: WeakSet[Pausable] = WeakSet()
_inner: WeakSet[Pausable] = WeakSet()
_paused: list[Pausable] = []


def pause_on_fork(target: Pausable, *, calls_others: bool = False) -> None:
    """Have ``target`` paused while this process forks; what calls other targets is paused before them."""
    (_outer if calls_others else _inner).add(target)


def _before() -> None:
    _fork_lock.acquire()
    for target in (*_outer, *_inner):
        target.pause()
        _paused.append(target)


def _after() -> None:
    while _paused:
        _paused.pop().resume()
    _fork_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
