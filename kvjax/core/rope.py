"""Rotary position embeddings (Su et al., 2021), applied and removed."""

from __future__ import annotations

import dataclasses
import sys

import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from kvjax.core.types import Array
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings, for contexts longer than the one that a model was first trained on.

    "linear" divides all frequencies by `factor` (Chen et al., 2023). "llama3" divides those with wavelengths above
    original_max_positions / low_freq_factor and keeps those below original_max_positions / high_freq_factor, with a
    smooth band between (Llama 3.1 model card).
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
    """The rotary embedding of a model: it rotates the first `dim` channels of a head, in pairs (i, i + dim / 2).

    Caches hold keys after RoPE. `unrotate` removes the rotation of a key's position, and `rotate` applies that of
    another one. Both return float32, so that a key in a narrower dtype is rounded only where it is stored.
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def frequencies(self) -> Float32[Array, " pairs"]:
        """The dim / 2 frequencies, in radians per position."""
        half = self.dim // 2
        freq = 1.0 / self.theta ** (jnp.arange(half, dtype=jnp.float32) / half)
        s = self.scaling
        if s is None:
            return freq
        if s.kind == "linear":
            return freq / s.factor
        wavelength = 2 * jnp.pi / freq
        # Llama 3.1, `apply_scaling` of its reference code.
        long, short = s.original_max_positions / s.low_freq_factor, s.original_max_positions / s.high_freq_factor
        smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blended = (1 - smooth) * freq / s.factor + smooth * freq
        return jnp.where(wavelength > long, freq / s.factor, jnp.where(wavelength < short, freq, blended))

    def angles(self, pos: Int32[Array, "*rest"]) -> tuple[Float32[Array, "*rest pairs"], Float32[Array, "*rest pairs"]]:
        """Returns the cosines and sines of positions for the dim / 2 frequencies."""
        # float32 whatever the model's dtype: bfloat16 has no odd integers above 256, and neighbors would coincide.
        angle = jnp.multiply.outer(pos.astype(jnp.float32), self.frequencies())
        return jnp.cos(angle), jnp.sin(angle)

    def rotate(self, x: Float[Array, "B K S H"], pos: Int32[Array, "#B #K S"]) -> Float32[Array, "B K S H"]:
        """Rotates pre-RoPE keys to their positions; a position below 0 counts as 0."""
        return rotate(x.astype(jnp.float32), *self.angles(jnp.maximum(pos, 0)))

    def unrotate(self, x: Float[Array, "B K S H"], pos: Int32[Array, "#B #K S"]) -> Float32[Array, "B K S H"]:
        """The inverse of `rotate`."""
        cos, sin = self.angles(jnp.maximum(pos, 0))
        return rotate(x.astype(jnp.float32), cos, -sin)

    def rotate_queries(self, q: Float[Array, "B K G T H"], pos: Int32[Array, "#B T"]) -> Float32[Array, "B K G T H"]:
        """`rotate` for queries."""
        return self.rotate(q.reshape(q.shape[0], -1, *q.shape[3:]), pos[:, None]).reshape(q.shape)

    def unrotate_queries(self, q: Float[Array, "B K G T H"], pos: Int32[Array, "#B T"]) -> Float32[Array, "B K G T H"]:
        """The inverse of `rotate_queries`."""
        return self.unrotate(q.reshape(q.shape[0], -1, *q.shape[3:]), pos[:, None]).reshape(q.shape)


def rotate(
    x: Float[Array, "*rest H"], cos: Float32[Array, "*#rest pairs"], sin: Float32[Array, "*#rest pairs"]
) -> Float[Array, "*rest H"]:
    """Rotates the first channels in float32; the pairs are (i, i + dim / 2). Negate sin to undo it."""
    # Halves as in Hugging Face's checkpoints, whose channels are permuted for it; Meta's own code rotates neighbors.
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], -1)
