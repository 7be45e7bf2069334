"""Measures quality and bytes of every method on the shipped model, for the methods' pages.

python -m experiments.methods            measures every method that experiments/results/methods.json lacks
python -m experiments.methods --again    measures all of them
python -m experiments.methods --speed    measures the decode speed of all; needs an idle machine
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from experiments.bench.measuring import make_parser
from kvjax import load
from kvjax.cli import use_compilation_cache
from kvjax.eval.run import harness
from kvjax.eval.run.context_reader import ContextReader
from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Case
from kvjax.eval.tasks.metrics import METRICS
from kvjax.generation.generate import generate
from kvjax.registry.loading import load_all
from kvjax.testbed import corpus, tasks

RESULTS = Path(__file__).parent / "results" / "methods.json"
SEED, NUM_CASES = 1_000_003, 8
QUESTION_TOKENS, READ_TOKENS, PREDICTED_TOKENS = 2048, 1536, 512


def read_results() -> dict[str, dict[str, Any]]:
    """Reads the stored measurements, by method string."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def make_cases() -> tuple[list[Case], list[Case]]:
    """Makes contexts with questions, and texts whose last part is predicted, of about one length: few programs."""
    rng, code = np.random.default_rng(SEED), corpus.load("held_out").window
    instances = [tasks.recall(rng, QUESTION_TOKENS, code) for _ in range(NUM_CASES)]
    questions = [symbols.instance_case("recall", f"recall/{i}", x, len(x.questions)) for i, x in enumerate(instances)]
    texts = []
    for i in range(NUM_CASES):
        ids = code(rng, READ_TOKENS + PREDICTED_TOKENS)
        # A token of code is a byte.
        texts.append(Case("ppl", f"ppl/{i}", ids[:READ_TOKENS], follows=ids[READ_TOKENS:], bytes=PREDICTED_TOKENS))
    return questions, texts


def measure_quality(methods: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the result of each method; `agreement` is with the first one."""
    (questions, texts), reader, reference = make_cases(), ContextReader(load("testbed"), PREDICTED_TOKENS), None
    longest = max(ask.new_tokens for case in questions for ask in case.asks)
    for name in methods:
        replies, size = harness.ask_shared_context(reader, name, questions, longest)
        answered = zip(zip(*replies, strict=True), questions, strict=True)
        pairs = [(text, ask) for answers, case in answered for text, ask in zip(answers, case.asks, strict=True)]
        bits, best, _ = harness.score_continuations(reader, name, texts)
        likeliest, held = np.concatenate(best), size.per_sequence(NUM_CASES).held
        reference = likeliest if reference is None else reference
        yield {
            "method": name,
            "recall": float(np.mean([METRICS[ask.metric](text, ask) for text, ask in pairs])),
            "code_bits": float(sum(map(np.sum, bits)) / sum(case.bytes for case in texts)),
            "agreement": float((likeliest == reference).mean()),
            "device_bytes": held["device"],
            "host_bytes": held["pinned_host"],
        }


def measure(remeasure: bool = False) -> None:
    """Measures the methods without stored results, or all, on the same contexts as `full`."""
    found = {} if remeasure else read_results()
    missing = [r.example for r in load_all().values() if r.example not in found]
    for row in measure_quality(dict.fromkeys(["full", *missing])):
        found.setdefault(row["method"], row)  # `full` is measured in every run; its first result stays
        _write(found)  # after every method, so that an interrupted run loses nothing


def measure_speed() -> None:
    """Measures the decode speed of each method over that of `full`, both in turns."""
    found, model, contexts = read_results(), load("testbed"), [case.context for case in make_cases()[0]]

    # The loop is one program: dispatched layer by layer, this small model would measure Python.
    def rate(method: str) -> float:
        options = {"max_new_tokens": 64, "eos_ids": (), "loop": "while"}
        return generate(model, contexts, method, **options).tokens_per_second

    for method, row in track(found.items(), "methods", transient=True):
        # A ratio of neighbors in time, and the median of several: load of the machine falls on both sides alike.
        row["speed"] = statistics.median(rate(method) / rate("full") for _ in range(harness.SPEED_RUNS))
        _write(found)


def _write(found: dict[str, dict[str, Any]]) -> None:
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--again", action="store_true", help="measure all methods, not only the missing ones")
    p.add_argument("--speed", action="store_true", help="measure the decode speed only")
    args = p.parse_args()
    use_compilation_cache()
    if args.speed:
        measure_speed()
    else:
        measure(args.again)


if __name__ == "__main__":
    main()
