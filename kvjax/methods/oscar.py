"""OSCAR: keys and values in two bits, after rotations that are calibrated on what attention reads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.cache.calibration.bases import group_size
from kvjax.cache.codecs.per_token import hadamard


@kv.register_table_kind("rotations")
@dataclasses.dataclass(frozen=True)
class Rotations(kv.TableKind):
    """Orthogonal matrices that spread what attention reads of keys and values over all channels (OSCAR).

    Arrays, each for U groups of heads: `keys` f32[U H H] and `values` f32[U Hv Hv]; a rotated vector is x R. R is made
    of the eigenvectors of a covariance, times Hadamard's matrix, with its columns in bit-reversed order of the
    eigenvalues. The covariance of keys is that of the queries after RoPE. That of values weighs each token t of a text
    by k_t C k_t, where C is the covariance of the text's queries; the mean weight of a text is 1.

    Args:
      heads: neighboring key/value heads that have a rotation in common; 0 for all of a layer, as in the authors' code.
    """

    heads: int = 0

    num_queries = None

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, Any]:
        observation = kv.require_observation(observation, "a table of rotations", "all queries")
        is_real = (block.pos >= 0)[..., None]
        q = jnp.where((observation.pos >= 0)[:, None, None, :, None], observation.q.astype(jnp.float32), 0.0)
        k, v = (jnp.where(is_real, x.astype(jnp.float32), 0.0) for x in (block.k, block.v))
        num_tokens = jnp.maximum(is_real.sum(2, keepdims=True, dtype=jnp.float32), 1.0)  # [B 1|K 1 1]
        B, K, G, Q, H = q.shape
        queries = kv.sum_outer_products(q.reshape(B, K, G * Q, H)) / G
        weights = (kv.matmul_in_float32(k, queries) * k).sum(-1, keepdims=True)
        weights = weights / jnp.maximum(weights.sum(2, keepdims=True), 1e-12) * num_tokens
        values = kv.sum_outer_products(v * jnp.sqrt(jnp.maximum(weights, 0.0)))
        return {"tokens": jnp.broadcast_to(num_tokens, (B, K, 1, 1)), "keys": queries, "values": values}

    def arrays(self, counted: dict[str, Any], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        size = group_size(self.heads, spec)
        covariances = {name: counted[name] / np.maximum(counted["tokens"], 1) for name in ("keys", "values")}
        grouped = {name: c.reshape(-1, size, *c.shape[1:]).mean(1) for name, c in covariances.items()}
        return {name: np.stack([make_rotation(c) for c in each]).astype(np.float32) for name, each in grouped.items()}


def make_rotation(covariance: np.ndarray) -> np.ndarray:
    """Makes the rotation f64[C C] of a covariance f64[C C]; C is a power of two."""
    size = len(covariance)
    spread = np.linalg.eigh(covariance)[1] @ hadamard(size).astype(np.float64)
    num_bits = size.bit_length() - 1
    reversed_bits = [int(f"{i:0{num_bits}b}"[::-1], 2) if num_bits else 0 for i in range(size)]
    # `eigh` sorts by rising eigenvalue. Column j of the result is that of the r-th largest, r being j with its bits
    # reversed, so that large and small ones take turns and neighbors in a group are unlike.
    return spread[:, size - 1 - np.array(reversed_bits)]


Levels = Literal["uniform", "lloyd_max"]
"""Of the two bits of a group: even steps from the smallest to the largest number, or thresholds for normal numbers."""


@dataclasses.dataclass(frozen=True)
class ClippedGroups(kv.Kivi):
    """Clips each vector to the size of its channel of rank `clip` H before it is quantized; 0 clips nothing."""

    clip: Annotated[float, kv.Within("[0, 1]")] = 0.0
    levels: Levels = "uniform"

    def quantize(self, x: kv.Array) -> tuple[kv.Array, kv.Array, kv.Array]:
        if self.clip:
            H = x.shape[3]
            largest = jnp.sort(jnp.abs(x), -1)[..., min(int(self.clip * H), H - 1), None]
            x = jnp.clip(x, -largest, largest)
        if self.levels == "uniform":
            return super().quantize(x)
        x = kv.refuse_gradient(x, "codes of Lloyd-Max levels")
        groups = x.astype(jnp.float32).reshape(*x.shape[:3], x.shape[3] // self.group, self.group)
        mean = groups.mean(-1, keepdims=True)
        deviation = jnp.sqrt(jnp.square(groups - mean).mean(-1, keepdims=True) + 1e-8)
        z = (groups - mean) / deviation
        thresholds = jnp.asarray([-0.9810653, 0.0, 0.9810653], jnp.float32)
        codes = jnp.searchsorted(thresholds, z, side="right", method="compare_all").astype(jnp.uint32)
        # Lloyd and Max's levels are +-0.453 and +-1.510. The authors restore even steps, 1.16 times as wide as a third
        # of what lies between the outer ones, so that kernels read both kinds of codes alike.
        step = (2 * 1.5095586 / 3 * 1.16) * deviation
        lo = mean - 1.5 * step
        return codes.reshape(x.shape), step[..., 0].astype(x.dtype), lo[..., 0].astype(x.dtype)


@kv.pytree
class RotatedState:
    """What the inner codec stores of the rotated vectors."""

    inner: Any
    rotation: kv.Array  # f32[1 K H H]


@dataclasses.dataclass(frozen=True)
class CalibratedRotation(kv.CodecWrapper):
    """Rotates each head's vectors by a table of `Rotations` before another codec stores them.

    Args:
      inner: the codec of the rotated vectors.
      table: the file.
      of: which of the table's rotations.
      spec: the layer, set by `at`.
    """

    table: kv.TableFile | None = None
    of: Literal["keys", "values"] = "keys"
    spec: kv.LayerSpec | None = None

    def at(self, spec: kv.LayerSpec) -> kv.Codec:
        bound = dataclasses.replace(kv.bind_fields(self, spec), spec=spec.without_index)
        bound._read_table()  # a table that does not fit raises here, when the method is bound
        return bound

    def encode(self, x: kv.Array, pos: kv.Array) -> RotatedState:
        rotation = kv.over_heads.local_part(jnp.asarray(self._read_table()), x.shape[1])[None]
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return RotatedState(self.inner.encode(_rotate(x, rotation), pos), rotation)

    def append(self, stored: RotatedState, x: kv.Array, at: kv.Array) -> RotatedState:
        inner = self.inner.append(stored.inner, _rotate(x, stored.rotation), at)
        return dataclasses.replace(stored, inner=inner)

    def decode(self, stored: RotatedState) -> kv.Array:
        return _rotate(self.inner.decode(stored.inner), stored.rotation.swapaxes(2, 3))

    def gather(self, stored: RotatedState, idx: kv.Array) -> kv.Array:
        return _rotate(self.inner.gather(stored.inner, idx), stored.rotation.swapaxes(2, 3))

    def scores(self, q: kv.Array, stored: RotatedState) -> kv.Array:
        # A rotation of queries and keys changes no dot product, so the keys stay rotated.
        return self.inner.scores(kv.matmul_in_float32(q, stored.rotation[:, :, None]), stored.inner)

    def mix(self, p: kv.Array, stored: RotatedState) -> kv.Array:
        return kv.matmul_in_float32(self.inner.mix(p, stored.inner), stored.rotation.swapaxes(2, 3)[:, :, None])

    def _read_table(self) -> np.ndarray:
        """The rotation of each head of the layer, f32[K H H]."""
        assert self.spec is not None and self.table is not None
        H = self.spec.value_dim if self.of == "values" else self.spec.head_dim
        rotations = self.table.layer_arrays(self.spec, **{self.of: (None, H, H)})[self.of]
        K = self.spec.num_kv_heads
        if K % len(rotations):
            raise kv.KvjaxError(
                f"{self.table.path} has rotations of {self.of} for {len(rotations)} groups of heads, which do not "
                f"divide the layer's {K} key/value heads; make the table anew for this model"
            )
        return np.repeat(rotations, K // len(rotations), 0)


def _rotate(x: kv.Array, rotation: kv.Array) -> kv.Array:
    """x [B K n H] times each head's matrix f32[1 K H H], in x's dtype."""
    return kv.matmul_in_float32(x, rotation).astype(x.dtype)


@kv.register_method(example="oscar:group=32,sinks=8,recent=32", family="quantization by token")
def oscar(
    bits: int = 2,
    k_clip: float = 0.96,
    v_clip: float = 0.92,
    group: int = 128,
    sinks: kv.NonNegativeInt = 64,
    recent: int = 256,
    table: str = "shipped",
    levels: Levels = "uniform",
) -> kv.Method:
    """Quantizes each token to two bits after rotations calibrated on a text; first and recent tokens stay exact.

    Attention in the prompt is exact; so is all of it while prompt and answer fit into the recent tokens.

    Formula:
      y = x R, R = E H / sqrt(d) P: E the eigenvectors of sum q q' (keys) or of sum w_t v_t v_t' with w_t = k_t C k_t
      (values), P the bit-reversed order of eigenvalues; y is clipped to the |y_c| of rank c d; over a group x' =
      round((y - min) / s) s + min, s = (max - min) / (2^bits - 1); with lloyd_max, of mean m and deviation d,
      x' = m + (c - 3/2) 1.167 d, c the number of thresholds m - 0.981 d, m, m + 0.981 d that y reaches

    Differs:
      From the authors' code (FutureMLS-Lab/OSCAR, MIT; SGLang): a value's weight is by the queries of its own text
      instead of all texts; ties of codes go to the even one; scales are of the model's dtype.

    Args:
      bits: 2 (the authors'), 1, 4 or 8.
      k_clip: rank, as a fraction of a key's channels, whose size clips the others; 0 for none (the authors: 0.96).
      v_clip: the same of a value (the authors: 0.92).
      group: channels that share a scale and a minimum (the authors: 128, a whole head).
      sinks: first tokens that stay exact (the authors: 64).
      recent: recent tokens that stay exact, a multiple of `group` (the authors: 256).
      table: the file of `kvjax calibrate rotations`; "shipped" for the tables that ship with kvjax.
      levels: "uniform", or "lloyd_max" (the authors' SGLANG_LLOYD_MAX=1), for 2 bits.

    Reference:
      OSCAR, Zhou et al. 2026, arXiv 2605.17757
    """
    if recent < 1 or group < 1 or recent % group:
        raise kv.KvjaxError(
            f"recent={recent} of oscar is no multiple of group={group}; give one, such as {2 * max(group, 1)}"
        )
    if levels == "lloyd_max" and bits != 2:
        raise kv.KvjaxError(f"levels=lloyd_max of oscar are four, got bits={bits}; use bits=2 or levels=uniform")
    rotations = Rotations.table_file(table)

    def codec(of: Literal["keys", "values"], clip: float) -> kv.Codec:
        rotated = CalibratedRotation(
            ClippedGroups(bits, group, "token", recent, clip=clip, levels=levels), rotations, of
        )
        return kv.ExactPrefix(rotated, sinks)

    return kv.Method(k=codec("keys", k_clip), v=codec("values", v_clip))
