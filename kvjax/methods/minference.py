"""MInference: each query head of a prompt reads vertical and slash lines, an A-shape, or blocks of similar keys."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.utils.files import expand_user

PatternName = Literal["vertical_and_slash", "stream_llm", "block_sparse"]
"""The authors' names, as their files have them."""


@dataclasses.dataclass(frozen=True)
class HeadPattern:
    """What one query head reads.

    Args:
      name: of the pattern.
      vertical: single keys that all queries read; of "stream_llm" the first keys of the prompt.
      slash: distances at which each query reads a key; of "stream_llm" the distances below this one.
    """

    name: PatternName
    vertical: kv.PositiveInt
    slash: kv.PositiveInt

    __post_init__ = kv.check_fields


@dataclasses.dataclass(frozen=True)
class LinesAndBlocks(kv.TileChoosing):
    """Chooses keys by the patterns of a layer's query heads.

    Args:
      default: pattern of the heads for which `layers` has none.
      topk: tiles of keys that a "block_sparse" head reads.
      queries: last queries whose weights say which lines are read.
      sinks: first keys that are always among the vertical lines.
      recent: least distances that are always among the slash lines.
      tile: queries and keys of a tile.
      layers: patterns of all layers' heads, (head, pattern), from `read_head_patterns`; () for none.
      heads: patterns of all query heads of the layer, from `at`.
      rule: the layer's window and soft cap, from `at`.
    """

    default: HeadPattern
    topk: kv.PositiveInt
    queries: kv.PositiveInt
    sinks: kv.NonNegativeInt
    recent: kv.PositiveInt
    tile: kv.PositiveInt
    layers: tuple[tuple[tuple[int, HeadPattern], ...], ...] = ()
    heads: tuple[HeadPattern, ...] = ()
    rule: kv.attention.Rule = kv.attention.PLAIN

    def __post_init__(self):
        kv.check_fields(self)
        patterns = {self.default, *(pattern for layer in self.layers for _, pattern in layer)}
        for pattern in sorted(patterns, key=str):
            if pattern.name == "vertical_and_slash" and (pattern.vertical < self.sinks or pattern.slash < self.recent):
                raise kv.KvjaxError(
                    f"vertical={pattern.vertical} and slash={pattern.slash} lines have no room for those that are "
                    f"always read, sinks={self.sinks} and recent={self.recent}; give more lines, or fewer of these"
                )

    def at(self, spec: kv.LayerSpec) -> LinesAndBlocks:
        num_heads = spec.num_kv_heads * spec.num_groups
        found: dict[int, HeadPattern] = {}
        if self.layers:
            if len(self.layers) != spec.num_layers:
                raise kv.KvjaxError(
                    f"the table has patterns for {len(self.layers)} layers, and the model has {spec.num_layers}; give "
                    "the file that was published for this model"
                )
            assert spec.index is not None
            found = dict(self.layers[spec.index])
        if found and max(found) >= num_heads:
            raise kv.KvjaxError(
                f"the table has a pattern for head {max(found)} of layer {spec.index}, which has {num_heads} query "
                "heads; give the file that was published for this model"
            )
        heads = tuple(found.get(head, self.default) for head in range(num_heads))
        return dataclasses.replace(self, layers=(), heads=heads, rule=spec.rule)

    def choose_keys(
        self, q: kv.Array, k: kv.Array, start: kv.Array | int, lengths: kv.Array
    ) -> Callable[[kv.Array, kv.Array], kv.ChosenKeys]:
        (B, K, G, _, _), S, tile = q.shape, k.shape[2], self.tile
        num_tiles, names = -(-S // tile), {pattern.name for pattern in self.heads}
        is_blocks = self._of_heads((p.name == "block_sparse" for p in self.heads), q)[..., None] == 1
        is_column, is_slash = self.choose_lines(q, k, start, lengths)

        def tiles_of(x: kv.Array, axis: int) -> kv.Array:
            padding = [(0, num_tiles * tile - S if i == axis else 0) for i in range(x.ndim)]
            return jnp.pad(x, padding).reshape(*x.shape[:axis], num_tiles, tile, *x.shape[axis + 1 :])

        # Between the queries of a tile and the keys m tiles before lie all distances that differ from m * tile by less
        # than a tile.
        distances = tiles_of(is_slash, 3)
        before = jnp.pad(distances[..., 1:].any(-1), [(0, 0)] * 3 + [(1, 0)])[..., :-1]
        is_crossed = distances.any(-1) | before
        most = max((p.vertical for p in self.heads if p.name != "block_sparse"), default=0)
        slots = kv.mask_to_slots((is_column & ~is_blocks).reshape(B, K * G, S), min(most, S))
        columns = slots.reshape(B, K, G, -1)
        is_key = jnp.arange(S, dtype=jnp.int32)[None] < lengths[:, None]
        keys = tiles_of(jnp.where(is_key[:, None, :, None], k, 0), 2).mean(3, dtype=jnp.float32)

        def choose(q: kv.Array, first: kv.Array) -> kv.ChosenKeys:
            own, tiles = first // tile, jnp.arange(num_tiles, dtype=jnp.int32)[None, None, None]
            is_past = tiles <= own
            chosen = is_crossed[..., jnp.maximum(own - tiles[0, 0, 0], 0)] & is_past
            if "block_sparse" in names:
                is_query = first + jnp.arange(tile, dtype=jnp.int32)[None] < lengths[:, None]
                mean = jnp.where(is_query[:, None, None, :, None], q, 0).mean(3, dtype=jnp.float32)
                similar, candidates = jnp.einsum("bkgh,bknh->bkgn", mean, keys), is_past
                if (window := self.rule.window) is not None:
                    # The last queries of a tile see less of the past than the first: only their own tile is sure to
                    # have a key for each of them.
                    candidates = is_past & ((tiles + 1) * tile > first - window + 1)
                    similar = jnp.where(tiles == own, jnp.inf, similar)
                chosen = jnp.where(is_blocks, kv.top_k_mask(similar, candidates, self.topk), chosen)
            return kv.ChosenKeys(chosen, columns)

        return choose

    def choose_lines(
        self, q: kv.Array, k: kv.Array, start: kv.Array | int, lengths: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        """Marks the keys of vertical lines and the distances of slash lines, both bool[B K G S]; see `choose_keys`."""
        index = jnp.arange(k.shape[2], dtype=jnp.int32)
        numbers = [self._of_heads((getattr(p, x) for p in self.heads), q)[..., None] for x in ("vertical", "slash")]
        # As an A-shape has them; [1 K G S].
        first, nearest = (index[None, None, None] < number for number in numbers)
        names = [pattern.name for pattern in self.heads]
        if "vertical_and_slash" not in names:
            shape = (*q.shape[:3], k.shape[2])
            return jnp.broadcast_to(first, shape), jnp.broadcast_to(nearest, shape)
        last = start + jnp.minimum(lengths - start, q.shape[3]) - 1  # the last query, below `start` if there is none
        exists = (index[None] <= last[:, None])[:, None, None]
        is_a_shape = self._of_heads((name == "stream_llm" for name in names), q)[..., None] == 1
        sums, least = self._sum_weights(q, k, start, last), (self.sinks, self.recent)
        column, slash = (
            jnp.where(is_a_shape, a_shape, kv.top_k_mask(jnp.where(index < always, jnp.inf, x), exists, number[..., 0]))
            for a_shape, x, always, number in zip((first, nearest), sums, least, numbers, strict=True)
        )
        return column, slash

    @staticmethod
    def _of_heads(numbers: Iterable[int], q: kv.Array) -> kv.Array:
        """Makes i32[1 K G] of the numbers of all query heads of the layer: those of this device's heads."""
        return kv.over_heads.local_part(jnp.asarray(list(numbers), jnp.int32).reshape(-1, q.shape[2]), q.shape[1])[None]

    def _sum_weights(
        self, q: kv.Array, k: kv.Array, start: kv.Array | int, last: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        """Sums the weights of the queries up to the positions `last`, by key and by distance: both f32[B K G S]."""
        (B, K, G, _, _), S = q.shape, k.shape[2]
        pos = last[:, None] - jnp.arange(self.queries, dtype=jnp.int32)[None]  # [B queries]
        index = jnp.arange(S, dtype=jnp.int32)
        observed = jnp.take_along_axis(q, jnp.maximum(pos - start, 0)[:, None, None, :, None], 3)

        def add_query(sums: tuple[kv.Array, kv.Array], xs: tuple[kv.Array, kv.Array]) -> tuple[Any, None]:
            q, pos = xs  # [B K G H], [B]
            logits = self.rule.logits(kv.attention.scores(q[:, :, :, None], k), index[None, None], pos[:, None])
            weights = jnp.where((pos >= start)[:, None, None, None], kv.attention.softmax(logits)[:, :, :, 0], 0.0)
            key = pos[:, None] - index[None]  # of each distance
            at_distance = jnp.take_along_axis(weights, jnp.maximum(key, 0)[:, None, None], 3)
            at_distance = jnp.where((key >= 0)[:, None, None], at_distance, 0.0)
            return (sums[0] + weights, sums[1] + at_distance), None

        # A query at a time: the weights of all of them would be larger than the keys.
        zeros = kv.vary((jnp.zeros((B, K, G, S)), jnp.zeros((B, K, G, S))))
        return jax.lax.scan(add_query, zeros, (jnp.moveaxis(observed, 3, 0), pos.T))[0]


def read_head_patterns(path: str) -> tuple[tuple[tuple[int, HeadPattern], ...], ...]:
    """Reads a file of patterns as MInference publishes them: for each layer {head: [name, vertical, slash, score]}.

    Raises:
      KvjaxError: for a file that cannot be read, or that is none.
    """
    remedy = "give a file of MInference's folder minference/configs, or one of that form"
    try:
        layers = json.loads(expand_user(path).read_bytes())
        return tuple(
            tuple(sorted((int(head), HeadPattern(*pattern[:3])) for head, pattern in layer.items())) for layer in layers
        )
    except OSError as e:
        raise kv.KvjaxError(f"no table of head patterns can be read from {path!r} ({e.strerror}); {remedy}") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as e:
        raise kv.KvjaxError(f"{path} is no table of head patterns ({e}); {remedy}") from None


@kv.register_method(
    example="minference:vertical=16,slash=32,queries=16,sinks=4,recent=16,tile=16", family="sparse reading"
)
def minference(
    pattern: PatternName = "vertical_and_slash",
    vertical: int = 1000,
    slash: int = 6096,
    topk: int = 100,
    queries: int = 64,
    sinks: int = 30,
    recent: int = 100,
    tile: int = 64,
    table: str = "",
) -> kv.Method:
    """Gives each query head of a prompt one of three sparse patterns; decoding reads all.

    Nothing leaves the cache. A chunk of a prompt chooses its lines by its own last queries, so that other chunks give
    other outputs than the whole prompt at once.

    Formula:
      w the weights of the last queries; vertical lines are the keys of the largest sum of w over queries, slash lines
      the distances t - s of the largest sum; a query reads the tiles of keys that a slash line of its own tile crosses,
      and the keys of the vertical lines. "stream_llm": the first keys, the last distances. "block_sparse": the tiles
      of keys with the largest product of their mean key and the mean query of the tile

    Differs:
      The authors' kernel puts blocks of keys anywhere, so that they cover slash lines; here tiles begin at multiples of
      their size, and a line may cross two. Their window of "stream_llm" ends at a token, and here at a tile. Fewer
      lines than `sinks` and `recent` are refused, where theirs are raised. In a layer with a sliding window
      "block_sparse" heads choose among the tiles that it shows, their own always among them; their code has no such
      layers.

    Args:
      pattern: of the heads for which the table has none.
      vertical: vertical lines of these heads (the authors' default: 1,000).
      slash: their slash lines (the authors' default: 6,096).
      topk: tiles of keys that a tile of queries reads under "block_sparse" (the authors: 100).
      queries: last queries that say which lines are read (the authors: 64).
      sinks: first keys that are always read (the authors: 30).
      recent: least distances that are always read (the authors: 100).
      tile: queries, and keys, that are read or left out together (the authors' kernel: 64). Chunks of a prompt must be
        multiples of it.
      table: a file of patterns by layer and head that the authors published, as in their folder `minference/configs`;
        by default all heads have the same.

    Reference:
      MInference 1.0, Jiang et al. 2024, arXiv 2407.02490, section 3; its public code, microsoft/MInference
    """
    layers = read_head_patterns(table) if table else ()
    default = HeadPattern(pattern, vertical, slash)
    return kv.Method(attend=LinesAndBlocks(default, topk, queries, sinks, recent, tile, layers))
