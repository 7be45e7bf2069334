"""Keys that are held in a way which a prompt's queries and keys decide: few channels, or channels in balance."""

from __future__ import annotations

from typing import Any

from kvjax.cache.codecs.base import Codec
from kvjax.cache.side_store.mixed_precision import Low, Tiers
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


class PromptAdaptiveKeys(Codec):
    """The base of such codecs: `found` looks at a prompt, and `held` holds keys by what it found."""

    by_head = True

    def found(self, x: Array, pos: Array, observation: Observation) -> Array:
        """Of a prompt's keys [B K S H] and its queries: an array [B K 1 ...]."""
        raise NotImplementedError

    def held(self, x: Array, pos: Array, found: Array) -> Any:
        """Keys x [B K S H] as they are stored by what was found."""
        raise NotImplementedError

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> Any:
        if observation is None:
            return self.encode(x, pos)
        return self.held(x, pos, self.found(x, pos, observation))

    def encode(self, x: Array, pos: Array) -> Any:
        raise KvjaxError(
            f"{self} holds keys by a prompt's queries, and has seen none; give it to a slot that brings them, such as "
            "`k` or a tier"
        )


class PromptAdaptiveTiers(Tiers):
    """The base of tiers whose key codec looks at the whole prompt, also at the tokens that stay in the slots."""

    k: PromptAdaptiveKeys

    def held(self, there: KVBlock, block: KVBlock, observation: Observation | None) -> Low:
        if observation is None:
            raise KvjaxError(
                f"{self} holds keys by a prompt's queries, got none; observe {self.num_queries or 'all'} of them"
            )
        keys = self.k.held(there.k, there.pos, self.k.found(block.k, block.pos, observation))
        return Low(keys, self.v.encode(there.v, there.pos), there.pos, there.bias)
