"""Fast KVzip: trained gates on the hidden states predict KVzip's scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.competition import level_components
from kvjax.methods.kvzap import ScoreRegression

EXAMPLE_WIDTH = 8  # channels of the hidden states that the example is made for, those of the tests' layer
CALIBRATED_BIAS = 1000.0  # beside which a calibrated gate's own channel is small, so that the norm leaves it linear
LONG_PROMPT_TOKENS = 32_000  # from which on the window has a fixed number of tokens (kvpress)


@kv.register_table_kind("fastkvzip")
@dataclasses.dataclass(frozen=True)
class FastKVzipGates(ScoreRegression):
    """The weights of a gate for each layer: G queries and a key of C channels for each key/value head, and S sink keys.

    `query` f32[K G C D], `query_bias` f32[K G C], `key` f32[K C D], `query_norm` and `key_norm` f32[C], `sink_keys`
    f32[K S C], `bias` f32[K G]. The authors publish a pickle of torch, which kvjax does not open. Written as
    safetensors.torch.save_file({f"{i}.{name}": x for i, layer in enumerate(torch.load(FILE)["module"])
    for name, x in layer.items()}, NEW), NEW is read as a table.

    Calibrated, C = 2, S = 1 and keys are zero, so that a gate is the sigmoid of a linear map: of that to the logarithm
    of KVzip's score, see `ScoreRegression`.
    """

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        weight, bias = kv.fit_linear_map(counted, self.ridge)
        K, D = weight.shape
        query, query_bias = np.zeros((K, spec.num_groups, 2, D)), np.zeros((K, spec.num_groups, 2))
        query[:, :, 0], query_bias[:, :, 0], query_bias[:, :, 1] = weight[:, None], bias[:, None], CALIBRATED_BIAS
        arrays = {
            "query": query,
            "query_bias": query_bias,
            "key": np.zeros((K, 2, D)),
            "query_norm": np.array([CALIBRATED_BIAS, 1.0]),
            "key_norm": np.ones(2),
            "sink_keys": np.tile([-1.0, 0.0], (K, 1, 1)),
            "bias": np.zeros((K, spec.num_groups)),
        }
        return {name: array.astype(np.float32) for name, array in arrays.items()}

    @staticmethod
    def read_published(file: kv.PublishedFile, spec: kv.LayerSpec) -> Sequence[Mapping[str, np.ndarray]]:
        K, G, layers = spec.num_kv_heads, spec.num_groups, []
        for i in range(spec.num_layers):
            norm = file.take(f"{i}.q_norm.weight", None)
            C = len(norm)
            query = file.take(f"{i}.q_proj.weight", K * G * C, None)
            D = query.shape[1]
            layers.append(
                {
                    "query": query.reshape(K, G, C, D),
                    "query_bias": file.take(f"{i}.q_proj.bias", K * G * C).reshape(K, G, C),
                    "key": file.take(f"{i}.k_proj.weight", K * C, D).reshape(K, C, D),
                    "query_norm": norm,
                    "key_norm": file.take(f"{i}.k_norm.weight", C),
                    "sink_keys": file.take(f"{i}.k_base", K, 1, None, C)[:, 0],
                    "bias": file.take(f"{i}.b", K, 1, G)[:, 0],
                }
            )
        return layers

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        K, G, C, D, S = spec.num_kv_heads, spec.num_groups, 4, EXAMPLE_WIDTH, 2
        shapes = {"query": (K, G, C, D), "query_bias": (K, G, C), "key": (K, C, D), "query_norm": (C,)}
        shapes |= {"key_norm": (C,), "sink_keys": (K, S, C), "bias": (K, G)}
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class GateScores(kv.Scorer):
    """Scores a token by its gate, and the first and the latest tokens by 1, which no gate reaches (2601.17668).

    Args:
      given: a file of `FastKVzipGates`.
      sinks: first tokens that score 1.
      window: last tokens that score 1, of a prompt of 32,000 tokens or more.
      window_share: the same of a shorter prompt, as a fraction of its tokens, at least one token.
    """

    given: kv.TableFile
    sinks: kv.NonNegativeInt = 4
    window: kv.PositiveInt = 4096
    window_share: Annotated[float, kv.Within("[0, 1]")] = 0.02
    needs_hidden: ClassVar[bool] = True

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        x = self.require_observation(observation).hidden_states
        assert x is not None
        K, G, T = spec.num_kv_heads, spec.num_groups, block.pos.shape[2]
        C = self.given.layer_arrays(spec, query_norm=(None,))["query_norm"].shape[0]
        per_head = {"query": (K, G, C, None), "query_bias": (K, G, C), "key": (K, C, None)}
        per_head |= {"sink_keys": (K, None, C), "bias": (K, G)}
        arrays = self.given.layer_arrays(spec, **per_head, query_norm=(C,), key_norm=(C,))
        self.given.check_hidden_size(arrays["query"].shape[3], x.shape[3])
        own = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
        own |= {name: kv.over_heads.local_part(own[name], block.k.shape[1]) for name in per_head}
        x = jnp.where((block.pos[:, 0] >= 0)[..., None], x[:, 0].astype(jnp.float32), 0.0)
        precision = lax.Precision.HIGHEST
        query = (
            jnp.einsum("bsd,kgcd->bkgsc", x, own["query"], precision=precision) + own["query_bias"][None, :, :, None]
        )
        query = root_mean_square_norm(query, own["query_norm"][None, None, None, None])
        key = jnp.einsum("bsd,kcd->bksc", x, own["key"], precision=precision)
        key = root_mean_square_norm(key, own["key_norm"][None, None, None])
        logit = jnp.einsum("bkgsc,bksc->bkgs", query, key, precision=precision) * C**-0.5 + own["bias"][None, ..., None]
        sinks = jnp.einsum("bkgsc,knc->bkgsn", query, own["sink_keys"], precision=precision) * C**-0.5
        gates = 1.0 / (1.0 + jnp.exp(sinks - logit[..., None]).sum(-1))
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)[:, None, None]
        # The window is a Python function of the length, which is traced: it is tabulated over all lengths.
        windows = [max(1, int(n * self.window_share)) if n < LONG_PROMPT_TOKENS else self.window for n in range(T + 1)]
        always = (block.pos < self.sinks) | (block.pos >= length - jnp.asarray(windows, jnp.int32)[length])
        return kv.token_scores(jnp.where(always, 1.0, gates.mean(2)), block)


def root_mean_square_norm(x: kv.Array, weight: kv.Array) -> kv.Array:
    """Divides vectors by their root mean square, as Qwen3's norm does, and multiplies channels by the weight."""
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight


@kv.register_method(example="fastkvzip:budget=512", family="eviction after the prompt")
def fastkvzip(
    budget: kv.TokenBudget = 1024,
    sinks: int = 4,
    window: int = 4096,
    window_share: float = 0.02,
    level: Literal["model", "layer", "head"] = "model",
    table: str = "shipped",
    page: int = 16,
) -> kv.Method:
    """Keeps the prompt tokens to which trained gates give the highest scores, over all heads of all layers.

    Formula:
      score of token s = mean over gates g of 1 / (1 + sum over sink keys n of exp((q_gs n - q_gs k_s) / sqrt(C) -
      b_g)), q and k normalized projections of the token's hidden state; the L K budget pairs of the highest scores
      stay

    Differs:
      The prompt attends exactly and is pruned once, as under kvpress' `FastKVzipPress`; the authors' own code prunes
      after each chunk of a long prompt. Calibrated gates are linear and fitted to a text's later half, where the
      authors train gates on KVzip's scores.

    Args:
      budget: as in `make_selection`, on average over the heads that share it; the sinks and the window are included.
      sinks: first tokens that stay.
      window: last tokens that stay of a prompt of 32,000 tokens or more.
      window_share: the same of a shorter prompt, as a fraction of it, at least one token.
      level: as in `kvzip`; "layer" is `layerwise=True` of kvpress.
      table: a file of kind `fastkvzip`, or the authors' gates as safetensors, as the kind's description says; "shipped"
        for the shipped model's, made as `kvjax calibrate fastkvzip` does.
      page: as in `kvzip`.

    Reference:
      Fast KVzip, Kim et al. 2026, arXiv 2601.17668; its public code, Janghyun1230/FastKVzip, and kvpress
    """
    scorer = GateScores(FastKVzipGates.table_file(table), sinks, window, window_share)
    return kv.Method(select=kv.make_selection(scorer, budget), **level_components(level, page))
