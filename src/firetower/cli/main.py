"""Entry point of ``firetower``: finds the command modules, parses, runs one, turns errors into one line.

Exit codes: 0 fine, 1 user error, 2 usage, 3 a fire or a red gate.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

import firetower.cli
from firetower.core.config import check_environment
from firetower.core.errors import FiretowerError

EXIT_OK, EXIT_USER, EXIT_USAGE, EXIT_FIRE = 0, 1, 2, 3
_NOT_COMMANDS = {"main", "output"}


def command_names() -> list[str]:
    """Names of all commands, from the files of this room."""
    return sorted(m.name for m in pkgutil.iter_modules(firetower.cli.__path__) if m.name not in _NOT_COMMANDS)


def load_command(name: str) -> ModuleType:
    """Import one command module; it has a docstring, ``configure(parser)`` and ``run(args) -> int``."""
    return importlib.import_module(f"firetower.cli.{name}")


def build_parser() -> argparse.ArgumentParser:
    """The whole parser; command modules keep heavy imports inside ``run``."""
    parser = argparse.ArgumentParser(
        prog="firetower",
        description="Spots the first NaN or Inf of LLM inference, keeps the incident, says what to do next.",
        epilog="Exit codes: 0 fine, 1 user error, 2 usage, 3 a fire or a finding. "
        "Data goes to stdout, talk to stderr; every command takes --json.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in command_names():
        module = load_command(name)
        doc = (module.__doc__ or "").strip()
        sub = commands.add_parser(
            name,
            help=doc.splitlines()[0].rstrip("."),
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        module.configure(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never shows a traceback unless ``--debug``."""
    args = build_parser().parse_args(argv)
    try:
        check_environment()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except FiretowerError as e:
        if args.debug:
            raise
        print(f"firetower: {e}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("firetower: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our stdout went away (head, less): point stdout elsewhere so that exit stays quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as e:
        # the boundary of the program: one line for the user, all of it with --debug
        if args.debug:
            raise
        what = f"internal error: {type(e).__name__}: {e}"
        print(f"firetower: {what} (run with --debug for the traceback)", file=sys.stderr)
        return EXIT_USER


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that costs 20 ms, too much for every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"firetower {_version()}")
        parser.exit()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("firetower")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
