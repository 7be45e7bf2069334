"""Every script runs at a small form: tables for people, pictures, and one JSON document, which it can sum up."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path

import jax
import pytest

import kvjax
from experiments.bench import measuring, packed_kernel, shapes
from experiments.papers.specache import table3 as specache_table3
from experiments.papers.specache import table4 as specache_table4

TINY = "--model {model} --out {out}"
ASKED = f"{TINY} --length 96 --contexts 1 --windows 1 --tokens 3 --tasks needle"
# Rows and tokens are such that text and questions share their compiled programs.
EVICTED = f"{TINY} --length 96 --contexts 2 --batch 4 --windows 4 --tokens 8 --tasks variables"
SMALL_FORMS = {
    "papers.kcache.table1": "--model {model} --batch 2 --context 64 --n 8",
    "papers.kcache.equations": "--n 128",
    "papers.kcache.table2": f"{ASKED} --n 32 --layers 0",
    "papers.kcache.table3": (
        "--models toy --inputs 32 --batches 1 --n 8 --device-layers 0 --output 16 --steps 1 --repeats 1"
    ),
    "papers.kcache.table4": f"{ASKED} --n 32 --layers 0",
    "papers.specache.table1": f"{ASKED} --bits 1",
    "papers.specache.table2": f"{EVICTED} --ratios 4 --block 2",
    "papers.specache.table3": "--contexts 2048 --measure toy --batch 2 --steps 1 --repeats 1",
    "papers.specache.table4": f"{ASKED} --rows 1 --steps 1 --repeats 1",
    "papers.specache.table5": ASKED,
    "papers.specache.figure2": (
        f"{TINY} --length 96 --percent 2,50 --contexts 1 --windows 1 --tokens 128 --steps 1 --repeats 1"
    ),
    "papers.specache.figure4": f"{TINY} --contexts 1 --depths 2 --run {{out}}/run --lengths 96 --methods full",
    "papers.specache.figure5": f"{ASKED} --topk 64",
    "papers.specache.appendix": f"{TINY} --length 96 --contexts 1 --methods full --tasks symbols.variables",
    "papers.kvcrush.tables table2": f"{EVICTED} --page 4 --budget 48 --anchors mean",
    "papers.kvcrush.tables table3": f"{EVICTED} --budget 48 --bases SnapKV",
    "papers.kvcrush.tables figure5": f"{EVICTED} --budget 48 --shares 0.25 --bases accumulated",
    "papers.kvcrush.figure6": (
        "--model {model} --budget 48 --timed-length 64 --steps 2 --repeats 1 --shapes toy --no-accuracy"
    ),
    "papers.kvcrush.tables figure7": f"{EVICTED} --budget 48 --units token --bases SnapKV",
    "papers.kvcrush.tables figure8": f"{EVICTED} --page 4 --pages 8",
    "papers.eviction_curves": f"{EVICTED} --budgets 48 --methods random",
    "papers.streaming": f"{TINY} --tokens 400 --recent 28 --sinks 4 --chunk 32 --full 200",
    "bench.decode": "--models toy --contexts 8 --batches 1,2 --steps 1 --repeats 1 --read-megabytes 1",
    "bench.heads": "--models toy --tokens 200 --batches 1 --pages 4,8 --steps 1 --repeats 1",
    "bench.products": "--shapes 128x256,64x128 --rows 1,4 --megabytes 1 --repeats 1",
    "bench.prefill": "--models toy --tokens 24 --repeats 1 --product 64 --methods snapkv;accumulated:budget=8",
    "bench.host": "--megabytes 1 --n 4 --steps 2 --row-steps 2 --repeats 1",
    "bench.compile": "--shape toy --depths 2 --methods full;snapkv --tokens 2 --loop while",
    "bench.dtypes": "--model {model} --context 20 --batches 1 --steps 1 --repeats 1",
    "bench.first_answers": "--model {model} --tokens 64 --methods snapkv:budget=25%",
    "bench.packed_kernel": ("--context 128 --batches 1,2 --megabytes 0 --rounds 1 --repeats 1 --read-megabytes 1"),
    "bench.steps": "--methods full;snapkv:budget=8,window=4 --shape small --layers 1 --tokens 64 --dtype float32",
    "bench.lowbit": "--tokens 64 --heads 1x2 --head-dim 64 --methods int8 --steps 1 --repeats 1",
    "bench.restore": "--gigabytes 0.001 --layouts 1x1x2",
    "gpu.decode": (
        "--model toy --cells 64x1 --methods full;kcache:n=8 --steps 1 --repeats 1 --workers 1 --probe-megabytes 1 "
        "--no-torch"
    ),
    "gpu.kernels": "--parts fetch --megabytes 1",
    "gpu.overlap": "--model toy --context 64 --methods full",
    "bench.memory": "--models {model} --dtypes bfloat16 --tokens 20",
}


@pytest.fixture
def run(directory, tmp_path, monkeypatch, capsys):
    """A function that runs a script and returns its results."""
    monkeypatch.setattr(measuring, "PAUSE_SECONDS", 0.0)
    monkeypatch.setitem(shapes.SHAPES, "toy", kvjax.load(directory).config)
    monkeypatch.setattr(specache_table3, "METHODS", ("full",) * 3)
    low_bits = {key: paper for key, paper in specache_table4.PAPER.items() if key[0] == 1}
    monkeypatch.setattr(specache_table4, "PAPER", low_bits)
    for name, value in {"K": 1, "G": 2, "H": 64}.items():
        monkeypatch.setattr(packed_kernel, name, value)

    def run_script(name: str, options: str):
        module, *table = name.split()
        script = importlib.import_module(f"experiments.{module}")
        script.main([*table, *shlex.split(options.format(model=directory, out=tmp_path))])
        *people, document = capsys.readouterr().out.strip().splitlines()
        document = json.loads(document)
        assert len(people) > 3 and document["results"] and document["machine"]["jax"] == jax.__version__
        return script, document["results"]

    return run_script


@pytest.mark.parametrize("name", SMALL_FORMS)
def test_a_script_ends_with_one_document(name, run, tmp_path):
    script, results = run(name, SMALL_FORMS[name])
    if name.startswith("papers."):
        sentences = script.in_brief(results)
        assert len(sentences) == 3 and all(sentences)
    for picture in tmp_path.glob("*.png"):
        assert picture.stat().st_size > 1000


def test_every_script_has_a_small_form():
    folder = Path(measuring.__file__).parents[1]
    elsewhere = {
        "bench.aot",
        "bench.launches",
        "gpu.__main__",
        "gpu.methods",
        "equal_bytes",
        "catalogue",
        "catalogue_tables",
        "quality_against_bytes",
        "gemma_chat",
        "paper_claims",
        "all",
        "run_notebooks",
    }
    scripts = [path for path in folder.rglob("*.py") if "def main(argv: Sequence" in path.read_text()]
    names = {".".join(path.relative_to(folder).with_suffix("").parts) for path in scripts}
    assert names - elsewhere == {name.split()[0] for name in SMALL_FORMS}
