"""TriAttention: keeps tokens whose distance suits the mean query, by a trigonometric series of the rotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.cache.eviction.future_queries import mean_over_pre_rope, rotate_ahead, sum_queries, visible_to_next_query
from kvjax.methods.recompress import Recompress


@kv.register_table_kind("query_moduli")
class QueryModuli(kv.TableKind):
    """Means of each query head's queries before RoPE: `mean` f32[K G H], of their rotated pairs' lengths `modulus`."""

    num_queries = None

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None
        is_real = (observation.pos >= 0)[:, None, None, :, None]
        q = jnp.where(is_real, spec.rope.unrotate_queries(observation.q, observation.pos), 0.0)
        return {
            "tokens": is_real.sum((3, 4), dtype=jnp.float32),  # [B 1 1]
            "mean": q.sum(3),
            "modulus": moduli(q, spec.rope.dim).sum(3),
        }

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        tokens = counted["tokens"].item()
        return {name: (counted[name] / tokens).astype(np.float32) for name in ("mean", "modulus")}


@dataclasses.dataclass(frozen=True)
class TriAttention(kv.Scorer):
    """Scores a key by its product with the mean query of its head at distances that double, and by its size.

    Mao et al. 2026, arXiv 2604.04921. With pre-RoPE queries and keys as complex numbers, one for each rotated pair f of
    channels, mean query m and mean modulus a: the sum over f of |m| |k| cos((t - p + d) w + arg(m conj k)) +
    (a - |m|) |k|, in the mean over d = 1, 2, 4, .., `furthest`. The first term is the dot product of the rotated key
    with the mean query rotated to t + d; channels without rotation count in it alone. The fields are arguments of
    `triattention`.
    """

    num_queries: ClassVar[int | None] = None
    furthest: kv.PositiveInt = 65536
    normalise: bool = True

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, rope = block.clean(), spec.rope
        mean, modulus = self._pre_rope_queries(block, observation, spec)
        steps = jnp.asarray(2 ** np.arange(self.furthest.bit_length()), jnp.int32)
        rotated = rotate_ahead(mean[:, :, :, None], rope, block, steps)[:, :, :, 0]
        keys = block.k.astype(jnp.float32)
        heads = jnp.einsum("bkgh,bksh->bkgs", rotated, keys)
        spread = modulus - moduli(mean, rope.dim)
        heads += jnp.einsum("bkgf,bksf->bkgs", spread, moduli(keys, rope.dim))
        readable = visible_to_next_query(block, spec.rule)  # bool[B 1|K 1 S]
        if self.normalise:
            number = jnp.maximum(readable.sum(3, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
            heads -= jnp.where(readable, heads, 0.0).sum(3, keepdims=True) / number
            variance = jnp.where(readable, jnp.square(heads), 0.0).sum(3, keepdims=True) / number
            heads /= jnp.maximum(jnp.sqrt(variance), 1e-6)
        heads = jnp.where(readable, heads, kv.MASKED_LOGIT)
        return kv.head_scores(heads, heads.max(2), block)

    def _pre_rope_queries(
        self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> tuple[kv.Array, kv.Array]:
        """Averages queries before RoPE, f32[B K G H], and the lengths of their rotated pairs, f32[B K G dim/2]."""
        observation = self.require_observation(observation)
        return mean_over_pre_rope(
            observation,
            observation.pos >= 0,
            spec.rope,
            lambda q, counts: (sum_queries(q, counts), moduli(q, spec.rope.dim).sum(3)),
        )


@dataclasses.dataclass(frozen=True)
class CalibratedTriAttention(TriAttention):
    """`TriAttention` whose queries are those of other texts, so that no query has to be observed.

    Args:
      given: a file of `QueryModuli`.
    """

    given: kv.TableFile = dataclasses.field(kw_only=True)
    num_queries: ClassVar[int | None] = 0

    def _pre_rope_queries(
        self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec
    ) -> tuple[kv.Array, kv.Array]:
        heads = spec.num_kv_heads, spec.num_groups
        given = self.given.layer_arrays(spec, mean=(*heads, spec.head_dim), modulus=(*heads, spec.rope.dim // 2))
        B, num_local = block.k.shape[:2]
        own = (kv.over_heads.local_part(jnp.asarray(given[x], jnp.float32), num_local) for x in ("mean", "modulus"))
        mean, modulus = (jnp.broadcast_to(x[None], (B, *x.shape)) for x in own)
        return mean, modulus


def moduli(x: kv.Array, dim: int) -> kv.Array:
    """Computes the lengths of the rotated pairs of channels of x [... H], f32[... dim / 2]; rotations keep them."""
    half = dim // 2
    return jnp.sqrt(jnp.square(x[..., :half]) + jnp.square(x[..., half:dim]))


@kv.register_method(example="triattention:budget=512", family="eviction at every step")
def triattention(
    budget: kv.TokenBudget = 2048,
    every: kv.NonNegativeInt = 128,
    recent: int = 128,
    furthest: int = 65536,
    normalise: bool = True,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
    table: str = "",
) -> kv.Method:
    """Returns to its budget whenever `every` tokens have come, and keeps those that match each head's mean query.

    The prompt is compressed likewise. With every=0 it is compressed once and all decoded tokens stay; only then does
    the method compose with others that act when the prompt ends, as in 'triattention:every=0 + adakv'.

    Formula:
      score_s = mean over d of sum_f |m_f| |k_f| cos((t - s + d) w_f + arg(m_f conj k_f)) + (a_f - |m_f|) |k_f| with m
      and a the mean and the mean modulus of a head's queries before RoPE; back to `budget` tokens whenever `every` more
      are cached

    Differs:
      Without a `table` statistics come from a sequence's own queries, all of the prompt's and, while decoding, the last
      `every`, which are held; the authors calibrate them once per model, as `table` does, and keep them in a file of
      their own form. The held queries raise what 1,024 tokens take of the exact cache's bytes from 25% to 44%
      (SmolLM2-135M, budget=256). Each layer and head selects for itself, the authors' `per_layer_per_head`, where by
      default a head selects for all layers; all keep the same number in both. As in their vLLM plugin the prompt
      competes with the answer, which takes 0.006 bits per byte more of it than a prompt compressed once (0.001 to
      0.011; SmolLM2-135M, 4 contexts); their code for transformers keeps all of it, and compresses at positions that
      are multiples of `every`.

    Args:
      budget: as in `make_selection` (the authors' plugin: 2,048).
      every: tokens between compressions, the plugin's `divide_length` (128); 0 compresses the prompt alone.
      recent: as in `make_selection` (the authors' plugin: 128).
      furthest: largest distance ahead; the distances are the powers of two up to it.
      normalise: whether each query head's scores are standardized over a sequence's tokens before the largest of a
        key/value head's query heads is taken (optional in the authors' code, on in their plugin and TensorRT-LLM).
      sinks, unit, per: as in `make_selection`.
      table: a file of kind `query_moduli`, for the queries of other texts in place of the sequence's own, of which none
        is then held: made by `kvjax calibrate query_moduli`; "shipped" for the shipped model's.

    Reference:
      TriAttention, Mao et al. 2026, arXiv 2604.04921; constants of its authors' vLLM plugin, WeianMao/triattention
    """
    scorer = TriAttention(furthest, normalise)
    if table:
        scorer = CalibratedTriAttention(furthest, normalise, given=QueryModuli.table_file(table))
    select = kv.make_selection(scorer, budget, sinks, recent, unit, per)
    return kv.Method(select=select, decode=Recompress(every) if every else None)
