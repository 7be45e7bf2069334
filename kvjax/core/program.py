"""A jitted function compiled ahead of its first run, so that compile time is known apart from run time."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kvjax.core.types import KvjaxError

MAPPINGS = 30_000
"""Memory mappings of a process, several to each compiled program, beyond which a new one replaces all that there are.

Linux allows 65,530, and a compiler that gets no more ends the process.
"""

_ALL: list[Program] = []


def cache_directory() -> Path:
    """Where what can be made again is kept: $KVJAX_CACHE, or kvjax in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVJAX_CACHE") or Path(base) / "kvjax")


def use_compilation_cache(directory: Path | None = None) -> None:
    """Keeps compiled programs on disk, in `cache_directory` if nothing else is said.

    Where JAX has been given a directory already it stays, and with KVJAX_COMPILATION_CACHE=0 nothing is kept.
    """
    if directory is None:
        if jax.config.jax_compilation_cache_dir or os.environ.get("KVJAX_COMPILATION_CACHE") == "0":
            return
        directory = cache_directory()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def forget() -> None:
    """Drops every compiled program, also those of jax.jit; what is still called is compiled again."""
    for program in _ALL:
        program._done.clear()
    jax.clear_caches()
    gc.collect()


def forget_many(mappings: int) -> None:
    """Forgets them where the process holds more memory mappings than that."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > mappings:
        forget()


class Program:
    """`compile` gives an executable per set of static values and shapes; the same ones are compiled once.

    options: what XLA's compiler is told, by the keyword arguments; what this version of it does not know is left out.
    """

    def __init__(
        self,
        fun,
        static: tuple[str, ...] = (),
        donate: tuple[str, ...] = (),
        options: Callable[..., dict[str, Any]] | None = None,
    ):
        self._fun, self._options = fun, options
        self._jit = jax.jit(fun, static_argnames=static, donate_argnames=donate)
        self._static = set(static)
        self._done: dict[Any, Any] = {}
        _ALL.append(self)

    def compile(self, **kwargs) -> tuple[Any, float]:
        """(executable taking the non-static keyword arguments, seconds spent compiling now).

        Under `jax.disable_jit` the executable is the function itself, which sees the arrays' values. Raises KvjaxError
        where JAX is set to 64 bits.
        """
        if jax.config.jax_enable_x64:
            raise KvjaxError(
                "kvjax computes in 32 bits, and JAX_ENABLE_X64 is set: unset it, or call kvjax within "
                "`with jax.enable_x64(False):`"
            )
        if jax.config.jax_disable_jit:
            static = {k: kwargs[k] for k in self._static & kwargs.keys()}
            return functools.partial(self._fun, **static), 0.0
        key = self.key(kwargs)
        start = time.perf_counter()
        done = self._done.get(key)
        if done is None:
            forget_many(MAPPINGS)
            options = {} if self._options is None else self._options(**kwargs)
            done = self._done[key] = _compiled(self.lower(**kwargs), options)
        return done, time.perf_counter() - start

    def key(self, kwargs: dict[str, Any]) -> Any:
        """What an executable is made for: equal for calls that share one."""
        static = [(k, kwargs[k]) for k in sorted(self._static & kwargs.keys())]
        leaves, tree = jax.tree.flatten(self.traced(kwargs))
        return tuple(static), tree, tuple(map(_type, leaves))

    def traced(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Of keyword arguments, those that an executable takes."""
        return {k: v for k, v in kwargs.items() if k not in self._static}

    def __call__(self, **kwargs):
        """Compiles when needed and runs."""
        executable, _ = self.compile(**kwargs)
        return executable(**self.traced(kwargs))

    def lower(self, platform: str | None = None, **kwargs):
        """The lowered program, for looking at; for this machine or, say, "cuda"."""
        return self._jit.trace(**kwargs).lower(lowering_platforms=None if platform is None else (platform,))


def _compiled(lowered: Any, options: dict[str, Any]) -> Any:
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()


def _type(x) -> tuple:
    return (x.shape, x.dtype, getattr(x, "weak_type", False), getattr(x, "sharding", None))
