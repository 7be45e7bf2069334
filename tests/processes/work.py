"""What two processes do together in `test_processes.py`, and one process alone for comparison.

python -m tests.processes.work HOST:PORT I/2 FILE writes what one of the processes sees as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import processes
from kvjax.core.mesh import make_mesh, put, to_numpy
from kvjax.models.model import Model
from kvjax.models.sharding import param_shardings
from kvjax.speculative import speculate
from kvjax.testing import toy_model

CAPACITY = 128
BOUNDARIES = {"batch": (2, 2), "heads": (1, 4)}
"""Meshes of two devices of each of two processes, by the axis along which the processes meet."""

METHODS = {
    "heads": (
        "full",
        "snapkv:budget=8,window=4 + offload",
        "kcache:n=8",
        "kivi:bits=2,group=8,residual=8",
        "quest:budget=16,page=4",
        "h2o:heavy=4,recent=4",
        "specache:bits=2,group=8",
        "minicache",
        "turned_queries:budget=16",
        "kvzip:budget=16",
        "snapkv:budget=8,window=4 + adakv:page=4",
    ),
    "batch": ("kcache:n=8", "turned_queries:budget=16"),
}
ASKED = ("full", "kcache", "turned_queries")
"""Methods that are asked, and score: further tokens at once, which take programs of their own."""


def toy_on_mesh(batch: int, heads: int) -> Model:
    """A toy model of four key/value heads, each device with its shards."""
    model, mesh = toy_model(heads=8, kv_heads=4, vocab_size=96), make_mesh(batch, heads)
    params = jax.tree.map(lambda x, s: put(np.asarray(x), s), model.params, param_shardings(model.config, mesh))
    return dataclasses.replace(model, params=params, mesh=mesh)


def texts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(96, size=n).tolist() for n in lengths]


def run_method(model: Model, method: str) -> dict[str, Any]:
    """All that a user reads of a method on one batch."""
    prompts, more = texts(60, 41, 52, 33), texts(3, 5, 2, 4)
    context = kvjax.read(model, prompts, method, capacity=CAPACITY)
    assert method.partition(":")[0] in repr(context) or " + " in repr(context)
    out = context.generate(max_new_tokens=3, logprobs=1)
    results = {}
    if method.partition(":")[0] in ASKED:
        results["answers"] = context.ask(more, max_new_tokens=2).tokens
        results["scores"] = [logp.tolist() for logp, _ in context.score(more)]
    return results | {
        "tokens": out.tokens,
        "logprobs": out.logprobs,
        "bytes": [dict(out.bytes.held), dict(out.bytes.reserved), out.bytes.full],
        "kept": [[head.tolist() for heads in layer for head in heads] for layer in context.kept_positions()],
    }


def run_operations(model: Model, folder: Path) -> dict[str, Any]:
    """Streams, saved files, and operations on caches."""
    prompts, more = texts(60, 41, 52, 33), texts(3, 5, 2, 4)
    context = kvjax.read(model, prompts, "full", capacity=CAPACITY)
    longer = context.feed(more)
    results = {
        "streamed": list(kvjax.stream(model, prompts, "full", capacity=CAPACITY, max_new_tokens=3)),
        "generated": kvjax.generate(model, prompts, "full", capacity=CAPACITY, max_new_tokens=3).tokens,
        "in one program": context.generate(max_new_tokens=3, loop="while").tokens,
        "fed": to_numpy(longer.last_logits).tolist(),
        "cropped": longer.crop([60, 41, 52, 33]).ask(more, max_new_tokens=2).tokens,
        "taken": context.take([1, 0, 3, 3]).generate(max_new_tokens=2).tokens,
        "logits": to_numpy(kvjax.logits(model, more)[:, :2]).tolist(),
    }
    for method in ("full", "kcache:n=8"):
        own = context if method == "full" else kvjax.read(model, prompts, method, capacity=CAPACITY)
        path = own.save(folder / f"{method.partition(':')[0]}.context")
        results[f"resumed {method}"] = kvjax.resume(model, path).ask(more, max_new_tokens=2).tokens
    spoken = speculate(model, prompts, "quest:budget=16,page=4", "full", num_draft_tokens=2, max_new_tokens=4)
    results["speculated"] = [spoken.tokens, spoken.accepted]
    return results


def count_gatherings(model: Model) -> list[Any]:
    """Collectives that the host asks for in three steps of decoding, and what of the state is on every device."""
    session = kvjax.read(model, texts(60, 41, 52, 33), "full", capacity=CAPACITY).start(max_new_tokens=4)
    from jax.experimental import multihost_utils

    calls, gather = [], multihost_utils.process_allgather
    multihost_utils.process_allgather = lambda *args, **kwargs: calls.append(args) or gather(*args, **kwargs)
    session.loop = "layers"
    session.advance(4)
    tokens = session.tokens.tolist()
    multihost_utils.process_allgather = gather
    return [len(calls), session.state.done.is_fully_replicated, session.state.out.is_fully_replicated, len(tokens)]


def run_all(folder: Path) -> dict[str, Any]:
    """Everything, by boundary and method."""
    warnings.simplefilter("ignore", kvjax.KvjaxWarning)
    results: dict[str, Any] = {}
    for boundary, shape in BOUNDARIES.items():
        model = toy_on_mesh(*shape)
        for method in METHODS[boundary]:
            results[f"{boundary}: {method}"] = run_method(model, method)
        if boundary == "batch":
            results["operations"] = run_operations(model, folder)
            results["gatherings"] = count_gatherings(model)
    return results


def refusals(number: int) -> dict[str, str]:
    """Errors of processes that disagree, which are those of all of them."""
    model, found = toy_on_mesh(1, 4), {}
    asked = {
        "method": lambda: kvjax.read(model, texts(9), f"snapkv:budget={number},window=1"),
        "tokens": lambda: kvjax.read(model, texts(9 + number), "full"),
        "model": lambda: kvjax.read(dataclasses.replace(model, name=f"number {number}"), texts(9), "full"),
        "options": lambda: kvjax.generate(model, texts(9), "full", max_new_tokens=number),
        "version": lambda: processes.require_agreement(kvjax=f"1.{number}"),
    }
    for name, call in asked.items():
        try:
            call()
        except kvjax.KvjaxError as e:
            found[name] = str(e)
    other = toy_on_mesh(*((1, 4), (2, 2))[number - 1])
    try:
        kvjax.read(other, texts(9, 9), "full")
    except kvjax.KvjaxError as e:
        found["mesh"] = str(e)
    return found


if __name__ == "__main__":
    coordinator, process, file = sys.argv[1:]
    processes.initialize(coordinator, process)
    number = processes.process_index() + 1
    results = run_all(Path(file).parent)
    results["refusals"] = refusals(number)
    results["exchange"] = [processes.gather([number]), processes.broadcast({"work": number}), processes.is_writer()]
    Path(file).write_text(json.dumps(results))
