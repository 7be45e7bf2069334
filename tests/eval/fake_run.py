"""A run that nobody ran: records and run.json with the papers' orders in them, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

METHODS = (
    "full",
    "offload",
    "kcache:n=64,device_layers=0",
    "kcache:n=64,device_layers=1",
    "kivi:bits=2",
    "kivi:bits=1",
    "specache:bits=1",
    "snapkv:budget=256",
    "snapkv:budget=256 + kvcrush",
    "h2o:heavy=128,recent=128",
    "streaming_llm:recent=252",
)
LOSS = dict(zip(METHODS, (0, 0, 0.12, 0.005, 0.02, 0.3, 0.02, 0.15, 0.05, 0.2, 0.35), strict=True))
BYTES = dict(zip(METHODS, (2.08, 0.02, 1.04, 1.3, 0.39, 0.27, 0.34, 0.57, 0.57, 0.52, 0.5), strict=True))
EVICTS = METHODS[7:]
TASKS = ("niah", "ruler.single", "ruler.multikey", "ruler.vt", "ruler.fwe", "turns.recall", "code.complete", "ppl")
LENGTHS = (512, 1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def record(method: str, task: str, length: int, case: int, rng: np.random.Generator) -> dict:
    """The record of one context of `task` under `method`."""
    host = 2.06 if method in ("offload", "specache:bits=1") else 1.03 if method.startswith("kcache") else 0
    size = {"device": int(BYTES[method] * 1024 * length), "pinned_host": int(host * 1024 * length)}
    base = {"method": method, "task": task, "key": f"{task}/{length}/{case}", "about": {"length": length}}
    base |= {"tokens": length, "scores": [], "asks": [], "predictions": [], "turns": False, "bytes": size}
    fraction = {"device": BYTES[method] / BYTES[METHODS[0]], "pinned_host": host / BYTES[METHODS[0]]}
    base |= {"dtype": "float32", "bfloat16_fraction": fraction}
    base |= {"bfloat16_bytes": {kind: num_bytes // 2 for kind, num_bytes in size.items()}}
    if task == "ppl":
        shared = np.random.default_rng(case)
        right = shared.integers(0, 256, 64)
        own = np.where(rng.random(64) < LOSS[method] / 3, 0, right)
        noise = 0.05 * shared.random() + 0.002 * rng.random()
        return base | {"bits": 1.62 + 0.2 * LOSS[method] + noise, "likeliest": own.tolist()}
    if task == "niah":
        depth = DEPTHS[case % 5]
        far = method == METHODS[-1] and (1 - depth) * length > 252
        base["about"] |= {"depth": depth}
        return base | _answers(rng, [{"depth": depth}], [0.02 if far else 1 - LOSS[method] / 2])
    turns = task.startswith("turns")
    lost = [0.25 if turns and i and method in EVICTS else 0 for i in range(4)]
    asks = [{"depth": float(rng.random())} | ({"turn": i} if turns else {}) for i in range(4)]
    chances = [0.97 - LOSS[method] * length / 2048 - x for x in lost]
    return base | {"turns": turns} | _answers(rng, asks, chances)


def _answers(rng: np.random.Generator, asks: Sequence[dict], chances: Sequence[float]) -> dict:
    scores = [float(rng.random() < p) for p in chances]
    return {"scores": scores, "asks": list(asks), "predictions": ["?"] * len(scores), "metric": "exact"}


def speed(method: str, length: int) -> dict:
    """The record of one measurement of times."""
    about = {"length": length, "batch": 4}
    times = {"prefill_seconds": length / 2000, "tokens_per_second": 900 / (1 + LOSS[method])}
    return {
        "method": method,
        "task": "speed",
        "key": f"speed/{length}",
        "about": about,
        "scores": [],
        "bytes": {},
    } | times


def records(
    methods: Sequence[str] = METHODS, tasks: Sequence[str] = TASKS, lengths: Sequence[int] = LENGTHS, cases: int = 20
) -> Iterator[dict]:
    """All records, as a run writes them."""
    rng = np.random.default_rng(7)
    for method in methods:
        for length in lengths:
            yield speed(method, length)
            for task in tasks:
                yield from (record(method, task, length, i, rng) for i in range(cases))


RUN = {
    "model": "testbed",
    "digest": "sha256:0123456789abcdef",
    "dtype": "float32",
    "seed": 0,
    "batch": 8,
    "methods": list(METHODS),
    "tasks": list(TASKS),
    "lengths": list(LENGTHS),
    "machine": {"processor": "a <fast> one", "cores": 2, "device": "cpu", "load": [0.1, 0.2, 0.3], "jax": "0.10.2"},
    "kvjax": "0.1.0",
    "started": "2025-01-01T00:00:00+00:00",
}


def write(directory: Path, **chosen) -> Path:
    """Writes a run, and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(r) for r in records(**chosen)]
    (directory / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "run.json").write_text(json.dumps(RUN), encoding="utf-8")
    return directory
