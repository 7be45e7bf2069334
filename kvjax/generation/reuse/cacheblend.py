"""CacheBlend: chunks that were read alone are put one behind the other, and the tokens that change most are run again.

Yao et al. 2024, arXiv 2405.16444, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.generation.inputs import Prompts
from kvjax.generation.reuse.chunk_layout import Span, again, lay
from kvjax.generation.reuse.full_kv import FullKV


def blend(
    chunks: FullKV, order: Sequence[Sequence[int]], questions: Prompts, *, ratio: float = 0.16, layer: int = 1
) -> FullKV:
    """Texts made of chunks that were read alone, and a question behind each, nearly as if each had been read whole.

    chunks: `kvjax.reuse.read_exactly(model, texts)`, one chunk a row. order: for each text the chunks that it is made
    of. questions: what follows them, always run in full. ratio: share of the chunks' tokens, rounded down, that is run
    again (the public code: 0.16). layer: up to it all tokens are run, and in it those are chosen whose values deviate
    most, by the sum of squares over heads and channels (the public code: 1; the paper narrows the choice further in
    each layer, its code chooses once). `.under(method, capacity)` makes a context of what comes out.

    Attention is masked by true positions. The public code's mask takes the tokens that are run for the last ones of the
    text, so that the first of them see later ones (vllm_blend, attention/backends/xformers.py).
    """
    layers = chunks.model.config.layers
    if not 0 <= ratio <= 1:
        raise KvjaxError(f"ratio is a share of the chunks' tokens in 0..1, got {ratio}; the public code uses 0.16")
    if not 0 <= layer < layers:
        raise KvjaxError(f"layer must be one of 0..{layers - 1}, got {layer}; the public code uses 1")
    laid = lay(chunks, [Span(i, 0, int(n)) for i, n in enumerate(np.asarray(chunks.lengths))], order, questions)
    return again(chunks, laid, np.array([int(n * ratio) for n in laid.reused]), None, layer)[0]
