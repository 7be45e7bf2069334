"""The tables that ship with kvjax: `python -m experiments.tables.shipped [KIND ...]` makes them, all or some.

Of every kind that is registered (kvjax/cache/tables.py) examples for the battery's layers, of random numbers, and a
table for the shipped model, calibrated on the source code of Python's library, where a text can give one. For learned
ones it is random numbers too: the format, and nothing to measure.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

import kvjax
from kvjax.cache import given
from kvjax.cache.given import FOLDER
from kvjax.cache.tables import KINDS, Kind
from kvjax.methods.catalogue import load_all
from kvjax.run.calibrate import arrays
from kvjax.run.plan import specs
from kvjax.testbed import corpus
from tests.contract import layer

CONTEXT, CONTEXTS = 1024, 16
EXAMPLES = {
    "example.safetensors": layer.spec(),
    "example_devices.safetensors": dataclasses.replace(layer.spec(), kv_heads=4),  # of tests/contract/test_devices.py
}


def learned(kind: Kind) -> bool:
    """Whether no text gives a table of this kind."""
    return type(kind).count is Kind.count


def write(name: str) -> None:
    """All tables of a kind."""
    kind, folder = KINDS[name], FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    said = "random numbers: an example of the format"
    for file, spec in EXAMPLES.items():
        given.write(folder / file, name, spec, [kind.example(spec, np.random.default_rng(0))], said)
    model = kvjax.load("testbed")
    all_specs = specs(model.config)
    if learned(kind):
        layers = [kind.example(spec, np.random.default_rng(spec.index)) for spec in all_specs]
    else:
        layers = arrays(model, name, corpus.load("train").windows(CONTEXT)[:CONTEXTS], rows=4)
        read = f"{CONTEXT * CONTEXTS} tokens of the source code it was trained on"
        if kind.documents(model.config.vocab_size, model.config.max_positions) is not None:
            read = "documents of its own"
        said = f"kvjax calibrate {name} testbed, {read}"
    given.write(folder / "testbed.safetensors", name, all_specs[0], layers, said)


if __name__ == "__main__":
    load_all()
    for kind in sys.argv[1:] or sorted(KINDS):
        write(kind)
