"""Rotary position embeddings (Su et al., 2021), applied and removed."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import PositiveFloat, check_fields

SCALING_KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings, for contexts longer than the one that a model was first trained on.

    "linear" divides all frequencies by `factor` (Chen et al., 2023). "llama3" divides those with wavelengths above
    original_max_positions / low_freq_factor and keeps those below original_max_positions / high_freq_factor, with a
    smooth band between (Llama 3.1 model card). "yarn" divides those that turn fewer than `beta_slow` times within the
    original positions and keeps those that turn more than `beta_fast` times, with a ramp over the pairs between (Peng
    et al., 2023, arXiv 2309.00071). "longrope" divides each frequency by a number of its own, for which it has two
    lists (Ding et al., 2024, arXiv 2402.13753). These two multiply rotated queries and keys by `attention_factor`; see
    `Rope.query_factor`. `yarn_scaling` and `longrope_scaling` have the papers' default of it. "proportional" turns the
    pairs of the highest frequencies alone, which it divides by `factor`; all others have frequency 0 (Gemma 4).

    Attributes:
      kind: "linear", "llama3", "yarn", "longrope" or "proportional".
      factor: by which a context is longer than the original one.
      low_freq_factor, high_freq_factor: of "llama3".
      original_max_positions: positions of the context that the model was first trained on.
      beta_fast, beta_slow: of "yarn", in turns.
      truncate: of "yarn", whether the ends of the ramp are rounded to whole pairs.
      attention_factor: of "yarn" and "longrope", the factor of rotated queries and of rotated keys.
      short_factors, long_factors: of "longrope", dim / 2 divisors each, for texts within the original positions and for
        longer ones.
      is_long: whether "longrope" uses `long_factors`. One of the two lists holds for all positions: with both, as in
        transformers, keys that are cached from before the end of the original positions would have other rotations
        than their positions say.
      is_fixed: whether `is_long` holds for all texts. Otherwise a long one is a default, in whose place each of kvjax's
        own calls takes the list for the length of its texts, `kvjax.models.Config.for_length`.
      rotated_fraction: of "proportional", the fraction of the pairs that turn.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = True
    is_fixed: bool = False
    rotated_fraction: float = 1.0

    def __post_init__(self):
        if self.kind not in SCALING_KINDS:
            supported = ", ".join(map(repr, SCALING_KINDS))
            raise KvjaxError(f"RoPE scaling {self.kind!r:.80} is not supported; supported: {supported}")
        numbers = ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions")
        for name in (*numbers, "beta_fast", "beta_slow", "attention_factor"):
            x = getattr(self, name)
            if not _is_positive(x):
                raise KvjaxError(f"{name} of RoPE scaling must be a positive number, got {x!r:.80}")
        if not _is_positive(self.rotated_fraction) or self.rotated_fraction > 1:
            raise KvjaxError(
                "rotated_fraction of RoPE scaling must be a number above 0 and at most 1, got "
                f"{self.rotated_fraction!r:.80}"
            )
        for name in ("truncate", "is_long", "is_fixed"):
            if not isinstance(getattr(self, name), bool):
                raise KvjaxError(f"{name} of RoPE scaling must be true or false, got {getattr(self, name)!r:.80}")
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise KvjaxError(
                f"beta_fast ({self.beta_fast:g}) of RoPE scaling 'yarn' must be at least beta_slow ({self.beta_slow:g})"
            )
        for name in ("short_factors", "long_factors"):
            x = getattr(self, name)
            if not isinstance(x, list | tuple) or not all(map(_is_positive, x)):
                raise KvjaxError(f"{name} of RoPE scaling must be positive numbers, got {x!r:.80}")
            object.__setattr__(self, name, tuple(x))  # lists, as JSON has them, have no hash
        if self.kind == "longrope" and (not self.short_factors or len(self.short_factors) != len(self.long_factors)):
            raise KvjaxError(
                "RoPE scaling 'longrope' needs a number for each pair of channels in both short_factors and "
                f"long_factors, got {len(self.short_factors)} and {len(self.long_factors)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that `cls(**fields)` makes the scaling of; the newer kinds' fields are only in their own.

        So files and digests of "linear" and "llama3" do not depend on the kinds that came later.
        """
        newer_fields = {
            "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate"),
            "longrope": ("attention_factor", "short_factors", "long_factors", "is_long"),
            "proportional": ("rotated_fraction",),
        }
        left_out = set().union(*newer_fields.values()).difference(newer_fields.get(self.kind, ()))
        left_out |= set() if self.is_fixed else {"is_fixed"}
        return {name: x for name, x in dataclasses.asdict(self).items() if name not in left_out}


def _is_positive(x: Any) -> bool:
    return isinstance(x, float | int) and not isinstance(x, bool) and 0 < x <= sys.float_info.max


def yarn_length_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor of rotated vectors, 0.1 mscale ln(factor) + 1; 1 for a context that is not extended.

    Reference:
      Peng et al., 2023, arXiv 2309.00071, equation 22; `mscale` is DeepSeek-V2's, arXiv 2405.04434.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_scaling(
    factor: float,
    original_max_positions: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> RopeScaling:
    """Makes the scaling "yarn".

    Args:
      factor, original_max_positions, beta_fast, beta_slow, truncate: as in `RopeScaling`.
      attention_factor: factor of rotated queries and keys; None for `yarn_length_factor`.
      mscale, mscale_all_dim: DeepSeek's; with both, and without an attention factor, that is the quotient of the length
        factors of the two. In addition, DeepSeek multiplies the scale of its attention by the square of the second.
    """
    if attention_factor is None:
        attention_factor = yarn_length_factor(factor)
        if mscale and mscale_all_dim:
            attention_factor = yarn_length_factor(factor, mscale) / yarn_length_factor(factor, mscale_all_dim)
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original_max_positions,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def longrope_length_factor(factor: float, original_max_positions: int) -> float:
    """Returns LongRoPE's factor of rotated vectors, sqrt(1 + ln(factor) / ln(original_max_positions)).

    It is 1 for a context that is not extended.

    Reference:
      Ding et al., 2024, arXiv 2402.13753.
    """
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_positions))


def longrope_scaling(
    short_factors: Sequence[float],
    long_factors: Sequence[float],
    factor: float,
    original_max_positions: int,
    is_long: bool,
    attention_factor: float | None = None,
) -> RopeScaling:
    """Makes the scaling "longrope".

    Args:
      short_factors, long_factors, is_long, original_max_positions: as in `RopeScaling`.
      factor: positions of the model, over the original ones.
      attention_factor: factor of rotated queries and keys; None for `longrope_length_factor`.
    """
    if attention_factor is None:
        attention_factor = longrope_length_factor(factor, original_max_positions)
    return RopeScaling(
        "longrope",
        factor,
        original_max_positions=original_max_positions,
        attention_factor=attention_factor,
        short_factors=tuple(short_factors),
        long_factors=tuple(long_factors),
        is_long=is_long,
    )


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model: it rotates the first `dim` channels of a head, in pairs (i, i + dim / 2).

    Caches hold keys after RoPE. `unrotate` removes the rotation of a key's position, and `rotate` applies that of
    another one. Both return float32, so that a key in a narrower dtype is rounded only where it is stored. With a `dim`
    of 0 nothing is rotated.
    """

    dim: int
    theta: PositiveFloat = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self):
        check_fields(self)
        if self.scaling is not None and self.scaling.kind == "longrope":
            num_factors = len(self.scaling.long_factors)
            if num_factors != self.dim // 2:
                raise KvjaxError(
                    f"RoPE scaling 'longrope' has {num_factors} factors for {self.dim // 2} pairs of channels; give "
                    "one for each pair"
                )
        if self.scaling is not None and self.scaling.kind == "yarn" and self.theta <= 1:
            raise KvjaxError(f"RoPE scaling 'yarn' needs a theta above 1, got {self.theta:g}")

    @property
    def query_factor(self) -> float:
        """The decoder's factor of the rotated channels of queries; 1.0 except with "yarn" and "longrope".

        Their attention factor multiplies rotated queries and rotated keys. Its square in the queries gives the same
        dot products and leaves cached keys purely rotated, which makes `unrotate` exact.
        """
        return 1.0 if self.scaling is None else self.scaling.attention_factor**2

    def frequencies(self) -> Float32[Array, " pairs"]:
        """The dim / 2 frequencies, in radians per position."""
        half = self.dim // 2
        freq = 1.0 / self.theta ** (jnp.arange(half, dtype=jnp.float32) / half)
        s = self.scaling
        if s is None or half == 0:
            return freq
        if s.kind == "linear":
            return freq / s.factor
        if s.kind == "proportional":
            num_rotated = int(s.rotated_fraction * self.dim // 2)
            return jnp.where(jnp.arange(half) < num_rotated, freq / s.factor, 0.0)
        if s.kind == "longrope":
            return freq / jnp.asarray(s.long_factors if s.is_long else s.short_factors, jnp.float32)
        if s.kind == "yarn":
            # The pairs that turn `turns` times: (original positions) * theta ** (-pair / half) = 2 pi turns.
            fast, slow = (
                half * math.log(s.original_max_positions / (2 * math.pi * turns)) / math.log(self.theta)
                for turns in (s.beta_fast, s.beta_slow)
            )
            if s.truncate:
                fast, slow = math.floor(fast), math.ceil(slow)
            # The upper end is clipped to channels, where pairs would be meant, in the authors' code and transformers.
            fast, slow = max(fast, 0), min(slow, self.dim - 1)
            width = 0.001 if fast == slow else slow - fast
            divided = jnp.clip((jnp.arange(half, dtype=jnp.float32) - fast) / width, 0, 1)
            return freq / s.factor * divided + freq * (1 - divided)
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
