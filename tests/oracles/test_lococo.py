"""LoCoCo against its oracle: the tokens mixed into each slot, and the calibration of a table.

LoCoCo in NumPy, float64, one head at a time, from its public code (VITA-Group/LoCoCo; arXiv 2406.05317).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.core.attention_mass import Observation
from kvjax.errors import KvjaxError
from kvjax.methods.lococo import Convolution, ConvolutionTable, relative_error, split_texts
from kvjax.testing import dense_attention
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.eviction import top_indices
from tests.oracles.slots import head_slots


def mixing_weights(x, weight, bias) -> np.ndarray:
    """The softmax weights [M T] of tokens [T C] under a convolution [M C w] with zero padding."""
    M, _, w = weight.shape
    out = np.zeros((M, len(x)))
    for m in range(M):
        for t in range(len(x)):
            for i in range(w):
                s = t + i - w // 2
                if 0 <= s < len(x):
                    out[m, t] += weight[m, :, i] @ x[s]
            out[m, t] = max(out[m, t] + bias[m], 0)
        out[m] = np.exp(out[m] - out[m].max())
    return out / out.sum(1, keepdims=True)


def compress(k, v, scores, budget, recent, weight, bias, normalizer):
    """Compresses keys and values [T H] by scores [T] -> (tokens that keep their slots, keys, values [budget H])."""
    T, M = len(k), len(weight)
    if budget >= T:
        return list(range(T)), k, v
    newest = set(range(T - recent, T))
    heavy = newest | set(top_indices(scores.tolist(), budget - M - recent, newest))
    others = [t for t in range(T) if t not in heavy]
    weights = mixing_weights(np.concatenate([k, v], 1)[others], weight, bias)
    anchors = top_indices(scores.tolist(), M, heavy)
    new_k, new_v = k.copy(), v.copy()
    for m, t in enumerate(anchors):
        new_k[t] = (1 - normalizer) * k[t] + normalizer * weights[m] @ k[others]
        new_v[t] = (1 - normalizer) * v[t] + normalizer * weights[m] @ v[others]
    tokens = sorted(heavy | set(anchors))
    return tokens, new_k[tokens], new_v[tokens]


SPEC = layer.spec()
TABLE = {
    "weight": np.random.default_rng(5).normal(size=(3, 2 * layer.H, 5)).astype(np.float32) / 10,
    "bias": np.array([0.5, -0.5, 1], np.float32),
    "normalizer": np.array([0.7], np.float32),
}


def write_table(path, **changed: np.ndarray) -> str:
    return str(table_file.write(path / "-".join(["table", *changed]), "lococo", SPEC, [TABLE | changed]))


def test_the_example_by_hand():
    """Token 4 is heavy; the mean of tokens 1 to 4 goes into the best of the others, together with half of itself."""
    x = np.array([[1.0], [2.0], [3.0], [4.0]])
    tokens, k, v = compress(x, 10 * x, np.array([1, 3, 2, 9]), 2, 0, np.zeros((1, 2, 3)), [0.0], 0.5)
    assert (tokens, k.tolist(), v.tolist()) == ([1, 3], [[2], [4]], [[20], [40]])
    kernels = np.zeros((1, 2, 3))
    kernels[0, 0, 0] = np.log(3)  # the key of the token before is the logit: 0, ln 3 and 2 ln 3
    np.testing.assert_allclose(
        mixing_weights(np.concatenate([x, x], 1)[:3], kernels, [0.0]), [[1 / 13, 3 / 13, 9 / 13]]
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("budget", "recent"), [(6, 2), (3, 0)])
def test_slots_are_the_oracles_whatever_padding_holds(tmp_path, dtype, budget, recent):
    batch = layer.random_batch(6, dtype=dtype)
    bound = layer.bind(f"lococo:budget={budget},recent={recent},table={write_table(tmp_path)}")
    state = layer.prefill(bound, batch, padding=np.inf)
    numbers = (TABLE["weight"], TABLE["bias"], TABLE["normalizer"][0])
    for b, n in enumerate(batch.lengths):
        q, k, v = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
        scores = eviction.accumulated_scores(eviction.attention_weights(q, k))[1]
        for head in range(layer.K):
            pos, keys, values = head_slots(state, b, head)
            expected = compress(k[head], v[head], scores[head], budget, recent, *numbers)
            assert pos == expected[0]
            tolerance = {"atol": 2e-5} if dtype == jnp.float32 else {"rtol": 1e-2, "atol": 1e-2}
            np.testing.assert_allclose(keys.astype(np.float64), expected[1], **tolerance)
            np.testing.assert_allclose(values.astype(np.float64), expected[2], **tolerance)


def test_a_calibrated_table_makes_later_queries_miss_less():
    kind = ConvolutionTable(slots=1, kernel=3, length=9, steps=40)
    batch = dataclasses.replace(layer.random_batch(4), lengths=np.array([9, 1, 7], np.int32))
    q, block = layer.prompt(batch, padding=np.inf)
    count = jax.jit(lambda block, q: kind.count(block.clean(), Observation(q, block.pos[:, 0]), SPEC))
    counted = count(block, q)
    counts = [
        jax.tree.map(lambda x, cache=cache: np.asarray(x[cache], np.float64), counted) for cache in range(layer.B)
    ]
    totals = jax.tree.map(lambda *x: kind.join(kind.join(x[0], x[1]), x[2]), *counts)
    for name, x in (("q", batch.q), ("k", batch.k), ("v", batch.v)):
        np.testing.assert_array_equal(totals[name][:, 2, ..., :7, :], x[2][..., :7, :])
    arrays = kind.arrays(totals, SPEC)
    assert {name: x.shape for name, x in arrays.items()} == {"weight": (1, 64, 3), "bias": (1,), "normalizer": (1,)}
    texts = split_texts(block.clean(), jnp.nan_to_num(q, posinf=0.0), 2, SPEC)
    share = jax.jit(lambda kernels: relative_error(kernels, texts, 1, SPEC.rule))
    after = share(Convolution(*(jnp.asarray(x, jnp.float32) for x in arrays.values())))
    assert float(after) < 0.97 * float(share(kind._initial_weights(SPEC)))


def test_a_calibration_reads_a_models_sinks_too():
    kind, sinks = ConvolutionTable(slots=1, kernel=3, length=9), np.array([[1.0, 3.0], [-0.5, 2.0]], np.float32)
    batch = dataclasses.replace(layer.random_batch(4), lengths=np.array([9, 9, 9], np.int32))
    q, block = layer.prompt(batch)
    counted = kind.count(block, Observation(q, block.pos[:, 0], sinks=jnp.asarray(sinks)[None]), SPEC)
    np.testing.assert_array_equal(counted["sinks"], np.broadcast_to(sinks[:, None], (layer.B, layer.K, 1, layer.G)))
    texts = split_texts(block, q, 2, SPEC, jnp.asarray(sinks)[None])
    for b in range(layer.B):
        arrays = q[b].reshape(-1, *q.shape[-2:]), block.k[b], block.v[b]
        expected = dense_attention(*map(np.asarray, arrays), np.arange(9), sinks=sinks.reshape(-1))
        np.testing.assert_allclose(texts.target[b].reshape(expected.shape)[:, 5:], expected[:, 5:], atol=5e-6)


def test_what_cannot_be_says_so(tmp_path):
    batch = layer.random_batch()
    for text, says in (
        (f"lococo:budget=4,recent=2,table={write_table(tmp_path)}", "mixes 3 slots, .* use a budget of at least 5"),
        (f"lococo:budget=6,table={write_table(tmp_path, bias=np.zeros(2, np.float32))}", "3 slots with 2 biases"),
        (f"lococo:budget=6,table={write_table(tmp_path, weight=TABLE['weight'][..., :4])}", "a kernel of 4 tokens"),
    ):
        with pytest.raises(KvjaxError, match=says):
            jax.eval_shape(
                lambda q, block, text=text: layer.make_state(layer.bind(text), q, block, 22), *layer.prompt(batch)
            )
    with pytest.raises(KvjaxError, match="must be"):
        ConvolutionTable(kernel=4)
    kind = ConvolutionTable(slots=8, length=9)
    q, block = layer.prompt(batch)
    counted = kind.count(block, Observation(q, block.pos[:, 0]), SPEC)
    with pytest.raises(KvjaxError, match="no text loses a token; give texts of 33 tokens or more, as `length`"):
        kind.arrays(jax.tree.map(lambda x: np.asarray(x[0], np.float64), counted), SPEC)
