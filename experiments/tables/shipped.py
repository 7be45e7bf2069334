"""The tables that ship with kvjax: `python -m experiments.tables.shipped [KIND ...]` makes them, all or some.

Of every kind that is registered (`kvjax.cache.calibration.table_kinds`) examples for the layers of the battery, and a
table for the shipped model, calibrated on the source code of Python's library, where a text can give one. For learned
ones it is random numbers too: the format, and nothing to measure. Kinds in `REAL` also ship for the models that Python
packages bring, where these are installed.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import FOLDER
from kvjax.cache.calibration.table_kinds import KINDS, Kind
from kvjax.calibrate import count_arrays
from kvjax.engine.plan import specs
from kvjax.methods.registry import load_all
from kvjax.testbed import corpus
from kvjax.testbed.vocab import END
from tests.contract import layer

CONTEXT, CONTEXTS = 1024, 16
REAL = {"head_shares": ("smollm2-135m", "qwen2.5-coder-0.5b")}
REAL_CONTEXTS = 8
EXAMPLES = {
    "example.safetensors": layer.spec(),
    # of tests/contract/test_devices.py
    "example_devices.safetensors": dataclasses.replace(layer.spec(), num_kv_heads=4),
}


def learned(kind: Kind) -> bool:
    """Whether no text gives a table of this kind."""
    return type(kind).count is Kind.count and not kind.measured_by


def write(name: str) -> None:
    """All tables of a kind."""
    kind, folder = KINDS[name], FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    said = "random numbers: an example of the format"
    for file, spec in EXAMPLES.items():
        table_file.write(folder / file, name, spec, [kind.example(spec, np.random.default_rng(0))], said)
    model = kvjax.load("testbed")
    all_specs = specs(model.config)
    if learned(kind):
        layers = [kind.example(spec, np.random.default_rng(spec.index)) for spec in all_specs]
    else:
        layers = count_arrays(model, name, corpus.load("train").windows(CONTEXT)[:CONTEXTS], rows=4)
        read = f"{CONTEXT * CONTEXTS} tokens of the source code it was trained on"
        if kind.documents(model.config.vocab_size, model.config.max_positions) is not None:
            read = "documents of its own"
        said = f"kvjax calibrate {name} testbed, {read}"
    table_file.write(folder / "testbed.safetensors", name, all_specs[0], layers, said)
    for real in REAL.get(name, ()):
        write_real(name, real)


def source_code(texts: int, characters: int) -> list[str]:
    """So many texts from places all over the source code of Python's library."""
    tokens = corpus.load("train").tokens
    code = np.where(tokens == END, ord("\n"), tokens).astype(np.uint8)
    starts = range(0, texts * (len(code) // texts), len(code) // texts)
    return [code[start : start + characters].tobytes().decode(errors="replace") for start in starts]


def write_real(name: str, model_name: str) -> None:
    """A kind's table for a model that a package brings; nothing where it is not installed."""
    try:
        model = kvjax.load(model_name)
    except kvjax.KvjaxError as e:
        print(f"no table of {name} for {model_name}: {e}")
        return
    texts = source_code(REAL_CONTEXTS, 16 * CONTEXT)
    layers = count_arrays(model, name, [model.text_tokenizer().encode(text)[:CONTEXT] for text in texts])
    read = f"{REAL_CONTEXTS} x {CONTEXT} tokens of the source code of Python's library"
    said = f"kvjax calibrate {name} {model_name}, {read}"
    table_file.write(FOLDER / name / f"{model_name}.safetensors", name, specs(model.config)[0], layers, said)


if __name__ == "__main__":
    load_all()
    for kind in sys.argv[1:] or sorted(KINDS):
        write(kind)
