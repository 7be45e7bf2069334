"""DuoAttention: retrieval heads keep all tokens, streaming heads the first and the last ones."""

from __future__ import annotations

import dataclasses

from kvjax import method_api as kv
from kvjax.cache.eviction.head_budgets import (
    ALL_TOKENS,
    HeadTableBudgets,
    HeadTokens,
    MeanOfHeads,
    scores_of_all_heads,
    top_heads_mask,
)
from kvjax.methods.sinks_and_recent import Recency


@dataclasses.dataclass(frozen=True)
class StreamingBudgets(HeadTableBudgets):
    """Keeps `streaming` tokens in heads whose weight is below the quantile `sparsity` of all heads, all in the others.

    As in the authors' code, no head streams at 0 and every head at 1. Ties go to the earlier head; there, they are
    decided at random.

    Args:
      given: a file of `HeadWeights`.
      sparsity: fraction of the model's heads that stream.
      streaming: tokens of a streaming head.
    """

    given: kv.TableFile
    sparsity: kv.UnitFloat
    streaming: int

    __post_init__ = kv.check_fields

    def at(self, spec: kv.LayerSpec) -> HeadTokens:
        weights = scores_of_all_heads(self.given, spec, "weights")
        # The heads below an interpolated quantile are ceil(sparsity * (n - 1)); two signs make the floor a ceiling.
        num_streaming = -kv.fraction_of(self.sparsity, 1 - weights.size) if self.sparsity < 1 else weights.size
        is_full = top_heads_mask(weights, weights.size - num_streaming)[spec.place]
        return HeadTokens(tuple(ALL_TOKENS if full else self.streaming for full in is_full.tolist()))


@kv.register_method(family="heads of unequal length")
def duo_attention(
    sparsity: float = 0.5, sinks: int = 64, recent: int = 256, table: str = "shipped", page: int = 16
) -> kv.Method:
    """Keeps the whole prompt in retrieval heads, and its first and last tokens in streaming heads.

    Formula:
      head h keeps all tokens if alpha_h >= quantile(alpha, sparsity), else s < sinks or s >= T - recent

    Differs:
      Streaming heads hold decoded tokens too, n more for an answer of n tokens, and see them all; the authors' drop
      those that leave the window, so that they hold sinks + recent tokens at any length. Where all heads stream by 272
      tokens, 512 and an answer of 512 take 77% of the exact cache's bytes, and 27% as the authors', for 0.016 bits per
      byte of the answer (0.011 to 0.021; SmolLM2-135M, 4 contexts, `sinks_and_recent` and `streaming_llm`). Attention
      in the prompt is exact, where the authors' streaming heads read it by first and last tokens only. Both are as in
      kvpress.

    Args:
      sparsity: fraction of the model's key/value heads that stream, those of the lowest weight (the authors: 0.5 under
        grouped heads, 0.75 without).
      sinks: first tokens that a streaming head keeps (the authors' evaluation: 64).
      recent: last tokens that a streaming head keeps (the authors' evaluation: 256).
      table: a file of kind `heads`, with a weight for each key/value head, such as the trained gates alpha or the
        output of `kvjax calibrate heads`; "shipped" for the shipped model's.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      DuoAttention, Xiao et al. 2024, arXiv 2410.10819, section 3; its public code, mit-han-lab/duo-attention
    """
    rule = StreamingBudgets(kv.HeadWeights.table_file(table), sparsity, sinks + recent)
    return kv.Method(
        select=kv.Selection(Recency(), MeanOfHeads(rule), sinks, recent), side_store=kv.PagedHeads(rule, page)
    )
