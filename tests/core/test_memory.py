"""Buffers: bits survive, host stays host through jit, loops and donation, and nothing copies the whole buffer."""

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
both = pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])


def values(n: int = S, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(B, K, n, W)).astype(np.float32)
    x[0, 0, 0, :4] = [np.inf, -0.0, np.nan, 1e-40]  # bits, not values, must survive
    return jnp.asarray(x, dtype)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@both
@dtypes
def test_packing_keeps_every_bit(host, dtype):
    x = values(dtype=dtype)
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


@both
@dtypes
def test_append_writes_each_row_at_its_own_slot(host, dtype):
    x, new = values(dtype=dtype), values(3, dtype, seed=1)
    at = jnp.array([[13], [4]])
    buf = jax.jit(memory.append)(memory.pack(x, host), new, at)
    want = np.array(x)
    for b, i in enumerate([13, 4]):
        want[b, :, i : i + 3] = np.asarray(new)[b]
    np.testing.assert_array_equal(bits(memory.unpack(buf)), bits(want))
    assert buf.host == host


@both
@dtypes
def test_rows_are_the_rows_asked_for(host, dtype):
    x = values(dtype=dtype)
    idx = jnp.array([[[0, 5, 5], [15, 2, 0]], [[1, 1, 1], [7, 8, 99]]])
    got = jax.jit(memory.gather_tokens)(memory.pack(x, host), idx)
    want = np.take_along_axis(np.asarray(x), np.clip(np.asarray(idx), 0, S - 1)[..., None], 2)
    np.testing.assert_array_equal(bits(got), bits(want))
    assert not memory.is_host(got)


def loop(carry, steps: int):
    def step(c, _):
        buf, q, n = c
        buf = memory.append(buf, q, n[:, None])
        idx = jnp.broadcast_to(n[:, None, None], (B, K, 1))
        return (buf, q + memory.gather_tokens(buf, idx), n + 1), None

    return lax.scan(step, carry, length=steps)[0]


@both
def test_a_donated_decode_loop_is_in_place(host):
    S = 512
    x = jnp.zeros((B, K, S, W))
    carry = (memory.pack(x, host), jnp.ones((B, K, 1, W)), jnp.zeros(B, jnp.int32))
    compiled = jax.jit(loop, static_argnums=1, donate_argnums=0).lower(carry, 5).compile()
    assert full_copies(compiled.as_text(), (B, K, S, W)) == []
    assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    pointer = carry[0].data.unsafe_buffer_pointer()
    buf, q, n = compiled(carry)
    assert buf.data.unsafe_buffer_pointer() == pointer
    assert buf.host == host
    np.testing.assert_array_equal(np.asarray(memory.unpack(buf))[:, :, :5, 0], [[[1, 2, 4, 8, 16]] * K] * B)


def test_the_copy_detector_detects_recall_before_append():
    S = 512

    def wrong(c, _):  # the order that copies: this is the positive control
        buf, q, n = c
        got = memory.gather_tokens(buf, jnp.broadcast_to(n[:, None, None], (B, K, 1)))
        return (memory.append(buf, q, n[:, None]), q + got, n + 1), None

    carry = (memory.pack(jnp.zeros((B, K, S, W)), True), jnp.ones((B, K, 1, W)), jnp.zeros(B, jnp.int32))
    compiled = jax.jit(lambda c: lax.scan(wrong, c, length=5)[0], donate_argnums=0).lower(carry).compile()
    copies = full_copies(compiled.as_text(), (B, K, S, W))
    assert copies or compiled.memory_analysis().temp_size_in_bytes >= B * K * S * W * 4


def test_while_loops_keep_host_memory_too():
    buf = memory.pack(jnp.zeros((B, K, S, W)), True)

    def body(c):
        buf, n = c
        return memory.append(buf, jnp.ones((B, K, 1, W)), jnp.full((B, 1), n)), n + 1

    out, _ = jax.jit(lambda b: lax.while_loop(lambda c: c[1] < 3, body, (b, jnp.int32(0))))(buf)
    assert out.host and float(memory.unpack(out).sum()) == 3 * B * K * W


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["offload", "kcache:n=2,device_layers=1"])
def test_the_compiled_decode_step_keeps_host_values_in_place(method, dtype):
    model = kvjax.random_model(toy_model().config, dtype=dtype)
    context = kvjax.read(model, [[1, 2, 3], [4]], method, capacity=640)
    run = context.start(max_new_tokens=4, eos_ids=(), use_up=True)
    host = [x for x in jax.tree.leaves(run.cache) if memory.is_host(x)]
    assert len(host) == (2 * 3 if method == "offload" else 2)
    if method != "offload":  # which is there to bring everything back
        assert full_copies(run.program(), host[0].shape) == []
    pointers = [x.unsafe_buffer_pointer() for x in host]
    run.advance(4)
    after = [x for x in jax.tree.leaves(run.cache) if memory.is_host(x)]
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
