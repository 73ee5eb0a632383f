"""Environment variables, in one table, and the folders that follow from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from firetower.core.errors import ConfigError

ENVIRONMENT: dict[str, str] = {
    "FIRETOWER_STORE": "path of the fires store (default: fires.sqlite in the data folder)",
    "FIRETOWER_DATA": "data folder (default: $XDG_DATA_HOME/firetower, or ~/.local/share/firetower)",
    "FIRETOWER_OPS": "pins kernels of the op library to backends: rms_norm=torch,moe.down=triton",
    "FIRETOWER_API_KEY": "key that replay sends to an OpenAI-compatible server; never stored, never an argument",
    "FIRETOWER_CACHE": "cache folder for real weights that tests and the demo use "
    "(default: $XDG_CACHE_HOME/firetower, or ~/.cache/firetower)",
}
"""Every variable that firetower reads; an unknown FIRETOWER_* variable is an error."""


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse misspelt variables rather than ignoring them.

    Raises:
        ConfigError: a FIRETOWER_* variable that is not in `ENVIRONMENT`.
    """
    for name in os.environ if environ is None else environ:
        if name.startswith("FIRETOWER_") and name not in ENVIRONMENT:
            raise ConfigError(f"{name}: unknown environment variable; known: {', '.join(ENVIRONMENT)}")


def data_folder() -> Path:
    """Folder for the store; not created here."""
    return _folder("FIRETOWER_DATA", "XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """Folder for files that can be made again; not created here."""
    return _folder("FIRETOWER_CACHE", "XDG_CACHE_HOME", ".cache")


def store_path() -> Path:
    """Path of the fires store: ``FIRETOWER_STORE``, or fires.sqlite in the data folder."""
    override = os.environ.get("FIRETOWER_STORE")
    return Path(override).expanduser() if override else data_folder() / "fires.sqlite"


def _folder(name: str, xdg: str, fallback: str) -> Path:
    if override := os.environ.get(name):
        return Path(override).expanduser()
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / fallback) / "firetower"
