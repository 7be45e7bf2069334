"""Makes the calibrated tables that ship with kvjax: `python -m experiments.tables.build [KIND ...]`, all or some.

Every registered kind (`kvjax.cache.calibration.table_kinds`) ships with examples for the layers of the tests, and with
a table for the shipped model, calibrated on the source code of Python's library. Tables of learned kinds are random
numbers: examples of the format, without quality. Kinds in `REAL_MODELS` also ship with tables for models from Python
packages, where these are installed.
"""

from __future__ import annotations

import sys

import numpy as np

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import SHIPPED_TABLES
from kvjax.cache.calibration.table_kinds import TABLE_KINDS, TableKind
from kvjax.cache.protocol import LayerSpec
from kvjax.calibrate import count_arrays
from kvjax.core.rope import Rope
from kvjax.engine.plan import specs
from kvjax.registry.loading import load_all
from kvjax.testbed import corpus
from kvjax.testbed.vocab import END

CONTEXT_TOKENS, NUM_CONTEXTS = 1024, 16
# These two are older than the default, which is KVzip's scores; on SmolLM2 turned queries divide no worse.
TURNED = "head_shares:method=turned_queries"
ON_TESTBED = {"head_shares": TURNED}
REAL_MODELS = {"head_shares": {"smollm2-135m": TURNED, "qwen2.5-coder-0.5b": "head_shares:method=kvzip"}}
NUM_REAL_CONTEXTS = 8
# The examples fit the layers that the tests of every method run: one with two KV heads, and one whose four KV heads
# divide among four devices.
EXAMPLES = {
    file: LayerSpec(index=0, num_layers=1, num_kv_heads=kv_heads, num_groups=2, head_dim=32, rope=Rope(32))
    for file, kv_heads in (("example.safetensors", 2), ("example_devices.safetensors", 4))
}


def write_kind(name: str) -> None:
    """Writes all tables of a kind."""
    kind, folder = TABLE_KINDS[name], SHIPPED_TABLES / name
    folder.mkdir(parents=True, exist_ok=True)
    source = "random numbers: an example of the format"
    for file, spec in EXAMPLES.items():
        table_file.write(folder / file, name, spec, [kind.example(spec, np.random.default_rng(0))], source)
    model = kvjax.load("testbed")
    all_specs = specs(model.config)
    # A kind that neither counts nor measures comes from training by gradient: its table only shows the format.
    if type(kind).count is TableKind.count and not kind.measuring_method:
        layers = [kind.example(spec, np.random.default_rng(spec.index)) for spec in all_specs]
    else:
        settings = ON_TESTBED.get(name, name)
        layers = count_arrays(model, settings, corpus.load("train").windows(CONTEXT_TOKENS)[:NUM_CONTEXTS], rows=4)
        text = f"{CONTEXT_TOKENS * NUM_CONTEXTS} tokens of the source code it was trained on"
        if kind.documents(model.config.vocab_size, model.config.max_positions) is not None:
            text = "documents of its own"
        source = f"kvjax calibrate {settings} testbed, {text}"
    table_file.write(folder / "testbed.safetensors", name, all_specs[0], layers, source)
    for real, settings in REAL_MODELS.get(name, {}).items():
        write_real(settings, real)


def source_code(num_texts: int, characters: int) -> list[str]:
    """Texts from places all over the source code of Python's library."""
    # Only training files are read: methods are measured on the held-out code.
    tokens = corpus.load("train").tokens
    code = np.where(tokens == END, ord("\n"), tokens).astype(np.uint8)
    stride = len(code) // num_texts
    starts = range(0, num_texts * stride, stride)
    return [code[start : start + characters].tobytes().decode(errors="replace") for start in starts]


def write_real(settings: str, model_name: str) -> None:
    """Writes the table of a kind, with its settings, for a model from a Python package, if that is installed."""
    name = settings.partition(":")[0]
    try:
        model = kvjax.load(model_name)
    except kvjax.KvjaxError as e:
        print(f"no table of {name} for {model_name}: {e}")
        return
    texts = source_code(NUM_REAL_CONTEXTS, 16 * CONTEXT_TOKENS)  # a token of code has fewer than 16 in the mean
    encode = model.text_tokenizer().encode_prompt
    layers = count_arrays(model, settings, [encode(text)[:CONTEXT_TOKENS] for text in texts])
    read = f"{NUM_REAL_CONTEXTS} x {CONTEXT_TOKENS} tokens of the source code of Python's library"
    source = f"kvjax calibrate {settings} {model_name}, {read}"
    table_file.write(SHIPPED_TABLES / name / f"{model_name}.safetensors", name, specs(model.config)[0], layers, source)


if __name__ == "__main__":
    load_all()
    for kind in sys.argv[1:] or sorted(TABLE_KINDS):
        write_kind(kind)
