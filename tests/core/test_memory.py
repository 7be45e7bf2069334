"""Buffers keep every bit and stay in their memory through jit, loops and donation, and are never copied whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax.core import memory
from kvjax.errors import KvjaxError
from kvjax.testing import full_copies, toy_model

B, K, S, W = 2, 2, 16, 8
each_memory = pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])


def random_vectors(n: int = S, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(B, K, n, W)).astype(np.float32)
    x[0, 0, 0, :4] = [np.inf, -0.0, np.nan, 1e-40]  # bits, not values, must survive
    return jnp.asarray(x, dtype)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@each_memory
@each_dtype
def test_packing_keeps_every_bit(host, dtype):
    x = random_vectors(dtype=dtype)
    buf = jax.jit(lambda x: memory.pack(x, host))(x)
    assert buf.host == host
    assert buf.data.sharding.memory_kind == ("pinned_host" if host else jax.devices()[0].default_memory().kind)
    np.testing.assert_array_equal(bits(memory.unpack(buf)), bits(x))


@pytest.mark.parametrize("slots", [0, S])
@pytest.mark.parametrize("width", [0, 7, 8])
def test_two_halves_are_a_word_on_the_host(slots, width):
    x = jnp.arange(B * K * slots * width, dtype=jnp.bfloat16).reshape(B, K, slots, width)
    buf = memory.pack(x, host=True)
    assert buf.data.dtype == (jnp.uint16 if width == 7 else jnp.uint32)
    assert buf.data.nbytes == x.nbytes
    assert memory.to_device(buf).data.dtype == jnp.uint16
    np.testing.assert_array_equal(bits(memory.unpack(buf)), bits(x))


@each_memory
@each_dtype
def test_append_writes_each_row_at_its_own_slot(host, dtype):
    x, new = random_vectors(dtype=dtype), random_vectors(3, dtype, seed=1)
    slots = jnp.array([[13], [4]])
    buf = jax.jit(memory.append)(memory.pack(x, host), new, slots)
    expected = np.array(x)
    for b, i in enumerate([13, 4]):
        expected[b, :, i : i + 3] = np.asarray(new)[b]
    np.testing.assert_array_equal(bits(memory.unpack(buf)), bits(expected))
    assert buf.host == host


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("starts_by_head", [False, True])
@pytest.mark.parametrize("rest", [(), (W,)], ids=["numbers", "vectors"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_write_on_the_device_drops_what_lies_beyond_the_last_slot(backend, starts_by_head, rest, count, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    data, x = (rng.normal(size=(B, K, n, *rest)).astype(np.float32) for n in (S, count))
    for at in ([[0, 5], [S - 1, 3]], [[S - 2, S], [S + 4, S - count]]):
        at = np.array(at, np.int32)[:, : K if starts_by_head else 1]
        expected = data.copy()
        for b, k, i in np.ndindex(B, K, count):
            slot = at[b, k if starts_by_head else 0] + i
            if slot < S:
                expected[b, k, slot] = x[b, k, i]
        np.testing.assert_array_equal(memory.put(jnp.asarray(data), jnp.asarray(x), jnp.asarray(at)), expected)


@each_memory
@each_dtype
def test_rows_are_the_rows_asked_for(host, dtype):
    x = random_vectors(dtype=dtype)
    idx = jnp.array([[[0, 5, 5], [15, 2, 0]], [[1, 1, 1], [7, 8, 99]]])
    vectors = jax.jit(memory.gather_tokens)(memory.pack(x, host), idx)
    expected = np.take_along_axis(np.asarray(x), np.clip(np.asarray(idx), 0, S - 1)[..., None], 2)
    np.testing.assert_array_equal(bits(vectors), bits(expected))
    assert not memory.is_host(vectors)


def decode_loop(carry, steps: int):
    """Appends a vector and reads it back, step by step; the carry is (buffer, vector, lengths)."""

    def step(carry, _):
        buf, q, n = carry
        buf = memory.append(buf, q, n[:, None])
        idx = jnp.broadcast_to(n[:, None, None], (B, K, 1))
        return (buf, q + memory.gather_tokens(buf, idx), n + 1), None

    return lax.scan(step, carry, length=steps)[0]


@each_memory
def test_a_donated_decode_loop_is_in_place(host):
    S = 512
    x = jnp.zeros((B, K, S, W))
    carry = (memory.pack(x, host), jnp.ones((B, K, 1, W)), jnp.zeros(B, jnp.int32))
    compiled = jax.jit(decode_loop, static_argnums=1, donate_argnums=0).lower(carry, 5).compile()
    assert full_copies(compiled.as_text(), (B, K, S, W)) == []
    assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    pointer = carry[0].data.unsafe_buffer_pointer()
    buf, q, n = compiled(carry)
    assert buf.data.unsafe_buffer_pointer() == pointer
    assert buf.host == host
    np.testing.assert_array_equal(np.asarray(memory.unpack(buf))[:, :, :5, 0], [[[1, 2, 4, 8, 16]] * K] * B)


def test_the_copy_detector_detects_recall_before_append():
    S = 512

    def read_then_append(carry, _):  # the order that copies: this is the positive control
        buf, q, n = carry
        vectors = memory.gather_tokens(buf, jnp.broadcast_to(n[:, None, None], (B, K, 1)))
        return (memory.append(buf, q, n[:, None]), q + vectors, n + 1), None

    carry = (memory.pack(jnp.zeros((B, K, S, W)), True), jnp.ones((B, K, 1, W)), jnp.zeros(B, jnp.int32))

    def run(carry):
        return lax.scan(read_then_append, carry, length=5)[0]

    compiled = jax.jit(run, donate_argnums=0).lower(carry).compile()
    copies = full_copies(compiled.as_text(), (B, K, S, W))
    assert copies or compiled.memory_analysis().temp_size_in_bytes >= B * K * S * W * 4


def test_while_loops_keep_host_memory_too():
    buf = memory.pack(jnp.zeros((B, K, S, W)), True)

    def append_ones(carry):
        buf, n = carry
        return memory.append(buf, jnp.ones((B, K, 1, W)), jnp.full((B, 1), n)), n + 1

    def run(buf):
        return lax.while_loop(lambda carry: carry[1] < 3, append_ones, (buf, jnp.int32(0)))

    out, _ = jax.jit(run)(buf)
    assert out.host and float(memory.unpack(out).sum()) == 3 * B * K * W


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["offload", "kcache:n=2,device_layers=1"])
def test_the_compiled_decode_step_keeps_host_values_in_place(method, dtype):
    model = kvjax.random_model(toy_model().config, dtype=dtype)
    context = kvjax.read(model, [[1, 2, 3], [4]], method, capacity=640)
    session = context.start(max_new_tokens=4, eos_ids=(), donate=True)
    host_arrays = [x for x in jax.tree.leaves(session.cache) if memory.is_host(x)]
    assert len(host_arrays) == (2 * 3 if method == "offload" else 2)
    if method != "offload":  # `offload` brings whole buffers back by design
        assert full_copies(session.program(), host_arrays[0].shape) == []
    pointers = [x.unsafe_buffer_pointer() for x in host_arrays]
    session.advance(4)
    after = [x for x in jax.tree.leaves(session.cache) if memory.is_host(x)]
    assert [x.unsafe_buffer_pointer() for x in after] == pointers


def test_old_jax_on_cuda_is_refused(monkeypatch):
    class Kind:
        kind = "pinned_host"

    class Gpu:
        platform = "gpu"

        def addressable_memories(self):
            return [Kind()]

    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    with pytest.raises(KvjaxError, match="install jax >= 0.11.2"):
        memory.require_host_memory()
    monkeypatch.setattr(jax, "__version__", "0.11.2")
    memory.require_host_memory()


def test_a_device_without_host_memory_is_named(monkeypatch):
    class Tpu:
        platform = "tpu"

        def addressable_memories(self):
            return []

    monkeypatch.setattr(jax, "devices", lambda: [Tpu()])
    with pytest.raises(KvjaxError, match="tpu has no pinned_host memory"):
        memory.require_host_memory()


def test_what_is_installed_is_known():
    sizes = memory.installed_memory(jax.devices())
    assert sizes.host is None or sizes.host > 2**28
    assert sizes.shared == (jax.default_backend() == "cpu")
    assert not sizes.shared or sizes.device == sizes.host
