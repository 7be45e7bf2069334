"""Key codecs whose stored form depends on a prompt's queries and keys, and precision tiers that use them."""

from __future__ import annotations

from typing import Any

from kvjax.cache.side_store.mixed_precision import LowTier, PrecisionTiers
from kvjax.cache.storage import ObservingCodec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.utils.abstract import abstract


class PromptAdaptiveKeys(ObservingCodec):
    """The base: `fit_prompt` computes parameters from a prompt, and `encode_with` stores keys by them."""

    @abstract
    def fit_prompt(self, x: Array, pos: Array, observation: Observation) -> Array:
        """Computes the parameters [B K 1 ...] from a prompt's keys x [B K S H] and its queries."""
        ...

    @abstract
    def encode_with(self, x: Array, pos: Array, params: Array) -> Any:
        """Stores keys x [B K S H] by parameters that were fitted before."""
        ...

    def encode(self, x: Array, pos: Array, observation: Observation | None = None) -> Any:
        if observation is None:
            raise KvjaxError(
                f"{self} holds keys by a prompt's queries, and has seen none; give it to a component that brings them, "
                "such as `k` or a tier"
            )
        return self.encode_with(x, pos, self.fit_prompt(x, pos, observation))

    def in_pages(self, page: int) -> None:
        return None  # what was fitted to a head does not hold for the head whose page it would store


class PromptAdaptiveTiers(PrecisionTiers):
    """The base of tiers whose key codec is fitted to the whole prompt, including the tokens that stay in the slots."""

    k: PromptAdaptiveKeys

    def encode_low_tier(self, low: KVBlock, block: KVBlock, observation: Observation | None) -> LowTier:
        if observation is None:
            raise KvjaxError(
                f"{self} holds keys by a prompt's queries, got none; observe {self.num_queries or 'all'} of them"
            )
        keys = self.k.encode_with(low.k, low.pos, self.k.fit_prompt(block.k, block.pos, observation))
        return LowTier(keys, self.v.encode(low.v, low.pos), low.pos, low.bias)
