"""Compiled programs: cached on disk, and dropped from memory when there are too many."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import jax

MAX_MAPPINGS = 30_000
"""Memory mappings of a process beyond which all compiled programs are dropped; each program has several.

Linux allows 65,530, and a compiler that gets no more of them ends the process.
"""


def cache_directory() -> Path:
    """The directory of files that can be made again: $KVJAX_CACHE, or kvjax in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVJAX_CACHE") or Path(base) / "kvjax")


def use_compilation_cache(directory: Path | None = None) -> None:
    """Caches compiled programs in `directory`, by default `cache_directory()`.

    Without a directory, one that JAX has been given already stays, and KVJAX_COMPILATION_CACHE=0 turns the cache off.
    """
    if directory is None:
        if jax.config.values["jax_compilation_cache_dir"] or os.environ.get("KVJAX_COMPILATION_CACHE") == "0":
            return
        directory = cache_directory()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX leaves out programs that compile in less than a second: most of those of a small model.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def clear_compiled() -> None:
    """Drops every compiled program; the next call of each compiles it again."""
    jax.clear_caches()
    # Reference circles can hold programs, and the memory mappings go only with the programs.
    gc.collect()


def clear_if_many(mappings: int | None = None) -> None:
    """Drops every compiled program if the process holds more memory mappings than `mappings` (MAX_MAPPINGS)."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > (MAX_MAPPINGS if mappings is None else mappings):
        clear_compiled()
