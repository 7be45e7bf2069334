"""ChunkKV: whole chunks of tokens, one set of them for all heads."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(example="chunkkv:budget=512", family="eviction after the prompt")
def chunkkv(
    budget: kv.TokenBudget = 1024,
    chunk: kv.PositiveInt = 10,
    window: kv.PositiveInt = 32,
    kernel: int = 1,
    sinks: int = 0,
) -> kv.Method:
    """Keeps the chunks of the prompt that its last queries attend to most, one set for all heads, and the window.

    Other scores select chunks in the same way: 'keydiff:unit=chunk10,per=layer'.

    Formula:
      score of a chunk = sum over its tokens, all heads and the window's queries of softmax(q k_s); the best chunks
      stay, and the window

    Differs:
      An incomplete chunk before the window always stays, where kvpress scores it like the others. The paper's reuse of
      one layer's chunks by the layers above, which saves time and no memory, is left out.

    Args:
      budget: as in `make_selection`; the window is included, and only whole chunks are added to it, so a few slots may
        stay empty.
      chunk: tokens of a chunk (the paper: 10; kvpress: 20).
      window: last queries of the prompt (unverified in the paper: SnapKV's 32).
      kernel: neighbors over which attention is averaged first, 1 for none (kvpress over its SnapKV: 5).
      sinks: as in `make_selection`.

    Reference:
      ChunkKV, Liu et al. 2025, arXiv 2502.00299; one set for all heads as in kvpress
    """
    scorer = kv.WindowAttention(window, kernel, "avg")
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, window, f"chunk{chunk}", "layer"))
