"""Exact keys and values of prompts, run once in full attention, for any number of methods to make their caches of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import Cache, KVMethod, Needs, num_layer_slots
from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.engine.forward import Plan, Target, outer_params
from kvjax.engine.layer_prompt import LayerPrompt, select_queries
from kvjax.engine.plan import bind
from kvjax.engine.prefill import compress_prompts, prefill_exactly
from kvjax.errors import KvjaxError
from kvjax.generation import checks
from kvjax.generation.compiled import compiled_for
from kvjax.generation.context import Context, read
from kvjax.generation.inputs import Prompts, pad, place, token_ids
from kvjax.generation.prompt_runner import replay_prompts
from kvjax.generation.timing import Timer
from kvjax.methods.strings import method_of
from kvjax.models.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class FullKV:
    """What full attention has of a batch of prompts: keys and values of every layer, and the queries.

    Many methods compared on the same prompts need them run only once: `under` makes what `kvjax.read` makes.
    """

    model: Model
    prompts: tuple[LayerPrompt, ...]  # one per layer: k, v [B K S H], and all queries [B K G S H], or none of them
    lengths: Array  # i32[B]
    last: Array  # f32[B V], the logits of each row's last token
    ids: Sequence[Sequence[int]] | None = None

    def under(self, method: str | KVMethod, capacity: int) -> Context:
        """The prompts under a method, in a cache with room for `capacity` tokens per row.

        Raises KvjaxError for a method that looks at queries where there are none, and for one that changes the
        prompt's own attention where the tokens of the prompts are not known.
        """
        model, method = self.model, method_of(method)
        plan = bind(method, model.config)
        if any(
            n.prompt_chunk or n.prompt_pattern or n.hidden_states or n.output_projection or n.replay
            for n in (layer.needs for layer in plan)
        ):
            return self._read_again(method, capacity)
        lengths, width = tuple(np.asarray(self.lengths).tolist()), self.prompts[0].k.shape[2]
        num_slots = tuple(num_layer_slots(layer, lengths, capacity) for layer in plan)
        checks.check_prompts(model, plan, lengths, num_slots, capacity, width, width)
        prompts = [self._wanted(i, plan) for i in range(len(plan))]
        timer, target, lengths = Timer(), Target(model.config, model.mesh), jnp.copy(self.lengths)
        with timer.timed():
            layers = jax.block_until_ready(compress_prompts(prompts, lengths, plan, target, capacity, num_slots))
        cache = Cache(layers, lengths, capacity, plan, model.config, model.dtype.name, model.fingerprint)
        return Context(model, cache, self.last, method, timer.run_seconds)

    def _read_again(self, method: KVMethod, capacity: int) -> Context:
        if self.ids is None:
            raise KvjaxError(
                "this method attends within the prompt in its own way, or looks at more of it than keys, values and "
                "queries: read the prompts' tokens with it"
            )
        return read(self.model, self.ids, method, capacity=capacity)

    def _wanted(self, layer: int, plan: Plan) -> LayerPrompt:
        """The layer's prompt with those queries that its method looks at."""
        k, v, q = self.prompts[layer][:3]
        if plan[layer].needs.observed_queries != 0 and not q.shape[3]:
            raise KvjaxError("this method looks at the prompt's queries, and only keys and values are given")
        return LayerPrompt(k, v, select_queries(plan[layer], q, 0, self.lengths) if q.shape[3] else q)


@dataclasses.dataclass(frozen=True)
class AllQueries:
    """A layer that only asks the decoder for all of a prompt's queries, and is never asked for a state."""

    needs: Needs = Needs(observed_queries=None)


def read_exactly(model: Model, documents: Prompts, *, width: int | None = None) -> FullKV:
    """Runs documents, texts or lists of ids, in full attention, once; width: what rows are padded to."""
    ids, plan = token_ids(model, documents), (AllQueries(),) * model.config.layers
    tokens, lengths = pad(ids, width)
    lengths = place(model, lengths, "B")
    last, prompts = run_exact_passes(model, cast(Plan, plan), place(model, tokens, "B T"), lengths)
    return FullKV(model, tuple(prompts), lengths, last, ids)


def run_exact_passes(model: Model, plan: Plan, tokens: Array, lengths: Array) -> tuple[Array, list[LayerPrompt]]:
    """Runs prompts i32[B T] of lengths i32[B]: logits of each last token f32[B V], and what each layer observes."""
    compiled = compiled_for(model, tokens.size, in_place=True, logits_of=len(tokens))
    target, texts = Target(model.config, model.mesh), replay_prompts(model, plan)
    with Timer().timed():
        hidden, prompts = prefill_exactly(
            model.params, tokens, lengths, plan, target, replay_prompts=texts, compiled=compiled
        )
        logits = compiled.unembed(outer_params(model.params), hidden, target=target)
        return jax.block_until_ready((logits, prompts))


def full_kv_from_context(context: Context) -> FullKV:
    """What a context that was read under `full` holds; of the queries nothing is left."""
    if context.cache.plan != bind("full", context.model.config):
        raise KvjaxError("exact keys and values are left by `full` alone: read the documents under it")
    pairs = [(memory.unpack(layer.k), memory.unpack(layer.v)) for layer in context.cache.layers]
    return dataclasses.replace(full_kv_from_arrays(context.model, pairs, context.cache.length), last=context.last)


def full_kv_from_arrays(model: Model, pairs: Sequence[tuple[Array, Array]], lengths: Array) -> FullKV:
    """Given keys and values [B K S H] of every layer, in rows of lengths i32[B]; without queries and logits."""
    B, c = lengths.shape[0], model.config
    none = jnp.zeros((B, c.kv_heads, c.groups, 0, c.head_dim), model.dtype)
    prompts = tuple(LayerPrompt(k, v, none) for k, v in pairs)
    return FullKV(model, prompts, lengths, jnp.zeros((B, c.vocab_size)))
