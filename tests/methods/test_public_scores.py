"""Scores as arrays against kvpress: of one prompt, alone and without padding.

`tests/fixtures/make_eviction_scores.py` and `make_eviction_presses.py` made them.

Where kvpress fills tokens that always stay with a constant, our scorers rank them above the others, or leave them to
the selection: of these tokens nothing is compared but that.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.convert import read
from kvjax.cache.components import PromptSelection, Scorer, Scores, SelectedSlots
from kvjax.cache.eviction.scorers import AccumulatedAttention, WindowAttention
from kvjax.cache.eviction.selection import make_selection, select_slots
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.methods.cam import ValueSpread
from kvjax.methods.cap import Capacity
from kvjax.methods.compactor import compactor
from kvjax.methods.criticalkv import OutputScores
from kvjax.methods.cur import Cur
from kvjax.methods.expected_attention import ExpectedAttention
from kvjax.methods.keydiff import KeyDiff
from kvjax.methods.keynorm import KeyNorm
from kvjax.methods.kvzip import ReplayAttention
from kvjax.methods.lagkv import LagKV
from kvjax.methods.leverage_score import LeverageScore, draw_sketch
from kvjax.methods.noncausal_attention import NoncausalAttention
from kvjax.methods.sinks_and_recent import Recency
from kvjax.methods.think import ChannelPruner
from tests.fixtures import ROOT

T, HALF, LAYER = 50, 25, 1
SPEC = LayerSpec(index=LAYER, num_layers=3, num_kv_heads=2, num_groups=2, head_dim=16, rope=Rope(16))
SNAPKV = WindowAttention(num_queries=8, kernel=5)
CASES = {
    # case -> our scorer, first tokens and last tokens that kvpress fills with a constant
    "snapkv": (SNAPKV, 0, 8),
    "pyramidkv": (SNAPKV, 0, 8),
    "observed": (AccumulatedAttention("visible"), 0, 0),
    "knorm": (KeyNorm(), 0, 0),
    "keydiff": (KeyDiff(), 0, 0),
    # Five partitions of 8 tokens follow 4 sinks; the last one has no next partition. 6 tokens remain.
    "lagkv": (LagKV(lag=8), 4, 14),
    "lagkv_cross": (LagKV(lag=8, cross=True), 4, 14),
    "cur": (Cur(), 4, 0),
    "cur_mean": (Cur(window=10, leverage="mean"), 4, 0),
    "cur_whole": (Cur(window=T), 4, 0),  # not the mean: without neighbours kvpress adds keys and values unscaled
    "cur_key": (Cur(leverage="key"), 4, 0),
    "cur_value": (Cur(leverage="value"), 4, 0),
    "expected": (ExpectedAttention(), 4, 0),
    "expected_mean": (ExpectedAttention(future=16, covariance=False, value_norms=False), 4, 0),
    "expected_epsilon": (ExpectedAttention(epsilon=0.02), 4, 0),
}
SELECTED = {
    # case -> our selection; tokens that it keeps in any case have no score there, and a constant in kvpress
    "leverage": make_selection(LeverageScore(), HALF),
    "noncausal": make_selection(NoncausalAttention(chunk=25), HALF),
    "cap": make_selection(Capacity(), HALF, sinks=4),
    "compactor": compactor(HALF, chunk=19).select,
    "compactor_blend": compactor(HALF, chunk=2, blend="0.35").select,
}
PRESSES = {
    "CURPress": "cur",
    "CapPress": "cap",
    "CompactorPress": "compactor",
    "CriticalKVPress": "criticalkv",
    "ExpectedAttentionPress": "expected",
    "KeyDiffPress": "keydiff",
    "KnormPress": "knorm",
    "LagKVPress": "lagkv",
    "LeverageScorePress": "leverage",
    "NonCausalAttnPress": "noncausal",
    "ObservedAttentionPress": "observed",
    "PyramidKVPress": "pyramidkv",
    "SnapKVPress": "snapkv",
    "StreamingLLMPress": "streaming",
    "TOVAPress": "tova",
    "RandomPress": "Its numbers are those of torch's generator; ours go by seed, head and position.",
    "ExpectedAttentionStatsPress": "Its numbers are a file: test_public_eviction compares the tokens that stay.",
    "KVzapPress": "Its numbers are a file: test_public_eviction compares the tokens that stay.",
    "QFilterPress": "Its numbers are a file: test_public_eviction compares the tokens that stay.",
}
"""Every press of kvpress that scores tokens -> a stored case, or one sentence why there is nothing to compare."""


@functools.cache
def load_arrays() -> dict[str, np.ndarray]:
    files = (np.load(ROOT / "eviction" / name) for name in ("scores.npz", "scores_presses.npz"))
    return {path: x for arrays in files for path, x in arrays.items()}


def kvpress_scores(case: str) -> np.ndarray:
    """kvpress' scores, f32[K T]."""
    return load_arrays()[f"scores/{case}"]


def prompt() -> tuple[KVBlock, Observation]:
    """Keys and values of the prompt, and all of its queries."""
    q, k, v = (jnp.asarray(load_arrays()[name])[None] for name in "qkv")
    pos = jnp.arange(T, dtype=jnp.int32)[None]
    return KVBlock(k, v, pos[:, None]), Observation(q, pos)


@functools.cache
def read_output_projection() -> jax.Array:
    """The layer's output projection [1 K G H D]."""
    return jnp.asarray(read(ROOT / "eviction" / "gqa")[1][f"layer_{LAYER}"]["attention"]["o"]["kernel"])[None]


def own_scores(scorer: Scorer) -> np.ndarray:
    """Scores of a scorer of ours, f32[K T]."""
    return np.asarray(jax.jit(functools.partial(scorer.scores, spec=SPEC))(*prompt()).per_kv_head[0])


def assert_close(ours: np.ndarray, public: np.ndarray) -> None:
    """Asserts 1e-5 of each score, ten times float32's rounding, or 1e-6 of the greatest for scores near zero."""
    np.testing.assert_allclose(ours, public, rtol=1e-5, atol=1e-6 * np.abs(public).max())


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_kvpress(case):
    scorer, first, last = CASES[case]
    ours, public = own_scores(scorer), kvpress_scores(case)
    free = slice(first, T - last)
    assert_close(ours[:, free], public[:, free])
    assert np.ptp(public[:, free]) > 1e-3  # there is something to compare
    if last:
        assert ours[:, T - last :].min() > ours[:, free].max()
        assert np.unique(public[:, T - last :]).size == 1
    assert np.unique(public[:, :first]).size == (first > 0)


@pytest.mark.parametrize("case", SELECTED)
def test_scores_of_the_tokens_that_may_leave_are_those_of_kvpress(case):
    select = SELECTED[case]
    assert select is not None
    free = slice(select.sinks, T - select.recent)
    public = kvpress_scores(case)
    # A sketch of 48 columns has rank 16 here, and solving for it costs float32 a digit.
    np.testing.assert_allclose(own_scores(select.scorer)[:, free], public[:, free], rtol=1e-4, atol=1e-5)
    assert np.ptp(public[:, free]) > 1e-3


def test_the_sketch_is_the_one_that_kvpress_was_given():
    np.testing.assert_array_equal(draw_sketch(0, 2, 16, 48), np.load(ROOT / "eviction" / "sketch.npy"))


def test_the_attention_of_the_last_query_is_one_score_for_all_heads_of_a_layer():
    """TOVA: the mean over all query heads; the last token always stays."""
    ours = own_scores(WindowAttention(num_queries=1, kernel=1)).mean(0)
    for public in kvpress_scores("tova"):
        assert_close(ours[:-1], public[:-1])
    assert ours.argmax() == T - 1


def test_kvpress_marks_the_first_and_the_last_tokens_where_ours_selects_them():
    """StreamingLLM: kvpress scores what it keeps by 1 and the others by 0; ours scores by position."""
    block, _ = prompt()
    select = make_selection(Recency(), HALF, sinks=4, per="layer")
    choose = jax.jit(functools.partial(select_slots, PromptSelection(SPEC, select), num_slots=HALF))
    kept = np.asarray(choose(block, None, num_kept=jnp.array([HALF])).slots)[0, 0]
    for public in kvpress_scores("streaming"):
        np.testing.assert_array_equal(np.flatnonzero(public == 1), kept)


def test_the_second_half_of_a_budget_goes_by_what_values_add_to_the_output():
    """CriticalKV: kvpress gives the first half of a budget, window included, the greatest float32."""
    block, observation = prompt()
    own = own_scores(SNAPKV)
    rescored = jax.jit(functools.partial(OutputScores().scores, spec=SPEC))
    ours = np.asarray(
        rescored(block, jnp.asarray(own)[None], observation._replace(output_projection=read_output_projection()))
    )[0]
    public = kvpress_scores("criticalkv")
    first = public == np.finfo(np.float32).max
    for head, chosen in zip(own, first, strict=True):
        assert set(np.flatnonzero(chosen)) == set(head.argsort()[-(HALF // 2) :])
    assert_close(ours[~first], public[~first])


@pytest.mark.parametrize("plus", [False, True])
def test_the_attention_of_a_repetition_is_that_of_kvpress(plus):
    """KVzip: the greatest over all query heads and queries of the repetition; the first tokens always stay."""
    block, _ = prompt()
    replayed = {name: jnp.asarray(load_arrays()[f"again/{name}"])[None] for name in ("q", "k", "hidden")}
    pos = T + jnp.arange(T, dtype=jnp.int32)[None]
    extra = {}
    if plus:
        extra = {"output_projection": read_output_projection(), "hidden_states": replayed["hidden"][:, None]}
    new = KVBlock(replayed["k"], jnp.zeros_like(replayed["k"]), pos[:, None])
    update_scores = jax.jit(functools.partial(ReplayAttention(plus=plus).update_scores, spec=SPEC))
    ours = update_scores(block, jnp.int32(0), Observation(replayed["q"], pos, **extra), new, jnp.zeros((1, 2, T)))[0]
    assert_close(np.asarray(ours), kvpress_scores("kvzip_plus" if plus else "kvzip"))


@pytest.mark.parametrize("percent", [75, 60, 50, 25])
def test_think_keeps_the_same_channels_of_each_head_and_zeros_stand_for_the_others(percent):
    """A key/value head's channels go by the mean of squares over its query heads in both.

    kvpress thins the keys of all tokens of a prompt, the last ones too, and holds zeros in place of what it drops. Its
    window is that of ours, 32 queries.
    """
    block, observation = prompt()
    codec, is_kept = ChannelPruner(1 - percent / 100, num_queries=32), load_arrays()[f"think/{percent}"]

    @jax.jit
    def prune(k, pos, observation):
        pruned = codec.encode(k, pos, observation)
        return pruned.channels, codec.decode(pruned)

    channels, keys = prune(block.k, block.pos, observation)
    assert [head.tolist() for head in np.asarray(channels)[0, :, 0]] == [np.flatnonzero(x).tolist() for x in is_kept]
    np.testing.assert_array_equal(keys[0], load_arrays()["k"] * is_kept[:, None])


def test_cam_merges_the_same_tokens_by_the_same_probability(monkeypatch):
    """With one number in place of chance, the tokens of a larger probability merge, in parts as large as kvpress'.

    kvpress' CAMPress does this while decoding, by the attention since the prompt, and merges of the lost tokens only as
    many as are new; here it is told that all are. Ours merges when the prompt ends, by the selection's own scores, and
    refuses to be composed with `recompress`: so the whole methods do not mean the same.
    """
    block, _ = prompt()
    kept, scores = load_arrays()["cam/kept"], jnp.asarray(kvpress_scores("observed"))[None]
    choice = SelectedSlots(jnp.asarray(kept)[None, None], Scores(scores[:, :, None], scores))
    kept_block = KVBlock(block.k[:, :, kept], block.v[:, :, kept], block.pos[:, :, kept])

    @jax.jit
    def merge_values(number):
        monkeypatch.setattr(sys.modules[ValueSpread.__module__], "_draw_uniform", lambda *_: number)
        return ValueSpread(window=4).at(SPEC)(block, kept_block, choice, SPEC).v[0]

    for percent in (25, 50, 75):
        np.testing.assert_allclose(merge_values(percent / 100), load_arrays()[f"cam/{percent}"], rtol=1e-4, atol=1e-6)


def test_every_press_that_scores_is_compared_or_has_a_reason():
    assert set(load_arrays()["presses"].tolist()) == set(PRESSES)
    cases = {path.removeprefix("scores/") for path in load_arrays() if path.startswith("scores/")}
    assert {*CASES, *SELECTED, "tova", "streaming", "criticalkv", "kvzip", "kvzip_plus"} == cases
    assert all(why in cases or why.endswith(".") for why in PRESSES.values())
