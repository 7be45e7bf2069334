"""The rules that every method keeps, tried on one of your own: what breaks them gives wrong answers without a word."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import kept_positions, state_bytes
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Codec
from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, Cache, KVMethod, LayerSpec, LayerState, Traits
from kvjax.cache.validation import uncompared_fields
from kvjax.core import memory
from kvjax.errors import KvjaxError
from kvjax.generation.generate import generate
from kvjax.generation.memory_plan import planned_bytes
from kvjax.generation.model_calls import extend, logits, prefill
from kvjax.methods.registry import load_all
from kvjax.methods.strings import format_methods, method_of, name_of, parse_parts, split_methods
from kvjax.models.model import Model
from kvjax.utils import arguments, display

STEPS = 6  # tokens that are decoded one by one
FED = ((3, 1, 2), (2, 3, 1), (1, 2, 3))  # tokens that rows are fed at once: each row meets each number
ALIKE = 0.2  # the least mean cosine of what is held with what it stands for; codes of one bit have 0.6
NEAR = {4: 1e-3, 2: 5e-2}
"""What logits of two programs may differ by, as a share of the greatest, by the bytes of the model's numbers."""
OTHER_CODES = 20
"""Times as much where a number on the edge between two codes may be rounded to the other one."""


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A method on three prompts, the first the longest and the second of one token, and what then follows each."""

    model: Model
    method: KVMethod
    prompts: list[list[int]]
    following: list[list[int]]

    def read(self, rows: list[int], capacity: int | None = None) -> Cache:
        """The cache after these prompts."""
        prompts = [self.prompts[row] for row in rows]
        _, cache = prefill(self.model, prompts, self.method, capacity=capacity or len(self.prompts[0]) + STEPS)
        return cache

    def feed(self, cache: Cache, tokens: list[list[int]]) -> tuple[np.ndarray, Cache]:
        """(logits [B T V], the cache) after so many tokens of each row at once."""
        out, cache = extend(self.model, tokens, cache)
        return np.asarray(out, np.float32), cache

    @functools.cached_property
    def beginning(self) -> Cache:
        """The cache after all prompts."""
        return self.read([0, 1, 2])

    @functools.cached_property
    def guarded(self) -> _Tried:
        """The same prompts under the method whose layers tell when they use an index that they lack."""
        return dataclasses.replace(self, method=_Guarded(self.method))

    @functools.cached_property
    def walk(self) -> list[tuple[np.ndarray | None, Cache]]:
        """(logits [B 1 V], cache) after the prompts, and after each step of all rows together."""
        found: list[tuple[np.ndarray | None, Cache]] = [(None, self.beginning)]
        for t in range(STEPS):
            found.append(self.feed(found[-1][1], [tokens[t : t + 1] for tokens in self.following]))
        return found


class _IndexRead(Exception):
    """A bound layer has used the index of its spec, which is None."""


class _NoIndex:
    """Stands for the index that a bound layer's spec lacks: raises where None would be unequal or false in silence."""

    def __eq__(self, other: object) -> bool:
        raise _IndexRead

    def __hash__(self) -> int:
        raise _IndexRead

    def __bool__(self) -> bool:
        raise _IndexRead


_NO_INDEX: Any = _NoIndex()


class _GuardedSpec(LayerSpec):
    """The spec of a bound layer, with `_NO_INDEX` in the place of None; it is compared by its other fields."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GuardedSpec) and self._others() == other._others()

    def __hash__(self) -> int:
        return hash(self._others())

    def _others(self) -> tuple[Any, ...]:
        return tuple(value for name, value in vars(self).items() if name != "index")


def _guarded(value: Any) -> Any:
    """A bound layer, or what it holds, with every spec without an index guarded."""
    if isinstance(value, LayerSpec):
        return _GuardedSpec(**vars(value) | {"index": _NO_INDEX}) if value.index is None else value
    if type(value) is tuple:
        parts = tuple(map(_guarded, value))
        return parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    new = {name: _guarded(x) for name, x in old.items()}
    changed = {name: x for name, x in new.items() if x is not old[name]}
    return dataclasses.replace(value, **changed) if changed else value


@dataclasses.dataclass(frozen=True)
class _Guarded:
    """A method whose bound layers tell when they use an index that they lack."""

    method: KVMethod

    @property
    def traits(self) -> Traits:
        return self.method.traits

    def bind(self, spec: LayerSpec) -> BoundLayer:
        return _guarded(self.method.bind(spec))


class _Broken(NamedTuple):
    """What breaks a rule, and how that is usually mended."""

    what: str
    mend: str


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A rule that every method keeps: its short name, what it says, how a breach is mended, and what finds one.

    `find` returns an empty text where the rule is kept, what breaks it, or that with a mend of its own.
    """

    name: str
    says: str
    mend: str
    find: Callable[[_Tried], str | _Broken]


class BrokenRule(KvjaxError):
    """A method breaks a rule of methods; `rule` is its short name."""

    def __init__(self, message: str, rule: str):
        super().__init__(message)
        self.rule = rule


def _any_left(tried: _Tried) -> bool:
    """Whether any head has lost a token of the longest prompt."""
    longest = [rows[0] for rows in kept_positions(tried.beginning)]
    return any(len(head) < len(tried.prompts[0]) for heads in longest for head in heads)


def _fields(tried: _Tried) -> str:
    for field in uncompared_fields("method", tried.method):
        return f"{field} is not compared, so that methods which differ there share one compiled program"
    return ""


def _scores(tried: _Tried) -> str:
    """Run without compiling, where the parts of a method that check values can see them."""
    # An index that is used is what the next rule finds, which goes on from this cache.
    with jax.disable_jit(), contextlib.suppress(_IndexRead):
        try:
            tried.guarded.beginning  # noqa: B018
        except KvjaxError as e:
            return str(e)
    return ""


def _place(tried: _Tried) -> str:
    """Run without compiling, since programs of layers that are guarded would serve nothing else."""
    with jax.disable_jit():
        try:
            tried.guarded.feed(tried.guarded.beginning, [tokens[:1] for tokens in tried.following])
        except _IndexRead as e:
            return f"{_where(e)}`spec.index` is used when the layer is called, where it is None and compares as unequal"
    return ""


def _types(tried: _Tried) -> str:
    (_, before), (_, after) = tried.walk[:2]
    for i, states in enumerate(zip(before.layers, after.layers, strict=True)):
        if changed := changed_types(*states):
            return f"in layer {i} a step makes {changed}"
    return ""


def changed_types(before: Any, after: Any) -> str:
    """What a step made of a state that differs in shapes, dtypes or memory kinds; empty where nothing does."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "a state of other parts than the prompt did"
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jax.typeof(was) != jax.typeof(now):
            return f"{jax.typeof(now)} of an array {jax.typeof(was)} of the state"
    return ""


def _numbers(tried: _Tried) -> str:
    for t, (out, _) in enumerate(tried.walk[1:]):
        for row in range(3):
            if out is not None and not np.isfinite(out[row]).all():
                return f"the logits of row {row} are not finite in step {t + 1}"
    return ""


def _tokens(tried: _Tried) -> str | _Broken:
    for t, (_, cache) in enumerate(tried.walk):
        for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
            for row, heads in enumerate(np.asarray(layer.positions(state))):
                if wrong := wrong_positions(tried.method, heads, len(tried.prompts[row]) + t, bool(t)):
                    when = f"after step {t}" if t else "after the prompt"
                    return wrong._replace(what=f"in layer {i}, row {row}, {when}, {wrong.what}")
    return ""


def wrong_positions(method: KVMethod, heads: np.ndarray, length: int, decoded: bool) -> _Broken | None:
    """What is the matter with the positions [1|K S] of what heads hold, slot by slot, of a text of so many tokens."""
    for head, positions in enumerate(heads):
        real = positions[positions >= 0]
        if positions.min(initial=-1) < -1 or positions.max(initial=-1) >= length:
            return _Broken(
                f"head {head} says that it holds position {positions.max()} of a text of {length} tokens",
                "Take positions from `block.pos` (or `state.pos`) and do not count anew; an empty slot has -1.",
            )
        values, counts = np.unique(real, return_counts=True)
        if (counts > 1).any():
            return _Broken(
                f"head {head} holds position {values[counts > 1][0]} {counts.max()} times, which counts it as often",
                "Usual cause: a token that is chosen twice, as one of the window and by its score: take the window out "
                "of what is scored, or give it an infinite score.",
            )
        if not method.traits.evicts and len(real) < length:
            return _Broken(
                f"head {head} holds {len(real)} of {length} tokens, and `traits.evicts` is False",
                "Set `evicts=True` in the method's traits, or keep every token.",
            )
        if isinstance(method, Method) and method.decode and len(real) == len(positions):
            return _Broken(
                f"head {head} has no empty slot for the next token: the policy must let one go",
                "In `after_token`, give one slot of each full head the position -1: "
                "`jnp.where(full & (state.pos == oldest), -1, state.pos)`.",
            )
        if decoded and length - 1 not in positions:
            return _Broken(
                f"head {head} does not hold the newest token",
                "Usual cause: the newest token competes with the others before it was ever read: never let the slot "
                "with the greatest position go.",
            )
    return None


def _codecs(tried: _Tried) -> str:
    for t in (0, STEPS):
        _, cache = tried.walk[t]
        for i, (layer, state) in enumerate(_by_slots(cache)):
            for name, codec, stored in (("keys", layer.k, state.k), ("values", layer.v, state.v)):
                if wrong := _wrongly_held(tried, codec, stored, np.asarray(state.pos)):
                    return f"in layer {i}, after step {t}, of the {name}, {wrong}"
    return ""


def _by_slots(cache: Cache) -> list[tuple[MethodLayer, LayerState]]:
    """The layers of a kvjax.Method, with their states."""
    both = zip(cache.plan, cache.layers, strict=True)
    return [(layer, state) for layer, state in both if isinstance(layer, MethodLayer)]


def _wrongly_held(tried: _Tried, codec: Codec, stored: Any, pos: np.ndarray) -> str:
    """What is the matter with what a codec gives of the slots at positions [B 1|K S]."""
    every = codec.decode(stored)
    B, _, S = pos.shape
    want = (B, tried.model.config.kv_heads, S, tried.model.config.head_dim)
    if every.shape != want or not jnp.issubdtype(every.dtype, jnp.floating):
        return f"{type(codec).__name__}.decode gives {jax.typeof(every)}, and must give floats [B K S H], here {want}"
    idx = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), want[:3])
    rows = codec.gather(stored, idx)
    if rows.shape != want:
        return f"{type(codec).__name__}.rows gives {jax.typeof(rows)}, and must give [B K n H], here {want}"
    held = np.broadcast_to(pos >= 0, want[:3])
    every, rows = (np.asarray(x, np.float32)[held] for x in (every, rows))
    if every.size and not _near(tried, rows, every):
        return f"{type(codec).__name__}.rows gives other rows than {type(codec).__name__}.decode"
    return ""


def _likeness(tried: _Tried) -> str:
    """In the first layer, where keys and values are those of the full cache under any method."""
    full = dataclasses.replace(tried, method=method_of("full"))
    for t in (0, STEPS):
        first, wanted = (_by_slots(x.walk[t][1])[:1] for x in (tried, full))
        for (layer, state), (_, exact) in zip(first, wanted, strict=False):
            values = layer.v.decode(state.v), memory.unpack(exact.v)
            sides = {"values": values}
            if layer.method.positions == "true":
                sides["keys"] = layer.keys(state.k, state.pos), memory.unpack(exact.k)
            for name, (held, true) in sides.items():
                if wrong := _unlike(tried, np.asarray(state.pos), held, true):
                    return f"after step {t}, the {name} that the first layer holds {wrong}"
    return ""


def _unlike(tried: _Tried, pos: np.ndarray, held: Any, true: Any) -> str:
    """How rows held [B K S H] at positions [B 1|K S] differ from the true ones [B K S' H], the slot a position."""
    held, true = (np.asarray(x, np.float32) for x in (held, true))
    pos = np.broadcast_to(pos, held.shape[:3])
    wanted = np.take_along_axis(true, np.maximum(pos, 0)[..., None], 2)
    norms = np.linalg.norm(held, axis=-1) * np.linalg.norm(wanted, axis=-1)
    alike = (held * wanted).sum(-1) / np.maximum(norms, 1e-30)
    for row, prompt in enumerate(tried.prompts):
        there, fresh = pos[row] >= 0, pos[row] >= len(prompt)
        for what, which in (("", there), (" that were decoded", fresh)):
            if which.any() and alike[row][which].mean() < ALIKE:
                found = alike[row][which].mean()
                return f"are not those of the tokens at their positions in row {row}{what} (mean cosine {found:.2f})"
    return ""


def _rows(tried: _Tried) -> str | _Broken:
    beginnings = []
    for row in range(3):
        alone: list[tuple[np.ndarray | None, Cache]] = [(None, tried.read([row]))]
        beginnings.append(alone[0][1])
        for t in range(STEPS):
            alone.append(tried.feed(alone[-1][1], [tried.following[row][t : t + 1]]))
        for t, (mine, every) in enumerate(zip(alone, tried.walk, strict=True)):
            if wrong := _differs(tried, row, mine, every):
                return f"{wrong} when it is read alone than beside others, after step {t}"
    for row, beginning in enumerate(beginnings):
        if wrong := _fed_raggedly(tried, row, beginning):
            return _Broken(
                f"{wrong} when it is fed beside rows that are fed other numbers of tokens",
                "Usual cause: rows that get no token in a step are changed nevertheless: where `q_pos` is -1, keep "
                "what there was, as in `jnp.where(q_pos >= 0, new, old)`, and let what falls due when a row is full "
                "wait for that row's own next token.",
            )
    return ""


def _fed_raggedly(tried: _Tried, row: int, alone: Cache) -> str:
    """How a row goes on otherwise than alone once all rows were fed unequal numbers of tokens in one call.

    Alone it is fed as many tokens in a call: what a method makes of a chunk may differ from what it makes of steps.
    """
    for counts in FED:
        fed = [tokens[:count] for tokens, count in zip(tried.following, counts, strict=True)]
        mine, every = tried.feed(alone, fed[row : row + 1]), tried.feed(tried.beginning, fed)
        if wrong := _differs(tried, row, mine, every, counts[row] - 1):
            return wrong
        for t in range(STEPS - max(counts)):
            fed = [tokens[count + t : count + t + 1] for tokens, count in zip(tried.following, counts, strict=True)]
            mine, every = tried.feed(mine[1], fed[row : row + 1]), tried.feed(every[1], fed)
            if wrong := _differs(tried, row, mine, every):
                return f"{wrong}, {t + 1} steps later,"
    return ""


def _differs(tried: _Tried, row: int, mine: Any, every: Any, last: int = 0) -> str:
    """In what a row alone, (logits, cache), is not that row beside others; last: which of its tokens is the last."""
    for i, (here, there) in enumerate(zip(kept_positions(mine[1]), kept_positions(every[1]), strict=True)):
        if not all(map(np.array_equal, here[0], there[row])):
            return f"row {row} holds other tokens in layer {i}"
    if mine[0] is None:
        return ""
    alike = _near(tried, mine[0][0, last], every[0][row, last], OTHER_CODES)
    return "" if alike else f"row {row} has other logits"


def _near(tried: _Tried, x: np.ndarray, y: np.ndarray, times: int = 1) -> bool:
    return np.abs(x - y).max() <= times * NEAR[tried.model.dtype.itemsize] * np.abs(y).max()


def _exact(tried: _Tried) -> str:
    if not tried.method.traits.exact:
        return ""
    for row, prompt in enumerate(tried.prompts):
        want = np.asarray(logits(tried.model, [prompt + tried.following[row]]), np.float32)[0, len(prompt) :]
        got = np.concatenate([out[row] for out, _ in tried.walk[1:] if out is not None])
        if not _near(tried, got, want):
            return f"the logits of row {row} are not those of the full cache, and `traits.exact` is True"
    return ""


def _bytes(tried: _Tried) -> str:
    _, cache = tried.walk[-1]
    held = state_bytes(cache).total
    if not any(layer.needs.global_budget for layer in cache.plan):  # which are planned as if all prompts were alike
        sizes = {"capacity": cache.capacity, "batch": 3, "dtype": tried.model.dtype}
        planned = planned_bytes(tried.method, tried.model.config, len(tried.prompts[0]), **sizes)
        if held != planned.total:
            return f"{planned.total} bytes are planned for these prompts and {held} are held"
    if tried.method.traits.constant and state_bytes(tried.read([0, 1, 2], 4 * cache.capacity)).total != held:
        return "its bytes grow with the room for more tokens, and `traits.constant` is True"
    return ""


def _loops(tried: _Tried) -> str:
    if tried.model.dtype.itemsize < 4:
        return ""

    def tokens(loop: str) -> list[list[int]]:
        how = {"max_new_tokens": STEPS, "eos_ids": (), "loop": loop}
        return generate(tried.model, tried.prompts, tried.method, **how).tokens

    wanted, found = tokens("while"), tokens("layers")
    if wanted != found:
        return f"a compiled loop makes the tokens {wanted}, and step after step {found}: something is kept outside"
    return ""


RULES = (
    _Rule(
        "fields",
        "methods that compare equal are equal",
        "Take `compare=False` off that field, or the field out of the dataclass.",
        _fields,
    ),
    _Rule(
        "scores",
        "scores are numbers",
        "Usual cause: a division by zero, or a logarithm of it, at empty slots: mask them before, as in "
        "`jnp.where(block.pos >= 0, x, 1)`.",
        _scores,
    ),
    _Rule(
        "place",
        "what depends on a layer's place is known when the method is bound",
        "Give the component a method `at(self, spec)`, which is called for each layer before anything is run, and "
        "returns the component of that layer: keep what follows from `spec.index` in a field of it.",
        _place,
    ),
    _Rule(
        "shapes",
        "a step keeps shapes, dtypes and memory kinds of the state",
        "Usual cause: a step that concatenates or lets a dtype widen: write into slots (`x.at[...].set(...)`) and cast "
        "the result (`.astype(x.dtype)`).",
        _types,
    ),
    _Rule(
        "finite",
        "logits are finite",
        "Usual cause: a scale of zero that is divided by, or empty slots that are read: `jnp.maximum(scale, 1e-6)`, "
        "and mask empty slots: `block.pos >= 0`.",
        _numbers,
    ),
    _Rule(
        "positions",
        "a head holds tokens of the text, each once, and the newest one",
        "",  # each of its findings has its own
        _tokens,
    ),
    _Rule(
        "codecs",
        "a codec gives the rows that it decodes",
        "`decode(stored)` gives floats [B K S H] of all slots, and `rows(stored, idx)` the same numbers at the slots "
        "`idx` [B K n]: `jnp.take_along_axis(self.decode(stored), idx[..., None], 2)`.",
        _codecs,
    ),
    _Rule(
        "contents",
        "what is held is like the keys and values of the tokens at these positions",
        "Usual cause: rows and positions that are moved differently, or an `append` that drops what is new: gather "
        "keys, values and positions by the same indices, and return the updated arrays.",
        _likeness,
    ),
    _Rule(
        "independence",
        "a sequence does not depend on its neighbours, on padding, or on how many tokens these are fed",
        "Usual cause: something is computed over the whole batch or over padding: mask empty slots "
        "(`block.pos >= 0`) and compute per sequence and head, with no mean, maximum or sort over axis 0.",
        _rows,
    ),
    _Rule(
        "exact",
        "logits are those of the full cache where `traits.exact` says so",
        "Set `exact=False` in the method's traits unless it holds and reads every token unchanged.",
        _exact,
    ),
    _Rule(
        "bytes",
        "bytes are the planned ones",
        "Usual cause: arrays whose sizes follow from something other than the layer's `slots(prompt, room)` and its "
        "`LayerSpec`; where they grow with the room, set `constant=False` in the traits.",
        _bytes,
    ),
    _Rule(
        "loops",
        "every decode loop makes the same tokens",
        "Usual cause: a number that changes and lies outside the state, such as an attribute, a global or a counter in "
        "Python: keep it in an array of the state.",
        _loops,
    ),
)
"""The rules in the order in which they are tried: a later one may rely on the earlier ones."""


@dataclasses.dataclass(frozen=True)
class RuleReport:
    """A rule that was tried and kept: its short name, what it says, and the seconds that it took."""

    name: str
    says: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check_method` tried: prints as a small table."""

    method: str
    rules: tuple[RuleReport, ...]
    seconds: float  # of everything, with the reading of the prompts

    def __repr__(self) -> str:
        return f"{self.method} keeps all {len(self.rules)} rules of methods ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        width = max(len(rule.name) for rule in self.rules)
        lines = [f"  {rule.name:{width}}  {rule.seconds:5.1f} s  {rule.says}" for rule in self.rules]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        rows = [(rule.name, rule.says, rule.seconds) for rule in self.rules]
        return display.table(repr(self), ("rule", "what it says", "seconds"), rows)


def check_method(
    method: str | KVMethod, model: Model, *, length: int = 90, seed: int = 0, progress: bool | None = None
) -> CheckReport:
    """Tries a method on random prompts of a small model against the rules that all methods keep.

    What breaks them gives wrong answers without a word. `print` of the result lists the rules.

    Args:
      method: a value, or its string.
      model: any, best one of two layers (`kvjax.testing.toy_model`); one in float32 for the rule `loops`, since
        rounding in 16 bits may tell two sound loops apart.
      length: tokens of the longest prompt; it must be beyond the method's budget for anything to leave.
      seed: of the prompts.
      progress: whether a line says which rule is being tried; by default on a terminal and in a notebook.

    Returns:
      The rules, each with what it says and the seconds that it took.

    Raises:
      BrokenRule: a KvjaxError that names the first rule that the method breaks, and the usual cause.
      KvjaxError: the method's own code raises something, or nothing can be said, since the method keeps all tokens of
        these prompts.
    """
    method = method_of(method)
    arguments.integer("length", length, 3)
    rng = np.random.default_rng(arguments.integer("seed", seed, 0))

    def ids(count: int) -> list[int]:
        """Different ones while there are any: scores of a token that comes twice tie but for rounding."""
        rounds = -(-count // model.config.vocab_size)
        return np.concatenate([rng.permutation(model.config.vocab_size) for _ in range(rounds)])[:count].tolist()

    lengths = (length, 1, 2 * length // 3)
    texts = [ids(n + STEPS) for n in lengths]
    tried = _Tried(model, method, [text[:-STEPS] for text in texts], [text[-STEPS:] for text in texts])
    name, began = name_of(method), time.perf_counter()
    with display.StatusLine(progress) as status, _naming_failures(name):
        status.say(f"{name}: reading prompts of {', '.join(map(str, lengths))} tokens")
        if method.traits.evicts and not _any_left(tried):
            raise KvjaxError(
                f"{name} keeps all {length} tokens of the longest prompt, so nothing can be said of what "
                f"leaves; check it with a greater `length`, or a smaller budget{_smaller(name, length)}"
            )
        kept = tuple(_try(rule, i, tried, name, status) for i, rule in enumerate(RULES))
    return CheckReport(name, kept, time.perf_counter() - began)


def _try(rule: _Rule, index: int, tried: _Tried, name: str, status: display.StatusLine) -> RuleReport:
    """Raises BrokenRule where the method breaks this rule."""
    status.say(f"{name}: rule {index + 1} of {len(RULES)}, {rule.name}: {rule.says}")
    start = time.perf_counter()
    if broken := rule.find(tried):
        what, mend = broken if isinstance(broken, _Broken) else (broken, rule.mend)
        raise BrokenRule(f"{name} breaks a rule of methods: {rule.name}: {what}. {mend}", rule.name)
    return RuleReport(rule.name, rule.says, time.perf_counter() - start)


@contextlib.contextmanager
def _naming_failures(name: str) -> Iterator[None]:
    """Makes one line of what the method's own code raises, with the line of its file; the cause has the traceback."""
    try:
        yield
    except KvjaxError:
        raise
    except Exception as e:
        said = (str(e).splitlines() or [""])[0]
        raise KvjaxError(f"{name} fails: {_where(e)}{type(e).__name__}: {said}") from e


def _where(error: Exception) -> str:
    """The last line of the user's own files that an error has passed, as the beginning of a message."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno}: " if frames else ""


def _is_users(file: str) -> bool:
    """Whether a file is neither kvjax's nor Python's nor an installed package's."""
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return os.path.isfile(file) and not file.startswith((os.path.dirname(__file__), *installed))


def _smaller(name: str, length: int) -> str:
    """An example of a smaller budget for a method that a string makes."""
    components = list(parse_parts(name))
    for i, part in enumerate(split_methods(name)):
        if sizes := [size for size in load_all()[part.name].size_parameters if isinstance(part.values.get(size), int)]:
            smaller = dict.fromkeys(sizes, max(length // 3 // len(sizes), 1))
            components[i] = part._replace(values=components[i].values | smaller)
            return f", such as {format_methods(components)}"
    return ""
