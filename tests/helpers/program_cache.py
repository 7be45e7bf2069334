"""The folder in which the tests keep compiled programs between runs, and between clones."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jaxlib

from kvjax.core.compile_cache import cache_directory

MAX_BYTES = 2 * 10**9


def folder() -> Path:
    """Returns the folder for this processor and jaxlib in $KVJAX_TEST_CACHE, or in `tests` of kvjax' cache directory.

    JAX finds a program by a digest of the program itself, so an old one is never taken for a changed one. Not every
    jaxlib tells processors apart by that digest, and code that was compiled for one may not run on another.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.platform()]
    kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))} or set(lines[:1]))
    processor = hashlib.sha256("\n".join(kind).encode()).hexdigest()[:12]
    base = Path(os.environ.get("KVJAX_TEST_CACHE") or cache_directory() / "tests")
    return base / f"jaxlib-{jaxlib.__version__}-{processor}"


def remove_oldest(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Removes the programs that were written first until the others take less than `max_bytes`.

    JAX's own limit reads the whole folder for each program that it adds.
    """
    files = [(file.stat(), file) for file in folder.glob("*") if file.is_file()]
    num_bytes = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda entry: entry[0].st_mtime):
        if num_bytes <= max_bytes:
            break
        file.unlink()
        num_bytes -= stat.st_size
