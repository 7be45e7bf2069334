"""KVzip: keeps the tokens that the model attends to while it repeats the prompt."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.competition import level_components
from kvjax.cache.protocol import Replay

FIRST_INSTRUCTION = "\n\nRepeat the previous context exactly."
LATER_INSTRUCTION = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclasses.dataclass(frozen=True)
class ReplayAttention(kv.Scorer):
    """Scores a token by the most attention that it gets while the model repeats its chunk (KVzip, 2505.23416).

    For its score, a query of the repetition attends only to the first `sinks` tokens of the prompt, to the chunk that
    it repeats, to the repetition before it, and to a model's learned sinks. The fields are the arguments of `kvzip`;
    `reduce` says whether the largest or the mean over a key/value head's query heads counts, and `has_instructions`
    whether the model is told what to repeat.
    """

    chunk: kv.PositiveInt = 2048
    lead: kv.NonNegativeInt = 8
    sinks: int = 4
    plus: bool = False
    reduce: Literal["max", "mean"] = "max"
    has_instructions: bool = True

    __post_init__ = kv.check_fields

    @property
    def replay(self) -> Replay:
        """The second pass, with KVzip's instructions or none."""
        first, later = (FIRST_INSTRUCTION, LATER_INSTRUCTION) if self.has_instructions else ("", "")
        return Replay(chunk_tokens=self.chunk, lead_tokens=self.lead, first=first, later=later)

    @property
    def needs_output(self) -> bool:
        """KVzip+ needs the output projection, and the hidden states of the repetition."""
        return self.plus

    needs_hidden = needs_output

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        replay_scores = self.require_observation(observation).replay_scores
        assert replay_scores is not None
        return kv.token_scores(replay_scores, block)

    def update_scores(
        self,
        block: kv.KVBlock,
        start: kv.Array,
        observation: kv.Observation,
        new: kv.KVBlock,
        before: kv.Array,
        spec: kv.LayerSpec,
    ) -> kv.Array:
        size = min(self.chunk, block.pos.shape[2])
        # The size is static, so the last chunk overlaps the one before it, whose tokens are masked here.
        first = jnp.minimum(start, block.pos.shape[2] - size)
        chunk = kv.KVBlock(*(lax.dynamic_slice_in_dim(x, first, size, 2) for x in (block.k, block.v, block.pos)))
        sinks = block.first(self.sinks)
        sinks_pos = jnp.where(sinks.pos < start, sinks.pos, -1)
        chunk_pos = jnp.where(chunk.pos >= start, chunk.pos, -1)
        keys = jnp.concatenate([chunk.k, sinks.k, new.k], 2)
        pos = jnp.concatenate([chunk_pos, sinks_pos, new.pos], 2)
        value_norms, query_scale = self.weigh_attention(chunk, observation)

        def update(most: kv.Array, queries: tuple[kv.Array, kv.Array, kv.Array]) -> tuple[kv.Array, None]:
            q, q_pos, query_scale = queries
            p = kv.attention.softmax(spec.rule.logits(kv.attention.scores(q, keys), pos, q_pos), observation.sinks)
            received = p[..., :size] * query_scale[:, None, None, :, None]
            return jnp.maximum(most, (received * value_norms[:, :, :, None]).max(3)), None

        blocks = (
            kv.attention.split_blocks(observation.q, 3, 64),
            kv.attention.split_blocks(observation.pos, 1, 64, -1),
            kv.attention.split_blocks(query_scale, 1, 64),
        )
        per_query_head, _ = lax.scan(update, kv.vary(jnp.zeros((*observation.q.shape[:3], size))), blocks)
        most = per_query_head.max(2) if self.reduce == "max" else per_query_head.mean(2)
        most = jnp.where(chunk_pos >= 0, most, 0.0)
        most = jnp.maximum(lax.dynamic_slice_in_dim(before, first, size, 2), most)
        return lax.dynamic_update_slice_in_dim(before, most, first, 2)

    def weigh_attention(self, chunk: kv.KVBlock, observation: kv.Observation) -> tuple[kv.Array, kv.Array]:
        """Returns the factors of attention weights by token, f32[B K G S], and by query, f32[B Q]; 1 without `plus`."""
        if not self.plus:  # another component of the method may have asked for the projection
            return jnp.ones((1, 1, 1, chunk.pos.shape[2])), jnp.ones(observation.pos.shape)
        assert observation.hidden_states is not None
        hidden_norms = jnp.linalg.norm(observation.hidden_states[:, 0].astype(jnp.float32), axis=-1)
        scale = jnp.where(observation.pos >= 0, 1.0 / jnp.maximum(hidden_norms, 1e-6), 0.0)
        return output_norms(chunk, observation), scale


def output_norms(block: kv.KVBlock, observation: kv.Observation) -> kv.Array:
    """Computes the norm of each value's contribution to the layer's output by each query head, f32[B K G S]."""
    assert observation.output_projection is not None
    weight = observation.output_projection[0].astype(jnp.float32)
    return jnp.linalg.norm(jnp.einsum("bksh,kghd->bkgsd", block.v.astype(jnp.float32), weight), axis=-1)


@kv.register_method(example="kvzip:budget=512", family="eviction after the prompt")
def kvzip(
    budget: kv.TokenBudget = 1024,
    chunk: int = 2048,
    lead: int = 8,
    sinks: int = 4,
    plus: bool = False,
    level: Literal["model", "layer", "head"] = "model",
    page: int = 16,
) -> kv.Method:
    """Keeps the tokens that the model needs to repeat the prompt, whatever will be asked later.

    It costs about two more prefills; the prompt itself attends exactly. With level=model bytes are planned as an upper
    bound.

    Formula:
      score_s = max over queries t that repeat s's chunk, and over query heads, of softmax(q_t k_s); plus: times |v_s
      W_o| / |x_t|; the L K T c pairs of the highest scores stay, of all heads of all layers

    Differs:
      The first tokens always stay, in every head; the template's end of turn is not appended to the instruction.
      level=layer is `layerwise=True` of kvpress; level=head is the authors' `--level pair-uniform`, and their `--level
      head`, which drops whole heads, is not here. `docs/divisions.md` has what each division keeps.

    Args:
      budget: as in `make_selection`, on average over the heads that share it.
      chunk: tokens of the prompt that are repeated at a time, after an instruction (for a model with a tokenizer).
      lead: last tokens of the previous chunk that the instruction quotes.
      sinks: as in `make_selection`; every repetition sees them.
      plus: whether scores are those of KVzip+, which multiplies attention by the norm of the token's contribution to
        the layer's output, over the norm of the query's hidden state.
      level: the heads that share the budget by one ranking of scores: "model", all heads of all layers, as the authors
        do; "layer", all heads of a layer; or "head", where every head keeps the same number of tokens.
      page: slots of a page, in which heads of unequal length are stored, unless level is "head".

    Reference:
      KVzip, Kim et al. 2025, arXiv 2505.23416, section 3; constants and KVzip+ of kvpress
    """
    return kv.Method(
        select=kv.make_selection(ReplayAttention(chunk, lead, sinks, plus), budget, sinks),
        **level_components(level, page),
    )
