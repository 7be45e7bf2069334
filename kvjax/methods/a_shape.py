"""A-shape: a query of the prompt reads the first tokens and those just before it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class AShape:
    """Restricts the prompt's own attention to sinks and a local window; see `AttentionPattern`.

    Args:
      sinks: first tokens.
      recent: tokens of the window, the query's own included.
    """

    sinks: kv.NonNegativeInt
    recent: kv.PositiveInt

    __post_init__ = kv.check_fields

    def is_visible(self, s: kv.Array, t: kv.Array) -> kv.Array:
        """Whether a query at t reads the key at s: one of the first `sinks`, or of the last `recent`, t included."""
        return (s < self.sinks) | (s > t - self.recent)

    def block_visibility(
        self, first: kv.Array, last: kv.Array, start: kv.Array, end: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        """Says whether any pair of keys first..last and queries start..end is read, and whether all causal ones are."""
        some = (first < self.sinks) | (last > start - self.recent)
        beyond_sinks = jnp.maximum(first, self.sinks)
        return some, (last < self.sinks) | (beyond_sinks > end - self.recent)


@kv.register_method(example="a_shape:sinks=64,recent=512", family="sparse reading")
def a_shape(sinks: int = 1024, recent: int = 4096) -> kv.Method:
    """Restricts the prompt's attention to the first tokens and a local window; decoding reads everything.

    Blocks of the prompt outside that shape are skipped, so prefill time grows with the length and not with its square.

    Formula:
      a prompt's query at t reads s <= t where s < sinks or s > t - recent

    Differs:
      MInference gives each head one of three patterns by a search (`minference`); here all heads have this one.

    Args:
      sinks: first tokens that every query of the prompt reads (MInference's baseline: 1,024).
      recent: last tokens that a query reads, its own included (MInference's baseline: 4,096).

    Reference:
      A-shape heads of MInference, Jiang et al. 2024, arXiv 2407.02490, section 3; StreamingLLM's pattern, 2309.17453
    """
    return kv.Method(attend=AShape(sinks, recent))
