"""RazorAttention: retrieval heads keep all tokens, others first and last ones and the mean of those between."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

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
class RazorBudgets(HeadTableBudgets):
    """Keeps all tokens in the heads of the highest echo or induction scores, and first and last ones in the others.

    The fields are arguments of `razor_attention`, whose `table` is the file `given`.
    """

    given: kv.TableFile
    echo: kv.UnitFloat
    induction: kv.UnitFloat
    sinks: int
    recent: int
    part: kv.NonNegativeInt

    __post_init__ = kv.check_fields

    def at(self, spec: kv.LayerSpec) -> HeadTokens:
        full = np.zeros((len(spec.method_layers), spec.num_kv_heads), bool)
        for name, share in (("echo", self.echo), ("induction", self.induction)):
            full |= top_heads_mask(scores_of_all_heads(self.given, spec, name), round(share * full.size))
        num_extra = self.sinks + 1  # one more for the mean token
        tokens = (ALL_TOKENS if whole else num_extra + self.recent for whole in full[spec.place].tolist())
        return HeadTokens(tuple(tokens), self.part, num_extra)


@dataclasses.dataclass(frozen=True)
class Compensation:
    """Replaces the first kept token after the sinks by the mean of all evicted tokens and itself.

    Its key is the mean of keys after RoPE. Its bias is the logarithm of the number of averaged tokens, so that softmax
    counts it that many times. Heads that evict nothing stay as they are.
    """

    sinks: int

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n = kv.evicted_mask(block, choice), kept.k.shape[2]
        evicts = lost.any(2, keepdims=True)
        # The mean takes the slot of the first kept token after the sinks, so that token is averaged too.
        replaced = choice.slots[:, :, min(self.sinks, n - 1), None]
        is_averaged = lost | (evicts & (jnp.arange(block.k.shape[2])[None, None] == replaced))
        number = jnp.maximum(is_averaged.sum(2, keepdims=True, dtype=jnp.float32), 1.0)
        is_compensation = evicts & (jnp.arange(n)[None, None] == self.sinks)

        def compensate(x: kv.Array, every: kv.Array) -> kv.Array:
            total = jnp.where(is_averaged[..., None], every.astype(jnp.float32), 0.0).sum(2, keepdims=True)
            return jnp.where(is_compensation[..., None], (total / number[..., None]).astype(x.dtype), x)

        bias = jnp.where(is_compensation, jnp.log(number), 0.0)
        return dataclasses.replace(kept, k=compensate(kept.k, block.k), v=compensate(kept.v, block.v), bias=bias)


@kv.register_method(example="razor_attention:recent=256", family="heads of unequal length")
def razor_attention(
    recent: int = 4000,
    part: int = 5,
    sinks: int = 4,
    echo: float = 0.01,
    induction: float = 0.14,
    table: str = "shipped",
    page: int = 16,
) -> kv.Method:
    """Keeps the whole prompt in retrieval heads; other heads keep its ends and one token that averages the rest.

    Formula:
      retrieval heads keep all; others the sinks, the last max(S0, N / C) and one token (mean k, mean v) of the N_d
      between them, with ln N_d on its logit

    Differs:
      The buffer's size is set once, when the prompt ends, and all heads hold decoded tokens, n more for an answer of n
      tokens, where the paper averages those that leave the buffer; `duo_attention` has what that costs. There is no
      code of the authors'. Unverified: that the averaged token counts N_d times, as remembered of the paper; Huawei's
      golden-stick counts it once.

    Args:
      recent: last tokens that the other heads keep (the paper: 4000).
      part: they keep one in `part` of the prompt's tokens where that is more than `recent` (the paper: 5; 0 for never).
      sinks: first tokens that the other heads keep (the paper: 4).
      echo: fraction of the model's key/value heads that are retrieval heads by the echo score (the paper: 0.01).
      induction: likewise by the induction score (the paper: 0.14).
      table: a file of kind `retrieval_heads`, which `kvjax calibrate retrieval_heads` makes from random tokens;
        "shipped" for the shipped model's.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      RazorAttention, Tang et al. 2024, arXiv 2407.15891, section 3; constants of its experiments
    """
    rule = RazorBudgets(kv.RetrievalHeads.table_file(table), echo, induction, sinks, recent, part)
    return kv.Method(
        select=kv.Selection(Recency(), MeanOfHeads(rule), sinks, recent),
        merge=Compensation(sinks),
        side_store=kv.PagedHeads(rule, page),
    )
