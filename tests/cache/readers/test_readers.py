"""Long chunks are read a block of queries at a time, with the same result."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import method_api as kv
from kvjax.cache.codecs import per_token_kernel  # noqa: F401 (registers the kernel)
from kvjax.cache.codecs.quantizers import Absmax
from kvjax.cache.readers.full import Full
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.core.attention import attend_dense
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.testing import toy_model
from tests.contract import layer


@pytest.mark.parametrize("n", [1, 4, 5, 10, 64])
def test_blocks_of_queries_give_what_all_at_once_give(n):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 2, 3, 10, 4)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 12, 4)), jnp.float32) for _ in range(2))
    block = KVBlock(k, v, jnp.arange(12, dtype=jnp.int32)[None, None].repeat(2, 0))
    q_pos = jnp.asarray([np.arange(2, 12), np.arange(10)], jnp.int32)

    def attend(q, q_pos):
        return attend_dense(q, block, q_pos)

    chex.assert_trees_all_close(map_query_blocks(attend, q, q_pos, n), attend(q, q_pos), atol=1e-6)


@pytest.mark.parametrize("method", ["full", "kcache:n=5,device_layers=0"])
def test_a_chunk_longer_than_a_block_is_the_chunk_in_pieces(method):
    model, parsed = toy_model(), kvjax.parse(method)
    tokens = np.random.default_rng(0).integers(0, 97, 140).tolist()
    _, state = kvjax.prefill(model, [[1, 2, 3]], parsed, capacity=192)
    expected, _ = kvjax.extend(model, [tokens], state, parsed)
    first, state = kvjax.extend(model, [tokens[:50]], state, parsed)
    rest, _ = kvjax.extend(model, [tokens[50:]], state, parsed)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), expected, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 12])
def test_the_kernel_reads_what_the_plain_form_reads(bits, window):
    """Ragged sequences, some without any codes yet, decode over several flushes; the kernel is interpreted."""
    rng = np.random.default_rng(bits)
    shape, lengths = (3, 2, 48, 16), np.array([40, 3, 33])
    k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(3, 2, 2, 1, 16)), jnp.float32)
    pos = jnp.asarray(np.where(np.arange(48)[None] < lengths[:, None], np.arange(48)[None], -1), jnp.int32)
    outputs = []
    for kernel in ("xla", "pallas"):
        bound = layer.bind(kvjax.methods.kivi(bits, group=16, residual=32, kernel=kernel), window, 16)

        def run(k, v, q, bound=bound):
            state = bound.prefill(KVBlock(k, v, pos[:, None]), None, 96)

            def step(state, i):
                new_pos = (lengths[:, None] + i).astype(jnp.int32)
                offset = i.astype(jnp.float32)
                new = KVBlock(k[:, :, :1] + offset, v[:, :, :1] - offset, new_pos[:, None])
                out, state, _ = bound.extend(state, q, new, 1, None)
                return state, out

            return jax.lax.scan(step, state, jnp.arange(34))[1]

        outputs.append(jax.jit(run)(k, v, q))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)


@pytest.mark.parametrize(
    "codec", [kv.PerTokenCodec(Absmax()), kv.PerTokenCodec(kv.MinMax(4), "hadamard"), kv.PerTokenCodec(kv.Fp8())]
)
def test_the_kernel_over_codes_of_single_tokens_reads_what_the_plain_form_reads(codec):
    """Ragged sequences with padding that holds infinities; the kernel is interpreted."""
    rng, lengths = np.random.default_rng(0), np.array([40, 3])
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 48, 32)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(2, 2, 2, 1, 32)), jnp.float32)
    pos = jnp.asarray(np.where(np.arange(48)[None] < lengths[:, None], np.arange(48)[None], -1), jnp.int32)
    k = jnp.where((pos >= 0)[:, None, :, None], k, jnp.inf)
    outputs = []
    for kernel in ("xla", "pallas"):
        bound = layer.bind(kv.Method(k=codec, v=codec, read=Full(kernel)), None, 32)
        state = bound.prefill(KVBlock(k, v, pos[:, None]), None, 64)
        new_pos = jnp.asarray(lengths[:, None], jnp.int32)
        out, state, _ = bound.extend(state, q, KVBlock(k[:, :, :1], v[:, :, :1], new_pos[:, None]), 1, None)
        outputs.append(out)
    np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)


def test_the_kernel_wants_codes_on_the_device():
    method = kvjax.compose(kvjax.methods.kivi(8, 8, 8, kernel="pallas"), kvjax.methods.offload())
    with pytest.raises(KvjaxError, match="use kernel='auto'"):
        kvjax.generate(toy_model(), [[1, 2]], method)
    with pytest.raises(KvjaxError, match="kernel must be one of 'auto', 'xla', 'pallas'"):
        kvjax.parse("kivi:kernel=cuda")
