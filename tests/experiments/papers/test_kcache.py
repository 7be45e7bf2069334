"""The scripts of the KCache paper, and Figure 4 and appendix C of SpeCache, in miniature."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.bench.shapes import SHAPES
from experiments.papers.kcache import equations as kcache_equations
from experiments.papers.kcache import table1 as kcache_table1
from experiments.papers.kcache import table3 as kcache_table3
from experiments.papers.kcache import table4 as kcache_table4
from experiments.papers.specache import appendix as specache_appendix
from kvjax.registry.strings import split_methods

LLAMA2, LLAMA3 = (kcache_table1.CONFIGS[name] for name in ("llama-2-7b", "llama-3-8b"))
A100 = kcache_equations.Machine(312e12, 2039e9, 32e9, 32e9)


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


def test_equations_one_and_two_say_the_same():
    one, two, exact = kcache_equations.prefill(A100, LLAMA2, 4, 2048)
    assert one["left"] / one["right"] == pytest.approx(two["left"] / two["right"])
    assert two["left"] == 11 * 4096 + 2 * 2048 and two["right"] == 312e12 / 32e9 and two["holds"]
    assert exact["left"] / one["left"] == pytest.approx((24 + 3 * 2 * (11008 - 4096 * 8 / 3) / 4096 + 2) / 24, rel=0.05)


# --- Tables 2 to 4


def test_table4_pairs_tasks():
    difference = kcache_table4.difference([(1.0, 3.0), (2.0, 2.0), (5.0, 4.0)])
    assert difference["mean"] == pytest.approx(1 / 3)
    assert (difference["up"], difference["down"], difference["same"]) == (1, 1, 1)
    assert difference["error"] == pytest.approx(np.std([2, 0, -1], ddof=1) / math.sqrt(3))
    assert len(kcache_table4.PAPER) == 27
    means = np.mean(list(kcache_table4.PAPER.values()), 0)
    np.testing.assert_allclose(means, (62.39, 62.79), atol=0.1)  # as in the paper's Table 2


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


# --- SpeCache, Figure 4 and appendix C


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
