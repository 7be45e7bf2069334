"""Compares a decoder's own rotation with a `Rope`: another convention gives wrong results and no error elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import LayerSpec
from kvjax.core.mesh import to_numpy
from kvjax.core.precision import computes_in_32_bits
from kvjax.core.rope import Rope
from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.mesh_context import keeps_callers_mesh

POSITIONS = (0, 1, 2, 7, 100, 500)
"""Positions at which rotations are compared; a table of a tiny model may end soon after."""
TOLERANCE = 2e-3
"""Largest difference that counts as rounding: float32 angles of position 500 are exact to 3e-5."""


@checks_keywords
@computes_in_32_bits
@keeps_callers_mesh
def check_rope(spec: LayerSpec | Rope, rotate: Callable[[Array, Array], Array], *, layout: str = "BTNH") -> None:
    """Checks that a decoder rotates queries and keys as its spec says.

    Methods that store keys before RoPE, renumber positions, or turn queries to other positions use the spec's rotation.
    Where the decoder has another one they are wrong without notice; call this once for each distinct layer.

    Args:
      spec: of a layer, from `specs_of`, or its rope.
      rotate: the decoder's function (x, positions) -> x of the same shape, for x f32[B T N H] and positions i32[B T].
      layout: "BTNH", or "BNTH" for a function that takes x [B N T H].

    Raises:
      KvjaxError: they differ; the message says which convention the decoder's function looks like.
    """
    if isinstance(spec, LayerSpec):
        rope, H = spec.rope, spec.head_dim
    elif isinstance(spec, Rope):
        rope, H = spec, spec.dim
    else:
        raise KvjaxError(f"spec is an entry of specs_of(..), or a custom_decoder.Rope, got {type(spec).__name__}")
    if layout not in ("BTNH", "BNTH"):
        raise KvjaxError(f"layout is one of 'BTNH', 'BNTH', got {layout!r:.60}")
    x, positions = _unit_vectors(H)
    x = jnp.swapaxes(x, 1, 2) if layout == "BTNH" else x
    rotated = rotate(x, positions)
    if getattr(rotated, "shape", None) != x.shape:
        raise KvjaxError(
            f"rotate returns an array of the shape of x, {x.shape}, got {getattr(rotated, 'shape', type(rotated))}"
        )
    got = to_numpy(rotated).astype(np.float64)
    got = got[:, :, 0] if layout == "BTNH" else got[:, 0]  # [channel, position, channel]
    want = _rotation_matrices(rope, H)
    # YaRN and LongRoPE multiply rotated vectors by a factor; kvjax's decoder has its square in the queries instead, and
    # a decoder may have it on either side.
    factor = np.where(np.arange(H) < rope.dim, rope.query_factor**0.5, 1.0)
    if min(np.abs(got - want).max(), np.abs(got - want * factor).max()) <= TOLERANCE:
        return
    off = np.abs(got - want).max((0, 2))
    raise KvjaxError(
        f"rotate differs from {rope} by {off.max():.2g} at position {POSITIONS[int(off.argmax())]}; "
        f"it {_describe(got, want, rope)}"
    )


def _unit_vectors(H: int) -> tuple[Array, Array]:
    """Returns x f32[H 1 T H] and positions i32[H T]: sequence h holds the unit vector of channel h at all positions.

    Their rotations are the rows of the rotation's matrices.
    """
    T = len(POSITIONS)
    positions = jnp.broadcast_to(jnp.asarray(POSITIONS, jnp.int32), (H, T))
    return jnp.broadcast_to(jnp.eye(H, dtype=jnp.float32)[:, None, None], (H, 1, T, H)), positions


def _rotation_matrices(rope: Rope, H: int) -> np.ndarray:
    """Computes the matrices [channel, position, channel] of a rotary embedding."""
    x, positions = _unit_vectors(H)
    return to_numpy(rope.rotate(x, positions[:, None]))[:, 0].astype(np.float64)


def _describe(got: np.ndarray, want: np.ndarray, rope: Rope) -> str:
    """Says which convention the matrices [channel, position, channel] look like, and the remedy."""
    H = len(got)
    identity = np.eye(H)
    moved = np.abs(got - identity[:, None]).max(1)  # how far each unit vector goes, by channel
    if not (moved > TOLERANCE).any():
        return "does not rotate at all: say rope=None in specs_of"
    zero = got[:, POSITIONS.index(0)]
    if np.abs(zero - identity).max() > TOLERANCE:
        scale = np.diag(zero)
        if np.abs(zero - np.diag(scale)).max() <= TOLERANCE:
            return (
                f"multiplies vectors by {scale.max():.4g} at position 0: leave that factor out of rotate, and give "
                "attend(.., scale=..) its square times the usual scale"
            )
        return "rotates at position 0: it counts positions from another start, and kvjax from 0"
    others = moved * (1 - identity)
    rotates = np.flatnonzero(others.max(1) > 0)
    dim = len(rotates)
    partner = others[rotates].argmax(1)
    if dim == 0 or (np.abs(np.linalg.norm(got, axis=2) - 1) > 0.02).any():
        return "is no rotation: vectors change their lengths"
    if rotates[0] != 0 or rotates[-1] != dim - 1:
        return (
            f"rotates the channels {rotates[0]}..{rotates[-1]}, and kvjax the first ones: give attend q and k "
            "with these channels first (dot products stay as they are), and Rope their number"
        )
    half = dim // 2
    if (partner[:half] == np.arange(half) + half).all():
        first, second, is_interleaved = np.arange(half), np.arange(half) + half, False
    elif (partner[::2] == np.arange(1, dim, 2)).all():
        first, second, is_interleaved = np.arange(0, dim, 2), np.arange(1, dim, 2), True
    else:
        return f"pairs channels in a way of its own, channel 0 with {partner[0]}; kvjax pairs i with i + dim / 2"
    one = got[:, POSITIONS.index(1)]
    freq = np.arctan2(one[first, second], one[first, first])
    expected = to_numpy(rope.frequencies()).astype(np.float64)
    found = []
    if is_interleaved and dim > 2:
        found.append(
            "has interleaved pairs (2i, 2i + 1), and kvjax pairs (i, i + dim / 2): give attend q[..., order] and "
            f"k[..., order] with order = np.r_[0:{dim}:2, 1:{dim}:2, {dim}:{H}], by which dot products stay as they are"
        )
    if dim != rope.dim:
        found.append(f"rotates {dim} channels and not {rope.dim}: say Rope({dim}, ..)")
    if (freq < 0).any():
        found.append("turns in the other direction: negate the sine, or the second half of the channels of q and k")
        freq = np.abs(freq)
    if dim != rope.dim or np.abs(freq - expected).max() > 1e-6 + 1e-3 * expected.max():
        found += _describe_frequencies(freq, rope)
    elif not found:
        at = POSITIONS[int(np.abs(got - want).max((0, 2)).argmax())]
        found.append(
            f"agrees at position 1 and is off at position {at}: its angles are rounded, as in bfloat16, or its table "
            "ends there; compute angles in float32"
        )
    return ", and ".join(found)


def _describe_frequencies(freq: np.ndarray, rope: Rope) -> list[str]:
    """Compares the angles of position 1 with those of other bases and scalings."""
    half = len(freq)
    if half < 2 or (freq <= 0).any():
        return [f"has other frequencies, {freq[:3]} at first"]
    # log(freq) = -log(factor) - i / half * log(theta), for a plain or linearly scaled embedding.
    slope, start = np.polyfit(np.arange(half), np.log(freq), 1)
    residual = np.abs(np.log(freq) - (start + slope * np.arange(half))).max()
    theta, factor = np.exp(-slope * half), np.exp(-start)
    if residual > 0.02:
        ratio = freq / (1.0 / rope.theta ** (np.arange(half) / half))
        return [
            f"scales its frequencies by {ratio.min():.3g} to {ratio.max():.3g} of those of theta={rope.theta:g}: give "
            "the decoder's scaling, Rope(.., scaling=RopeScaling('llama3', ..)), or that of 'yarn' or 'longrope'"
        ]
    found = []
    if abs(theta / rope.theta - 1) > 0.02:
        found.append(f"looks like theta={theta:.3g} and not {rope.theta:g}: say Rope({2 * half}, theta=..)")
    if abs(factor - 1) > 0.02:
        found.append(f"divides positions by {factor:.3g}: say scaling=RopeScaling('linear', {factor:.3g})")
    if not found and rope.scaling is not None:
        found.append(f"has no scaling of its frequencies, and the spec has {rope.scaling.kind!r}")
    return found or [f"has other frequencies, {freq[:3]} at first"]
