"""Compiled programs: where they are kept on disk, and when those in memory are dropped."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import jax

MAX_MAPPINGS = 30_000
"""Memory mappings of a process, several to each compiled program, beyond which new programs replace all that there are.

Linux allows 65,530, and a compiler that gets no more ends the process.
"""


def cache_directory() -> Path:
    """Where what can be made again is kept: $KVJAX_CACHE, or kvjax in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVJAX_CACHE") or Path(base) / "kvjax")


def use_compilation_cache(directory: Path | None = None) -> None:
    """Keeps compiled programs on disk, in `cache_directory` if nothing else is said.

    Where JAX has been given a directory already it stays, and with KVJAX_COMPILATION_CACHE=0 nothing is kept.
    """
    if directory is None:
        if jax.config.values["jax_compilation_cache_dir"] or os.environ.get("KVJAX_COMPILATION_CACHE") == "0":
            return
        directory = cache_directory()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def clear_compiled() -> None:
    """Drops every compiled program; what is still called is compiled again."""
    jax.clear_caches()
    gc.collect()


def clear_if_many(mappings: int | None = None) -> None:
    """Drops them where the process holds more memory mappings than that, by default `MAX_MAPPINGS`."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > (MAX_MAPPINGS if mappings is None else mappings):
        clear_compiled()
