"""Gates: a small attention over a prompt's hidden states that says which tokens heads keep, and its table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.calibration.text_halves import split_halves
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.readers.base import map_query_blocks
from kvjax.core.attention import attend_dense, merge
from kvjax.core.attention_mass import Observation, attention_mass
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError

SHARPNESS = 32.0  # in a calibrated gate, the logit that a token of root-mean-square length pays to itself
EXAMPLE_WIDTH = 8  # channels of the hidden states that the example is made for, those of the tests' layer


def gate_attention(hidden: Array, pos: Array, query: Array, key: Array, value: Array) -> Array:
    """Hidden states [B 1 T D] at pos i32[B T], weights [A D C], [A D C] and [A D E] -> f32[B A T E].

    A attention heads of C channels, each over all tokens of the prompt, those that follow included; no rotation.
    """
    x = jnp.where((pos >= 0)[..., None], hidden[:, 0].astype(jnp.float32), 0.0)
    q, k, v = (jnp.einsum("btd,adc->batc", x, w, precision=lax.Precision.HIGHEST) for w in (query, key, value))
    prompt, last = KVBlock(k, v, pos[:, None]), pos.max(1, keepdims=True)

    def attend(q: Array, pos: Array) -> Array:
        return merge([attend_dense(q, prompt, jnp.broadcast_to(last, pos.shape))])

    return map_query_blocks(attend, q[:, :, None], pos, 64)[:, :, 0]


@register_table_kind("attention_gate")
@dataclasses.dataclass(frozen=True)
class AttentionGateTable(TableKind):
    """The weights of an Attention-Gate: A attention heads of C channels over hidden states of D, which mix E channels.

    `query`, `key` f32[A D C], `value` f32[A D E], `needs_output` f32[A E K], `bias` f32[K]. With x the hidden states
    that the layer's queries and keys are made of, the gate of key/value head h is the sigmoid of column h of the sum
    over a of softmax(x query_a (x key_a)^T / sqrt(C)) x value_a output_a, plus bias_h. There is no public release; of a
    torch module with linear maps q [A*C D] and o [K A*E], `query` is `q.weight.reshape(A, C, D).transpose(1, 2)` and
    `needs_output` is `o.weight.T.reshape(A, E, K)`.

    Calibrated, A = 1 and E = K: a token attends to those that are like it, by a random projection which is query and
    key at once, and linear discriminants tell apart what it mixes: the logistic regression of two normal distributions
    with one covariance. What a head should keep are those tokens of a text's earlier half that get most attention from
    the later half. keep: how many of a hundred. channels: C. ridge: as in `RetainingHeads`.
    """

    keep: int = 50
    channels: int = 32
    ridge: int = 1000
    num_queries = None
    needs_hidden = True
    needs_layer_index = True

    def __post_init__(self):
        if not 0 < self.keep < 100:
            raise KvjaxError(f"keep is how many of a hundred tokens a gate keeps, 1 to 99, got {self.keep}; use 50")
        if min(self.channels, self.ridge) < 1:
            raise KvjaxError(f"channels and ridge must be at least 1, got {self.channels} and {self.ridge}")

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        assert observation is not None
        earlier, later = split_halves(block, observation)
        received, asking = attention_mass(block, observation, later.astype(jnp.float32), spec.window)
        asked = earlier[:, :1] & (asking[:, :1] > 0)
        number = asked.sum(2, dtype=jnp.int32)
        quota = jnp.broadcast_to(number * self.keep // 100, received.shape[:2])
        best = top_k_mask(received.sum(2), asked, quota).astype(jnp.float32)
        x, scale = self._alike(observation, spec)
        x = jnp.where(asked[:, 0, :, None], x, 0.0)
        return {
            "texts": jnp.ones(number.shape),
            "scale": scale,
            "tokens": number.astype(jnp.float32),
            "kept": quota.astype(jnp.float32),
            "x": x.sum(1)[:, None],
            "kept_x": jnp.einsum("bkt,btd->bkd", best, x, precision=lax.Precision.HIGHEST),
            "xx": jnp.einsum("btd,bte->bde", x, x, precision=lax.Precision.HIGHEST)[:, None],
        }

    def _alike(self, observation: Observation, spec: LayerSpec) -> tuple[Array, Array]:
        """What each token mixes of hidden states like its own, f32[B T D], and what the projection is scaled by."""
        real = (observation.pos >= 0)[:, None, :, None]
        assert observation.hidden_states is not None
        x = jnp.where(real, observation.hidden_states.astype(jnp.float32), 0.0)
        tokens = jnp.maximum(real.sum((2, 3), dtype=jnp.float32), 1.0)
        power = jnp.maximum(jnp.square(x).sum((2, 3)) / tokens, 1e-12)
        scale = jnp.sqrt(SHARPNESS * self.channels**0.5 / power)  # f32[B 1], of each row's own hidden states
        D = x.shape[3]
        projection = jnp.asarray(self._projection(D, spec), jnp.float32)[None]
        by_row = scale[:, :, None, None]
        mixed = gate_attention(by_row * x, observation.pos, projection, projection, jnp.eye(D)[None])
        return (mixed / by_row)[:, 0], scale

    def _projection(self, width: int, spec: LayerSpec) -> np.ndarray:
        """[D C], under which the square of a vector's length stays as it is in the mean."""
        return np.random.default_rng(spec.index).normal(size=(width, self.channels)) / self.channels**0.5

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        if not (counted["kept"].all() and (counted["tokens"] > counted["kept"]).all()):
            raise KvjaxError(
                f"of these texts each head would keep {counted['kept'].astype(int).tolist()} of "
                f"{int(counted['tokens'].item())} tokens that are asked, none or all; give longer ones"
            )
        value, bias = _discriminants(counted, self.ridge)
        scale = (counted["scale"] / counted["texts"]).item()
        projection = scale * self._projection(len(value), spec)[None]
        same = np.eye(spec.num_kv_heads)[None]
        made = {"query": projection, "key": projection, "value": value[None], "output": same, "bias": bias}
        return {name: array.astype(np.float32) for name, array in made.items()}

    def example(self, spec: LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        A, C, D, K = 2, 3, EXAMPLE_WIDTH, spec.num_kv_heads
        shapes = {"query": (A, D, C), "key": (A, D, C), "value": (A, D, C), "output": (A, C, K), "bias": (K,)}
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _discriminants(counted: dict[str, np.ndarray], ridge: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums over tokens and over those that each head keeps -> the logit of keeping: directions [D K], offsets [K]."""
    tokens, kept = counted["tokens"], counted["kept"]
    others = tokens - kept
    in_mean, out_mean = counted["kept_x"] / kept[:, None], (counted["x"] - counted["kept_x"]) / others[:, None]
    directions = []
    for n, m, a, b in zip(kept, others, in_mean, out_mean, strict=True):
        within = (counted["xx"][0] - n * np.outer(a, a) - m * np.outer(b, b)) / tokens
        within += np.eye(len(a)) * (np.trace(within) / len(a) / ridge + 1e-12)
        directions.append(np.linalg.solve(within, a - b))
    middle = (np.stack(directions) * (in_mean + out_mean) / 2).sum(1)
    return np.stack(directions, 1), np.log(kept / others) - middle
