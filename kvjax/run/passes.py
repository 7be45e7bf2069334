"""Passes through the decoder: what each layer makes of its queries, keys and values.

`kvjax.run.by_layer` runs a pass layer by layer, with one compiled program for all layers that are alike; `advance`
traces the pass of a decode step through all layers at once, for loops that are one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.contract import Cache, Layer, last_positions
from kvjax.cache.read.reader import by_query_blocks
from kvjax.core.attention import attend_dense, causal, causal_with_sums, merge
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, pytree
from kvjax.models.config import Config
from kvjax.models.decoder import Decoder
from kvjax.run import devices
from kvjax.run.forward import Plan, Setting, apply, heads, positions, unembed
from kvjax.run.reading import Prompt, encode, output_projection, seen_by, shown


@dataclasses.dataclass(frozen=True)
class Site:
    """A layer in a pass: hashable, so that it can be a static argument."""

    layer: Layer
    window: int | None  # the model's sliding window in this layer
    slots: int = 0  # of its state, where the pass makes one
    last: bool = False  # the model's last layer, where the pass asks less of that one


class Fresh(NamedTuple):
    """What a layer has made of its input in this pass."""

    q: Array  # [B K G T H]
    k: Array  # [B K T H]
    v: Array  # [B K T H]
    x: Array  # [B T D], of which these were made
    output: Array  # [1 K G H D], the layer's output projection


class Pass:
    """What happens in every layer; a pytree of what all layers share."""

    def wanted(self, site: Site) -> Array | None:
        """i32[B Q]: of which tokens the layer's output is wanted; None: of all."""
        return None

    def attend(self, site: Site, mine: Any, fresh: Fresh, carry: Any, mesh: Mesh | None) -> tuple[Array, Any, Any]:
        """Attention in one layer: (out [B K G T|Q H], what becomes of the layer's own `mine`, the next carry)."""
        raise NotImplementedError


@pytree
class Whole(Pass):
    """A prompt in one piece: each layer's exact keys and values exist until its state has been made of them."""

    lengths: Array  # i32[B]
    capacity: int = dataclasses.field(metadata={"static": True})  # tokens per row of the cache
    # How many of a row's last queries are looked at in any layer, at least 1; None: all of them.
    queries: int | None = dataclasses.field(metadata={"static": True})

    def wanted(self, site: Site) -> Array | None:
        """Of the last layer only the tokens whose queries are looked at, the last token among them."""
        return jnp.maximum(last_positions(self.lengths, self.queries), 0) if self._few(site) else None

    def attend(self, site: Site, mine: None, fresh: Fresh, carry: Any, mesh: Mesh | None) -> tuple[Array, Any, Any]:
        """Causal attention, and the layer's state."""
        q, k, v, x, output = fresh
        needs, lengths = site.layer.needs, self.lengths
        first, sums = 0, None
        if self._few(site):
            block = Block(k, v, positions(k[:, 0, :, 0], lengths)[:, None])
            asking, first = last_positions(lengths, self.queries), lengths - self.queries
            out = merge([attend_dense(q, block, asking, site.window, needs.pattern)])
        else:
            out, found = causal_with_sums(q, k, v, window=site.window, pattern=needs.pattern)
            if needs.queries is None and needs.pattern is None:
                sums = found
        asked = shown(site.layer, q, first, lengths)
        hidden = x[:, None] if needs.hidden else None
        prompt = Prompt(k, v, asked, hidden, output if needs.output else None, sums=sums)
        return out, encode(site.layer, prompt, lengths, site.slots, self.capacity, mesh), carry

    def _few(self, site: Site) -> bool:
        return site.last and self.queries is not None


@pytree
class Piece(Pass):
    """One piece of a prompt behind the pieces before it, which each layer holds exactly, or has fed to its method."""

    start: Array  # i32[], the position of the piece's first token
    lengths: Array  # i32[B], of whole prompts

    def attend(
        self, site: Site, mine: Prompt | Any, fresh: Fresh, carry: Any, mesh: Mesh | None
    ) -> tuple[Array, Prompt | Any, Any]:
        """Causal attention to all pieces so far, or what the method makes of this one."""
        q, k, v, x, _ = fresh
        layer, start = site.layer, self.start
        if layer.needs.chunk:
            pos = start + positions(k[:, 0, :, 0])
            block = Block(k, v, jnp.where(pos < self.lengths[:, None], pos, -1)[:, None])
            return *devices.extend(layer, mine, q, block, k.shape[2], None, mesh)[:2], carry
        at = (0, 0, start, 0)
        k, v = (lax.dynamic_update_slice(old, new, at) for old, new in ((mine.k, k), (mine.v, v)))
        out = causal(q, k, v, start, site.window, pattern=layer.needs.pattern)
        hidden = mine.hidden
        if hidden is not None:
            hidden = lax.dynamic_update_slice(hidden, x[:, None], at)
        return out, Prompt(k, v, shown(layer, q, start, self.lengths, mine.q), hidden), carry


@pytree
class Repeat(Pass):
    """Tokens behind a whole prompt that repeat one piece of it, for what methods see in that (`Needs.probe`)."""

    start: Array  # i32[], the position of the piece's first token
    count: Array  # i32[B], how many of a row's tokens are real
    lengths: Array  # i32[B], of the prompts

    def attend(
        self, site: Site, mine: Prompt, fresh: Fresh, carry: Any, mesh: Mesh | None
    ) -> tuple[Array, Prompt, Any]:
        """Attention to the prompt and the repetition; in `probed` what the method saw of it."""
        q, k, v, x, _ = fresh
        layer, pos = site.layer, repeated_positions(k[:, 0, :, 0], self.count, self.lengths)
        block, _ = seen_by(layer, mine, self.lengths)
        again = Block(k, v, pos[:, None])

        def over_both(q: Array, q_pos: Array) -> Array:
            return merge([attend_dense(q, past, q_pos, site.window) for past in (block, again)])

        if layer.needs.probe is not None:
            hidden = x[:, None] if layer.needs.hidden else None
            seen = Obs(q, pos, None, mine.output, hidden)
            probed = devices.look(layer, block, self.start, seen, again, mine.probed, mesh)
            mine = mine._replace(probed=probed)
        return by_query_blocks(over_both, q, pos, 128), mine, carry


def repeated_positions(tokens: Array, count: Array, lengths: Array) -> Array:
    """i32[B T]: the positions of tokens behind prompts of lengths i32[B], -1 beyond the first count i32[B]."""
    pos = positions(tokens, count)
    return jnp.where(pos >= 0, lengths[:, None] + pos, -1)


@pytree
class Advance(Pass):
    """Tokens on what a cache holds, of which the first `commit` are kept."""

    pos: Array  # i32[B T], -1 for padding
    commit: int = dataclasses.field(metadata={"static": True})

    def attend(self, site: Site, mine: Any, fresh: Fresh, carry: Any, mesh: Mesh | None) -> tuple[Array, Any, Any]:
        """What the method makes of it."""
        block = Block(fresh.k, fresh.v, self.pos[:, None])
        return devices.extend(site.layer, mine, fresh.q, block, self.commit, carry, mesh)


def sites(
    plan: Plan, config: Config, slots: Sequence[int] | None = None, less_of_last: bool = False
) -> tuple[Site, ...]:
    """The layers of a plan; slots: of the state that each is to make. less_of_last: the last layer is asked less."""
    every = tuple(
        Site(layer, config.window(i), n)
        for i, (layer, n) in enumerate(zip(plan, slots or (0,) * len(plan), strict=True))
    )
    return (*every[:-1], dataclasses.replace(every[-1], last=less_of_last))


def decode_sites(cache: Cache) -> tuple[Site, ...]:
    """The layers of a cache in a decode step, without what acts on prompts alone: more of them share a program."""
    return sites(tuple(getattr(layer, "after_prompt", layer) for layer in cache.plan), cache.config)


def attention(params: Any, work: Pass, site: Site, mine: Any, carry: Any, setting: Setting, *made: Array):
    """`work.attend` in the layer of these parameters, on what it made: q, k, v, x."""
    q, k, v, x = made
    fresh = Fresh(*heads(q, k, v, setting.mesh), x, output_projection(params))
    return work.attend(site, mine, fresh, carry, setting.mesh)


def behind(tokens: Array, length: Array, real: Array | None) -> Array:
    """i32[B T]: positions of tokens behind rows of length i32[B], -1 where real bool[B T] says that there is none."""
    pos = length[:, None] + positions(tokens)
    return pos if real is None else jnp.where(real, pos, -1)


def kept(commit: int, real: Array | None) -> Array | int:
    """How many tokens each row keeps, i32[B] or one number for all."""
    return commit if real is None else real[:, :commit].sum(-1, dtype=jnp.int32)


def advance(
    params: Any, tokens: Array, cache: Cache, setting: Setting, commit: int, real: Array | None = None
) -> tuple[Array, Cache]:
    """tokens i32[B T], of which the first `commit` are kept -> (logits f32[B T V], cache); real bool[B T], or all."""
    pos, where = behind(tokens, cache.length, real), decode_sites(cache)
    carry = None

    def attend(i: int, *made: Array):
        nonlocal carry  # it goes up from layer to layer, and ends with the step
        mine = params[f"layer_{i}"]
        out, state, carry = attention(mine, Advance(pos, commit), where[i], cache.layers[i], carry, setting, *made)
        return out, state

    hidden, layers = apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.__call__)
    length = cache.length + kept(commit, real)
    return unembed(params, hidden, setting), dataclasses.replace(cache, layers=layers, length=length)
