"""ChunkKV: whole chunks of tokens, one set of them for all heads."""

from __future__ import annotations

from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.scorers import WindowAttention
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, selected


@recipe(
    "ChunkKV, Liu et al. 2025, arXiv 2502.00299; one set for all heads as in kvpress",
    Trial(
        "chunkkv:budget=6,chunk=2,window=2",
        "chunkkv:budget=100,chunk=2,window=2",
        selected(6, per_head=False),
    ),
    formula="score of a chunk = sum over its tokens, all heads and the window's queries of softmax(q k_s); the best "
    "chunks stay, and the window",
    differs="An incomplete chunk before the window always stays; kvpress scores it like the others. The paper's reuse "
    "of one layer's chunks by the layers above, which saves time and no memory, is left out.",
    example="chunkkv:budget=512",
    family="eviction after the prompt",
)
def chunkkv(budget: TokenBudget = 1024, chunk: int = 10, window: int = 32, kernel: int = 1, sinks: int = 0) -> Method:
    """After the prompt a layer keeps its window and the chunks that the window's queries attend to most.

    budget: prompt tokens kept per layer, the window included; only whole chunks are added to it, so a few places may
    stay empty. chunk: tokens of one (the paper: 10; kvpress: 20). window: last queries (unverified in the paper:
    SnapKV's 32). kernel: neighbours over which attention is averaged first, 1 for none (kvpress over its SnapKV: 5).
    Other scores choose chunks alike: 'keydiff:unit=chunk10,per=layer'.
    """
    scorer = WindowAttention(window, kernel, "avg")
    return Method(select=make_selection(scorer, budget, sinks, window, f"chunk{chunk}", "layer"))
