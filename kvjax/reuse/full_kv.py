"""Exact keys and values of prompts, computed once by full attention, which any number of methods can compress."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

from kvjax.cache.protocol import Cache, EditableLayer, KVMethod, Needs, num_layer_slots
from kvjax.cache.rings import RingLayer
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.engine.forward import BoundLayers, layer_calls, outer_params
from kvjax.engine.layer_prompt import LayerPrompt, select_queries
from kvjax.engine.plan import bind
from kvjax.engine.prefill import compress_prompts, prefill_exactly
from kvjax.errors import KvjaxError, OtherWeights
from kvjax.generation import user_warnings
from kvjax.generation.context import Context, read
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import Prompts, check_cache, pad, place, require_same_call, token_ids
from kvjax.generation.model_calls import model_for, replay_prompts
from kvjax.generation.programs import Timer, target_for
from kvjax.models.decoder import sinks_of
from kvjax.models.model import Model
from kvjax.registry.strings import method_of
from kvjax.utils.keywords import checks_keywords


@dataclasses.dataclass(frozen=True, eq=False)
class FullKV:
    """Exact keys, values and queries of a batch of prompts in every layer.

    To compare many methods on the same prompts, these are run only once: `compress` gives the result of `kvjax.read`.
    """

    model: Model
    prompts: tuple[LayerPrompt, ...]  # one per layer: k, v [B K S H], and all queries [B K G S H], or none of them
    lengths: Array  # i32[B]
    last_logits: Array  # f32[B V], the logits of each prompt's last token
    ids: Sequence[Sequence[int]] | None = None  # of the prompts, where they are known
    weights: str = ""  # fingerprint of the model when it ran the prompts; empty: made from the model

    def __post_init__(self):
        if not self.weights:
            object.__setattr__(self, "weights", self.model.fingerprint)

    def check_weights(self) -> None:
        """Raises OtherWeights where the model is no longer that which ran the prompts."""
        if self.weights != self.model.fingerprint:
            raise OtherWeights(
                "these keys and values are of a model with other weights; read the documents with this one, or go on "
                "with the model that read them"
            )

    def compress(self, method: str | KVMethod, capacity: int) -> Context:
        """Compresses the prompts under a method.

        Args:
          method: a method or its string.
          capacity: tokens that a sequence of the cache may grow to.

        Raises:
          KvjaxError: a method that observes queries, where there are none; a method that changes the attention within
            the prompt or observes more than its queries, where `ids` are unknown, since it has to read the prompts.
        """
        self.check_weights()
        model, method = self.model, method_of(method)
        plan = bind(method, model.config)
        needs = [layer.needs for layer in plan]
        needs_text = any(
            n.prompt_chunk or n.prompt_pattern or n.hidden_states or n.output_projection or n.replay for n in needs
        )
        if needs_text and self.ids is not None:
            return read(model, self.ids, method, capacity=capacity)
        if needs_text or (any(n.observed_queries != 0 for n in needs) and not self.prompts[0].q.shape[3]):
            raise KvjaxError(
                "this method attends within the prompt in its own way, or looks at more of it than the keys, values "
                "and queries that are given: read the prompts' tokens with it"
            )
        lengths = tuple(to_numpy(self.lengths).tolist())
        user_warnings.warn_of_positions(model, plan, 0, max(lengths))
        num_slots = tuple(num_layer_slots(layer, lengths, capacity) for layer in plan)
        calls = layer_calls(plan, model.config, num_slots)
        prompts = []
        for i, (layer, (k, v, q, *_)) in enumerate(zip(plan, self.prompts, strict=True)):
            q = select_queries(layer, q, 0, self.lengths) if q.shape[3] else q
            prompts.append(LayerPrompt(k, v, q, sinks=sinks_of(model.auto_params[f"layer_{i}"])))
        # The cache gets lengths of its own: the decode loop donates them, and these prompts stay usable.
        timer, lengths = Timer(), jnp.copy(self.lengths)
        with timer.timed():
            layers = jax.block_until_ready(compress_prompts(prompts, lengths, calls, capacity, model.auto_mesh))
        cache = Cache(layers, lengths, capacity, plan, model.config, model.dtype.name, self.weights)
        return Context(model, cache, self.last_logits, method, timer.run_seconds, self.ids)


@dataclasses.dataclass(frozen=True)
class AllQueries:
    """A stand-in for a bound layer: it observes all queries of a prompt, and is never asked for a state."""

    needs: Needs = Needs(observed_queries=None)


@checks_keywords
def read_exactly(
    model: Model, documents: Prompts, *, width: int | None = None, begins: bool | Sequence[bool] = True
) -> FullKV:
    """Runs documents in full attention once.

    Args:
      model: from `kvjax.load`.
      documents: texts, or lists of ids.
      width: tokens that documents are padded to.
      begins: whether a text begins a sequence, and gets the special tokens that stand before one, as bos; for all of
        them, or for each. Chunks that `kvjax.reuse.blend` puts after others only are read with False.
    """
    ids = token_ids(model, documents, begins=begins)
    if not isinstance(begins, bool) and len(begins) != len(ids):
        raise KvjaxError(f"begins has {len(begins)} values for {len(ids)} documents; give one per document")
    model = model_for(model, ids, 0)
    plan = (AllQueries(),) * model.config.layers
    tokens, lengths = pad(ids, width)
    require_same_call(model, (), ids, width=width)
    lengths = place(model, lengths, "B")
    last, prompts = observe_prompts(model, cast(BoundLayers, plan), place(model, tokens, "B T"), lengths)
    check_logits(model, last, ids)
    return FullKV(model, tuple(prompts), lengths, last, ids)


def observe_prompts(model: Model, plan: BoundLayers, tokens: Array, lengths: Array) -> tuple[Array, list[LayerPrompt]]:
    """Runs prompts i32[B T] in full attention and keeps what each layer of a plan observes.

    Returns:
      Logits of each prompt's last token f32[B V], and each layer's exact prompt.
    """
    model.config.require_own_caches("a pass that keeps exact keys and values")
    target = target_for(model, tokens.size, in_place=True, num_logits=len(tokens))
    calls, texts = layer_calls(plan, model.config), replay_prompts(model, plan)
    with Timer().timed():
        hidden, prompts = prefill_exactly(model.auto_params, tokens, lengths, calls, target, replay_prompts=texts)
        logits = target.unembed(outer_params(model.auto_params), hidden, target=target)
        return jax.block_until_ready((logits, prompts))


def full_kv_from_context(context: Context) -> FullKV:
    """Takes the exact keys and values of a context that was read under `full`; its queries are gone.

    Raises:
      KvjaxError: a context of another method, or one whose layers with a sliding window hold its tokens alone.
    """
    cache = check_cache(context.model, context.cache)
    model, config = context.model.with_config(cache.config), cache.config
    config.require_own_caches("kvjax.reuse", "go on with the context, fork it, or keep it by kvjax.Context.save")
    if cache.plan not in (bind("full", config), bind("full + in_windows", config)):
        raise KvjaxError("exact keys and values are left by `full` alone: read the documents under it")
    blocks = []
    for layer, state in zip(cache.plan, cache.layers, strict=True):
        if isinstance(layer, RingLayer) and state.pos.shape[2] < cache.capacity:
            raise KvjaxError(
                f"this model has layers with a sliding window, which under `full` hold the last {layer.window} tokens: "
                "read the documents under 'full + in_windows', or by kvjax.reuse.read_exactly"
            )
        assert isinstance(layer, EditableLayer)
        blocks.append(layer.decoded_block(state))
    pairs = [(block.k, block.v) for block in blocks]
    return dataclasses.replace(full_kv_from_arrays(model, pairs, cache.length), last_logits=context.last_logits)


def full_kv_from_arrays(model: Model, pairs: Sequence[tuple[Array, Array]], lengths: Array) -> FullKV:
    """Wraps keys and values [B K S H] of every layer, of sequences of lengths i32[B]; without queries and logits."""
    B, c = lengths.shape[0], model.config
    c.require_own_caches("kvjax.reuse")
    attention = [c.kind(i).attention for i in range(c.layers)]
    no_queries = [jnp.zeros((B, a.kv_heads, a.groups, 0, a.head_dim), model.dtype) for a in attention]
    prompts = tuple(LayerPrompt(k, v, q) for (k, v), q in zip(pairs, no_queries, strict=True))
    return FullKV(model, prompts, lengths, jnp.zeros((B, c.vocab_size)))
