"""Eviction against public PyTorch code: the same tokens stay and the same follow (tests/fixtures/make_eviction*.py)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from checkpoints_convert.convert import read
from kvjax import methods
from kvjax.methods.pyramidkv import Pyramid
from tests.fixtures import ROOT

# 62 tokens are three quarters of stored prompts of 83 tokens, half of those of 125, and a quarter of 250, rounded down
KEPT, STEPS, CAPACITY = 62, 32, 320
FIELD = 60  # tokens kept of the field's prompts: three quarters of 80 tokens, half of 120, a quarter of 240
AVG = {"window": 8, "kernel": 5, "pool": "avg"}
ADAKV = methods.adakv(rule="kvpress")
ROUNDED = methods.pyramidkv(KEPT, **AVG, beta=10, rule="peer")  # kvpress' ratios leave half a token more
PEER = dataclasses.replace(
    ROUNDED, select=dataclasses.replace(ROUNDED.select, budget=Pyramid(62.5, AVG["window"], beta=10, rule="peer"))
)
PUBLISHED = ROOT / "eviction" / "published"
KVZAP_LINEAR = str(PUBLISHED / "kvzap_linear.safetensors")
DECODING = {
    "kvpress_decoding_keydiff": ("gqa", kvjax.compose(methods.keydiff(FIELD), methods.recompress(12))),
    # Above a target that grows by half of the tokens, 12 tokens are 6.
    "kvpress_decoding_of_text_keydiff": ("gqa", kvjax.compose(methods.keydiff("50%"), methods.recompress(6))),
    "kvpress_dms_decoding_kvzap": (
        "gqa",
        kvjax.compose(methods.kvzap("100%", recent=16, table=KVZAP_LINEAR), methods.dms(0.0, decode=True)),
    ),
    "kvpress_dms_decoding_knorm": (
        "gqa",
        kvjax.compose(methods.keynorm("100%", recent=16), methods.dms(-6.5, decode=True)),
    ),
    "kvpress_decoding_tova": ("gqa", methods.tova(FIELD, keep_newest=True)),  # compressed after every token
}
METHODS = {
    "kvpress_snapkv": ("gqa", methods.snapkv(KEPT, **AVG)),
    "kvpress_pyramidkv": ("gqa", PEER),
    "kvpress_streaming": ("gqa", methods.sinks_and_recent(KEPT)),
    "kvpress_observed": ("gqa", methods.accumulated(KEPT, recent=0, normalise="visible")),
    "kvpress_knorm": ("gqa", methods.keynorm(KEPT)),
    "factory_pyramidkv": ("gqa", methods.pyramidkv(KEPT, **AVG)),
    "factory_h2o": ("gqa", methods.accumulated(KEPT, recent=8)),
    "authors_streaming": ("gqa", methods.streaming_llm(recent=KEPT - 4, sinks=4)),
    "authors_snapkv_avg": ("mha", methods.snapkv(KEPT, **AVG)),
    "authors_snapkv_max": ("mha", methods.snapkv(KEPT, window=8, kernel=3, pool="max")),
    "kvpress_tova": ("gqa", methods.snapkv(KEPT, window=1, kernel=1, per="layer")),  # of the prompt only
    "authors_tova": ("gqa", methods.tova(KEPT)),
    "kvpress_keydiff": ("gqa", methods.keydiff(KEPT)),
    "kvpress_adakv": ("gqa", kvjax.compose(methods.snapkv(KEPT, **AVG), ADAKV)),
    "kvpress_lagkv": ("gqa", methods.lagkv(FIELD, lag=20)),  # of 2, 4 or 10 partitions equally many stay: no ties
    "kvpress_lagkv_cross": ("gqa", methods.lagkv(FIELD, lag=16, cross=True)),
    "kvpress_cur": ("gqa", methods.cur(FIELD)),
    "kvpress_cur_mean": ("gqa", methods.cur(FIELD, leverage="mean", window=10)),
    # All chunks are whole, as the window.
    "kvpress_chunkkv": ("gqa", methods.chunkkv(FIELD, chunk=4, window=8, kernel=5)),
    "kvpress_expected": ("gqa", methods.expected_attention(FIELD)),
    "kvpress_expected_mean": ("gqa", methods.expected_attention(FIELD, future=16, covariance=False, value_norms=False)),
    "kvpress_expected_adakv": ("gqa", kvjax.compose(methods.expected_attention(FIELD, epsilon=0.02), ADAKV)),
    "kvpress_criticalkv": ("gqa", kvjax.compose(methods.snapkv(FIELD, **AVG), methods.criticalkv())),
    # half of each head's tokens are more than AdaKV's safe 12, and these are among them
    "kvpress_criticaladakv": (
        "gqa",
        kvjax.compose(kvjax.compose(methods.snapkv(FIELD, **AVG), ADAKV), methods.criticalkv()),
    ),
    "kvpress_merging": ("gqa", kvjax.compose(methods.keynorm(FIELD), methods.merging())),
    "kvpress_duo": ("gqa", methods.duo_attention(0.5, 4, FIELD - 4, str(ROOT / "eviction" / "heads.safetensors"))),
    # repeated without words of its own, for there is no tokenizer
    "kvpress_kvzip": ("gqa", methods.kvzip(FIELD, level="layer")),
    "kvpress_kvzip_model": ("gqa", methods.kvzip(FIELD)),  # kvpress' default
    "kvpress_kvzip_plus": ("gqa", methods.kvzip(FIELD, plus=True, level="layer")),
    "kvpress_kvgrad": ("gqa", methods.kvgrad(FIELD)),
    "kvpress_kvgrad_chunks": ("gqa", methods.kvgrad(FIELD, chunk=40, level="layer")),
    "kvpress_leverage": ("gqa", methods.leverage_score(FIELD)),
    "kvpress_noncausal": ("gqa", methods.noncausal_attention(FIELD, chunk=40)),
    "kvpress_compactor": ("gqa", methods.compactor(FIELD, chunk=4)),
    "kvpress_qfilters": ("gqa", methods.qfilters(FIELD, table=str(PUBLISHED / "qfilters.safetensors"))),
    "kvpress_stats": ("gqa", methods.expected_attention(FIELD, table=str(PUBLISHED / "query_statistics.safetensors"))),
    "kvpress_kvzap": ("gqa", methods.kvzap(FIELD, recent=0, table=str(PUBLISHED / "kvzap_mlp.safetensors"))),
    "kvpress_dms": ("gqa", kvjax.compose(methods.kvzap("100%", recent=16, table=KVZAP_LINEAR), methods.dms(0.0))),
    "kvpress_fastkvzip": ("gqa", methods.fastkvzip(FIELD, table=str(PUBLISHED / "fastkvzip.safetensors"))),
    "kvpress_lukv": (
        "gqa",
        kvjax.compose(
            methods.expected_attention(FIELD, epsilon=0.02, recent=1), methods.lukv(str(PUBLISHED / "lukv.npy"))
        ),
    ),
    "kvpress_entropy": (
        "gqa",
        kvjax.compose(methods.snapkv(FIELD, **AVG, per="layer"), methods.entropy_gated_chunks(chunk=4, kept=2)),
    ),
    "kvpress_chunk": ("gqa", kvjax.compose(methods.keynorm(FIELD), methods.chunk_budgets(20))),
    "kvpress_chunk_keydiff": (
        "gqa",
        kvjax.compose(methods.keydiff(FIELD), methods.chunk_budgets(20, score="chunk")),
    ),
    "kvpress_block_keydiff": ("gqa", kvjax.compose(methods.keydiff(FIELD), methods.blocks(16, attend="all"))),
    "kvpress_cap": ("gqa", methods.cap(FIELD)),
    "kvpress_kvcompose": ("gqa", methods.kvcompose(FIELD)),
    "kvpress_simlayer": ("gqa", methods.simlayerkv(0.5, recent=57)),
    "kvpress_simlayer75": ("gqa", methods.simlayerkv(0.8, recent=57)),
    "kvpress_simlayer25": ("gqa", methods.simlayerkv(0.25, recent=57)),
    **{f"kvpress_think{kept}": ("gqa", methods.think(1 - kept / 100, recent=0)) for kept in (75, 50, 25)},
    "kvpress_composed": ("gqa", kvjax.compose(methods.snapkv(FIELD, **AVG), methods.think(0.5, recent=0))),
    "kvpress_rerotated_snapkv": ("gqa", kvjax.compose(methods.snapkv(FIELD, **AVG), methods.rerotated())),
    "kvpress_rerotated_keydiff": ("gqa", kvjax.compose(methods.keydiff(FIELD), methods.rerotated())),
    "kvpress_finch": ("gqa", methods.finch(FIELD, window=8)),
    "kvpress_finch_chunks": ("gqa", methods.finch(FIELD, window=8, chunk=40)),
    **DECODING,
}
"""Public implementation -> (fixture, what it is here)."""

LENGTHS = [83, 83, 125, 125, 250, 250], [80, 80, 120, 120, 240, 240], [80, 80], [120, 120], [240, 240]
"""Lengths of the prompts of one method; the last three are of methods that are compared at one ratio."""


@functools.cache
def load(name: str) -> tuple[kvjax.Model, dict[str, list[dict]]]:
    """The model, and by public implementation a row per prompt: prompt, answer, kept and at_the_end [layer][head]."""
    config, params = read(ROOT / "eviction" / name)
    rows: dict[str, list[dict]] = {}
    for file in sorted((ROOT / "eviction" / name).glob("*.npz")):
        arrays = np.load(file)
        for case in dict.fromkeys(path.split("/")[0] for path in arrays):
            kept = [x for path, x in arrays.items() if path.startswith(f"{case}/kept/")]
            both = (arrays[f"{case}/{what}"] for what in ("prompts", "answers"))
            for prompt, answer, *layers in zip(*both, *kept, strict=True):
                kept = [[head[head >= 0].tolist() for head in layer] for layer in layers]
                row = {"prompt": prompt.tolist(), "answer": answer.tolist(), "kept": kept[: config.layers]}
                row["at_the_end"] = kept[config.layers :]
                rows.setdefault(case.rsplit("_", 1)[0], []).append(row)
    return kvjax.Model(config, jax.tree.map(jnp.asarray, params)), rows


def assert_alike(public: str, rows: list[dict]) -> None:
    (model, _), method = load(METHODS[public][0]), METHODS[public][1]
    prompts = [row["prompt"] for row in rows]
    out = kvjax.generate(model, prompts, method, max_new_tokens=STEPS, eos_ids=(), capacity=CAPACITY)
    assert out.tokens == [row["answer"] for row in rows]
    _, state = kvjax.prefill(model, prompts, method, capacity=CAPACITY)
    assert_kept(state, [row["kept"] for row in rows])


def assert_kept(state: kvjax.Cache, rows: list[list]) -> None:
    for layer, kept in enumerate(kvjax.kept_positions(state)):
        for row, heads in zip(rows, kept, strict=True):
            assert [positions.tolist() for positions in heads] == row[layer]


@pytest.mark.parametrize("public", METHODS)
def test_in_a_padded_batch_the_same_tokens_stay_and_the_same_follow(public):
    rows = load(METHODS[public][0])[1][public]
    assert sorted(len(row["prompt"]) for row in rows) in LENGTHS
    assert_alike(public, rows)


@pytest.mark.parametrize("public", ["kvpress_snapkv", "kvpress_pyramidkv", "kvpress_observed"])
def test_a_row_alone_keeps_the_same_tokens_and_goes_on_alike(public):
    assert_alike(public, load(METHODS[public][0])[1][public][:1])


@pytest.mark.parametrize("public", DECODING)
def test_while_decoding_the_same_tokens_stay(public):
    """PrefillDecodingPress: half of the prompt stays, and as many tokens again after every 12 or after each.

    It means what ours does where scores come from keys alone, in whatever order, or from the newest query: kvpress
    holds tokens in the order of their scores from then on, turns all queries of a window to the newest position, and
    counts steps below its target too; `recompress` asks with the query of the token that comes in as well.
    CompressionRatioDecodingPress keeps half of all tokens.
    """
    (model, _), rows = load("gqa"), load("gqa")[1][public]
    prompts, answers = ([row[what] for row in rows] for what in ("prompt", "answer"))
    _, state = kvjax.prefill(model, prompts, METHODS[public][1], capacity=CAPACITY)
    _, state = kvjax.extend(model, [answer[:-1] for answer in answers], state)
    assert_kept(state, [row["at_the_end"] for row in rows])


def test_every_stored_case_is_compared():
    assert {public for fixture in ("gqa", "mha") for public in load(fixture)[1]} == set(METHODS)
