"""`custom_decoder.check_rope` finds out another convention, and says which."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import custom_decoder
from kvjax.core.rope import yarn_scaling
from kvjax.errors import KvjaxError
from tests.attach import plain_decoder

H = 16


def halves(theta=10_000.0, dim=H, factor=1.0, sign=1.0, start=0, dtype=jnp.float32, scale=1.0):
    """Rotation in pairs (i, i + dim / 2) of x [B T N H], written anew."""

    def rotate(x, pos):
        frequencies = theta ** (-np.arange(dim // 2) / (dim // 2)) / factor
        angle = ((pos + start)[:, :, None].astype(dtype) * jnp.asarray(frequencies, dtype)[None, None])[:, :, None]
        cos, sin = (f(angle).astype(jnp.float32) * scale for f in (jnp.cos, jnp.sin))
        a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
        return jnp.concatenate([a * cos - sign * b * sin, b * cos + sign * a * sin, rest], -1)

    return rotate


def interleaved(x, pos):
    frequencies = jnp.asarray(10_000.0 ** (-np.arange(H // 2) / (H // 2)), jnp.float32)
    angle = (pos[:, :, None].astype(jnp.float32) * frequencies[None, None])[:, :, None]
    a, b = x[..., ::2], x[..., 1::2]
    rotated = a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)
    return jnp.stack(rotated, -1).reshape(x.shape)


def test_equal_rotations_pass_in_both_layouts_and_in_parts_of_a_head():
    (spec,) = custom_decoder.specs_of(1, 4, 2, H, rope=custom_decoder.Rope(H))
    custom_decoder.check_rope(spec, halves())
    custom_decoder.check_rope(
        spec, lambda x, pos: jnp.swapaxes(halves()(jnp.swapaxes(x, 1, 2), pos), 1, 2), layout="BNTH"
    )
    (spec,) = custom_decoder.specs_of(1, 4, 2, H, rope=custom_decoder.Rope(8, 1e6))
    custom_decoder.check_rope(spec, halves(1e6, 8))
    custom_decoder.check_rope(custom_decoder.specs_of(1, 4, 2, H, rope=None)[0], lambda x, pos: x)
    custom_decoder.check_rope(custom_decoder.Rope(8, 10_000.0), plain_decoder.rotate)


def test_an_attention_factor_in_the_vectors_or_left_to_the_queries_passes():
    rope = custom_decoder.Rope(H, scaling=yarn_scaling(4.0, 64))
    own = lambda scale: lambda x, pos: jnp.swapaxes(rope.rotate(jnp.swapaxes(x, 1, 2), pos[:, None]), 1, 2) * scale  # noqa: E731
    custom_decoder.check_rope(rope, own(1.0))
    custom_decoder.check_rope(rope, own(rope.query_factor**0.5))
    with pytest.raises(KvjaxError, match="multiplies vectors by 1.5 at position 0"):
        custom_decoder.check_rope(rope, own(1.5))


@pytest.mark.parametrize(
    ("rotate", "message"),
    [
        (interleaved, r"interleaved pairs \(2i, 2i \+ 1\).*order = np.r_\[0:16:2, 1:16:2, 16:16\]"),
        (halves(1e6), r"looks like theta=1e\+06 and not 10000"),
        (halves(factor=4.0), r"divides positions by 4: say scaling=RopeScaling\('linear', 4\)"),
        (halves(dim=8), r"rotates 8 channels and not 16: say Rope\(8"),
        (halves(sign=-1.0), "turns in the other direction"),
        (halves(start=1), "counts positions from another start"),
        (halves(dtype=jnp.bfloat16), "its angles are rounded"),
        (halves(scale=1.25), "multiplies vectors by 1.25 at position 0"),
        (lambda x, pos: x, "does not rotate at all: say rope=None"),
        (lambda x, pos: halves(dim=8)(x[..., ::-1], pos)[..., ::-1], r"rotates the channels 8\.\.15"),
        (
            lambda x, pos: jnp.swapaxes(
                custom_decoder.Rope(
                    H, scaling=custom_decoder.RopeScaling("llama3", 8.0, original_max_positions=64)
                ).rotate(jnp.swapaxes(x, 1, 2), pos[:, None]),
                1,
                2,
            ),
            r"scales its frequencies by .*'llama3'",
        ),
        (lambda x, pos: x[:, :, 0], "rotate returns an array of the shape of x"),
    ],
)
def test_another_convention_is_named(rotate, message):
    (spec,) = custom_decoder.specs_of(1, 4, 2, H, rope=custom_decoder.Rope(H))
    with pytest.raises(KvjaxError, match=message):
        custom_decoder.check_rope(spec, rotate)


def test_interleaved_pairs_become_halves_by_the_order_that_the_error_names():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 6, 1, H)), jnp.float32) for _ in range(2))
    pos, order = jnp.arange(6, dtype=jnp.int32)[None], np.r_[0:H:2, 1:H:2, H:H]
    theirs = jnp.einsum("btnh,bsnh->bts", interleaved(q, pos), interleaved(k, pos))
    ordered = [interleaved(x, pos)[..., order] for x in (q, k)]
    np.testing.assert_allclose(ordered[0], halves()(q[..., order], pos), atol=1e-5)
    np.testing.assert_allclose(jnp.einsum("btnh,bsnh->bts", *ordered), theirs, atol=1e-4)
