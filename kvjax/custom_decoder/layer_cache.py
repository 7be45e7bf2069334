"""The cache of one layer of a decoder that is not kvjax's, and `attach`, which makes the caches of all layers.

The first call of a layer is its prompt, all further ones are steps: the type of the state says which, so that it is
static under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, Needs, num_layer_slots
from kvjax.core.explicit_axes import accepts_explicit_axes, spec_of
from kvjax.core.mesh import auto_mesh, check_divides
from kvjax.core.types import Array, pytree
from kvjax.engine.layer_prompt import LayerCall, LayerPrompt
from kvjax.engine.plan import bind_specs
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

WITHOUT_MESH = "leave mesh out of attach(..): the cache is then divided as q, k and v are"
"""The remedy for a mesh that does not fit."""


class Extra(NamedTuple):
    """Something that a decoder gives to the methods that need it, in addition to q, k, v and positions."""

    call: str  # the code that gives it, for errors
    reason: str  # why a method needs it
    is_needed: Callable[[Needs], Any]
    alternative: str = ""  # a method that does without


GIVES = {
    "hidden": Extra(
        "attend(.., hidden=x), the normalized hidden vectors that q, k and v are projected from, on the prompt, and "
        "on every step where tokens are scored while decoding",
        "It scores tokens by the vectors that keys and values are projected from",
        lambda needs: needs.hidden_states,
    ),
    "output_projection": Extra(
        "attend(.., output_projection=w), the layer's output projection, on the prompt",
        "It scores tokens by what their values add to the output",
        lambda needs: needs.output_projection,
    ),
    "cross_layer": Extra(
        "out, cache[i], up = attend(.., cross_layer=up), with up=None in the first layer",
        "Each layer of a step hands a value to the layer above",
        lambda needs: needs.cross_layer,
    ),
    "drafts": Extra(
        "steps of a token and its draft, attend(.., commit=1), and one with commit=0 before the first",
        "It reads one step ahead, by a draft of the next token",
        lambda needs: needs.draft_tokens,
        "; kcache has the same layout without drafts",
    ),
    "repeat": Extra(
        "cache = finish(cache, tokens=tokens, repeat=run) between the prompt and the first step",
        "The model repeats the prompt, and its scores come from that",
        lambda needs: needs.replay,
        "; turned_queries scores in one pass",
    ),
    "finish": Extra(
        "cache = finish(cache) between the prompt and the first step",
        "What a layer keeps is known once all layers have seen the prompt",
        lambda needs: (needs.global_budget or needs.paired_layer) and not needs.replay,
        "; of methods that divide a budget among layers, head_shares knows the division beforehand",
    ),
}
"""What `attach(.., gives=..)` may name."""


@dataclasses.dataclass(frozen=True)
class AttachedLayer:
    """A bound layer and the sizes of its cache; static, and equal for layers that do the same.

    Attributes:
      bound: the method in this layer.
      spec: the layer, without its index.
      capacity: tokens that a sequence may grow to.
      defers: whether the prompts of all layers wait for `finish`.
      mesh: the devices that heads and sequences are split over, or None.
    """

    bound: BoundLayer
    spec: LayerSpec
    capacity: int
    defers: bool = False
    mesh: Mesh | None = None

    @property
    def has_constant_size(self) -> bool:
        """Whether the state's size does not grow with the text, so that steps may go beyond the capacity."""
        return self.bound.num_slots(1, 1 << 20) <= self.capacity

    def call(self, num_tokens: int) -> LayerCall:
        """The layer in a pass over prompts of up to `num_tokens` tokens."""
        num_slots = num_layer_slots(self.bound, (min(num_tokens, self.capacity),), self.capacity)
        return LayerCall(self.bound, self.spec.rule, num_slots)


@pytree
class Empty:
    """The state of a layer that has no token yet."""

    index: int | None = dataclasses.field(metadata={"static": True})  # of the layer, where layers wait for each other


@pytree
class ExactPrompt:
    """The state of a layer between its prompt and `finish`."""

    prompt: LayerPrompt | Any  # the state, of a method that is fed its prompt chunk by chunk
    order: Array | None  # i32[B T], the tokens in the order of `prompt`, for a method that has them repeated
    start: Array | None  # i32[], the first token of the chunk that is being repeated; None: no chunk is
    index: int | None = dataclasses.field(metadata={"static": True})


@pytree
class LayerCache:
    """The cache of one layer of a decoder; `attach` makes it, `attend` returns the next one.

    It is an ordinary pytree. From the prompt on its structure, shapes and dtypes stay as they are, so that it is a
    carry of `lax.scan` and `lax.while_loop`, and its buffers can be donated.
    """

    state: Any  # `Empty`, `ExactPrompt`, or what the method keeps of this layer
    layer: AttachedLayer = dataclasses.field(metadata={"static": True})
    length: Array | None = None  # i32[B], tokens of each sequence so far, also the position of the next one
    dtype: str = dataclasses.field(default="", metadata={"static": True})  # of the keys and values

    def __repr__(self) -> str:
        if isinstance(self.state, Empty):
            return f"LayerCache(empty, capacity {self.layer.capacity} tokens a sequence)"
        waits = ", waits for custom_decoder.finish" if isinstance(self.state, ExactPrompt) else ""
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))
        return f"LayerCache({num_bytes:,} bytes, capacity {self.layer.capacity} tokens a sequence{waits})"

    @property
    def positions(self) -> Array:
        """i32[B 1|K S], the position of the token in each slot, -1 for an empty slot."""
        if isinstance(self.state, Empty | ExactPrompt):
            raise KvjaxError(
                "this cache holds no compressed prompt yet: attend the prompt first, then cache = finish(cache)"
            )
        sequences = spec_of(self.length)
        return accepts_explicit_axes(lambda *_: sequences)(self.layer.bound.positions)(self.state)


@checks_keywords
def attach(
    method: str | KVMethod,
    specs: Sequence[LayerSpec],
    capacity: int,
    *,
    gives: Collection[str] = (),
    differentiable: bool = False,
    mesh: Mesh | None = None,
) -> dict[int, LayerCache]:
    """Makes the caches of a decoder's layers under a method.

    Args:
      method: a method or its string, as in "snapkv:budget=256 + int8".
      specs: of the layers, from `specs_of`.
      capacity: tokens that a sequence may grow to.
      gives: what the decoder gives in addition to q, k, v and positions: names of `GIVES`.
      differentiable: gradients pass through what the cache stores; see `kvjax.functional.bind`.
      mesh: the devices that sequences are split over, along its axis "data", and heads, along "model"; None for one
        device, or for the compiler, which divides the cache as it finds q, k and v divided, over any mesh.

    Returns:
      {layer: LayerCache}, empty; the first `attend` of each is its prompt.

    Raises:
      KvjaxError: a method that cannot serve the layers, or needs what the decoder does not give.
    """
    capacity = arguments.integer("capacity", capacity)
    specs = tuple(specs) if isinstance(specs, Sequence) else specs
    if not isinstance(specs, tuple) or not specs or not all(isinstance(spec, LayerSpec) for spec in specs):
        raise KvjaxError(
            f"specs are what custom_decoder.specs_of(num_layers, heads, kv_heads, ..) returns, got {specs!r:.80}"
        )
    if [(spec.index, spec.num_layers) for spec in specs] != [(i, len(specs)) for i in range(len(specs))]:
        raise KvjaxError(
            "specs name other layers than their places say; take all that specs_of has returned, in their order"
        )
    if reading := [spec.index for spec in specs if spec.reads_layer is not None]:
        raise KvjaxError(
            f"layer {reading[0]} reads the keys and values of another layer, and custom_decoder.attach does not serve "
            "such layers yet: write the model as a kvjax Config (AttentionKind.reads_layer)"
        )
    if recurrent := [spec.index for spec in specs if spec.recurrence is not None]:
        raise KvjaxError(
            f"layer {recurrent[0]} has a recurrence in place of keys and values, and custom_decoder.attach does not "
            "serve such layers: write the model as a kvjax Config (AttentionKind.recurrence)"
        )
    if mesh is not None:
        auto_mesh(mesh, f", or {WITHOUT_MESH}")
        for spec in specs:
            check_divides("K", spec.num_kv_heads, mesh, f"give another mesh, or {WITHOUT_MESH}")
    plan = bind_specs(method, specs, differentiable)
    if any(layer.needs.differentiates_replay for layer in plan):
        raise KvjaxError(
            "this method differentiates a second pass through all layers, which only kvjax's own decoder can do: write "
            "the model as a kvjax Config, or use kvzip, whose second pass needs no gradient"
        )
    _check_gives(plan, {gives} if isinstance(gives, str) else set(gives))
    defers = any(x.needs.global_budget or x.needs.replay or x.needs.paired_layer for x in plan)
    return {
        i: LayerCache(
            Empty(i if defers else None),
            AttachedLayer(bound, spec.without_index, capacity, defers, mesh),
        )
        for i, (bound, spec) in enumerate(zip(plan, specs, strict=True))
    }


def _check_gives(plan: Sequence[BoundLayer], gives: set[str]) -> None:
    """Raises KvjaxError, with each remedy, for what a method needs and the decoder does not give."""
    if unknown := sorted(gives - GIVES.keys()):
        suggestion = arguments.suggest_name(unknown[0], GIVES)
        raise KvjaxError(f"gives has no {unknown[0]!r:.60}{suggestion}; it takes {', '.join(GIVES)}")
    # A decoder that repeats the prompt does so in `finish`.
    given = gives | {"finish"} if "repeat" in gives else gives
    needed = [name for name, extra in GIVES.items() if any(extra.is_needed(layer.needs) for layer in plan)]
    missing = [GIVES[name] for name in needed if name not in given]
    if missing:
        sentences = ". ".join(f"{extra.reason}: {extra.call}{extra.alternative}" for extra in missing)
        raise KvjaxError(
            f"this method needs more than q, k, v and positions. {sentences}. "
            f"Say attach(.., gives={tuple(needed)!r}) once your decoder does so"
        )


def map_layer_caches(change: Callable[[LayerCache], LayerCache], cache: Any) -> Any:
    """Changes every layer's cache in a pytree, and leaves its other entries; raises KvjaxError where there are none."""
    layer_caches(cache)
    return jax.tree.map(lambda x: change(x) if _is_layer_cache(x) else x, cache, is_leaf=_is_layer_cache)


def layer_caches(cache: Any) -> list[LayerCache]:
    """The layers' caches in a pytree; raises KvjaxError where there are none."""
    caches = [x for x in jax.tree.leaves(cache, is_leaf=_is_layer_cache) if _is_layer_cache(x)]
    if not caches:
        raise KvjaxError(f"cache is what custom_decoder.attach returns, of all layers, got {type(cache).__name__}")
    return caches


def _is_layer_cache(x: Any) -> bool:
    return isinstance(x, LayerCache)
