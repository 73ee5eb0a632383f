"""Streams: a thread that runs an engine's steps, and async iterators that take what it hands on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from firetower.engine.request import Delta, Sampling

if TYPE_CHECKING:
    from firetower.engine.engine import Engine


class Service:
    """Runs steps while there is something to do, and sleeps otherwise.

    Attributes:
        error: what stopped it, where something did.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Event()
        self._is_stopping = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="firetower-engine", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A request was submitted."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; returns when it has."""
        self._is_stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                if not self._engine.step():
                    self._wake.wait(timeout=0.5)
                    self._wake.clear()
            except Exception as e:  # noqa: BLE001 - kept for every stream that waits, which raises it
                self.error = e
                self._engine.fail_all(e)
                return


async def deltas(
    engine: Engine, prompt: str | Sequence[int], sampling: Sampling | None, request_id: str | None
) -> AsyncIterator[Delta]:
    """See `firetower.engine.engine.Engine.stream`."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Delta] = asyncio.Queue()

    def sink(delta: Delta) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.put_nowait, delta)

    service = engine.service()
    sequence = engine.submit(prompt, sampling, request_id=request_id, sink=sink)
    service.wake()
    try:
        while True:
            delta = await arrived.get()
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        engine.cancel(sequence)
