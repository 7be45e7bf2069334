"""KVzap: a small network on the hidden states predicts how much a token will be attended to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv

EXAMPLE_WIDTH = 8  # channels of the hidden states that the example is made for, those of the tests' layer
SMALLEST_SCORE = 1e-30  # of which a logarithm is taken


@dataclasses.dataclass(frozen=True)
class ScoreRegression(kv.TableKind):
    """A kind whose calibration predicts the logarithm of KVzip's score by a linear map of hidden states.

    The later half of a text stands for its repetition: the score of a token of the earlier half is the greatest
    attention that any later query and query head pays it.

    Args:
      ridge: as in `fit_linear_map`.
    """

    ridge: kv.PositiveInt = 1000
    plus: ClassVar[bool] = False  # whether the score is that of KVzip+, see `repetition_scores`
    num_queries = None
    needs_hidden = True

    __post_init__ = kv.check_fields

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None and observation.hidden_states is not None
        earlier, later = kv.split_halves(block, observation)
        scores = repetition_scores(block.clean(), observation, later, spec.rule, self.plus)
        # A sliding window may hide a token from all later queries; such a token has no target.
        has_target = earlier[:, :1] & kv.over_heads.any(scores > 0)
        hidden = observation.hidden_states[:, 0].astype(jnp.float32)
        return kv.sum_moments(hidden, jnp.log(jnp.maximum(scores, SMALLEST_SCORE)), has_target)


@kv.register_table_kind("kvzap")
@dataclasses.dataclass(frozen=True)
class KVzapTable(ScoreRegression):
    """The weights of a network of M hidden units with GELU for each layer, as KVzap's public release has them.

    `hidden` f32[M D], `hidden_bias` f32[M], `output` f32[K M], `output_bias` f32[K]. A linear map has M = 2 K: the GELU
    of a number, minus that of its negative, is the number itself. Calibrated, the network is a linear map to the
    logarithm of KVzip+'s score, see `ScoreRegression`.
    """

    plus: ClassVar[bool] = True
    needs_output = True

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        return linear_network(*kv.fit_linear_map(counted, self.ridge))

    @staticmethod
    def read_published(file: kv.PublishedFile, spec: kv.LayerSpec) -> Sequence[Mapping[str, np.ndarray]]:
        K, layers = spec.num_kv_heads, []
        for i in range(spec.num_layers):
            if f"layers.{i}.weight" in file.arrays:
                layers.append(
                    linear_network(file.take(f"layers.{i}.weight", K, None), file.take(f"layers.{i}.bias", K))
                )
                continue
            hidden = file.take(f"layers.{i}.0.weight", None, None)
            layers.append(
                {
                    "hidden": hidden,
                    "hidden_bias": file.take(f"layers.{i}.0.bias", len(hidden)),
                    "output": file.take(f"layers.{i}.2.weight", K, len(hidden)),
                    "output_bias": file.take(f"layers.{i}.2.bias", K),
                }
            )
        return layers

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        weight, bias = rng.normal(size=(spec.num_kv_heads, EXAMPLE_WIDTH)), rng.normal(size=spec.num_kv_heads)
        return linear_network(weight, bias)


def linear_network(weight: np.ndarray, bias: np.ndarray) -> dict[str, np.ndarray]:
    """Writes a linear map [K D] with offsets [K] as a network of two hidden units for each output."""
    same = np.eye(len(weight))
    arrays = {
        "hidden": np.concatenate([weight, -weight]),
        "hidden_bias": np.zeros(2 * len(weight)),
        "output": np.concatenate([same, -same], 1),
        "output_bias": bias,
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def repetition_scores(
    block: kv.KVBlock, observation: kv.Observation, asking: kv.Array, rule: kv.attention.Rule, plus: bool
) -> kv.Array:
    """Computes the greatest attention that each slot gets from the queries of bool[B Q]; 0 where none sees it.

    With `plus` it is multiplied by the norm that the value adds to the output, and divided by that of the query's
    hidden state (KVzip+).
    """
    scale, added = asking.astype(jnp.float32), jnp.ones((1, 1, 1, 1))
    if plus:
        assert observation.output_projection is not None and observation.hidden_states is not None
        projection = observation.output_projection[0].astype(jnp.float32)
        added = jnp.linalg.norm(jnp.einsum("bksh,kghd->bkgsd", block.v.astype(jnp.float32), projection), axis=-1)
        scale = jnp.where(
            asking, 1.0 / jnp.linalg.norm(observation.hidden_states[:, 0].astype(jnp.float32), axis=-1), 0
        )

    def update(most: kv.Array, queries: tuple[kv.Array, kv.Array, kv.Array]) -> tuple[kv.Array, None]:
        q, pos, scale = queries
        weights = kv.attention_rows(block, observation._replace(q=q, pos=pos, softmax_lse=None), rule)
        received = weights * scale[:, None, None, :, None] * added[:, :, :, None]
        return jnp.maximum(most, received.max((2, 3))), None

    split = kv.attention.split_blocks
    blocks = split(observation.q, 3, 64), split(observation.pos, 1, 64, -1), split(scale, 1, 64)
    return lax.scan(update, kv.vary(jnp.zeros(block.k.shape[:3])), blocks)[0]


@dataclasses.dataclass(frozen=True)
class PredictedScores(kv.Scorer):
    """Scores a token by a network on its hidden state, output gelu(hidden x + b) + c, for each key/value head.

    Args:
      given: a file of `KVzapTable`.
    """

    given: kv.TableFile
    needs_hidden: ClassVar[bool] = True

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        x, K = self.require_observation(observation).hidden_states, spec.num_kv_heads
        assert x is not None
        arrays = self.given.layer_arrays(
            spec, hidden=(None, None), hidden_bias=(None,), output=(K, None), output_bias=(K,)
        )
        hidden, hidden_bias, output, output_bias = (jnp.asarray(a, jnp.float32) for a in arrays.values())
        self.given.check_hidden_size(hidden.shape[1], x.shape[3])
        output, output_bias = (kv.over_heads.local_part(a, block.k.shape[1]) for a in (output, output_bias))
        units = jnp.einsum("bsd,md->bsm", x[:, 0].astype(jnp.float32), hidden, precision=lax.Precision.HIGHEST)
        units = jax.nn.gelu(units + hidden_bias[None, None], approximate=False)
        scores = jnp.einsum("bsm,km->bks", units, output, precision=lax.Precision.HIGHEST)
        return kv.token_scores(scores + output_bias[None, :, None], block)


@kv.register_method(example="kvzap:budget=512", family="eviction after the prompt")
def kvzap(
    budget: kv.TokenBudget = 1024,
    recent: int = 128,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
    table: str = "shipped",
) -> kv.Method:
    """Keeps the prompt tokens to which a network on the hidden states gives the highest score, and the recent ones.

    Its authors keep all tokens above a threshold: 'kvzap:budget=50% + dms:threshold=-4'.

    Formula:
      score of token s in key/value head h = (W gelu(V x_s + b) + c)_h, or the linear map (W x_s + c)_h, x_s the hidden
      state that its query, key and value are made of: the logarithm of KVzip+'s score

    Differs:
      Tokens are scored when the prompt ends; 'kvzap + dms:decode=true' also evicts decoded ones, as kvpress'
      `DMSPress(decoding=True)`.
      Calibrated maps are linear, and fitted to the attention of a text's later half, where the authors have the model
      repeat it.

    Args:
      budget, recent, sinks, unit, per: as in `make_selection` (the authors: 128 recent tokens, no sinks).
      table: a file of kind `kvzap`, or one that the authors published, the `model.safetensors` of a repository
        `nvidia/KVzap-linear-..` or `nvidia/KVzap-mlp-..`; "shipped" for the shipped model's, made as `kvjax calibrate
        kvzap` does.

    Reference:
      KVzap, Jegou and Jeblick 2026, arXiv 2601.07891; its public code, NVIDIA/kvpress
    """
    scorer = PredictedScores(KVzapTable.table_file(table))
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
