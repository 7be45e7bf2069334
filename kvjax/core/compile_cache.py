"""Compiled programs: cached on disk, and dropped from memory when there are too many."""

from __future__ import annotations

import functools
import gc
import os
import warnings
from pathlib import Path

import jax

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.utils.arguments import environment_switch
from kvjax.utils.files import expand_user, make_folder

MAX_MAPPINGS = 30_000
"""Memory mappings of a process beyond which all compiled programs are dropped; each program has several.

Linux allows 65,530, and a compiler that gets no more of them ends the process.
"""


def cache_directory() -> Path:
    """Returns the folder of files that can be made again: $KVJAX_CACHE, or kvjax in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_user(os.environ.get("KVJAX_CACHE") or f"{base}/kvjax").absolute()


def make_cache_directory(name: str = "") -> Path:
    """Makes the folder `name` of the cache directory; raises KvjaxError, with the remedy, if it cannot be written."""
    try:
        return make_folder(cache_directory() / name)
    except KvjaxError as e:
        raise KvjaxError(f"{e}: the environment variable KVJAX_CACHE names kvjax's cache folder") from e


def use_compilation_cache(directory: Path | None = None) -> None:
    """Caches compiled programs in `directory`, by default `cache_directory()`.

    Without a directory, one that JAX has been given already stays, and KVJAX_COMPILATION_CACHE=0 turns the cache off.
    A cache directory that cannot be written gives a KvjaxWarning, the first time, and no program is kept.
    """
    if directory is None:
        is_on = environment_switch("KVJAX_COMPILATION_CACHE")
        if jax.config.values["jax_compilation_cache_dir"] or not is_on or not _is_usable(cache_directory()):
            return
        directory = cache_directory()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX leaves out programs that compile in less than a second: most of those of a small model.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


@functools.cache  # each directory is warned of once
def _is_usable(directory: Path) -> bool:
    try:
        make_folder(directory)
    except KvjaxError as e:
        warnings.warn(
            f"compiled programs are not kept: {e}, as the environment variable KVJAX_CACHE, or set "
            "KVJAX_COMPILATION_CACHE=0",
            KvjaxWarning,
            stacklevel=3,
        )
        return False
    return True


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
