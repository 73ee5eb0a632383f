from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import firetower.cli.main as cli
from firetower.core.errors import FiretowerError


@pytest.fixture
def command(monkeypatch):
    """Replace the commands by one, ``probe``, whose ``run`` the test chooses."""

    def install(run):
        module = SimpleNamespace(__doc__="Probe the frame.\n\nMore.", configure=lambda parser: None, run=run)
        monkeypatch.setattr(cli, "command_names", lambda: ["probe"])
        monkeypatch.setattr(cli, "load_command", lambda name: module)

    return install


@pytest.mark.parametrize("code", [0, 3])
def test_the_commands_exit_code_is_passed_on(command, code):
    command(lambda args: code)
    assert cli.main(["probe"]) == code


def raising(error):
    def run(args):
        raise error

    return run


def test_an_error_for_the_user_is_one_line_and_exit_1(command, capsys):
    command(raising(FiretowerError("path=x: no such file; check the name")))
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr().err == "firetower: path=x: no such file; check the name\n"


def test_an_internal_error_is_one_line_that_names_the_way_to_more(command, capsys):
    command(raising(KeyError("boom")))
    assert cli.main(["probe"]) == 1
    err = capsys.readouterr().err
    assert err == "firetower: internal error: KeyError: 'boom' (run with --debug for the traceback)\n"


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
@pytest.mark.parametrize("error", [FiretowerError("x"), KeyError("x")])
def test_debug_lets_errors_through(command, arguments, error):
    command(raising(error))
    with pytest.raises(type(error)):
        cli.main(arguments)


def test_an_interrupt_is_quiet(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "firetower: interrupted\n"


def test_a_misspelt_variable_is_refused_before_anything_runs(command, capsys, monkeypatch):
    command(lambda args: pytest.fail("ran"))
    monkeypatch.setenv("FIRETOWER_STOER", "x")
    assert cli.main(["probe"]) == 1
    assert "FIRETOWER_STOER: unknown environment variable; known: FIRETOWER_STORE" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["bits"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(arguments)
    assert e.value.code == 2
    assert "usage: firetower" in capsys.readouterr().err


def test_help_lists_every_command_with_its_summary(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    for name in cli.command_names():
        assert f"\n    {name}" in out
    assert "Read the bits of a NaN" in out


def test_the_docstring_is_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bits", "--help"])
    assert "16 are float64, 8 are float32" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys):
    from importlib.metadata import version

    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"firetower {version('firetower')}\n"


def test_a_reader_that_leaves_early_causes_no_noise():
    """``firetower bits ... | head -1``: the pipe is closed while we write."""
    command = [sys.executable, "-m", "firetower.cli.main", "bits", *["7fd6e000"] * 2000]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (0, b"")
