"""MiKV: the tokens that an eviction method would drop are held in few bits instead."""

from __future__ import annotations

import dataclasses

from kvjax.cache.codecs.balanced import ChannelBalancer
from kvjax.cache.codecs.base import Plain
from kvjax.cache.codecs.per_token import MinMax, Rows
from kvjax.cache.codecs.prompt_adaptive import TiersByPrompt
from kvjax.cache.codecs.tokens import Tokens
from kvjax.cache.eviction.scorers import Accumulated
from kvjax.cache.method import Method
from kvjax.cache.side_store.mixed_precision import Tier
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


@dataclasses.dataclass(frozen=True)
class BalancedTier(TiersByPrompt, Tier):
    """A low tier whose keys are brought into balance by all queries and keys of the prompt."""


def _bytes(x: Sizes) -> Bytes:
    """With 60 % of the prompt in 2 bits, the rest and what is decoded as they came."""
    low, heads = 3 * x.prompt // 5, x.B * x.K
    slots = x.left(x.prompt - low)
    codes_and_scales = 2 * heads * low * (x.H * 2 // 8 + 2 * x.itemsize)
    counts = 5 * x.per_row()  # slots in use; of the low tier's keys and values, those of the prompt and those in codes
    balance = 4 * heads * x.H
    positions = x.positions(slots + low, per_head=True)
    return Bytes(2 * x.rows(slots) + codes_and_scales + balance + positions + counts)


@recipe(
    "No Token Left Behind (MiKV), Yang et al. 2024, arXiv 2402.18096, sections 3.1 and 3.2",
    Trial("mikv:share=0.6", "mikv:share=0", _bytes),
    formula="s_i = attention that token i receives from all queries of the prompt; the lowest 80 % of a head, but not "
    "the newest, as code = round((x - min) / a), a = (max - min) / (2^bits - 1) by token, of k b with "
    "b_c = sqrt(max |q_c| / max |k_c|), read by q / b",
    differs="Tokens change no tier while decoding, where the paper moves them as their importance falls: what is "
    "decoded stays in the high tier. Without public code; unverified are the share, the group size, and that half of "
    "the high tier are the newest tokens.",
    example="mikv",
    family="quantization by channel and group",
)
def mikv(
    share: float = 0.8, recent: float = 0.5, low: int = 2, high: int = 0, group: int = 0, balance: bool = True
) -> Method:
    """The least attended tokens of a prompt in few bits, with channels in balance, and all others as they came.

    share: of each head's prompt tokens, those in the low tier. recent: of the others, the share that are the newest
    (H2O: a half). low: bits of the low tier (the paper: 2, 3 or 4). high: bits of all others, each row by itself; 0: as
    they came (the paper: 16 or 8). group: channels of a token that share a scale; 0: the whole row. balance: whether
    keys are weighted by channel. Attention in the prompt is exact.
    """
    coded = Tokens(low, group=group)
    held = Rows(MinMax(high)) if high else Plain()
    if balance:
        tier = BalancedTier(Accumulated(), share, ChannelBalancer(coded), coded, recent)
    else:
        tier = Tier(Accumulated(), share, coded, coded, recent)
    return Method(side_store=tier, k=held, v=held)
