"""MiKV: the tokens that an eviction method would drop are held in few bits instead."""

from __future__ import annotations

import dataclasses

from kvjax.cache.codecs.balanced import ChannelBalancer
from kvjax.cache.codecs.base import Plain
from kvjax.cache.codecs.chunk_quant import Tokenwise
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveTiers
from kvjax.cache.codecs.quantizers import MinMax
from kvjax.cache.eviction.scorers import AccumulatedAttention
from kvjax.cache.method import Method
from kvjax.cache.side_store.mixed_precision import ScoredTiers
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class BalancedTier(PromptAdaptiveTiers, ScoredTiers):
    """A low tier whose keys are brought into balance by all queries and keys of the prompt."""


@register_method(family="quantization by channel and group")
def mikv(
    share: float = 0.8, recent: float = 0.5, low: int = 2, high: int = 0, group: int = 0, balance: bool = True
) -> Method:
    """Quantizes the least attended prompt tokens to few bits, with balanced channels, and stores the others exactly.

    Attention in the prompt is exact.

    Formula:
      s_i = attention that token i receives from all queries of the prompt; the lowest 80 % of a head, but not the
      newest, as code = round((x - min) / a), a = (max - min) / (2^bits - 1) by token, of k b with b_c = sqrt(max |q_c|
      / max |k_c|), read by q / b

    Differs:
      Tokens never change their tier while decoding, where the paper moves them as their importance falls; decoded
      tokens stay in the high tier. There is no public code. Unverified: the fraction, the group size, and that half of
      the high tier are the newest tokens.

    Args:
      share: fraction of each head's prompt tokens in the low tier.
      recent: fraction of the high tier that is reserved for the newest tokens (H2O: a half).
      low: bits of the low tier (the paper: 2, 3 or 4).
      high: bits of the high tier, each token vector by itself; 0 stores them exactly (the paper: 16 or 8).
      group: channels of a token that share a scale; 0 for all of them.
      balance: whether keys are weighted by channel.

    Reference:
      No Token Left Behind (MiKV), Yang et al. 2024, arXiv 2402.18096, sections 3.1 and 3.2
    """
    coded = Tokenwise(low, group=group)
    held = PerTokenCodec(MinMax(high)) if high else Plain()
    if balance:
        tier = BalancedTier(AccumulatedAttention(), share, ChannelBalancer(coded), coded, recent)
    else:
        tier = ScoredTiers(AccumulatedAttention(), share, coded, coded, recent)
    return Method(side_store=tier, k=held, v=held)
