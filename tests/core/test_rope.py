"""Scaled and absent rotations against NumPy versions from the papers and against numbers of transformers."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.rope import Rope, RopeScaling, longrope_scaling, rotate, yarn_length_factor, yarn_scaling
from kvjax.errors import KvjaxError

SHORT, LONG = (1.0, 1.05, 1.1, 1.2), (1.5, 3.0, 7.0, 31.0)
LONGROPE = longrope_scaling(SHORT, LONG, 32.0, 4096, is_long=True)
YARN = yarn_scaling(4.0, 32768)


def turns(dim: int, theta: float, positions: int) -> np.ndarray:
    """How often each pair turns within some positions (YaRN, equation 17)."""
    return positions * theta ** (-np.arange(dim // 2) / (dim // 2)) / (2 * np.pi)


def yarn_oracle(dim: int, theta: float, s: RopeScaling) -> np.ndarray:
    """Equation 20, with the authors' ramp, linear in the pair's number where equation 18 is linear in its turns."""
    freq = theta ** (-np.arange(dim // 2) / (dim // 2))
    # The pair that turns r times: positions * theta ** (-2 pair / dim) = 2 pi r.
    low, high = (
        dim / 2 * math.log(s.original_max_positions / (2 * math.pi * r), theta) for r in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for pair, f in enumerate(freq):
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        out.append((1 - kept) * f / s.factor + kept * f)
    return np.array(out)


# Frequencies and attention factors by transformers 5.23 (`ROPE_INIT_FUNCTIONS`).
QWEN = [1.0, 0.17782793939113617, 0.03162277862429619, 0.004217559937387705, 0.0005000000237487257]
QWEN += [4.4456985051510856e-05, 7.905693564680405e-06, 1.405853367941745e-06]
GPT_OSS = [1.0, 0.22541800141334534, 0.05081327259540558, 0.006794959306716919, 0.0004564839182421565]
GPT_OSS += [1.818833698052913e-05, 4.099978468730114e-06, 9.242089618055616e-07]
DEEPSEEK = [1.0, 0.3162277638912201, 0.10000000149011612, 0.023914724588394165, 0.005124999675899744]
DEEPSEEK += [0.0008498621755279601, 2.499999936844688e-05, 7.905694474175107e-06]
GIVEN = [1.0, 0.3162277638912201, 0.10000000149011612, 0.024705294519662857, 0.005624999757856131]
GIVEN += [0.0010870329570025206, 0.0001250000059371814, 3.9528473280370235e-05]


@pytest.mark.parametrize(
    ("theta", "scaling", "frequencies", "attention_factor"),
    [
        (1e6, YARN, QWEN, 1.138629436111989),
        (150_000.0, yarn_scaling(32.0, 4096, truncate=False), GPT_OSS, 1.3465735902799727),
        (10_000.0, yarn_scaling(40.0, 4096, mscale=0.707, mscale_all_dim=1.0), DEEPSEEK, 0.9210423553163399),
        (10_000.0, yarn_scaling(8.0, 2048, attention_factor=1.25), GIVEN, 1.25),
    ],
)
def test_yarn_is_that_of_the_paper_and_of_transformers(theta, scaling, frequencies, attention_factor):
    rope = Rope(16, theta, scaling)
    np.testing.assert_allclose(rope.frequencies(), yarn_oracle(16, theta, scaling), rtol=3e-6)
    np.testing.assert_allclose(rope.frequencies(), frequencies, rtol=3e-6)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert rope.query_factor == pytest.approx(attention_factor**2, rel=1e-12)


def test_yarn_keeps_pairs_that_turn_often_and_divides_those_that_turn_seldom():
    scaling = yarn_scaling(16.0, 4096, beta_fast=20.0, beta_slow=2.0, truncate=False)
    scaled, r = np.asarray(Rope(64, 1e4, scaling).frequencies()), turns(64, 1e4, 4096)
    plain = np.asarray(Rope(64, 1e4).frequencies())
    often, seldom = r > 20, r < 2
    assert often.sum() > 5 and seldom.sum() > 5 and (~often & ~seldom).sum() > 3
    np.testing.assert_allclose(scaled[often], plain[often], rtol=1e-6)
    np.testing.assert_allclose(scaled[seldom], plain[seldom] / 16, rtol=1e-6)
    between = scaled[~often & ~seldom] / plain[~often & ~seldom]
    assert np.all(np.diff(between) < 0) and between[0] < 1 and between[-1] > 1 / 16


def test_the_length_factor_of_yarn_is_one_for_a_context_that_is_not_extended():
    assert yarn_length_factor(1.0, 3.0) == 1.0
    assert yarn_length_factor(math.e, 0.5) == pytest.approx(1.05)


def test_longrope_divides_each_frequency_by_the_factor_of_the_chosen_list():
    plain = 10_000.0 ** (-np.arange(4) / 4)
    short = longrope_scaling(SHORT, LONG, 32.0, 4096, is_long=False)
    np.testing.assert_allclose(Rope(8, scaling=LONGROPE).frequencies(), plain / np.array(LONG), rtol=2e-6)
    np.testing.assert_allclose(Rope(8, scaling=short).frequencies(), plain / np.array(SHORT), rtol=2e-6)
    # transformers 5.23 for 5,000 and for 100 positions; the attention factor is the same.
    by_transformers = [0.6666666865348816, 0.03333333507180214, 0.0014285714132711291, 3.2258063583867624e-05]
    np.testing.assert_allclose(Rope(8, scaling=LONGROPE).frequencies(), by_transformers, rtol=2e-6)
    by_transformers = [1.0, 0.095238097012043, 0.00909090880304575, 0.0008333333535119891]
    np.testing.assert_allclose(Rope(8, scaling=short).frequencies(), by_transformers, rtol=2e-6)
    assert LONGROPE.attention_factor == short.attention_factor == pytest.approx(1.1902380714238083, rel=1e-12)
    assert longrope_scaling(SHORT, LONG, 1.0, 4096, is_long=True).attention_factor == 1.0


@pytest.mark.parametrize("rope", [Rope(8, 1e6, YARN), Rope(8, scaling=LONGROPE), Rope(16, 1e6, YARN)])
def test_scaled_keys_are_purely_rotated_and_the_rotation_is_undone(rope):
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(1, 2, 3, 16)), jnp.float32)
    pos = jnp.array([[[0, 7, 40_000]]], jnp.int32)
    rotated = rope.rotate(k, pos)
    lengths = np.linalg.norm(rotated, axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(k, axis=-1), rtol=1e-5)
    assert np.array_equal(rotated[..., rope.dim :], k[..., rope.dim :])
    assert float(jnp.abs(rotated[:, :, 1:, : rope.dim] - k[:, :, 1:, : rope.dim]).max()) > 0.5
    np.testing.assert_allclose(rope.unrotate(rotated, pos), k, atol=1e-5)


@pytest.mark.parametrize("rope", [Rope(8, 1e6, YARN), Rope(8, scaling=LONGROPE)])
def test_the_factor_of_queries_stands_for_that_of_rotated_queries_and_keys(rope):
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=16).astype(np.float32) for _ in range(2))
    f, p, t = np.asarray(rope.frequencies(), np.float64), 11, 900

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        """Rotated channels times the attention factor, as transformers makes both sides; the others unchanged."""
        z = (x[:4] + 1j * x[4:8]) * np.exp(1j * position * f) * rope.scaling.attention_factor
        return np.concatenate([z.real, z.imag, x[8:]])

    rotated_q, rotated_k = (
        np.asarray(rotate(jnp.asarray(x), *rope.angles(jnp.asarray(position, jnp.int32))))
        for x, position in ((q, t), (k, p))
    )
    rotated_q = np.concatenate([rotated_q[: rope.dim] * np.float32(rope.query_factor), rotated_q[rope.dim :]])
    np.testing.assert_allclose(rotated_q @ rotated_k, turn(q, t) @ turn(k, p), rtol=1e-4)


def test_nothing_is_rotated_with_a_dim_of_zero():
    rope = Rope(0)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, 3, 3, 8)), jnp.float32)
    pos = jnp.array([[3, 5, -1], [1, 2, 90]], jnp.int32)
    assert rope.frequencies().shape == (0,) and rope.query_factor == 1.0
    for turn in (rope.rotate, rope.unrotate):
        assert np.array_equal(jax.jit(turn)(x[:, 0], pos[:, None]), x[:, 0])
    for turn in (rope.rotate_queries, rope.unrotate_queries):
        assert np.array_equal(turn(x, pos), x)
    assert np.array_equal(rotate(x, *rope.angles(pos[:, None, None])), x)
    assert Rope(0, 1e6, YARN).frequencies().shape == (0,)


def test_proportional_turns_the_highest_frequencies_of_a_whole_head():
    rope = Rope(16, 100.0, RopeScaling("proportional", 2.0, rotated_fraction=0.4))  # 3 of 8 pairs, rounded down
    expected = [100.0 ** -(2 * i / 16) / 2 for i in range(3)] + [0.0] * 5
    np.testing.assert_allclose(rope.frequencies(), expected, rtol=1e-6)
    with pytest.raises(KvjaxError, match="rotated_fraction of RoPE scaling must be a number above 0 and at most 1"):
        RopeScaling("proportional", 1.0, rotated_fraction=1.5)


PROPORTIONAL = RopeScaling("proportional", 2.0, rotated_fraction=0.5)


@pytest.mark.parametrize(
    "scaling", [RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0), YARN, LONGROPE, PROPORTIONAL]
)
def test_a_scaling_survives_its_json_and_is_a_static_value(scaling):
    again = RopeScaling(**json.loads(json.dumps(scaling.to_json())))
    assert again == scaling and hash(again) == hash(scaling)


def test_the_json_of_older_scalings_has_the_fields_that_it_had():
    old = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
    for kind in ("linear", "llama3"):
        raw = {"kind": kind, **old}
        assert RopeScaling(kind, 2.0).to_json() == raw and RopeScaling(**raw) == RopeScaling(kind, 2.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RopeScaling("ntk", 2.0), "'ntk' is not supported; supported: 'linear', 'llama3', 'yarn', 'longrope'"),
        (lambda: yarn_scaling(0.0, 4096), "factor of RoPE scaling must be a positive number, got 0.0"),
        (lambda: RopeScaling("linear", True), "must be a positive number, got True"),
        (lambda: yarn_scaling(2.0, 4096, beta_slow=40.0), r"beta_fast .32. .* must be at least beta_slow .40."),
        (lambda: RopeScaling("yarn", 2.0, truncate=1), "truncate of RoPE scaling must be true or false, got 1"),
        (lambda: Rope(8, 1.0, YARN), "needs a theta above 1, got 1"),
        (lambda: RopeScaling("longrope", 2.0), "both short_factors and long_factors, got 0 and 0"),
        (lambda: longrope_scaling(SHORT, LONG[:3], 2.0, 4096, is_long=True), "got 4 and 3"),
        (lambda: longrope_scaling(SHORT, (1.0, 2.0, 3.0, -4.0), 2.0, 4096, is_long=True), "long_factors .* positive"),
        (lambda: Rope(16, scaling=LONGROPE), "4 factors for 8 pairs of channels"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()
