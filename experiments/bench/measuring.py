"""Timing in turns, the machine's best rates, tables, and the JSON document that every script prints last."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from kvjax.errors import KvjaxError
from kvjax.eval.run.machine import machine, version
from kvjax.eval.run.ray_workers import RayWorkers, connect_if_asked
from kvjax.utils.files import check_output, make_folder

PAUSE_SECONDS = 0.05  # lets idle threads of the library that ran last stop spinning before the next run is timed

Probes = tuple[int, dict[str, Callable[[], float]]]
"""(bytes or operations of one run, runs by name, which return their seconds)."""


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows a module's docstring with its line breaks."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def output_folder(text: str) -> Path:
    """The folder of an option, made as the options are read: before the work whose results it gets."""
    try:
        return make_folder(text)
    except KvjaxError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def output_file(text: str) -> Path:
    """The file of an option, whose folder is made as the options are read."""
    try:
        return check_output(Path(text))
    except KvjaxError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def add_worker_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of `connect_workers`."""
    p.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster that does the work: local, auto or HOST:PORT")
    p.add_argument("--workers", type=int, metavar="N", help="with --ray: how many (default: one for each device)")


def connect_workers(args: argparse.Namespace) -> contextlib.AbstractContextManager[RayWorkers | None]:
    """Connects to the workers of --ray, or to none; to be entered before JAX computes anything."""
    return connect_if_asked(args.ray, args.workers, log_progress)


def parse_integers(text: str) -> list[int]:
    """Parses comma-separated integers."""
    return [int(word) for word in text.split(",") if word.strip()]


def time_run(fun: Callable[..., Any], *args: Any) -> float:
    """Seconds until the JAX arrays that `fun(*args)` returns are ready."""
    start = time.perf_counter()
    jax.block_until_ready(fun(*args))
    return time.perf_counter() - start


def time_in_turns(runs: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, list[float]]:
    """Calls all runs in turn, `repeats` times, every other round backwards.

    Other work on the machine, and its slow drifts, then affect all runs alike.

    Args:
      runs: functions that return their own seconds, by name.
      repeats: rounds.

    Returns:
      the seconds of each run, by name.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for i in range(repeats):
        # Every other round runs backwards, so that no side always follows the same neighbor.
        for name in list(runs)[:: 1 if i % 2 == 0 else -1]:
            time.sleep(PAUSE_SECONDS)
            seconds[name].append(runs[name]())
    return seconds


def read_probes(megabytes: int = 512) -> Probes:
    """Probes of memory bandwidth: a sum, and a matrix times a vector, over an array too large for the caches."""
    # The faster of two programs counts, since it depends on the machine and on XLA which of them that is.
    x = jnp.ones((megabytes * 2**20 // 4 // 1024, 1024), jnp.float32)
    v = jnp.ones((1024,), jnp.float32)
    total, matvec = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    jax.block_until_ready((total(x), matvec(x, v)))
    runs = {"sum": functools.partial(time_run, total, x), "matvec": functools.partial(time_run, matvec, x, v)}
    return x.nbytes, runs


def product_probes(n: int = 2048) -> Probes:
    """Probes of float32 operations: a product of two n x n matrices, in JAX and, when installed, in torch."""
    x = jnp.ones((n, n), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    runs = {"product (jax)": functools.partial(time_run, product, x, x)}
    # The measure is what the machine can do, so the faster of the two libraries counts for both sides.
    if version("torch"):
        import torch

        y = torch.ones(n, n)
        runs["product (torch)"] = functools.partial(time_run, torch.matmul, y, y)
    return 2 * n**3, runs


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, best and worst of repeated seconds."""
    # Tables show the median: the best of two sides may be of moments with unlike load.
    return {"median": statistics.median(seconds), "best": min(seconds), "worst": max(seconds)}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table for the terminal; None is shown as a dash."""
    t = Table(title=title, title_justify="left")
    for name in columns:
        t.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        t.add_row(*("-" if x is None else str(x) for x in row))
    return t


def log_progress(text: str) -> None:
    """Prints the present step of a measurement to stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def report(name: str, before: dict[str, Any], tables: Sequence[Table], notes: Sequence[str], results: Any) -> None:
    """Prints machine, tables and notes, then the same numbers as one JSON document on the last line.

    Args:
      name: of the script, in the document.
      before: `machine()` before the measurement; its load stands next to the load afterwards.
      tables: for the terminal.
      notes: lines below the tables.
      results: what the document holds, JSON-serializable.
    """
    after = machine()
    # Into a file or pipe, Rich would assume 80 columns and cut the tables.
    console = Console(width=max(Console().width, 180), highlight=False)
    load = f"load {before['load']} before, {after['load']} after"
    versions = ", ".join(f"{k} {after[k]}" for k in ("python", "jax", "torch", "transformers") if after[k])
    console.print(f"{after['processor']}, {after['cores']} cores, {after['device']}; {versions}; {load}")
    for t in tables:
        console.print(t)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)  # a note may hold [brackets]
    print(json.dumps({"benchmark": name, "machine": {**after, "load_before": before["load"]}, "results": results}))
