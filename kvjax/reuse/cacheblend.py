"""CacheBlend: chunks that were read alone are concatenated, and the tokens that change most are run again.

Yao et al. 2024, arXiv 2405.16444, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.mesh import to_numpy
from kvjax.generation.inputs import Prompts
from kvjax.reuse.chunk_layout import Span, layout_chunks, recompute
from kvjax.reuse.full_kv import FullKV
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def blend(
    chunks: FullKV, order: Sequence[Sequence[int]], questions: Prompts, *, ratio: float = 0.16, layer: int = 1
) -> FullKV:
    """Assembles texts from chunks that were read alone, nearly as if each text had been read whole.

    Attention is masked by true positions. The public code's mask takes the tokens that are run for the last ones of the
    text, so that the first of them see later ones (vllm_blend, attention/backends/xformers.py).

    Args:
      chunks: from `kvjax.reuse.read_exactly(model, texts)`, one chunk per sequence. Each is read with the special
        tokens that stand before a text, as bos, unless `begins` says otherwise there; a text of several chunks keeps
        those of the first.
      order: for each text the indices of its chunks.
      questions: the text after the chunks, always run in full; one per text.
      ratio: fraction of the chunks' tokens, rounded down, that is run again (the public code: 0.16).
      layer: up to this one all tokens are run, and in it the tokens are chosen whose values deviate most, by the sum of
        squares over heads and channels (the public code: 1; the paper narrows the choice further in each layer, its
        code chooses once).

    Returns:
      The texts' keys and values; `.compress(method, capacity)` makes a context of them.
    """
    arguments.number("ratio", ratio, 0, 1, "; the public code uses 0.16")
    arguments.integer("layer", layer, 0, chunks.model.config.layers - 1, "; the public code uses 1")
    spans = [Span(i, 0, int(n)) for i, n in enumerate(to_numpy(chunks.lengths))]
    layout = layout_chunks(chunks, spans, order, questions)
    return recompute(chunks, layout, np.array([int(n * ratio) for n in layout.num_known]), None, layer)[0]
