"""The child process that makes tries: ``python -m firetower.lab.replay.worker``.

One JSON document a line. On stdin: the target, then requests. On stdout: ``{"ready": true}`` or ``{"error": text}``,
then one result for each request. The end of stdin ends the process. What the target itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import IO

from firetower.core.codec import dumps
from firetower.core.errors import FiretowerError
from firetower.lab.replay.request import ReplayRequest
from firetower.lab.replay.schema import record_from_dict
from firetower.lab.replay.targets import TargetSpec, open_runner

_LOOK_S = 1.0


def serve(lines: Iterable[str], answers: IO[str]) -> None:
    """Open the target of the first line and run the request of every further one."""

    def answer(value: object) -> None:
        answers.write(dumps(value) + "\n")
        answers.flush()

    requests = iter(lines)
    try:
        runner = open_runner(record_from_dict(TargetSpec, json.loads(next(requests)), "target"))
    except FiretowerError as e:
        answer({"error": str(e)})
        return
    answer({"ready": True})
    try:
        for line in requests:
            answer(runner.run(record_from_dict(ReplayRequest, json.loads(line), "request")))
    finally:
        runner.close()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children: they notice, even in the middle of a try."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def main() -> None:
    """The child: results go to the real stdout; whatever else is printed there goes to stderr instead."""
    _end_with_parent()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            serve(sys.stdin, answers)
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(130)  # the parent is gone or going, and says so itself


if __name__ == "__main__":
    main()
