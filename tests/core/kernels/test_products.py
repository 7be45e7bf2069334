"""The two products with packed codes, as kernels in interpret mode, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax.cache.codecs.group_quant import Kivi
from kvjax.core.kernels import products
from kvjax.core.kernels.packed_attention import PackedCodes

B, K, GROUP = 2, 2, 16
SHAPES = [(64, 1, 2), (80, 4, 1), (16, 5, 4)]  # H, G, T


def random_codes(bits: int, axis: str, H: int, seed: int = 0) -> tuple[PackedCodes, np.ndarray]:
    """Codes of at least 17 rows of words, more than a block has, and the numbers f64[B K S H] that they stand for."""
    rng = np.random.default_rng(seed)
    codes_per_word = 32 // bits
    S = -(-17 * codes_per_word // GROUP) * GROUP
    integers = rng.integers(0, 2**bits, (B, K, S, H))
    words = np.zeros((B, K, S // codes_per_word, H), np.uint32)
    for s in range(S):
        shift = np.uint32(bits * (s % codes_per_word))
        words[:, :, s // codes_per_word] |= integers[:, :, s].astype(np.uint32) << shift
    shape = (B, K, S // GROUP, H) if axis == "channel" else (B, K, S, H // GROUP)
    scale, lo = (rng.uniform(0.5, 1.0, shape) * 3 / (2**bits - 1), rng.uniform(-1.5, -0.5, shape))
    scale, lo = (x.astype(np.float32) for x in (scale, lo))
    group_axis = 2 if axis == "channel" else 3
    scales, offsets = (np.repeat(x.astype(float), GROUP, group_axis) for x in (scale, lo))
    numbers = integers * scales + offsets
    return PackedCodes(*map(jnp.asarray, (words, scale, lo))), numbers


@pytest.mark.parametrize(("H", "G", "T"), SHAPES)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_both_products_are_those_with_the_numbers(bits, axis, H, G, T):
    codes, numbers = random_codes(bits, axis, H)
    rng = np.random.default_rng(1)
    q = rng.normal(size=(B, K, G, T, H)).astype(np.float32)
    p = rng.uniform(size=(B, K, G, T, numbers.shape[2])).astype(np.float32)
    scores = np.einsum("bkgth,bksh->bkgts", q.astype(float), numbers) / np.sqrt(H)
    np.testing.assert_allclose(products.scores(q, codes, bits=bits, interpret=True), scores, atol=2e-5)
    outputs = np.einsum("bkgts,bksh->bkgth", p.astype(float), numbers)
    mixed = products.mix(p, codes, jnp.float32, bits=bits, interpret=True)
    np.testing.assert_allclose(mixed, outputs, rtol=2e-5, atol=2e-4)


def test_operands_are_rounded_to_the_queries_dtype_and_sums_are_not():
    codes, numbers = random_codes(2, "channel", 64)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(B, K, 1, 1, 64)), jnp.bfloat16)
    rounded_numbers = np.asarray(jnp.asarray(numbers, jnp.bfloat16), float)
    expected = np.einsum("bkgth,bksh->bkgts", np.asarray(q, float), rounded_numbers) / 8
    scores = products.scores(q, codes, bits=2, interpret=True)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, atol=1e-2)  # numbers that round the other way
    assert np.median(np.abs(scores - expected)) < 1e-4


def test_what_the_kernels_do_not_serve():
    codes, _ = random_codes(2, "channel", 64)

    def kernels_serve(G, T):
        return products.fits(jax.ShapeDtypeStruct((B, K, G, T, 64), jnp.float32), codes)

    assert kernels_serve(8, products.MAX_QUERIES // 8)
    assert not kernels_serve(8, products.MAX_QUERIES // 8 + 1)
    nothing = codes._replace(words=codes.words[:, :, :0])
    assert not products.fits(jax.ShapeDtypeStruct((B, K, 1, 1, 64), jnp.float32), nothing)


@pytest.mark.parametrize(("packed", "by_kernel"), [("tokens", True), ("channels", False)])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_a_gpu_reads_codes_by_kernels_where_words_run_along_tokens(monkeypatch, axis, packed, by_kernel):
    """The program alone is examined; only a GPU can run it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    codec = Kivi(2, 32, axis, residual=32, packed=packed)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 96, 64)), jnp.bfloat16)
    stored = codec.encode(x, jnp.arange(96, dtype=jnp.int32)[None, None])

    def score_and_mix(q, p, stored):
        return codec.scores(q, stored), codec.mix(p, stored)

    q, p = jnp.zeros((1, 2, 1, 2, 64), jnp.bfloat16), jnp.zeros((1, 2, 1, 2, 96))
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        text = jax.jit(score_and_mix).trace(q, p, stored).lower(lowering_platforms=("cuda",)).as_text()
    assert ("packed_scores" in text and "packed_mix" in text) == by_kernel
