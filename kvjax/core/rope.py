"""Rotary position embeddings: applied to queries and keys, and taken off again (Su et al., 2021)."""

from __future__ import annotations

import dataclasses
import sys

import jax.numpy as jnp

from kvjax.core.types import Array
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    `linear` divides positions by `factor` (Chen et al., 2023); `llama3` divides only the frequencies whose
    wavelength exceeds the original context, with a smooth band between (Llama 3.1 model card).
    """

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise KvjaxError(f"RoPE scaling {self.kind!r:.80} is not supported; supported: 'linear', 'llama3'")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            x = getattr(self, name)
            if not (isinstance(x, float | int) and 0 < x <= sys.float_info.max):
                raise KvjaxError(f"{name} of RoPE scaling must be a positive number, got {x!r:.80}")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of a model: of the first `dim` channels of a head, in pairs (i, i + dim / 2).

    A key is held after its rotation. `unrotate` takes the rotation of its position off, and `rotate` applies that of
    any other position; both return float32, so that a key in a narrower dtype is rounded only where it is stored.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def frequencies(self) -> Array:
        """f32[dim / 2], radians per position."""
        half = self.dim // 2
        freq = 1.0 / self.theta ** (jnp.arange(half, dtype=jnp.float32) / half)
        s = self.scaling
        if s is None:
            return freq
        if s.kind == "linear":
            return freq / s.factor
        wavelength = 2 * jnp.pi / freq
        long, short = s.original_max_positions / s.low_freq_factor, s.original_max_positions / s.high_freq_factor
        smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blended = (1 - smooth) * freq / s.factor + smooth * freq
        return jnp.where(wavelength > long, freq / s.factor, jnp.where(wavelength < short, freq, blended))

    def angles(self, pos: Array) -> tuple[Array, Array]:
        """pos i32[...] -> (cos, sin), each f32[... dim / 2]."""
        angle = jnp.multiply.outer(pos.astype(jnp.float32), self.frequencies())
        return jnp.cos(angle), jnp.sin(angle)

    def rotate(self, x: Array, pos: Array) -> Array:
        """Bare keys x [B K S H] rotated to positions i32[B 1|K S], float32; a position below 0 counts as 0."""
        return rotate(x.astype(jnp.float32), *self.angles(jnp.maximum(pos, 0)))

    def unrotate(self, x: Array, pos: Array) -> Array:
        """The inverse of `rotate`."""
        cos, sin = self.angles(jnp.maximum(pos, 0))
        return rotate(x.astype(jnp.float32), cos, -sin)

    def rotate_queries(self, q: Array, pos: Array) -> Array:
        """`rotate` for queries [B K G T H] at positions i32[B T]."""
        return self.rotate(_as_rows(q), pos[:, None]).reshape(q.shape)

    def unrotate_queries(self, q: Array, pos: Array) -> Array:
        """The inverse of `rotate_queries`."""
        return self.unrotate(_as_rows(q), pos[:, None]).reshape(q.shape)


def _as_rows(q: Array) -> Array:
    """[B K G T H] -> [B K*G T H]."""
    B, K, G, T, H = q.shape
    return q.reshape(B, K * G, T, H)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the leading channels of x [..., H]; the pairs are (i, i + dim / 2). Negate sin to undo it.

    cos and sin broadcast against x's leading axes: [..., dim / 2]. Computed in float32.
    """
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], -1)
