from __future__ import annotations

from pathlib import Path

import pytest

from firetower.core.config import ENVIRONMENT, cache_folder, check_environment, data_folder, store_path
from firetower.core.errors import ConfigError


@pytest.fixture
def clean(monkeypatch):
    for name in [*ENVIRONMENT, "XDG_DATA_HOME", "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_folders_follow_the_desktop_convention(clean):
    assert data_folder() == Path.home() / ".local/share/firetower"
    assert cache_folder() == Path.home() / ".cache/firetower"
    clean.setenv("XDG_DATA_HOME", "/x/data")
    clean.setenv("XDG_CACHE_HOME", "/x/cache")
    assert (data_folder(), cache_folder()) == (Path("/x/data/firetower"), Path("/x/cache/firetower"))


def test_own_variables_win_over_the_convention(clean):
    clean.setenv("XDG_DATA_HOME", "/x/data")
    clean.setenv("FIRETOWER_DATA", "~/mine")
    assert data_folder() == Path.home() / "mine"
    assert store_path() == Path.home() / "mine" / "fires.sqlite"
    clean.setenv("FIRETOWER_STORE", "/y/store.sqlite")
    assert store_path() == Path("/y/store.sqlite")


def test_known_variables_pass_and_a_misspelt_one_is_refused():
    check_environment(dict.fromkeys(ENVIRONMENT, "x") | {"PATH": "/bin", "XFIRETOWER_A": "x"})
    with pytest.raises(
        ConfigError, match="FIRETOWER_STOR: unknown environment variable; known: FIRETOWER_STORE"
    ):
        check_environment({"FIRETOWER_STOR": "x"})


def test_tests_have_their_own_data_folder(own_data_folder):
    assert data_folder() == own_data_folder
    assert not own_data_folder.exists()
