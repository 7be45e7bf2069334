"""Q-Filters: keeps the keys that lie in the direction of most of a head's queries, which a table has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv


@kv.register_table_kind("qfilters")
class QFilters(kv.TableKind):
    """The direction opposite to each key/value head's queries: `filter` f32[K H].

    Of each query head, the first right-singular vector of the queries of a text after RoPE, with the sign by which
    their mean has a negative coordinate; of a key/value head, the mean over its query heads.
    """

    num_queries = None

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None
        is_real = (observation.pos >= 0)[:, None, None, :, None]
        q = jnp.where(is_real, observation.q.astype(jnp.float32), 0.0)
        return {"sum": q.sum(3), "products": jnp.einsum("bkgqh,bkgqi->bkghi", q, q, precision=lax.Precision.HIGHEST)}

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        # The right-singular vectors of the queries are the eigenvectors of their products, here ascending.
        direction = np.linalg.eigh(counted["products"])[1][..., -1]
        sign = np.where((direction * counted["sum"]).sum(-1, keepdims=True) > 0, -1.0, 1.0)
        return {"filter": (sign * direction).mean(1).astype(np.float32)}

    @staticmethod
    def read_published(file: kv.PublishedFile, spec: kv.LayerSpec) -> Sequence[Mapping[str, np.ndarray]]:
        filters = file.take("q_filters", spec.num_layers, spec.num_kv_heads, spec.head_dim)
        return [{"filter": layer} for layer in filters]


@dataclasses.dataclass(frozen=True)
class QueryFilter(kv.Scorer):
    """Scores a token by minus the inner product of its key with the filter of its head (2503.02812).

    Args:
      given: a file of `QFilters`.
    """

    given: kv.TableFile
    is_comparable = False  # keys of each layer are on a scale of their own

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        given = self.given.layer_arrays(spec, filter=(spec.num_kv_heads, spec.head_dim))["filter"]
        own = kv.over_heads.local_part(jnp.asarray(given, jnp.float32), block.k.shape[1])
        keys = block.clean().k.astype(jnp.float32)
        return kv.token_scores(-jnp.einsum("bksh,kh->bks", keys, own, precision=lax.Precision.HIGHEST), block)


@kv.register_method(example="qfilters:budget=512", family="eviction after the prompt")
def qfilters(
    budget: kv.TokenBudget = 1024,
    sinks: int = 0,
    recent: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
    table: str = "shipped",
) -> kv.Method:
    """Keeps the prompt tokens whose keys lie in the main direction of a head's queries; it needs no queries.

    Formula:
      score_s = -f k_s, f = minus the mean over a head's query heads of the first right-singular vector of its queries

    Differs:
      A calibrated filter has the sign of the queries' mean, where the authors take that of most queries. The prompt is
      pruned once, as under kvpress' `QFilterPress`; the authors' cache prunes whenever it is full.

    Args:
      budget, sinks, recent, unit, per: as in `make_selection` (kvpress: no sinks and no recent tokens).
      table: a file of kind `qfilters`, or one that the authors published, the `model.safetensors` of a repository
        `nthngdy/.._qfilt`; "shipped" for the shipped model's, made as `kvjax calibrate qfilters` does.

    Reference:
      Q-Filters, Godey et al. 2025, arXiv 2503.02812; its public code, NathanGodey/qfilters
    """
    scorer = QueryFilter(QFilters.table_file(table))
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
