"""The kernel over packed keys and values, in interpret mode, against loops in NumPy."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax.core.kernels import packed_attention
from kvjax.core.kernels.packed_attention import PackedCodes
from kvjax.errors import KvjaxError

EMPTY = -1e29  # a maximum below this stands for no scores at all


class Case(NamedTuple):
    """Sizes of a test; the axis letters are those of the library."""

    bits: int
    group: int  # slots of keys
    v_group: int  # channels of values
    S: int
    H: int = 64
    G: int = 1
    T: int = 1
    K: int = 1
    dtype: Any = jnp.float32
    scales: Any = jnp.float32
    window: int | None = None
    heads: bool = False  # whether each head has its own pos
    splits: int | None = None


class Data(NamedTuple):
    """The arguments of `attend`, and the codes as plain numbers."""

    args: tuple
    k_codes: np.ndarray  # [B K S H]
    v_codes: np.ndarray


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes [B K S H] into words, token by token."""
    B, K, S, H = codes.shape
    codes_per_word = 32 // bits
    words = np.zeros((B, K, S // codes_per_word, H), np.uint32)
    for s in range(S):
        words[:, :, s // codes_per_word] |= codes[:, :, s].astype(np.uint32) << np.uint32(bits * (s % codes_per_word))
    return words


@functools.cache
def make(c: Case, B: int = 4) -> Data:
    """Draws random inputs.

    Nothing is quantized in the first sequence, everything in the second, and the third ends within a word. The values
    of invisible slots hold infinities and NaN, and so do the keys of groups that are not quantized.
    """
    rng = np.random.default_rng(c.bits * 1000 + c.H)
    codes = [rng.integers(0, 2**c.bits, (B, c.K, c.S, c.H)) for _ in "kv"]
    num_quantized = np.array([0, c.S, c.S - c.group - 3, c.group])[:B].astype(np.int32)
    pos = np.broadcast_to(np.arange(c.S, dtype=np.int32), (B, c.K if c.heads else 1, c.S)).copy()
    pos[rng.random(pos.shape) < 0.2] = -1
    q_pos = (np.array([c.S, c.S // 2, c.S, c.S])[:B, None] + np.arange(c.T)).astype(np.int32)
    step = 3.0 / (2**c.bits - 1)  # numbers between about -1.5 and 1.5

    def draw_scale_and_lo(*shape):
        scale = rng.uniform(0.5, 1.0, shape) * step
        return [np.array(jnp.asarray(x, c.scales)) for x in (scale, rng.uniform(-1.5, -0.5, shape))]

    k = draw_scale_and_lo(B, c.K, c.S // c.group, c.H)
    v = draw_scale_and_lo(B, c.K, c.S, c.H // c.v_group)
    is_invisible = (pos < 0) | (np.arange(c.S) >= num_quantized[:, None, None])
    is_invisible = np.broadcast_to(is_invisible, (B, c.K, c.S))
    v[0][is_invisible], v[1][is_invisible] = np.inf, np.nan
    for b in range(B):
        k[0][b, :, -(-num_quantized[b] // c.group) :], k[1][b, :, -(-num_quantized[b] // c.group) :] = np.inf, np.nan
    q = jnp.asarray(rng.normal(size=(B, c.K, c.G, c.T, c.H)), c.dtype)
    k, v = (PackedCodes(*map(jnp.asarray, (pack(x, c.bits), *y))) for x, y in zip(codes, (k, v), strict=True))
    return Data((q, k, v, *map(jnp.asarray, (pos, q_pos, num_quantized))), *codes)


@functools.cache
def oracle(c: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes (o, m, l) in float64, query by query and slot by slot."""
    data = make(c)
    q, k, v, pos, q_pos, num_quantized = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), data.args)
    B, K, G, T, H = q.shape
    o, m, l = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf), np.zeros(q.shape[:-1])
    for b, n, g, t in np.ndindex(B, K, G, T):
        scores, values = [], []
        for s in range(int(num_quantized[b])):
            key_pos, query_pos = pos[b, n if c.heads else 0, s], q_pos[b, t]
            if key_pos < 0 or key_pos > query_pos or (c.window is not None and key_pos <= query_pos - c.window):
                continue
            key = data.k_codes[b, n, s] * k.scale[b, n, s // c.group] + k.lo[b, n, s // c.group]
            groups = np.arange(H) // c.v_group
            values.append(data.v_codes[b, n, s] * v.scale[b, n, s, groups] + v.lo[b, n, s, groups])
            scores.append(q[b, n, g, t] @ key / np.sqrt(H))
        if scores:
            m[b, n, g, t] = max(scores)
            p = np.exp(np.array(scores) - m[b, n, g, t])
            o[b, n, g, t], l[b, n, g, t] = p @ np.array(values), p.sum()
    return o, m, l


@functools.cache
def program(c: Case, B: int = 4, attend=packed_attention.attend):
    """The compiled program of a case."""
    run = functools.partial(attend, bits=c.bits, window=c.window, splits=c.splits, interpret=True)
    return jax.jit(run).lower(*make(c, B).args).compile()


def check_partial(partial, expected, tolerance: float) -> None:
    """Asserts that the partial is finite and gives the expected output, maximum and sum."""
    o, m, l = (np.asarray(x, np.float64) for x in partial)
    assert all(np.isfinite(x).all() for x in (o, m, l))
    is_empty = np.isneginf(expected[1])
    assert (m[is_empty] < EMPTY).all() and (l[is_empty] == 0).all() and (o[is_empty] == 0).all()
    has_scores = ~is_empty
    assert has_scores.any() and is_empty.any()
    np.testing.assert_allclose(m[has_scores], expected[1][has_scores], atol=4 * tolerance)
    scale = np.exp(m[has_scores] - expected[1][has_scores])  # another maximum is as good, if o and l go with it
    np.testing.assert_allclose(l[has_scores] * scale, expected[2][has_scores], rtol=4 * tolerance)
    exact = expected[0][has_scores] / expected[2][has_scores][:, None]
    np.testing.assert_allclose(o[has_scores] / l[has_scores][:, None], exact, atol=tolerance)


CASES = {
    "1 bit": Case(1, 64, 32, S=320, K=2, heads=True),
    "1 bit, groups smaller than words": Case(1, 16, 64, S=288, T=2, dtype=jnp.bfloat16, scales=jnp.bfloat16),
    "2 bits": Case(2, 32, 80, S=288, H=80, G=4, T=2, window=70),
    "2 bits, bfloat16": Case(2, 64, 64, S=320, H=128, G=4, dtype=jnp.bfloat16, scales=jnp.bfloat16),
    "2 bits, float16": Case(2, 16, 40, S=144, H=80, dtype=jnp.float16, scales=jnp.float16, window=50),
    "4 bits": Case(4, 32, 32, S=160, G=4, T=2, K=2, scales=jnp.bfloat16, splits=2),
    "4 bits, bfloat16": Case(4, 64, 32, S=192, T=2, dtype=jnp.bfloat16, window=40),
    "8 bits": Case(8, 64, 64, S=192, T=2, scales=jnp.float16),
    "8 bits, bfloat16": Case(8, 16, 64, S=80, G=4, K=2, dtype=jnp.bfloat16, scales=jnp.bfloat16, heads=True),
    "8 bits, float16, 10 queries": Case(8, 32, 32, S=96, G=5, T=2, dtype=jnp.float16),
}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_loops(name):
    c = CASES[name]
    data = make(c)
    check_partial(program(c)(*data.args), oracle(c), TOLERANCE[jnp.dtype(c.dtype).name])


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_loops(name):
    c = CASES[name]
    data = make(c)
    check_partial(program(c, attend=packed_attention.attend_reference)(*data.args), oracle(c), 1e-5)


SMALL = Case(8, 16, 16, S=160, H=16, dtype=jnp.bfloat16)


def test_splits_share_the_slots():
    data = make(SMALL)
    expected = oracle(SMALL)
    for splits in (1, 3, 9):  # all blocks; some; more programs than blocks
        check_partial(program(SMALL._replace(splits=splits))(*data.args), expected, TOLERANCE["bfloat16"])


def test_a_row_is_the_same_alone():
    data = make(SMALL)
    together = program(SMALL)(*data.args)
    for b in (1, 2):
        args = jax.tree.map(lambda x, b=b: x[b : b + 1], data.args)
        for x, y in zip(program(SMALL, 1)(*args), together, strict=True):
            np.testing.assert_array_equal(x, y[b : b + 1])


def test_without_slots_there_is_nothing_to_see():
    q, k, v, pos, q_pos, num_quantized = make(SMALL).args
    k, v = (PackedCodes(x.words[:, :, :0], x.scale[:, :, :0], x.lo[:, :, :0]) for x in (k, v))
    for attend in (packed_attention.attend, packed_attention.attend_reference):
        o, m, l = attend(q, k, v, pos[:, :, :0], q_pos, num_quantized, bits=8)
        assert (o.shape, m.shape) == (q.shape, q.shape[:-1])
        assert (m < EMPTY).all() and not l.any() and not o.any()


def test_packing_holds_tokens_of_one_channel_from_the_lowest_bit():
    codes = np.zeros((1, 1, 16, 16), np.int64)
    codes[0, 0, 0, 3], codes[0, 0, 5, 3], codes[0, 0, 15, 7] = 1, 2, 3
    words = pack(codes, 2)
    assert words[0, 0, 0, 3] == 1 + (2 << 10) and words[0, 0, 0, 7] == 3 << 30
    one, zero = (jnp.full((1, 1, 1, 16), x, jnp.float32) for x in (1, 0))
    np.testing.assert_array_equal(
        packed_attention.dequantize_keys(PackedCodes(jnp.asarray(words), one, zero), 2), codes
    )


def small_arguments(**changes):
    """The arguments of the small case with some of them replaced."""
    q, k, v, pos, q_pos, num_quantized = make(SMALL).args
    return {"q": q, "k": k, "v": v, "pos": pos, "q_pos": q_pos, "num_quantized": num_quantized, "bits": 8, **changes}


def test_errors_name_the_value():
    wrong = {
        "bits must be 1, 2, 4 or 8, got 3": {"bits": 3},
        "multiple of 16 up to 256, got 12": {"q": small_arguments()["q"][..., :12]},
    }
    for message, changes in wrong.items():
        for attend in (packed_attention.attend, packed_attention.attend_reference):
            with pytest.raises(KvjaxError, match=message):
                attend(**small_arguments(**changes))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_lowers_for_cuda_without_a_device(dtype):
    """The result is a Triton program, which only a GPU can compile."""
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    run = jax.jit(functools.partial(packed_attention.attend, bits=2))
    args = make(Case(2, 64, 40, S=320, H=80, G=4, K=2, dtype=dtype)).args
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        text = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text and "packed_attention" in text
