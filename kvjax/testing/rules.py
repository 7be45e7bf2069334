"""The rules that every method keeps; a method that breaks one gives wrong answers without an error."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import os
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import kept_positions, state_bytes
from kvjax.cache.eviction.scorers import InvalidScores
from kvjax.cache.eviction.selection import score_prompt
from kvjax.cache.method import Method
from kvjax.cache.protocol import Cache, KVMethod, LayerSpec, LayerState
from kvjax.cache.storage import Codec, KVStorage
from kvjax.cache.validation import find_difference, uncompared_fields
from kvjax.core import memory
from kvjax.core.rope import Rope
from kvjax.core.types import Array, KVBlock
from kvjax.custom_decoder import attach, attend, finish, specs_of
from kvjax.engine.decode import extend
from kvjax.engine.forward import Target, layer_calls
from kvjax.engine.layer_prompt import LayerPrompt, observed_block
from kvjax.engine.plan import bind
from kvjax.engine.prefill import prefill, prefill_exactly
from kvjax.errors import KvjaxError
from kvjax.generation.generate import generate
from kvjax.generation.inputs import pad, round_up
from kvjax.generation.memory_plan import planned_bytes
from kvjax.generation.model_calls import capacity_for, extend_padded, logits, replay_prompts, run_prompts
from kvjax.generation.programs import target_for
from kvjax.models.model import Model
from kvjax.registry.strings import method_of
from kvjax.testing.index_guard import GuardedMethod, IndexRead

DECODED_TOKENS = 6  # one by one, after each prompt
LEAST_COSINE = 0.2  # mean, of stored vectors with the true ones; codes of one bit have 0.6
LOGIT_TOLERANCE = {4: 1e-3, 2: 5e-2}
"""The difference of two programs' logits, as a fraction of the greatest one, by the bytes of the model's numbers."""
ROUNDED_CODES_FACTOR = 20
"""The tolerance is wider by this factor where a number between two codes may be rounded to either."""


@dataclasses.dataclass(frozen=True)
class MethodRun(abc.ABC):
    """A method on three prompts, the first the longest and the second of one token, and the tokens after each.

    `ModelRun` runs it on a whole model; the battery of the tests has a run on one layer.
    """

    method: KVMethod
    prompts: list[list[int]]
    following: list[list[int]]
    ragged_counts: ClassVar[tuple[tuple[int, ...], ...]] = ((3, 1, 2), (2, 3, 1), (1, 2, 3))
    """Tokens that are fed to each sequence at once: each sequence meets each number."""

    @abc.abstractmethod
    def read(self, sequences: list[int]) -> Cache:
        """Returns the cache after the prompts of these sequences; a single one may be read several times over."""

    @abc.abstractmethod
    def feed(self, cache: Cache, tokens: list[list[int]]) -> tuple[np.ndarray, Cache]:
        """Feeds tokens to each sequence in one call, and returns (logits, or a layer's output, f32[B T ..], cache)."""

    @abc.abstractmethod
    def are_close(self, x: np.ndarray, y: np.ndarray, factor: int = 1) -> bool:
        """Whether x and y differ by rounding alone; `factor` widens the tolerance."""

    @functools.cached_property
    def first_cache(self) -> Cache:
        """The cache after all prompts."""
        return self.read([0, 1, 2])

    @functools.cached_property
    def steps(self) -> list[tuple[np.ndarray | None, Cache]]:
        """(logits [B 1 V], cache) after the prompts, and after each step of all sequences together."""
        steps: list[tuple[np.ndarray | None, Cache]] = [(None, self.first_cache)]
        for tokens in zip(*self.following, strict=True):
            steps.append(self.feed(steps[-1][1], [[token] for token in tokens]))
        return steps


@dataclasses.dataclass(frozen=True)
class ModelRun(MethodRun):
    """A method on prompts of a model."""

    model: Model
    twin: KVMethod  # made in the same way as the method

    def read(self, sequences: list[int], capacity: int | None = None) -> Cache:
        """Returns the cache after the prompts of these sequences."""
        prompts = [self.prompts[i] for i in sequences]
        default = len(self.prompts[0]) + DECODED_TOKENS
        plan, capacity = bind(self.method, self.model.config), capacity_for(prompts, capacity or default, 0)
        return run_prompts(self.model, plan, prompts, capacity)[1]

    def feed(self, cache: Cache, tokens: list[list[int]]) -> tuple[np.ndarray, Cache]:
        """Feeds several tokens to each sequence in one call, and returns (logits f32[B T V], the cache)."""
        # Unlike `kvjax.extend` this takes logits that are not finite, which a rule reports.
        out, cache = extend_padded(self.model, tokens, cache)
        return np.asarray(out, np.float32), cache

    def are_close(self, x: np.ndarray, y: np.ndarray, factor: int = 1) -> bool:
        """Whether x and y differ by a fraction of the greatest one that rounding explains."""
        return np.abs(x - y).max() <= factor * LOGIT_TOLERANCE[self.model.dtype.itemsize] * np.abs(y).max()


class Breach(NamedTuple):
    """A broken rule in words, and the usual repair."""

    problem: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that every method keeps.

    Args:
      name: short.
      says: the rule in words.
      remedy: the usual repair of a method that breaks it.
      find: returns an empty text if the rule is kept, the problem, or a `Breach` with a remedy of its own.
      needs_model: whether `find` takes a `ModelRun`; the other rules also hold of one layer.
    """

    name: str
    says: str
    remedy: str
    find: Callable[[Any], str | Breach]
    needs_model: bool = True


def find_inequality(run: ModelRun) -> str | Breach:
    """Compares the method with its twin, and the layers that each is bound to."""
    pairs = [("method", run.method, run.twin)]
    pairs += zip(itertools.repeat("the bound layer"), *(bind(x, run.model.config) for x in (run.method, run.twin)))
    for name, one, other in pairs:
        if difference := find_difference(name, one, other):
            return Breach(*difference)
    return ""


def find_uncompared_field(run: ModelRun) -> str:
    """Finds a field that does not take part in equality: compiled programs are cached by the method's value."""
    for field in uncompared_fields("method", run.method):
        return f"{field} is not compared, so that methods which differ there share one compiled program"
    return ""


def find_unpacked(run: ModelRun) -> str | Breach:
    """Looks at the shapes of what codecs store of two numbers of slots: which arrays grow, and along which axis."""
    config, dtype = run.model.config, run.model.dtype
    few, many = 1024, 2048  # multiples of every group and page, and beyond every recent window

    def stored_arrays(codec: Codec, spec: LayerSpec, width: int, slots: int) -> list[Any]:
        x = jax.ShapeDtypeStruct((1, spec.num_kv_heads, slots, width), dtype)
        stored = jax.eval_shape(codec.encode, x, jax.ShapeDtypeStruct((1, 1, slots), jnp.int32))
        return jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, memory.Buffer))

    layers: list[Any] = [layer for layer in dict.fromkeys(bind(run.method, config)) if hasattr(layer, "storage")]
    codecs = dict.fromkeys(
        (codec.on_device(), layer.spec, width)
        for layer in layers
        for codec, width in ((layer.k, layer.spec.head_dim), (layer.v, layer.spec.value_dim))
    )
    for codec, spec, width in codecs:
        if type(codec).__module__.startswith("kvjax."):
            continue
        stored = (stored_arrays(codec, spec, width, slots) for slots in (few, many))
        for array, larger in zip(*stored, strict=True):
            if array == larger:  # a recent window, or a number for each sequence
                continue
            shape, larger_shape = (getattr(x, "data", x).shape for x in (array, larger))
            what = f"{type(codec).__name__}.encode stores {array.dtype}{list(shape)} for {few} slots"
            if not isinstance(array, memory.Buffer):
                return f"{what}, which `memory.pack` did not make, so that it can never lie in host memory"
            if len(shape) != 4 or shape[2] == larger_shape[2] or shape[:2] != larger_shape[:2]:
                return Breach(what, "Pack arrays [B K S W]: slots are axis 2, and a number for each token has W = 1.")
    return ""


def find_index_read(run: ModelRun) -> str:
    """Traces the prompts and a step under layers that raise where they use the index; nothing is run."""
    plan, config = bind(GuardedMethod(run.method), run.model.config), run.model.config
    tokens, lengths = pad(run.prompts, round_up(len(run.prompts[0])))

    def read_and_step(params: Any, tokens: Array, lengths: Array, new: Array) -> Array:
        target = Target(config)
        _, cache = prefill(params, tokens, lengths, plan, target, tokens.shape[1] + DECODED_TOKENS)
        return extend(params, new, cache, target)[0]

    try:
        jax.eval_shape(read_and_step, run.model.auto_params, tokens, lengths, tokens[:, :1])
    except IndexRead as e:
        where = users_line(e)
        return f"{where}`spec.index` is used when the layer is called, where it is None and compares as unequal"
    return ""


def find_invalid_scores(run: ModelRun) -> str:
    """Runs each layer's scorer on the exact prompts, outside of a program, so that its values can be looked at."""
    plan, model = bind(run.method, run.model.config), run.model
    # A layer that is not made of kvjax's components has no selection to ask.
    # Where a layer reads the prompt in chunks of its own, there are no exact keys and values of all tokens.
    selections = [None if layer.needs.prompt_chunk else getattr(layer, "selection", None) for layer in plan]
    if all(selection is None for selection in selections):
        return ""
    (tokens, lengths), calls = pad(run.prompts, round_up(len(run.prompts[0]))), layer_calls(plan, model.config)
    _, prompts = prefill_exactly(
        model.auto_params,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        calls,
        target_for(model, tokens.size, in_place=False),
        chunk=min((layer.needs.prompt_chunk for layer in plan if layer.needs.prompt_chunk), default=None),
        replay_prompts=replay_prompts(model, plan),
    )
    for layer, selection, prompt in zip(plan, selections, prompts, strict=True):
        if selection is not None and isinstance(prompt, LayerPrompt):
            try:
                score_prompt(selection, *observed_block(layer, prompt, jnp.asarray(lengths)))
            except InvalidScores as e:
                return str(e)
    return ""


_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__))


def users_line(error: Exception) -> str:
    """Returns the last line of the user's own files that an error passed, as the beginning of a message."""
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (_PACKAGE_FOLDER, *installed)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if os.path.isfile(f.filename) and not f.filename.startswith(others)
    ]
    return f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}: " if frames else ""


def find_changed_state(run: MethodRun) -> str:
    """Compares the state after the first step with the prompt's."""
    (_, before), (_, after) = run.steps[:2]
    for i, states in enumerate(zip(before.layers, after.layers, strict=True)):
        if changed := changed_types(*states):
            return f"in layer {i} a step makes {changed}"
        kinds = [[x.sharding.memory_kind for x in jax.tree.leaves(state)] for state in states]
        if kinds[0] != kinds[1]:
            return f"in layer {i} a step moves an array of the state to another memory"
    return ""


def changed_types(before: Any, after: Any) -> str:
    """Says which shape, dtype or memory kind of a state a step has changed; empty if none."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "a state of other parts than the prompt did"
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jax.typeof(was) != jax.typeof(now):
            return f"{jax.typeof(now)} of an array {jax.typeof(was)} of the state"
    return ""


def find_nonfinite_logits(run: MethodRun) -> str:
    """Looks at the logits of every step."""
    for t, (out, _) in enumerate(run.steps[1:]):
        for row in range(3):
            if out is not None and not np.isfinite(out[row]).all():
                return f"the logits of sequence {row} are not finite in step {t + 1}"
    for t, (_, cache) in enumerate(run.steps):
        for row in range(3):
            for i, arrays in enumerate(_policy_statistics(cache, row)):
                if any(np.isnan(x).any() for x in arrays):
                    return f"the policy's state of sequence {row} has NaN in layer {i}, after step {t}"
    return ""


def find_wrong_positions(run: MethodRun) -> str | Breach:
    """Looks at the positions of every layer and sequence after every step."""
    for t, (_, cache) in enumerate(run.steps):
        for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
            for row, heads in enumerate(np.asarray(layer.positions(state))):
                if breach := wrong_positions(run.method, heads, len(run.prompts[row]) + t, bool(t)):
                    when = f"after step {t}" if t else "after the prompt"
                    return breach._replace(problem=f"in layer {i}, sequence {row}, {when}, {breach.problem}")
    return ""


def wrong_positions(method: KVMethod, heads: np.ndarray, length: int, has_decoded: bool) -> Breach | None:
    """Checks the positions that the heads of one sequence hold.

    Args:
      method: its traits say whether tokens may be missing.
      heads: [1|K S], a position for each slot, -1 where it is empty.
      length: tokens of the sequence so far.
      has_decoded: whether a token was decoded.
    """
    for head, positions in enumerate(heads):
        real = positions[positions >= 0]
        if positions.min(initial=-1) < -1 or positions.max(initial=-1) >= length:
            return Breach(
                f"head {head} says that it holds position {positions.max()} of a text of {length} tokens",
                "Take positions from `block.pos` (or `state.pos`) and do not count anew; an empty slot has -1.",
            )
        values, counts = np.unique(real, return_counts=True)
        if (counts > 1).any():
            return Breach(
                f"head {head} holds position {values[counts > 1][0]} {counts.max()} times, which counts it as often",
                "Usual cause: a token that is chosen twice, as one of the window and by its score: take the window out "
                "of what is scored, or give it an infinite score.",
            )
        if not method.traits.evicts and len(real) < length:
            return Breach(
                f"head {head} holds {len(real)} of {length} tokens, and `traits.evicts` is False",
                "Set `evicts=True` in the method's traits, or keep every token.",
            )
        if isinstance(method, Method) and method.decode and len(real) == len(positions):
            return Breach(
                f"head {head} has no empty slot for the next token: the policy must let one go",
                "In `after_token`, give one slot of each full head the position -1: "
                "`jnp.where(full & (state.pos == oldest), -1, state.pos)`."
                if has_decoded
                else "`num_slots` must be one more than the tokens that `init` keeps.",
            )
        if isinstance(method, Method) and method.decode and not method.side_store and not len(real):
            return Breach(
                f"head {head} holds no token",
                "Usual cause: slots beyond the prompt: `init` chooses indices of `block`, below `block.pos.shape[2]`.",
            )
        if has_decoded and length - 1 not in positions:
            return Breach(
                f"head {head} does not hold the newest token",
                "Usual cause: the newest token competes with the others by the attention of its own query alone: never "
                "let the slot with the greatest position go. (`tova` does on purpose, as its authors' code, unless "
                "keep_newest=true.)",
            )
    return None


def _method_layers(cache: Cache) -> list[tuple[Any, LayerState]]:
    """The layers of a kvjax.Method, with their states."""
    both = zip(cache.plan, cache.layers, strict=True)
    return [(layer, state) for layer, state in both if isinstance(state, LayerState)]


def find_codec_mismatch(run: MethodRun) -> str:
    """Compares the ways to read what a codec stores with each other."""
    for t in (0, len(run.steps) - 1):
        _, cache = run.steps[t]
        for i, (layer, state) in enumerate(_method_layers(cache)):
            spec, pos = layer.spec, np.asarray(state.pos)
            state = layer.storage.open_values(state)
            sides = ("keys", layer.k, state.k, spec.head_dim), ("values", layer.v, state.v, spec.value_dim)
            for name, codec, stored, width in sides:
                if wrong := _codec_mismatch(run, codec, stored, pos, spec.num_kv_heads, width):
                    return f"in layer {i}, after step {t}, of the {name}, {wrong}"
    return ""


@functools.partial(jax.jit, static_argnums=0)  # eagerly, every operation of a codec would be compiled by itself
def _decode_and_gather(codec: Codec, stored: Any, idx: Array) -> tuple[Array, Array]:
    return codec.decode(stored), codec.gather(stored, idx)


@functools.partial(jax.jit, static_argnums=0)
def _decode_stored(storage: KVStorage, k: Any, v: Any, pos: Array) -> KVBlock:
    return storage.decode(k, v, pos)


def _codec_mismatch(run: MethodRun, codec: Codec, stored: Any, pos: np.ndarray, num_heads: int, width: int) -> str:
    name = type(codec).__name__
    B, _, S = pos.shape
    shape = (B, num_heads, S, width)
    idx = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), shape[:3])
    decoded, gathered = _decode_and_gather(codec, stored, idx)
    if decoded.shape != shape or not jnp.issubdtype(decoded.dtype, jnp.floating):
        return f"{name}.decode gives {jax.typeof(decoded)}, and must give floats [B K S H], here {shape}"
    if gathered.shape != shape:
        return f"{name}.gather gives {jax.typeof(gathered)}, and must give [B K n H], here {shape}"
    is_real = np.broadcast_to(pos >= 0, shape[:3])
    decoded, gathered = (np.asarray(x, np.float32)[is_real] for x in (decoded, gathered))
    if decoded.size and not run.are_close(gathered, decoded):
        return f"{name}.gather gives other vectors than {name}.decode"
    return ""


def find_wrong_contents(run: MethodRun) -> str:
    """Compares the first layer with the full cache's: keys and values reach it unchanged under any method."""
    full = dataclasses.replace(run, method=method_of("full"))
    for t in (0, len(run.steps) - 1):
        first, exact_first = (_method_layers(x.steps[t][1])[:1] for x in (run, full))
        for (layer, state), (exact_layer, exact_state) in zip(first, exact_first, strict=False):
            held, exact = (
                _decode_stored(x.storage, y.k, y.v, y.pos) for x, y in ((layer, state), (exact_layer, exact_state))
            )
            sides = {"values": (held.v, exact.v)}
            if layer.method.positions == "true":
                sides["keys"] = held.k, exact.k
            for name, (stored, true) in sides.items():
                if wrong := _unlike_vectors(run, np.asarray(state.pos), stored, true):
                    return f"after step {t}, the {name} that the first layer holds {wrong}"
    return ""


def _unlike_vectors(run: MethodRun, pos: np.ndarray, stored: Any, true: Any) -> str:
    """Compares vectors stored [B K S H] at positions [B 1|K S] with the true ones [B K S' H], one slot per position."""
    stored, true = (np.asarray(x, np.float32) for x in (stored, true))
    pos = np.broadcast_to(pos, stored.shape[:3])
    wanted = np.take_along_axis(true, np.maximum(pos, 0)[..., None], 2)
    norms = np.linalg.norm(stored, axis=-1) * np.linalg.norm(wanted, axis=-1)
    # A cosine, since a codec may scale: a vector of zeros has no direction, and counts as unlike.
    cosine = (stored * wanted).sum(-1) / np.maximum(norms, 1e-30)
    for row, prompt in enumerate(run.prompts):
        for which, mask in (("", pos[row] >= 0), (" that were decoded", pos[row] >= len(prompt))):
            if mask.any() and (mean := cosine[row][mask].mean()) < LEAST_COSINE:
                where = f"in sequence {row}{which} (mean cosine {mean:.2f})"
                return f"are not those of the tokens at their positions {where}"
    return ""


def find_dependence(run: MethodRun) -> str | Breach:
    """Runs each sequence alone, and compares it with itself in the batch."""
    first_caches = []
    for row in range(3):
        alone: list[tuple[np.ndarray | None, Cache]] = [(None, run.read([row]))]
        first_caches.append(alone[0][1])
        for token in run.following[row]:
            alone.append(run.feed(alone[-1][1], [[token]]))
        for t, (single, batch) in enumerate(zip(alone, run.steps, strict=True)):
            if wrong := _sequence_difference(run, row, single, batch):
                return f"{wrong} when it is read alone than with others, after step {t}"
    for counts in run.ragged_counts:
        if wrong := _ragged_difference(run, counts, first_caches):
            return Breach(
                f"{wrong} when it is fed together with sequences that are fed other numbers of tokens",
                "Usual cause: sequences that get no token in a step are changed nevertheless: where `q_pos` is -1, "
                "keep the old value, as in `jnp.where(q_pos >= 0, new, old)`, and let a compression of a full sequence "
                "wait for its own next token.",
            )
    return ""


def _ragged_difference(run: MethodRun, counts: tuple[int, ...], first_caches: list[Cache]) -> str:
    """Feeds sequences unequal numbers of tokens in one call, then one by one, and compares each with itself alone."""
    # Alone a sequence is fed as many tokens in a call: a method may treat a chunk differently from single steps.
    fed = [tokens[:count] for tokens, count in zip(run.following, counts, strict=True)]
    batch, singles = (
        run.feed(run.first_cache, fed),
        [run.feed(cache, [tokens]) for cache, tokens in zip(first_caches, fed, strict=True)],
    )
    for t in range(len(run.following[0]) - min(counts) + 1):
        is_fed = [bool(tokens) for tokens in fed]
        for row in range(3):
            last = counts[row] - 1 if t == 0 else 0
            # Without a new token a sequence has no logits, and holds what it held.
            single, whole = ((x[0] if is_fed[row] else None, x[1]) for x in (singles[row], batch))
            if wrong := _sequence_difference(run, row, single, whole, last):
                return f"{wrong}, {t} steps later," if t else wrong
        fed = [tokens[n + t : n + t + 1] for tokens, n in zip(run.following, counts, strict=True)]
        if any(fed):
            batch = run.feed(batch[1], fed)
            singles = [run.feed(x[1], [tokens]) if tokens else x for x, tokens in zip(singles, fed, strict=True)]
    return ""


def _sequence_difference(run: MethodRun, row: int, single: Any, batch: Any, last: int = 0) -> str:
    """Compares (logits, cache) of a sequence alone with the batch's; `last`: index of its last fed token."""
    for i, (here, there) in enumerate(zip(kept_positions(single[1]), kept_positions(batch[1]), strict=True)):
        if not all(map(np.array_equal, here[0], there[row])):
            return f"sequence {row} holds other tokens in layer {i}"
    if single[0] is not None and not run.are_close(single[0][0, last], batch[0][row, last], ROUNDED_CODES_FACTOR):
        return f"sequence {row} has other logits"
    statistics = _policy_statistics(single[1], 0), _policy_statistics(batch[1], row)
    for i, (here, there) in enumerate(zip(*statistics, strict=True)):
        # Sums of attention of many steps: wider than rounding of one step, far narrower than one step's attention.
        if not all(x.shape == y.shape and np.allclose(x, y, 1e-2, 1e-3) for x, y in zip(here, there, strict=True)):
            return f"the policy's state of sequence {row} is another in layer {i}"
    return ""


def _policy_statistics(cache: Cache, row: int) -> list[list[np.ndarray]]:
    """Returns each layer's policy statistics of a sequence's tokens: arrays [n ..] over heads, then positions."""
    statistics = []
    for _, state in _method_layers(cache):
        pos, layer_statistics = np.asarray(state.pos[row]), []
        for leaf in jax.tree.leaves(state.policy_state):
            if leaf.ndim < 3 or leaf.shape[2] != pos.shape[1]:
                continue  # of the sequence, and not of its tokens
            values, held = np.asarray(leaf[row], np.float32), np.broadcast_to(pos, leaf.shape[1:3])
            # Slots are in no order under a policy, so that only positions say which token a number belongs to.
            order = np.argsort(held, -1, kind="stable")
            held = np.take_along_axis(held, order, 1)
            values = np.take_along_axis(values, order.reshape(*order.shape, *(1,) * (values.ndim - 2)), 1)
            layer_statistics.append(values[held >= 0])
        statistics.append(layer_statistics)
    return statistics


def find_inexact_logits(run: ModelRun) -> str:
    """Compares with the full cache's logits where `traits.exact` is set."""
    if not run.method.traits.exact:
        return ""
    for row, prompt in enumerate(run.prompts):
        want = np.asarray(logits(run.model, [prompt + run.following[row]]), np.float32)[0, len(prompt) :]
        got = np.concatenate([out[row] for out, _ in run.steps[1:] if out is not None])
        if not run.are_close(got, want):
            return f"the logits of sequence {row} are not those of the full cache, and `traits.exact` is True"
    return ""


def find_unplanned_bytes(run: ModelRun) -> str:
    """Compares the bytes of the last step with the planned ones."""
    _, cache = run.steps[-1]
    total = state_bytes(cache).total
    # A plan takes all prompts as alike, and a global budget depends on each prompt.
    if not any(layer.needs.global_budget for layer in cache.plan):
        sizes = {"capacity": cache.capacity, "batch": 3, "dtype": run.model.dtype}
        planned = planned_bytes(run.method, run.model.config, len(run.prompts[0]), **sizes)
        if total != planned.total:
            return f"{planned.total} bytes are planned for these prompts and {total} are held"
    if run.method.traits.constant and state_bytes(run.read([0, 1, 2], 4 * cache.capacity)).total != total:
        return "its bytes grow with the room for more tokens, and `traits.constant` is True"
    return ""


def find_ignored_kind(run: ModelRun) -> str | Breach:
    """Runs one layer with a soft cap of 1 that bites, sinks and values narrower than keys, and its twin without a cap.

    Methods that need what a lone layer cannot give, or that refuse its widths by name, are left alone.
    """
    B, N, K, H, V, D, T = 2, 4, 2, 32, 16, 8, 12
    rng, gives = np.random.default_rng(0), ("hidden", "output_projection", "finish")
    layers = [specs_of(1, N, K, H, rope=Rope(H), soft_cap=cap, value_dim=V) for cap in (1.0, None)]
    try:
        capped, plain = (attach(run.method, specs, capacity=T + 4, gives=gives)[0] for specs in layers)
    except KvjaxError:
        return ""

    def random_arrays(num_tokens: int) -> list[jax.Array]:
        sizes = (4 * H**0.5, (N, H)), (1.0, (K, H)), (1.0, (K, V))
        return [jnp.asarray(rng.normal(size=(B, num_tokens, *axes)) * x, jnp.float32) for x, axes in sizes]

    hidden, output_projection = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in ((B, T, D), (N, V, D)))
    needs = capped.layer.bound.needs
    given = {"hidden": hidden} if needs.hidden_states else {}
    given |= {"output_projection": output_projection} if needs.output_projection else {}
    pos = jnp.asarray([range(T), [*range(T - 5), *[-1] * 5]], jnp.int32)
    try:
        _, capped = jax.jit(attend)(capped, *random_arrays(T), pos, sinks=jnp.ones(N), **given)
        capped = finish({0: capped})[0]
    except KvjaxError as e:
        # A scorer reads its table when it scores, and under a budget over the model `finish` scores.
        if "table" in str(e):
            return ""
        raise
    new, next_pos = random_arrays(1), jnp.asarray([[T], [T - 5]], jnp.int32)
    step = jax.jit(functools.partial(attend, sinks=jnp.ones(N)))
    out, _ = step(capped, *new, next_pos)
    if out.shape != (B, 1, N, V):
        return f"a step gives {out.shape} of a layer whose values have {V} channels and whose keys have {H}"
    uncapped, _ = step(dataclasses.replace(capped, layer=plain.layer), *new, next_pos)
    if np.allclose(out, uncapped, rtol=0, atol=1e-4):
        return Breach(
            "a soft cap of 1 on loud logits changes nothing in a step",
            "Turn scaled dot products into logits by `storage.spec.rule.logits(s, state.pos, q_pos, state.bias)`.",
        )
    return ""


def find_loop_mismatch(run: ModelRun) -> str:
    """Compares the tokens of both decode loops, in float32 alone: 16-bit rounding may tell two sound loops apart."""
    if run.model.dtype.itemsize < 4:
        return ""
    options = {"max_new_tokens": DECODED_TOKENS, "eos_ids": ()}
    compiled, stepwise = (
        generate(run.model, run.prompts, run.method, loop=loop, **options).tokens for loop in ("while", "layers")
    )
    if compiled != stepwise:
        return f"a compiled loop makes the tokens {compiled}, and step after step {stepwise}: something is kept outside"
    return ""


RULES = (
    Rule(
        "equality",
        "a method that is made twice is equal to itself, so that it is compiled once",
        "",  # each of its findings has its own remedy
        find_inequality,
    ),
    Rule(
        "fields",
        "methods that compare equal are equal",
        "Take `compare=False` off that field, or the field out of the dataclass.",
        find_uncompared_field,
    ),
    Rule(
        "packed",
        "what a codec stores of each slot is packed, so that it can lie in host memory",
        "Return `memory.pack(x)` of each array [B K S W] from `encode`, as in `jax.tree.map(memory.pack, parts)`, and "
        "use `memory.append`, `memory.gather_tokens` and `memory.unpack` on them (`from kvjax.core import memory`).",
        find_unpacked,
    ),
    Rule(
        "place",
        "what depends on a layer's place is known when the method is bound",
        "Give the component a method `at(self, spec)`, which is called for each layer before anything is run, and "
        "returns the component of that layer: keep what follows from `spec.index` in a field of it.",
        find_index_read,
    ),
    Rule(
        "scores",
        "scores are numbers",
        "Usual cause: a division by zero, or a logarithm of it, at empty slots: mask them before, as in "
        "`jnp.where(block.pos >= 0, x, 1)`.",
        find_invalid_scores,
    ),
    Rule(
        "shapes",
        "a step keeps shapes, dtypes and memory kinds of the state",
        "Usual cause: a step that concatenates or lets a dtype widen: write into slots (`x.at[...].set(...)`) and cast "
        "the result (`.astype(x.dtype)`).",
        find_changed_state,
        needs_model=False,
    ),
    Rule(
        "finite",
        "logits and a policy's statistics of tokens are finite",
        "Usual cause: a scale of zero that is divided by, or empty slots that are read: `jnp.maximum(scale, 1e-6)`, "
        "and mask empty slots: `block.pos >= 0`.",
        find_nonfinite_logits,
        needs_model=False,
    ),
    Rule(
        "positions",
        "a head holds tokens of the text, each once, and the newest one",
        "",  # each of its findings has its own remedy
        find_wrong_positions,
        needs_model=False,
    ),
    Rule(
        "codecs",
        "a codec gives the vectors that it decodes",
        "`decode(stored)` gives floats [B K S H] of all slots, and `gather(stored, idx)` the same numbers at the slots "
        "`idx` [B K n]: `jnp.take_along_axis(self.decode(stored), idx[..., None], 2)`.",
        find_codec_mismatch,
        needs_model=False,
    ),
    Rule(
        "contents",
        "what is held is like the keys and values of the tokens at these positions",
        "Usual cause: vectors and positions that are moved differently, or an `append` that drops what is new: gather "
        "keys, values and positions by the same indices, and return the updated arrays.",
        find_wrong_contents,
        needs_model=False,
    ),
    Rule(
        "independence",
        "a sequence does not depend on its neighbours, on padding, or on how many tokens these are fed",
        "Usual cause: something is computed over the whole batch or over padding: mask empty slots "
        "(`block.pos >= 0`) and compute per sequence and head, with no mean, maximum or sort over axis 0.",
        find_dependence,
        needs_model=False,
    ),
    Rule(
        "exact",
        "logits are those of the full cache where `traits.exact` says so",
        "Set `exact=False` in the method's traits unless it holds and reads every token unchanged.",
        find_inexact_logits,
    ),
    Rule(
        "bytes",
        "bytes are the planned ones",
        "Usual cause: arrays whose sizes follow from something other than the layer's "
        "`num_slots(prompt_tokens, headroom_tokens)` and its `LayerSpec`; where they grow with the headroom, set "
        "`constant=False` in the traits.",
        find_unplanned_bytes,
    ),
    Rule(
        "kinds",
        "a layer may bound its logits, have sinks, and values narrower than keys",
        "Take the shapes of outputs from values, not from queries or keys.",
        find_ignored_kind,
    ),
    Rule(
        "loops",
        "every decode loop makes the same tokens",
        "Usual cause: a number that changes and lies outside the state, such as an attribute, a global or a counter in "
        "Python: keep it in an array of the state.",
        find_loop_mismatch,
    ),
)
"""The rules in the order in which they are tried: a later one may rely on the earlier ones."""

NUM_STATIC_RULES = 3
"""The first rules run nothing: they look at values and shapes."""
NUM_RULES_BEFORE_READING = 5
"""The rules after these look at the prompts and steps of `MethodRun.steps`."""
NUM_QUICK_RULES = 9
"""The first rules, those of a quick check, compile little beside these prompts and steps."""
