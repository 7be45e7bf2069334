"""Locret: a trained network predicts which tokens later queries will attend to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.calibration.text_halves import max_logits


@kv.register_table_kind("locret")
@dataclasses.dataclass(frozen=True)
class RetainingHeads(kv.TableKind):
    """The weights of a network of one hidden layer of R units, without biases, as Locret's public release has them.

    `fc1` f32[R (N+K)*H+K*Hv]: of the layer's N query heads, its K keys and its K values, in this order and before
    RoPE; `fc2` f32[K R]. They are `model.layers.{i}.self_attn.fc1.weight` and `....fc2.weight` of the release.

    Calibrated, R = 2 K: linear regression of the greatest logit that a token of a text's earlier half gets from the
    queries of the later half. The SiLU of a number, minus that of its negative, is the number itself, so two units make
    one linear function.

    Args:
      ridge: as in `fit_linear_map`.
    """

    ridge: kv.PositiveInt = 1000
    num_queries = None

    __post_init__ = kv.check_fields

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None
        earlier, later = kv.split_halves(block, observation)
        target = max_logits(block, observation, later, spec.rule)
        # A sliding window may hide a token from all later queries; such a token has no target.
        has_target = earlier[:, :1] & kv.over_heads.any(target > kv.MASKED_LOGIT / 2)
        own = network_inputs(observation.q, observation.pos, block.k[:, :, None], block.v[:, :, None], spec.rope)
        every = jnp.moveaxis(kv.over_heads.gather(own), 1, 2)
        return kv.sum_moments(every.reshape(*every.shape[:2], -1), target, has_target)

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        # The network has no offsets, which change no order of a head's tokens.
        linear, _ = kv.fit_linear_map(counted, self.ridge)  # [K K*((G+1)*H+Hv)]
        weights = ungroup_heads(linear.T.reshape(spec.num_kv_heads, -1, spec.num_kv_heads), spec)
        same = np.eye(spec.num_kv_heads)
        arrays = {"fc1": np.concatenate([weights, -weights]), "fc2": np.concatenate([same, -same], 1)}
        return {name: array.astype(np.float32) for name, array in arrays.items()}


def group_by_head(fc1: np.ndarray, spec: kv.LayerSpec) -> np.ndarray:
    """Groups the released weights of the first layer [R (N+K)*H+K*Hv] by key/value head: [K (G+1)*H+Hv R]."""
    K, G, H = spec.num_kv_heads, spec.num_groups, spec.head_dim
    parts = np.split(fc1, [K * G * H, (K * G + K) * H], 1)
    return np.concatenate([x.reshape(-1, K, x.shape[1] // K) for x in parts], 2).transpose(1, 2, 0)


def ungroup_heads(weights: np.ndarray, spec: kv.LayerSpec) -> np.ndarray:
    """Inverts `group_by_head`."""
    G, H = spec.num_groups, spec.head_dim
    parts = np.split(weights.transpose(2, 0, 1), [G * H, (G + 1) * H], 2)
    return np.concatenate([x.reshape(len(x), -1) for x in parts], 1)


def network_inputs(q: kv.Array, pos: kv.Array, k: kv.Array, v: kv.Array, rope: kv.Rope) -> kv.Array:
    """Concatenates each token's queries, key and value of a head, all before RoPE; zeros for padding.

    Args:
      q: queries [B K G T H].
      pos: i32[B T], -1 for padding.
      k: keys [B K 1 T H].
      v: values [B K 1 T Hv].
      rope: the model's rotary embedding.

    Returns:
      f32[B K T (G+1)*H+Hv].
    """
    pre_rope = rope.unrotate_queries(q, pos), rope.unrotate_queries(k, pos), v.astype(jnp.float32)
    x = jnp.concatenate([jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1) for x in pre_rope], -1)
    return jnp.where((pos >= 0)[:, None, :, None], x, 0.0)


@dataclasses.dataclass(frozen=True)
class RetainingScorer(kv.Scorer):
    """Scores a token by its causal importance fc2 silu(fc1 [q, k, v]), a number for each key/value head (2410.01805).

    q, k and v are the token's own, in all heads and before RoPE, so later tokens do not change its score.

    Args:
      given: a file of `RetainingHeads`.
    """

    given: kv.TableFile
    num_queries: ClassVar[int | None] = None

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        observation = self.require_observation(observation)
        if observation.pos.shape[1] != block.pos.shape[2]:
            raise kv.IncompatibleMethod(
                f"RetainingScorer scores each of {block.pos.shape[2]} tokens by its own query, and there are "
                f"{observation.pos.shape[1]}; leave `recompress` out, which keeps the latest queries alone"
            )
        K = spec.num_kv_heads
        columns = K * ((spec.num_groups + 1) * spec.head_dim + spec.value_dim)
        fc1, fc2 = self.given.layer_arrays(spec, fc1=(None, columns), fc2=(K, None)).values()
        weights = (jnp.asarray(x, jnp.float32) for x in (group_by_head(fc1, spec), fc2))
        fc1, fc2 = (kv.over_heads.local_part(x, block.k.shape[1]) for x in weights)

        def run_network(q: kv.Array, pos: kv.Array, k: kv.Array, v: kv.Array) -> kv.Array:
            x = network_inputs(q, pos, k, v, spec.rope)
            # The hidden layer mixes all heads of the layer, so each device adds the part of its heads.
            hidden = jnp.einsum("bktc,kcr->btr", x, fc1, precision=lax.Precision.HIGHEST)
            hidden = jax.nn.silu(kv.over_heads.sum(hidden[:, None])[:, 0])
            return jnp.einsum("btr,kr->bkt", hidden, fc2, precision=lax.Precision.HIGHEST)[:, :, None]

        # In blocks of tokens, because the inputs are wider than keys and values together.
        k, v = block.k[:, :, None], block.v[:, :, None]
        scores = kv.map_query_blocks(run_network, observation.q, observation.pos, 512, k, v)[:, :, 0]
        return kv.token_scores(scores, block)


@kv.register_method(example="locret:budget=512", family="eviction after the prompt")
def locret(
    budget: kv.TokenBudget = 6100,
    recent: int = 100,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
    table: str = "shipped",
) -> kv.Method:
    """Keeps the prompt tokens that a trained network scores highest, and the local tokens.

    Formula:
      score of token s in key/value head h = (fc2 silu(fc1 [q_s, k_s, v_s]))_h, of all heads, before rotation

    Differs:
      The prompt attends exactly and is pruned once, at its end; the public code prunes after each chunk of 3,072 tokens
      and lets the last 2,500 stay until the next. Scores never change, so apart from the effect of pruning on later
      keys the two differ only in tokens that those 2,500 displaced. Calibrated heads are linear.

    Args:
      budget: as in `make_selection`; the last `recent` tokens are included (the public code: 6,000 and 100 local
        tokens).
      recent: as in `make_selection`.
      sinks: as in `make_selection` (the public code: none).
      unit, per: as in `make_selection`.
      table: a file of kind `locret`; the shipped tables are fitted by linear regression, as `kvjax calibrate locret`
        does, where the paper trains for 3,000 steps.

    Reference:
      Locret, Huang et al. 2024, arXiv 2410.01805, section 3.3; its public code, huangyuxiang03/Locret
    """
    scorer = RetainingScorer(RetainingHeads.table_file(table))
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
