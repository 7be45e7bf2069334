"""ReKV: stores blocks of a long context on the host, and reads the blocks that a question's mean query finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.readers.retrieval import slot_lookup


@kv.pytree
class QuestionState:
    """The summaries of the blocks, and the question so far."""

    blocks: Any  # buffers of the sums of `MeanKeys`
    question: kv.Array  # f32[B K G H], the sum of the queries since the prompt, before RoPE


@dataclasses.dataclass(frozen=True)
class MeanKeys(kv.Index):
    """Scores blocks by the cosine of their mean key with a query, over all heads of the layer as one vector.

    Sums stand for means, which have the same direction. The query's length is the same for all blocks and left out.
    """

    size: int
    shares_scores = True

    def summarize(self, keys: kv.Array, real: kv.Array) -> kv.Array:
        return jnp.where(real[..., None], keys.astype(jnp.float32), 0.0).sum(3)

    def join(self, before: kv.Array, more: kv.Array) -> kv.Array:
        return before + more

    def score(self, summary: kv.Array, q: kv.Array) -> kv.Array:
        product = kv.over_heads.sum(kv.attention.scores(q, summary).sum(2, keepdims=True))
        length = jnp.sqrt(kv.over_heads.sum(jnp.square(summary).sum(3)))
        return product / jnp.maximum(length, 1e-12)[:, :, None, None]


@dataclasses.dataclass(frozen=True)
class QuestionRetrieval(kv.Retrieve):
    """Retrieves by the mean of all queries since the prompt (ReKV, Di et al. 2025, arXiv 2503.00540)."""

    remembers_queries = True

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> QuestionState:
        B, K, _, H = block.k.shape
        pre_rope = dataclasses.replace(block, k=spec.rope.unrotate(block.k, block.pos))
        return QuestionState(self.index.build(pre_rope), jnp.zeros((B, K, spec.num_groups, H), jnp.float32))

    def append(self, reader_state: QuestionState, new: kv.KVBlock, at: kv.Array, spec: kv.LayerSpec) -> QuestionState:
        pre_rope = dataclasses.replace(new, k=spec.rope.unrotate(new.k, new.pos))
        return dataclasses.replace(reader_state, blocks=self.index.append(reader_state.blocks, pre_rope, at))

    def crop(self, storage: kv.KVStorage, state: kv.LayerState) -> Any:
        return kv.Reader.crop(self, storage, state)  # the sum of queries cannot be taken apart

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        assert state.n is not None
        real = (q_pos >= 0)[:, None, None, :, None]
        pre_rope = jnp.where(real, storage.spec.rope.unrotate_queries(q, q_pos), 0.0)
        question = state.reader_state.question
        search_q = question[:, :, :, None] + jnp.cumsum(pre_rope, 3)
        lookup_slot = slot_lookup(state, q_pos)
        # A draft that is not kept has a slot behind the last one, and leaves no trace in the question.
        is_kept = (lookup_slot(q_pos) < state.n[:, None])[:, None, None, :, None]
        question = question + jnp.where(is_kept, pre_rope, 0.0).sum(3)
        reader_state = dataclasses.replace(state.reader_state, question=question)
        out = self.attend_retrieved(storage, state, q, q_pos, search_q, reader_state.blocks)
        return kv.ReadResult(out, reader_state, cross_layer=cross_layer)


@kv.register_method(example="rekv:topk=4,block=64,recent=128", family="host memory")
def rekv(
    topk: kv.PositiveInt = 64, block: kv.PositiveInt = 196, sinks: kv.NonNegativeInt = 16, recent: kv.PositiveInt = 512
) -> kv.Method:
    """Stores a context on the host; question and answer read the blocks that the question's mean query finds.

    The method is made for video, where a block is a frame; in text it is a run of tokens. Unlike in `infllm`, a block's
    key is the mean of all of its keys, and the prompt attends exactly. All tokens after the prompt count as one
    question, so read the context first, with `kvjax.read`, and ask questions of it.

    Formula:
      score(block) = cos(mean of the queries since the prompt, mean of the block's keys), both before RoPE and over all
      heads of the layer as one vector

    Differs:
      Each token looks up for itself, by the mean of all queries since the prompt, so that an answer's queries change
      what is read; the authors look up once for a question, by all of its tokens, and read the same blocks for all of
      its answer. A context attends to itself in full, where theirs reads first tokens and a sliding window, as
      'rekv + a_shape:sinks=16,recent=15000' does. Keys keep their positions, which the authors renumber; the cosine is
      the paper's, their code takes the product.

    Args:
      topk: blocks that are read.
      block: tokens of a block (a frame of LLaVA-OneVision has 196).
      sinks: first tokens, which are always read (the authors: the tokens before the video).
      recent: last tokens, which are always read, for question and answer.

    Reference:
      ReKV, Di et al. 2025, arXiv 2503.00540; constants of its public code for LLaVA-OneVision
    """
    return kv.Method(
        k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()), read=QuestionRetrieval(MeanKeys(block), topk, sinks, recent)
    )
