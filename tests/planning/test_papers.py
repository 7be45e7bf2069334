"""The planner against the papers of KCache and SpeCache, and its bound against speeds measured on an H200."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest

import kvjax
from experiments.gpu.models import SHAPES
from experiments.papers.kcache import table3 as kcache
from experiments.papers.specache import table1, table3
from kvjax.planning import device_bytes
from kvjax.planning.device_bytes import RESERVED, Setting, count_device_bytes
from kvjax.planning.hardware import GB, GIB, Hardware, find_hardware
from kvjax.planning.models import PlannedModel
from kvjax.planning.plan import bound_tokens_per_second, plan

# KCache's GPU has 64 GB and 1 TB/s; H2D is unknown, and 31 GB/s would give its own 32.
PAPERS_GPU = Hardware("kcache", 64 * GIB, 1000 * GB, 31 * GB, 10**13, "KCache, section 5")
LLAMA_2 = PlannedModel("llama-2-7b", dataclasses.replace(kcache.CONFIG, max_positions=2**15), "the papers")


def setting(model: PlannedModel, hardware: Hardware, room: int = 0, reserved: float = 0.0) -> Setting:
    return Setting(model, hardware, (1, 1), "bfloat16", room, None, reserved)


@pytest.mark.parametrize("name", table1.MODELS)
def test_sizes_are_those_of_specache_table_1(name):
    """Fractions of the exact cache, of KIVI and of SpeCache alike, to both decimals that the paper prints."""
    paper = table1.MODELS[name]
    on = setting(PlannedModel(name, paper.config, "SpeCache"), find_hardware("a100-80"))
    full = count_device_bytes(on, kvjax.parse("full"), paper.length, 1).cache
    for (bits, group), size in paper.sizes.items():
        for method in ("kivi", "specache"):
            need = count_device_bytes(on, kvjax.parse(f"{method}:bits={bits},group={group}"), paper.length, 1)
            assert f"{need.cache / full:.2f}" == f"{size:.2f}", (method, bits, group)


@pytest.mark.parametrize("context", table3.PAPER)
def test_batches_of_specache_table_3_fit_and_grow_alike(context):
    """The paper's batches, found by trial with copies of the cache, fit the plan; both grow several times over full."""
    model = PlannedModel("mistral-7b", table3.CONFIG, "SpeCache")
    a6000 = dataclasses.replace(PAPERS_GPU, memory_bytes=48 * GIB, memory_bandwidth=768 * GB)
    methods = [method.format(group=64) for method in table3.METHODS]
    plans = plan(model, methods, [context], hardware=a6000, reserved=1 / 48)
    ours = [(p.largest_batches or {})["device memory"] for p in plans]
    papers = [batch for batch, _ in table3.PAPER[context]]
    assert all(most >= batch for most, batch in zip(ours, papers, strict=True))
    for more in (1, 2):
        assert 0.5 < (ours[more] / ours[0]) / (papers[more] / papers[0]) < 1.1
    on = setting(model, a6000)
    for method, (batch, tokens_per_second) in zip(methods, table3.PAPER[context], strict=True):
        assert bound_tokens_per_second(on, kvjax.parse(method), context, batch) > tokens_per_second


@pytest.mark.parametrize(("tokens", "batch"), kcache.PAPER)
def test_batches_of_kcache_table_3_fit_and_its_speeds_are_below_the_bound(tokens, batch):
    """All of its out-of-memory errors, and no other; no speed is above the bound, or far below it.

    The paper's engine runs an MLP over all tokens at once. kvjax, which takes blocks of them, reads five sequences of
    15,360 tokens: in the paper they are out of memory, by 0.1% of what the plan lets programs use.
    """
    on = setting(LLAMA_2, PAPERS_GPU, kcache.OUTPUT_TOKENS, RESERVED)
    for method, paper in zip(kcache.methods(kcache.SIZES, 1), kcache.PAPER[tokens, batch], strict=True):
        needed = count_device_bytes(on, kvjax.parse(method), tokens, batch)
        with mock.patch.object(device_bytes, "BLOCK_TOKENS", tokens):
            at_once = count_device_bytes(on, kvjax.parse(method), tokens, batch)
        assert (at_once.peak <= on.usable_bytes) == (paper is not None)
        reads_in_blocks = (tokens, batch) == (15_360, 5) or paper is not None
        assert (needed.peak <= on.usable_bytes) == reads_in_blocks
        if paper is not None:
            # The context grows by the answer; a step of the mean length stands for all.
            mean_context = tokens + kcache.OUTPUT_TOKENS // 2
            bound = bound_tokens_per_second(setting(LLAMA_2, PAPERS_GPU), kvjax.parse(method), mean_context, batch)
            assert (0.75 if method == "full" else 0.35) < paper / bound < 0.95


def test_speeds_measured_on_an_h200_are_below_the_bound():
    folder = Path(kvjax.__file__).parents[1] / "experiments/results/gpu/nvidia-h200"
    names = ("decode-1b.json", "equal-memory.json")
    cells = [r for name in names for r in json.loads((folder / name).read_text())["results"]]
    measured = [r for r in cells if "tokens_per_second" in r and r["method"] != "transformers"]
    assert len(measured) > 8
    for r in measured:
        model = PlannedModel(r["model"], dataclasses.replace(SHAPES[r["model"]], max_positions=2**17), "results")
        on = setting(model, find_hardware("h200"))
        bound = bound_tokens_per_second(on, kvjax.parse(r["method"]), r["context"], r["batch"])
        assert 0.05 < r["tokens_per_second"] / bound < 1
