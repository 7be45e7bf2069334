"""The battery that every method and every pair passes (C1-C6, C8)."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax.cache import state_bytes
from kvjax.core.types import IncompatibleMethod
from kvjax.testing import dense_attention
from tests.contract import composition, layer
from tests.contract.table import CASES, PAIRS

every = pytest.mark.parametrize("row", CASES.values(), ids=CASES.keys())


def dense(d: layer.Data, window: int | None) -> np.ndarray:
    out = np.zeros((layer.B, layer.K, layer.G, layer.STEPS, layer.H))
    for b, n in enumerate(d.lengths):
        at = n + np.arange(layer.STEPS)
        q = np.asarray(d.q[b])[:, :, at].reshape(-1, layer.STEPS, layer.H)
        total = n + layer.STEPS
        o = dense_attention(q, np.asarray(d.k[b])[:, :total], np.asarray(d.v[b])[:, :total], at, window)
        out[b] = o.reshape(out[b].shape)
    return out


@every
@pytest.mark.parametrize("window", [None, 5])
def test_c1_at_its_limit_it_is_dense_attention(row, window):
    d = layer.data()
    out, want = (x[:, :, :, row.exact_from :] for x in (layer.run(row.limit, d, window), dense(d, window)))
    np.testing.assert_allclose(out, want, atol=5e-6)


@every
def test_c2_eager_jitted_scanned_and_chunked_agree(row):
    d = layer.data()
    jitted = layer.run(row.method, d)

    state, eager = layer.prefill(row.method, d), []
    for t in range(2):
        out, state = layer.extend(row.method)(state, d.token(t))
        eager.append(out)
    np.testing.assert_allclose(np.concatenate(eager, 3), jitted[:, :, :, :2], atol=1e-6)

    fresh = jax.tree.map(lambda *x: jnp.stack(x), *[d.token(t) for t in range(layer.STEPS)])
    scanned = jax.jit(lambda s, f: lax.scan(lambda s, x: layer.extend(row.method)(s, x)[::-1], s, f)[1])
    np.testing.assert_allclose(
        np.concatenate(np.asarray(scanned(layer.prefill(row.method, d), fresh)), 3), jitted, atol=1e-6
    )

    chunk = jax.jit(layer.extend(row.method, layer.STEPS))
    out, state = chunk(layer.prefill(row.method, d), d.tokens(0, layer.STEPS))
    np.testing.assert_allclose(out, jitted, atol=1e-6)


@every
def test_c3_rows_are_independent_of_neighbours_and_padding(row):
    clean, dirty = layer.data(), layer.data(padding=1e4)
    together = layer.run(row.method, clean)
    other = layer.run(row.method, dirty, state=layer.prefill(row.method, dirty, padding=1e4))
    np.testing.assert_array_equal(together, other)
    for b in range(layer.B):
        np.testing.assert_allclose(layer.run(row.method, layer.rows(clean, b))[0], together[b], atol=1e-6)


@every
def test_c3_only_the_committed_tokens_are_kept(row):
    d = layer.data()
    both = jax.jit(layer.extend(row.method))
    state = layer.prefill(row.method, d)
    two, ahead = both(state, d.tokens(0, 2))
    one, alone = jax.jit(layer.extend(row.method))(state, d.token(0))
    # A reader may prefetch by the word of the other token.
    kept = lambda s: dataclasses.replace(s, aux=None) if hasattr(s, "aux") else s  # noqa: E731
    chex.assert_trees_all_equal(kept(ahead), kept(alone))
    np.testing.assert_allclose(two[:, :, :, :1], one, atol=1e-6)


@every
def test_c4_extend_keeps_shapes_dtypes_and_memory_kinds(row):
    d = layer.data()
    state = layer.prefill(row.method, d)
    _, after = jax.jit(layer.extend(row.method))(state, d.token(0))
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    kinds = lambda s: jax.tree.map(lambda x: x.sharding.memory_kind, s)  # noqa: E731
    assert kinds(after) == kinds(state)


@every
def test_c5_one_trace_per_shape(row):
    d = layer.data()
    state = layer.prefill(row.method, d)
    chex.clear_trace_counter()
    f = jax.jit(chex.assert_max_traces(layer.extend(row.method), n=1))
    for t in range(3):
        _, state = f(state, d.token(t))


@every
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c6_bytes_are_the_recipes(row, dtype):
    d = layer.data(dtype=dtype)
    state = layer.prefill(row.method, d)
    want = row.bytes(layer.B, layer.K, layer.CAPACITY, layer.H, jnp.dtype(dtype).itemsize)
    assert state_bytes(state) == want
    _, state = jax.jit(layer.extend(row.method))(state, d.token(0))
    assert state_bytes(state) == want


@pytest.mark.parametrize("name", [n for n, row in PAIRS.items() if isinstance(row, IncompatibleMethod)])
def test_c8_a_pair_that_cannot_be_says_so(name):
    message = str(PAIRS[name])
    assert "slot" in message and "leave one of them out" in message


def test_c8_pairs_are_decided():
    """Of 21: the policies that evict while decoding go with `full` only, and there is one way to read."""
    cannot = {name for name, row in PAIRS.items() if isinstance(row, IncompatibleMethod)}
    assert cannot == {"kcache + specache"} | {name for name in PAIRS if "h2o" in name and "full" not in name}


def test_the_documented_table_of_pairs_is_this_one():
    assert composition.PAGE.read_text() == composition.page(), "run python -m tests.contract.composition"
