"""The scripts of the SpeCache paper in miniature: exact sizes, quality against plain generation, the output."""

from __future__ import annotations

import argparse

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.papers import common
from experiments.papers.specache import figure2 as specache_figure2
from experiments.papers.specache import table1 as specache_table1
from experiments.papers.specache import table3 as specache_table3
from kvjax import KvjaxError
from kvjax.core.attention import PLAIN
from kvjax.testbed import tasks

LOW = "bits=1,group=8,residual=32"


@pytest.fixture(scope="module")
def tiny(directory) -> kvjax.Model:
    return kvjax.load(directory)


def test_every_size_of_the_paper_to_two_decimals():
    paper = {
        "LLaMA-2-7B": ("0.22", "0.19"),
        "LLaMA-2-13B": ("0.22", "0.19"),
        "Mistral-7B": ("0.19", "0.16", "0.13", "0.10"),
        "LLaMA-3-8B": ("0.20", "0.17", "0.14", "0.11"),
    }
    ours = {name: [r for r in specache_table1.sizes() if r["model"] == name] for name in paper}
    for name, records in ours.items():
        for i in (0, 1):  # kivi and specache
            assert tuple(f"{list(r['share'].values())[i]:.2f}" for r in records) == paper[name]
        assert tuple(f"{r['paper']:.2f}" for r in records) == paper[name]


def test_bytes_of_a_size_counted_by_hand():
    (r,) = (r for r in specache_table1.sizes() if (r["model"], r["bits"], r["group"]) == ("Mistral-7B", 1, 64))
    layers, numbers, tokens = 32, 8 * 128, 32768
    codes = 2 * (numbers * tokens // 8 + 2 * 2 * numbers * tokens // 64)  # with a scale and a minimum of 2 bytes each
    counts = 4 * tokens + 4  # positions, and how many there are

    def recent(n: int) -> int:
        return 2 * numbers * (n + n + 1)  # values stay a step longer

    kivi = codes + recent(128) + counts + 2 * 4
    fetched = 2 * 2 * numbers * 64 + 4 * 8 * 64
    specache = codes + recent(64) + counts + 2 * 4 + fetched
    assert r["bytes"] == {
        "full": layers * (2 * 2 * numbers * tokens + counts) + 4,  # the cache's own length
        "kivi:bits=1,group=64": {"device": layers * kivi + 4, "pinned_host": 0},
        "specache:bits=1,group=64": {
            "device": layers * specache + 4,
            "pinned_host": layers * 2 * 2 * numbers * tokens,
        },
    }


def small_instances(task: str, n: int, length: int) -> list[tasks.Instance]:
    return [tasks.TASKS[task](np.random.default_rng(i), length) for i in range(n)]


@pytest.mark.parametrize("text", ["full", f"kivi:{LOW}", f"specache:{LOW},topk=4"])
def test_a_shared_prefill_answers_as_generation_from_the_whole_prompt(tiny, text):
    """`full`, which comes first, leaves the exact state to the others, too."""
    method, batch = kvjax.parse(text), small_instances("needle", 2, 96)
    prompts = [np.concatenate([i.context, i.questions[0].prompt]) for i in batch]
    generated = kvjax.generate(tiny, prompts, method, max_new_tokens=4, eos_ids=())
    echo = []
    for instance, tokens in zip(batch, generated.tokens, strict=True):
        question = tasks.Question(instance.questions[0].prompt, np.array(tokens), 0.0)
        echo.append(tasks.Instance("needle", instance.context, (question,)))
    right = common.answers(tiny, {"first": common.FULL, text: method}, echo, "prompt")
    assert right[text] == [True, True]
    instances = [tasks.Instance("needle", i.context, i.questions) for i in batch]
    assert common.answers(tiny, {text: method}, instances, "prompt")[text] == [False, False]


def test_text_is_scored_as_by_a_context(tiny):
    rows = np.random.default_rng(0).integers(0, 256, (2, 100), np.int32)
    methods = {t: kvjax.parse(t) for t in ("full", f"kivi:{LOW}")}
    scores = common.continuations(tiny, methods, rows, 96)
    for text, method in methods.items():
        context_scores = kvjax.read(tiny, rows[:, :96], method, room=4).score(rows[:, 96:])
        nats, likeliest = map(np.stack, zip(*context_scores, strict=True))
        np.testing.assert_allclose(scores[text][0], -nats[:, 1:].mean(1) / np.log(2), rtol=1e-5)
        np.testing.assert_array_equal(scores[text][1], likeliest[:, 1:])


def arguments(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"text": None, "windows": 3, "length": 96, "contexts": 2, "seed": 0, **changes})


def test_windows_are_spread_over_a_text(tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("0123456789" * 5)
    rows = common.windows(arguments(text=file), tiny, 10)
    assert [bytes(r.tolist()) for r in rows] == [b"0123456789"] * 3
    with pytest.raises(KvjaxError, match="50 tokens, and one window takes 51: give a longer --text"):
        common.windows(arguments(text=file), tiny, 51)


def exact_weights(q: np.ndarray, k: np.ndarray, t: int) -> np.ndarray:
    s = k[: t + 1] @ q[t] / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max())
    return p / p.sum()


def greedy_hit_rate(q: np.ndarray, k: np.ndarray, size: int, first: int) -> float:
    """The hit rate of H2O in one head, in NumPy, with half of the size for the newest keys."""
    recent, kept, received, hits = max(size // 2, 1), [], np.zeros(len(k)), []
    for t in range(len(k)):
        kept.append(t)
        if len(kept) > size:
            kept.remove(min((s for s in kept if s <= t - recent), key=lambda s: received[s]))
        p = exact_weights(q, k, t)
        received[kept] += p[kept] / p[kept].sum()
        hits += [p[kept].sum()] * (t >= first)
        assert len(kept) <= size
    return float(np.mean(hits))


def test_hit_rates_are_those_of_a_plain_loop():
    rng, sizes, first = np.random.default_rng(0), (1, 3, 8, 24), 12
    q = rng.normal(size=(1, 2, 2, 24, 4)).astype(np.float32) * 2
    k = rng.normal(size=(1, 2, 24, 4)).astype(np.float32)
    heads = [(q[0, i, j], k[0, i]) for i in range(2) for j in range(2)]
    hits = specache_figure2.greedy_hits(jnp.asarray(q), jnp.asarray(k), first, sizes, PLAIN)
    np.testing.assert_allclose(
        hits, [np.mean([greedy_hit_rate(*h, n, first) for h in heads]) for n in sizes], rtol=1e-5
    )
    at = np.arange(first, 24)
    hits = specache_figure2.top_hits(
        jnp.asarray(q[:, :, :, at]), jnp.asarray(k), jnp.asarray(at, jnp.int32), sizes, PLAIN
    )
    best = [[np.sort(exact_weights(*h, t))[::-1][:n].sum() for h in heads for t in at] for n in sizes]
    np.testing.assert_allclose(hits, np.mean(best, 1), rtol=1e-5)


def test_a_plan_fills_the_memory_and_no_more():
    method, config = kvjax.parse("specache:bits=1,group=64"), specache_table3.CONFIG
    assert specache_table3.weight_bytes(config) == 2 * 7_241_732_096  # Mistral-7B's parameters
    plan = specache_table3.plan(config, method, 2048, 48 * 2**30, 2**30)
    b, free = plan["bytes"], 47 * 2**30 - plan["bytes"]["weights"]
    each = b["row"] + b["row_step"]
    assert plan["batch"] * each <= free < (plan["batch"] + 1) * each
    assert b["host"] == plan["batch"] * 32 * 2 * 2 * 8 * 128 * 2048
    assert specache_table3.plan(config, method, 2048, 2**30, 2**30)["batch"] == 0
