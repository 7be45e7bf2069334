"""Attention-Gate: a small trained attention over the prompt's hidden states flags the tokens that each head keeps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv

SELF_LOGIT = 32.0  # in a calibrated gate, the logit of a token of root-mean-square length with itself
EXAMPLE_WIDTH = 8  # channels of the hidden states that the example is made for, those of the tests' layer


@kv.register_table_kind("attention_gate")
@dataclasses.dataclass(frozen=True)
class AttentionGateTable(kv.TableKind):
    """The weights of an Attention-Gate: A attention heads of C channels over hidden states of D, which mix E channels.

    `query`, `key` f32[A D C], `value` f32[A D E], `output` f32[A E K], `bias` f32[K]. With x the hidden states that the
    layer's queries and keys are made of, the gate of key/value head h is the sigmoid of column h of the sum over a of
    softmax(x query_a (x key_a)^T / sqrt(C)) x value_a output_a, plus bias_h. There is no public release; of a torch
    module with linear maps q [A*C D] and o [K A*E], `query` is `q.weight.reshape(A, C, D).transpose(1, 2)` and `output`
    is `o.weight.T.reshape(A, E, K)`.

    Calibrated, A = 1 and E = K: a token attends to tokens that are like it, by a random projection that is query and
    key at once, and linear discriminants separate the mixed hidden states: the logistic regression of two normal
    distributions with one covariance. The tokens to keep are those of a text's earlier half that get most attention
    from the later half.

    Args:
      keep: percentage of tokens that a calibrated gate keeps.
      channels: C.
      ridge: 1 / ridge of the mean variance is added to the variances.
    """

    keep: Annotated[int, kv.Within("[1, 99]")] = 50
    channels: kv.PositiveInt = 32
    ridge: kv.PositiveInt = 1000
    num_queries = None
    needs_hidden = True
    needs_layer_index = True

    __post_init__ = kv.check_fields

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None
        earlier, later = kv.split_halves(block, observation)
        received, num_queries = kv.attention_mass(block, observation, later.astype(jnp.float32), spec.rule)
        is_scored = earlier[:, :1] & (num_queries[:, :1] > 0)
        num_tokens = is_scored.sum(2, dtype=jnp.int32)
        num_kept = jnp.broadcast_to(num_tokens * self.keep // 100, received.shape[:2])
        kept = kv.top_k_mask(received.sum(2), is_scored, num_kept).astype(jnp.float32)
        x, scale = self._mix_similar(observation, spec)
        x = jnp.where(is_scored[:, 0, :, None], x, 0.0)
        return {
            "texts": jnp.ones(num_tokens.shape),
            "scale": scale,
            "tokens": num_tokens.astype(jnp.float32),
            "kept": num_kept.astype(jnp.float32),
            "x": x.sum(1)[:, None],
            "kept_x": jnp.einsum("bkt,btd->bkd", kept, x, precision=lax.Precision.HIGHEST),
            "xx": jnp.einsum("btd,bte->bde", x, x, precision=lax.Precision.HIGHEST)[:, None],
        }

    def _mix_similar(self, observation: kv.Observation, spec: kv.LayerSpec) -> tuple[kv.Array, kv.Array]:
        """Mixes each token's similar hidden states, f32[B T D], and returns the scale of the projection, f32[B 1]."""
        real = (observation.pos >= 0)[:, None, :, None]
        assert observation.hidden_states is not None
        x = jnp.where(real, observation.hidden_states.astype(jnp.float32), 0.0)
        num_tokens = jnp.maximum(real.sum((2, 3), dtype=jnp.float32), 1.0)
        power = jnp.maximum(jnp.square(x).sum((2, 3)) / num_tokens, 1e-12)
        # Each sequence is scaled by its own power, so that a token's logit with itself does not depend on the model.
        scale = jnp.sqrt(SELF_LOGIT * self.channels**0.5 / power)
        D = x.shape[3]
        projection = jnp.asarray(self._projection(D, spec), jnp.float32)[None]
        x = scale[:, :, None, None] * x
        mixed = gate_attention(x, observation.pos, projection, projection, jnp.eye(D)[None])
        return (mixed / scale[:, :, None, None])[:, 0], scale

    def _projection(self, width: int, spec: kv.LayerSpec) -> np.ndarray:
        """Draws a random projection [D C] that preserves the squared length of a vector in the mean."""
        return np.random.default_rng(spec.index).normal(size=(width, self.channels)) / self.channels**0.5

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        tokens, kept = counted["tokens"], counted["kept"]
        if not (kept.all() and (tokens > kept).all()):
            raise kv.KvjaxError(
                f"of these texts each head would keep {kept.astype(int).tolist()} of {int(tokens.item())} tokens that "
                "are asked, none or all; give longer ones"
            )
        # Linear discriminants: the logit of keeping x is the inner product with a direction, plus a bias.
        dropped = tokens - kept
        kept_mean = counted["kept_x"] / kept[:, None]
        dropped_mean = (counted["x"] - counted["kept_x"]) / dropped[:, None]
        directions = []
        for n, m, a, b in zip(kept, dropped, kept_mean, dropped_mean, strict=True):
            within = (counted["xx"][0] - n * np.outer(a, a) - m * np.outer(b, b)) / tokens
            within += np.eye(len(a)) * (np.trace(within) / len(a) / self.ridge + 1e-12)
            directions.append(np.linalg.solve(within, a - b))
        bias = np.log(kept / dropped) - (np.stack(directions) * (kept_mean + dropped_mean) / 2).sum(1)
        scale = (counted["scale"] / counted["texts"]).item()
        projection = scale * self._projection(len(directions[0]), spec)[None]
        same = np.eye(spec.num_kv_heads)[None]
        value = np.stack(directions, 1)[None]
        arrays = {"query": projection, "key": projection, "value": value, "output": same, "bias": bias}
        return {name: array.astype(np.float32) for name, array in arrays.items()}

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        A, C, D, K = 2, 3, EXAMPLE_WIDTH, spec.num_kv_heads
        shapes = {"query": (A, D, C), "key": (A, D, C), "value": (A, D, C), "output": (A, C, K), "bias": (K,)}
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gate_attention(hidden: kv.Array, pos: kv.Array, query: kv.Array, key: kv.Array, value: kv.Array) -> kv.Array:
    """Mixes hidden states by A attention heads without RoPE, each over all tokens of the prompt, later ones included.

    Args:
      hidden: hidden states [B 1 T D].
      pos: i32[B T], -1 for padding.
      query: f32[A D C].
      key: f32[A D C].
      value: f32[A D E].

    Returns:
      f32[B A T E].
    """
    x = jnp.where((pos >= 0)[..., None], hidden[:, 0].astype(jnp.float32), 0.0)
    q, k, v = (jnp.einsum("btd,adc->batc", x, w, precision=lax.Precision.HIGHEST) for w in (query, key, value))
    prompt, last = kv.KVBlock(k, v, pos[:, None]), pos.max(1, keepdims=True)

    def attend(q: kv.Array, pos: kv.Array) -> kv.Array:
        # Asked from the last position, a causal query sees every token.
        return kv.attention.merge([kv.attention.attend_dense(q, prompt, jnp.broadcast_to(last, pos.shape))])

    return kv.map_query_blocks(attend, q[:, :, None], pos, 64)[:, :, 0]


@dataclasses.dataclass(frozen=True)
class Gate(kv.Scorer):
    """Scores a token by the logit of its gate, for each key/value head (Zeng et al. 2024, 2410.12876).

    Args:
      given: a file of `AttentionGateTable`.
    """

    given: kv.TableFile
    needs_hidden: ClassVar[bool] = True

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        observation, K = self.require_observation(observation), spec.num_kv_heads
        assert observation.hidden_states is not None
        wide = (None, None, None)
        arrays = self.given.layer_arrays(spec, query=wide, key=wide, value=wide, output=(None, None, K), bias=(K,))
        query, key, value, output, bias = (jnp.asarray(x, jnp.float32) for x in arrays.values())
        self.given.check_hidden_size(query.shape[1], observation.hidden_states.shape[3])
        mixed = gate_attention(observation.hidden_states, block.pos[:, 0], query, key, value)
        # The table has the gates of all heads of the layer, and a device scores for its own.
        output = kv.over_heads.local_part(jnp.moveaxis(output, 2, 0), block.k.shape[1])
        bias = kv.over_heads.local_part(bias, block.k.shape[1])
        logits = jnp.einsum("bate,kae->bkt", mixed, output, precision=lax.Precision.HIGHEST)
        return kv.token_scores(logits + bias[None, :, None], block)


@dataclasses.dataclass(frozen=True)
class ThresholdBudgets(kv.HeadBudgets):
    """Lets each head keep the units whose scores are above a threshold, few or many.

    If the heads of a layer together flag more units than their budgets hold, the best of them all stay; ties go to
    the earlier unit, then to the lower head. Memory is that of the budget, because shapes must be known beforehand.
    """

    above: float

    def allocate(self, scores: kv.Array, allowed: kv.Array, quota: kv.Array, num_always: kv.Array) -> kv.Array:
        B, K, U = scores.shape
        is_flagged = allowed[:, None] & (scores > self.above)
        scores, is_flagged = (x.swapaxes(1, 2).reshape(B, U * K) for x in (scores, is_flagged))
        return kv.top_k_mask(scores, is_flagged, K * quota).reshape(B, U, K).sum(1, dtype=jnp.int32)


@kv.register_method(example="attention_gate:budget=512", family="eviction after the prompt")
def attention_gate(
    budget: int = 1024,
    threshold: Annotated[float, kv.Within("[0, 1)")] = 0.5,
    sinks: int = 4,
    recent: int = 32,
    table: str = "shipped",
    page: int = 16,
) -> kv.Method:
    """Keeps the prompt tokens that each head's trained gate flags, up to a budget.

    Formula:
      gate of all heads = sigmoid(sum over a of softmax(x Q_a (x K_a)^T / sqrt(C)) x V_a O_a + b), x the hidden states
      of the prompt; a head keeps its tokens whose gate is above the threshold

    Differs:
      The paper has no public code. Unverified: the layout of the gate, its bias, that it sees no positions, and the
      threshold. The prompt attends exactly, where the paper also hides evicted tokens from later ones; grouped query
      heads share one gate. The budget, the sinks and the recent tokens are not in the paper.

    Args:
      budget: the most prompt tokens per layer and key/value head, on average over the heads; memory is reserved for
        them.
      threshold: gate value, 0 to 1, above which a token stays; 0 keeps all that the budget allows.
      sinks: first tokens that stay whatever the gate says.
      recent: last tokens that stay whatever the gate says.
      table: a file of kind `attention_gate`. The shipped tables are fitted by linear discriminants, as `kvjax calibrate
        attention_gate` does, where the paper trains through the model.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      Attention-Gate, Zeng et al. 2024, arXiv 2410.12876
    """
    above = math.log(threshold / (1 - threshold)) if threshold else -math.inf
    select = kv.make_selection(Gate(AttentionGateTable.table_file(table)), budget, sinks, recent)
    return kv.Method(select=select, side_store=kv.PagedHeads(ThresholdBudgets(above), page))
