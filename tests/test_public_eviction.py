"""Eviction against public PyTorch code: the same tokens stay, and the same 32 follow (tests/fixtures/make_eviction.py)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from checkpoints_convert.convert import read
from kvjax import zoo
from kvjax.kv.budgets import Budget, Pyramid, Ratio, Uniform
from tests.fixtures import ROOT

STEPS, CAPACITY = 32, 256
SIZES = ((125, 0.5), (110, 0.25))  # tokens of the stored prompts, and the share that stays: 1 - kvpress' ratio
FILLER = [(7 * i) % 128 for i in range(190)]  # a longer neighbour, which makes padding


@dataclasses.dataclass(frozen=True)
class ByLength:
    """A budget for each of SIZES, so that one batch and one program hold both."""

    budgets: tuple[Budget, Budget]

    def kept(self, length: int, layer: int, layers: int) -> int:
        return self.budgets[length == SIZES[1][0]].kept(length, layer, layers)


def whole(tokens: int, share: float) -> Uniform:
    return Uniform(int(tokens * share))


def each(make) -> ByLength:
    """make: (tokens, share) -> a budget."""
    return ByLength(tuple(make(*size) for size in SIZES))


def pyramid(make, beta: int, rule: str):
    """PyramidKV with budgets made of (tokens, share), which the recipe itself does not take by length."""
    settings = {"window": 8, "beta": beta, "rule": rule}
    method = zoo.pyramidkv(64, **settings, kernel=5, pool="avg")
    budget = each(lambda tokens, share: Pyramid(make(tokens * share), **settings))
    return dataclasses.replace(method, select=dataclasses.replace(method.select, budget=budget))


AVG = {"window": 8, "kernel": 5, "pool": "avg"}
RATIO = each(lambda _, share: Ratio(share))
METHODS = {
    "kvpress_snapkv": ("gqa", zoo.snapkv(RATIO, **AVG)),
    "kvpress_pyramidkv": ("gqa", pyramid(float, beta=4, rule="peer")),
    "kvpress_observed": ("gqa", zoo.accumulated(RATIO, recent=0, normalise="visible")),
    "kvpress_knorm": ("gqa", zoo.keynorm(RATIO)),
    "kvpress_streaming_50": ("gqa", zoo.sinks_and_recent(62)),
    "kvpress_streaming_25": ("gqa", zoo.sinks_and_recent(27)),
    "factory_pyramidkv": ("gqa", pyramid(int, beta=5, rule="authors")),
    "factory_h2o": ("gqa", zoo.accumulated(each(whole), recent=8)),
    "authors_streaming_50": ("gqa", zoo.streaming_llm(recent=58)),
    "authors_streaming_25": ("gqa", zoo.streaming_llm(recent=23)),
    "authors_snapkv_avg": ("mha", zoo.snapkv(each(whole), **AVG)),
    "authors_snapkv_max": ("mha", zoo.snapkv(each(whole), window=8, kernel=3, pool="max")),
}
"""Public implementation -> (fixture, the same here); of one share, or of both."""


@functools.cache
def load(name: str) -> tuple[kvjax.Model, dict[str, dict]]:
    """(model, case -> prompts, answers, kept as [layer][row][head] of sets) of one fixture."""
    config, params = read(ROOT / "eviction" / name)
    cases: dict[str, dict] = {}
    with np.load(ROOT / "eviction" / name / "cases.npz") as arrays:
        for path, x in arrays.items():
            case, what, *layer = path.split("/")
            here = cases.setdefault(case, {"kept": []})
            if layer:
                here["kept"].append([[set(head.tolist()) for head in row] for row in x])
            else:
                here[what] = x.tolist()
    return kvjax.Model(config, jax.tree.map(jnp.asarray, params)), cases


def stored(public: str) -> list[dict]:
    cases = load(METHODS[public][0])[1]
    return [case for name, case in cases.items() if name in (public, f"{public}_50", f"{public}_25")]


def compare(public: str, prompts: list, cases: list[dict], rows: int) -> None:
    """The first `rows` of each case in turn, at the head of the prompts."""
    model, method = load(METHODS[public][0])[0], METHODS[public][1]
    out = kvjax.generate(model, prompts, method, max_new_tokens=STEPS, eos_ids=(), capacity=CAPACITY)
    answers = [answer for case in cases for answer in case["answers"][:rows]]
    assert out.tokens[: len(answers)] == answers
    _, state = kvjax.prefill(model, prompts, method, capacity=CAPACITY)
    for layer, kept in enumerate(kvjax.kept_positions(state)):
        want = [heads for case in cases for heads in case["kept"][layer][:rows]]
        for prompt, ours, theirs in zip(prompts, kept, want, strict=False):
            assert [real(public, len(prompt), heads) for heads in every_head(ours, len(theirs))] == theirs


def every_head(heads: list, count: int) -> list:
    return heads if len(heads) == count else heads * count


def real(public: str, length: int, positions: np.ndarray) -> set[int]:
    """Without the token that no query sees any more, whose slot the next one takes (StreamingLLM)."""
    leaves = length - 1 - METHODS[public][1].recent if public.startswith("authors_streaming") else None
    return set(positions.tolist()) - {leaves}


@pytest.mark.parametrize("public", METHODS)
def test_in_a_padded_batch_the_same_tokens_stay_and_the_same_follow(public):
    cases = stored(public)
    compare(public, [*(row for case in cases for row in case["prompts"]), FILLER], cases, rows=2)


@pytest.mark.parametrize("public", ["kvpress_snapkv", "kvpress_pyramidkv", "kvpress_observed"])
def test_a_row_alone_keeps_the_same_tokens_and_goes_on_alike(public):
    case = stored(public)[0]
    compare(public, case["prompts"][:1], [case], rows=1)


def test_every_stored_case_is_compared():
    every = [case for fixture in ("gqa", "mha") for case in load(fixture)[1].values()]
    assert sorted(map(id, every)) == sorted(id(case) for public in METHODS for case in stored(public))
    assert {len(row) for case in every for row in case["prompts"]} == {tokens for tokens, _ in SIZES}
