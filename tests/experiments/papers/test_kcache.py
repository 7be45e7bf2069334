"""The scripts of the KCache paper, and Figure 4 and appendix C of SpeCache, in miniature."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.bench.shapes import SHAPES
from experiments.papers.kcache import equations as kcache_equations
from experiments.papers.kcache import table1 as kcache_table1
from experiments.papers.kcache import table2 as kcache_table2
from experiments.papers.kcache import table3 as kcache_table3
from experiments.papers.kcache import table4 as kcache_table4
from experiments.papers.specache import appendix as specache_appendix
from experiments.papers.specache import figure4 as specache_figure4
from kvjax import KvjaxError
from kvjax.registry.strings import split_methods
from kvjax.testing import toy_model
from tests.experiments.output import read_output

LLAMA2, LLAMA3 = (kcache_table1.CONFIGS[name] for name in ("llama-2-7b", "llama-3-8b"))
A100 = kcache_equations.Machine(312e12, 2039e9, 32e9, 32e9)


def brief(script, document: dict) -> tuple[str, ...]:
    """The script's own account of its document, which must be three sentences without gaps."""
    words = script.in_brief(document["results"])
    assert len(words) == 3 and all(words) and not any("nan" in w for w in words)
    return words


# --- Table 1


def parts(config, **sizes) -> dict[tuple[str, str], dict]:
    args = {"batch": 2, "context": 256, "n": 16, "dtype": "float32", **sizes}
    return {(r["method"], r["part"][:2]): r for r in kcache_table1.records(config, **args)}


def test_formulas_are_the_papers():
    b, s, d, n, h, N = 2, 256, 4096, 32, 128, 16
    formulas = {k: (r["paper"]["flops"], r["paper"]["bytes"] / 2) for k, r in parts(LLAMA2).items()}  # of float32
    assert formulas == {
        ("MHA", "Q,"): (6 * b * d**2, 12 * b * d + 6 * d**2),
        ("MHA", "S "): (2 * b * s * d, 2 * b * n * h + 2 * b * n * h * s + 2 * b * n * s),
        ("MHA", "A "): (2 * b * s * d, 2 * b * n * s + 2 * b * s * d + 2 * b * d),
        ("MHA", "AW"): (2 * b * d**2, 4 * b * d + 2 * d**2),
        ("KCache", "Q,"): (6 * b * d**2, 12 * b * d + 6 * d**2),
        ("KCache", "S~"): (2 * b * s * d, 2 * b * n * h + 2 * b * n * h * s + 2 * b * n * N),
        ("KCache", "A~"): (2 * b * N * d, 2 * b * n * N + 2 * b * N * d + 2 * b * d),
        ("KCache", "AW"): (2 * b * d**2, 4 * b * d + 2 * d**2),
    }


def test_printed_intensities_are_flops_over_bytes_but_for_one():
    for (_, name), r in parts(LLAMA2).items():
        own = 2 * r["paper"]["intensity"]  # of 16 bits
        assert (name == "A~") != math.isclose(r["printed_intensity"], own)
    assert 1 / (1 + 1 / 128 + 1 / 16) == pytest.approx(2 * parts(LLAMA2)["KCache", "A~"]["paper"]["intensity"])


@pytest.mark.parametrize("config", [LLAMA3, SHAPES["small"]])
def test_xla_counts_the_exact_operations_and_no_fewer_bytes(config):
    for (_, name), r in parts(config, batch=3).items():
        assert r["xla"]["flops"] == pytest.approx(r["exact"]["flops"], rel=0.02)
        assert r["xla"]["bytes"] >= 0.999 * r["exact"]["bytes"]
        if name in ("Q,", "AW"):
            assert r["xla"]["bytes"] == pytest.approx(r["exact"]["bytes"], rel=0.02)


def test_parts_compute_attention():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 2, 3, 1, 8), (2, 2, 40, 8), (2, 2, 40, 8)))
    p = kcache_table1.softmax(q, k)
    s = np.einsum("bkgth,bksh->bkgts", q, k) / math.sqrt(8)
    exact = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    np.testing.assert_allclose(p, exact, rtol=1e-4)
    out = np.einsum("bkgts,bksh->bkgth", exact, v)
    np.testing.assert_allclose(kcache_table1.mix_all(p, v), out, atol=1e-5)
    np.testing.assert_allclose(kcache_table1.mix_selected(*kcache_table1.top_weights(q, k, 40), v), out, atol=1e-5)
    part, idx = kcache_table1.top_weights(q, k, 4)
    left = np.zeros(exact.shape)
    np.put_along_axis(left, np.asarray(idx), np.asarray(part), -1)
    np.testing.assert_allclose(
        kcache_table1.mix_selected(part, idx, v), np.einsum("bkgts,bksh->bkgth", left, v), atol=1e-5
    )


def test_table1_prints_and_refuses(directory, capsys):
    kcache_table1.main(f"--model {directory} --batch 2 --context 64 --n 8".split())
    people, document = read_output(capsys)
    assert "2bnh + 2bnhs + 2bnN" in people and len(document["results"]["parts"]) == 8
    brief(kcache_table1, document)
    with pytest.raises(KvjaxError, match="--n 65 must lie between 1 and --context 64"):
        kcache_table1.main("--context 64 --n 65".split())
    with pytest.raises(KvjaxError, match="--model takes a checkpoint directory, testbed, llama-2-7b"):
        kcache_table1.configuration("llama-9")


# --- equations


def test_break_even_of_the_a100():
    ratios = [r["ratio"] for r in kcache_equations.break_even(A100, LLAMA2, 16384)]
    weighted = 2039 / 32 / (1 + 1 / 128)
    assert ratios == pytest.approx([2039 / 32, 1 + weighted / 2, 1 + weighted, 1 + weighted])
    assert round(ratios[0]) == kcache_equations.PAPER["s/N"]
    grouped = kcache_equations.break_even(A100, LLAMA3, 16384)[-1]["ratio"]
    assert 3.9 * ratios[2] < grouped < 4 * ratios[2]  # four query heads share what a full read brings once


@pytest.mark.parametrize("config", [LLAMA2, LLAMA3])
def test_both_sides_are_equal_at_the_break_even(config):
    for f in kcache_equations.fetches(config):
        x, y = f.sides(A100, 3, round(1e6 * f.break_even(A100)), 10**6)
        assert x == pytest.approx(y, rel=1e-5)
    for line in kcache_equations.break_even(A100, config, 4096):
        n = line["largest_n"]
        assert n and 4096 / n > line["ratio"] >= 4096 / (n + 1)


def test_largest_is_strict():
    assert [kcache_equations.largest_n(s, 64.0) for s in (64, 128, 129, 6400)] == [0, 1, 2, 99]


def test_equations_one_and_two_say_the_same():
    one, two, exact = kcache_equations.prefill(A100, LLAMA2, 4, 2048)
    assert one["left"] / one["right"] == pytest.approx(two["left"] / two["right"])
    assert two["left"] == 11 * 4096 + 2 * 2048 and two["right"] == 312e12 / 32e9 and two["holds"]
    assert exact["left"] / one["left"] == pytest.approx((24 + 3 * 2 * (11008 - 4096 * 8 / 3) / 4096 + 2) / 24, rel=0.05)


def test_equations_print_and_measure(capsys):
    kcache_equations.main(["--n", "128"])
    people, document = read_output(capsys)
    assert "63.7" in people and [r["n"] for r in document["results"]["decode"]] == [128] * 4
    assert "63.7" in brief(kcache_equations, document)[0]
    kcache_equations.main("--measure --probe 4,64 --repeats 1".split())
    measured = read_output(capsys)[1]["results"]["machine"]
    assert set(measured) == {"flops", "gpu", "h2d", "d2h"} and all(x > 0 for x in measured.values())
    with pytest.raises(KvjaxError, match="h2d must be more than 0"):
        kcache_equations.main(["--h2d", "0"])


# --- Tables 2 to 4

QUICK = "--length 96 --contexts 1 --windows 1 --tokens 3 --tasks needle"


def test_table2_stands_beside_the_paper(directory, tmp_path, capsys):
    assert len(kcache_table2.PAPER) == 13 and kcache_table2.PAPER[128, 1][0] == (38.57, 14.25, 64.24)
    command = kcache_table2.commands("DIR", kcache_table2.method(128, 1))[1]
    assert "model=DIR,method=kcache:n=128/device_layers=1 --tasks gsm8k --num_fewshot 8" in command
    kcache_table2.main(f"--model {directory} --out {tmp_path} {QUICK} --n 32 --layers 0".split())
    people, document = read_output(capsys)
    assert [tuple(r["key"]) for r in document["results"]["lines"]] == [(0, 0), (32, 0)]
    assert "33.2  5.5  63.6" in people and "Differs from the paper" in people
    assert "N=32 L=0" in brief(kcache_table2, document)[0]


def test_table4_pairs_tasks(directory, tmp_path, capsys):
    difference = kcache_table4.difference([(1.0, 3.0), (2.0, 2.0), (5.0, 4.0)])
    assert difference["mean"] == pytest.approx(1 / 3)
    assert (difference["up"], difference["down"], difference["same"]) == (1, 1, 1)
    assert difference["error"] == pytest.approx(np.std([2, 0, -1], ddof=1) / math.sqrt(3))
    assert len(kcache_table4.PAPER) == 27
    means = np.mean(list(kcache_table4.PAPER.values()), 0)
    np.testing.assert_allclose(means, (62.39, 62.79), atol=0.1)  # as in the paper's Table 2
    kcache_table4.main(f"--model {directory} --out {tmp_path} {QUICK} --n 32 --layers 0".split())
    people, document = read_output(capsys)
    assert "snarks" in people and document["results"]["difference"]["ours"]["same"] == 1
    brief(kcache_table4, document)


def test_the_plan_of_the_papers_gpu():
    """All cells out of memory in the paper but that of 15k tokens are so by bytes alone; KCache holds about twice."""
    args = kcache_table3.argparse.Namespace(memory_gb=64, workspace_gb=1, device_layers=1)
    plans = kcache_table3.plans(args)
    differ = [(r["input"], r["batch"]) for r in plans if r["fits"]["full"] != (r["paper"][0] is not None)]
    assert differ == [(15360, 5)] and all(r["fits"]["kcache"] for r in plans)
    assert all(1.9 < r["largest"]["kcache"] / r["largest"]["full"] <= 2 for r in plans)
    row = 32 * 2 * 2 * 32 * 128 * 8192 + 32 * (4 * 8192 + 4) + 4  # keys, values, positions of 7k + 1k tokens, lengths
    full = kcache_table3.largest_batch(kvjax.parse("full"), 7168, 1024, 0)
    assert full["row"] == row + kcache_table3.step_bytes(kcache_table3.CONFIG, kvjax.parse("full"), 8192)


def test_table3_measures_what_fits_and_says_what_does_not(directory, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "toy", kvjax.load(directory).config)
    quick = "--models toy --inputs 32 --batches 1 --n 8 --device-layers 0 --output 16 --steps 1 --repeats 1"
    kcache_table3.main(quick.split())
    _, document = read_output(capsys)
    (cell,) = document["results"]["decode"]
    assert list(cell["tokens_per_second"]) == ["full", "kcache:n=8,device_layers=0"] and cell["context"] == 40
    assert all(x > 0 for x in cell["tokens_per_second"].values())
    brief(kcache_table3, document)
    kcache_table3.main([*quick.split(), "--limit-gb", "0"])
    people, document = read_output(capsys)
    assert "needs 0.0 GiB" in people and "tokens_per_second" not in document["results"]["decode"][0]
    assert "No cell was timed" in brief(kcache_table3, document)[2]


# --- SpeCache, Figure 4 and appendix C


def test_figure4_draws_and_goes_on(directory, tmp_path, capsys):
    run = (
        f"--model {directory} --out {tmp_path} --contexts 1 --depths 2 --run {tmp_path / 'run'} --lengths 96 --methods"
    )
    specache_figure4.main([*run.split(), "full"])
    people, document = read_output(capsys)
    cells = document["results"]["cells"]
    assert [(c["method"], c["length"], c["depth"], c["n"]) for c in cells] == [("full", 96, d, 1) for d in (0.0, 1.0)]
    assert (tmp_path / "specache_figure4.png").stat().st_size > 1000 and "Differs from the paper" in people
    records = (tmp_path / "run" / "records.jsonl").read_text()
    specache_figure4.main([*run.split(), "full"])
    assert (tmp_path / "run" / "records.jsonl").read_text() == records
    assert read_output(capsys)[1]["results"] == document["results"]
    assert "pair of methods" in brief(specache_figure4, document)[2]


def test_figure4_compares_the_pair():
    scores = {"full": 1.0, "kivi:bits=1": 0.25, "specache:bits=1": 0.75}
    cell = {"length": 96, "depth": 0.0, "error": None, "n": 1}
    cells = [{"method": method, "score": score, **cell} for method, score in scores.items()]
    results = {"methods": list(scores), "cells": cells}
    assert specache_figure4.in_brief(results)[2] == "SpeCache finds more than one bit alone (+50.0 points)."
    model = toy_model(max_positions=4096)
    assert specache_figure4.lengths(model) == [256, 512, 1024, 2048, 4096]


def test_appendix_has_the_papers_averages_and_methods():
    for model in specache_appendix.PAPER:
        for label, scores in specache_appendix.paper_scores(model).items():
            assert len(scores) == 16
            mean = np.mean([scores[t] for t in specache_appendix.TASKS])
            assert mean == pytest.approx(scores["average"], abs=0.07), label
    methods = specache_appendix.methods(7500, [4, 8], 64, 128)
    assert list(methods) == list(specache_appendix.PAPER["LLaMA-3-8B"])
    parts = {label: split_methods(text)[0].values for label, text in methods.items()}
    infllm, stream, h2o = (parts[label] for label in ("InfLLM 4x", "StreamLLM 4x", "H2O 4x"))
    assert infllm["sinks"] + infllm["block"] * infllm["topk"] + infllm["local"] == 1875
    assert stream["sinks"] + stream["recent"] == h2o["heavy"] + h2o["recent"] == 1875


def longbench(folder, task: str) -> None:
    (folder / "longbench").mkdir(exist_ok=True)
    row = {"input": "Who?", "context": "Nobody was there. " * 8, "answers": ["Nobody"], "length": 24}
    (folder / "longbench" / f"{task}.jsonl").write_text(json.dumps({**row, "all_classes": None}) + "\n")


def test_appendix_runs_stand_ins_and_local_files(directory, tmp_path, capsys):
    quick = f"--model {directory} --out {tmp_path} --length 96 --contexts 1 --methods full --tasks"
    specache_appendix.main([*quick.split(), "symbols.variables"])
    people, document = read_output(capsys)
    assert "LongBench itself is not here: give --data DATA with DATA/longbench/TASK.jsonl" in people
    assert list(document["results"]["scores"]["full"]) == ["symbols.variables"]
    longbench(tmp_path, "hotpotqa")
    specache_appendix.main([*quick.split(), "longbench.hotpotqa", "--data", str(tmp_path)])
    people, document = read_output(capsys)
    assert document["results"]["longbench"] and list(document["results"]["scores"]["full"]) == ["longbench.hotpotqa"]
    assert "is not here" not in people
    jax.clear_caches()


def test_appendix_sums_up_an_order():
    results = {"longbench": False, "scores": {"Full": {"a": 90.0}, "KIVI 1 bit": {"a": 50.0}, "H2O 8x": {"a": 40.0}}}
    ours, paper, difference = specache_appendix.in_brief(results)
    assert "KIVI 1 bit 50.0" in ours and "KIVI 1 bit 30.1" in paper
    assert "order: Full > KIVI 1 bit > H2O 8x, the paper's Full > H2O 8x > KIVI 1 bit" in difference
