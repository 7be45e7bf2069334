"""The rules that every method keeps, tried on one of your own: what breaks them gives wrong answers without a word."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from kvjax.cache.accounting import kept_positions, state_bytes
from kvjax.cache.contract import Cache, KVMethod
from kvjax.core import arguments
from kvjax.core.types import KvjaxError
from kvjax.methods.strings import method_of, name_of
from kvjax.models.model import Model
from kvjax.run.calls import extend, logits, prefill
from kvjax.run.generate import generate
from kvjax.run.planned import planned_bytes

STEPS = 6  # tokens that are decoded one by one
NEAR = {4: 1e-3, 2: 5e-2}
"""What logits of two programs may differ by, as a share of the greatest, by the bytes of the model's numbers."""


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

    def step(self, rows: list[int], cache: Cache, step: int) -> tuple[np.ndarray, Cache]:
        """One more token in each of these rows: (logits [B V], the cache)."""
        out, cache = extend(self.model, [[self.following[row][step]] for row in rows], cache)
        return np.asarray(out[:, 0], np.float32), cache

    @functools.cached_property
    def walk(self) -> list[tuple[np.ndarray | None, Cache]]:
        """(logits, cache) after the prompts, and after each step of all rows together."""
        found: list[tuple[np.ndarray | None, Cache]] = [(None, self.read([0, 1, 2]))]
        for t in range(STEPS):
            found.append(self.step([0, 1, 2], found[-1][1], t))
        return found


def check_method(method: str | KVMethod, model: Model, *, length: int = 90, seed: int = 0) -> None:
    """Tries a method on random prompts of a small model, and raises KvjaxError with the first rule that it breaks.

    model: any, best one of two layers (`kvjax.testing.toy_model`). length: tokens of the longest prompt; it must be
    beyond the method's budget for anything to leave. The rules: scores are numbers; a head holds each token once, no
    token from beyond the text, the newest one always, and all of them where the method's traits say that it evicts
    none; a row does not depend on its neighbours, nor on padding; a step keeps shapes, dtypes and places; logits are
    finite, and those of the full cache where the traits say so; bytes are the planned ones; every decode loop makes
    the same tokens.
    """
    method = method_of(method)
    arguments.integer("length", length, 3)
    rng = np.random.default_rng(arguments.integer("seed", seed, 0))

    def ids(count: int) -> list[int]:
        return rng.integers(0, model.config.vocab_size, count).tolist()

    tried = _Tried(model, method, [ids(length), ids(1), ids(2 * length // 3)], [ids(STEPS) for _ in range(3)])
    if method.traits.evicts and not _any_left(tried):
        raise KvjaxError(
            f"{name_of(method)} keeps all {length} tokens of the longest prompt, so nothing can be said of what "
            "leaves; check it with a greater `length`, or a smaller budget"
        )
    for rule in (_scores, _types, _numbers, _tokens, _rows, _exact, _bytes, _loops):
        if broken := rule(tried):
            raise KvjaxError(f"{name_of(method)} breaks a rule of methods: {broken}")


def _any_left(tried: _Tried) -> bool:
    """Whether any head has lost a token of the longest prompt."""
    _, cache = tried.walk[0]
    longest = [rows[0] for rows in kept_positions(cache)]
    return any(len(head) < len(tried.prompts[0]) for heads in longest for head in heads)


def _scores(tried: _Tried) -> str:
    """Run without compiling, where the parts of a method that check values can see them."""
    with jax.disable_jit():
        try:
            tried.read([0, 1, 2])
        except KvjaxError as e:
            return str(e)
    return ""


def _types(tried: _Tried) -> str:
    (_, before), (_, after) = tried.walk[:2]
    for i, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        if jax.tree.structure(old) != jax.tree.structure(new):
            return f"in layer {i} a step makes a state of other parts than the prompt did"
        for was, now in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            if jax.typeof(was) != jax.typeof(now):
                return f"in layer {i} a step makes {jax.typeof(now)} of an array {jax.typeof(was)} of the state"
    return ""


def _numbers(tried: _Tried) -> str:
    for t, (out, _) in enumerate(tried.walk[1:]):
        for row in range(3):
            if not np.isfinite(out[row]).all():
                return f"the logits of row {row} are not finite in step {t + 1}"
    return ""


def _tokens(tried: _Tried) -> str:
    for t, (_, cache) in enumerate(tried.walk):
        for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
            for row, heads in enumerate(np.asarray(layer.positions(state))):
                if wrong := _wrong(tried.method, heads, len(tried.prompts[row]) + t, bool(t)):
                    when = f"after step {t}" if t else "after the prompt"
                    return f"in layer {i}, row {row}, {when}, {wrong}"
    return ""


def _wrong(method: KVMethod, heads: np.ndarray, length: int, decoded: bool) -> str:
    """What is the matter with the positions [1|K S] of what heads hold, slot by slot, of a text of so many tokens."""
    for head, positions in enumerate(heads):
        real = positions[positions >= 0]
        if positions.min(initial=-1) < -1 or positions.max(initial=-1) >= length:
            return f"head {head} says that it holds position {positions.max()} of a text of {length} tokens"
        values, counts = np.unique(real, return_counts=True)
        if (counts > 1).any():
            return f"head {head} holds position {values[counts > 1][0]} {counts.max()} times, which counts it as often"
        if not method.traits.evicts and len(real) < length:
            return f"head {head} holds {len(real)} of {length} tokens, and `traits.evicts` is False"
        if getattr(method, "decode", None) and len(real) == len(positions):  # only a kvjax.Method has policies
            return f"head {head} has no empty slot for the next token: the policy must let one go"
    if decoded and not (heads == length - 1).any():
        return "no head holds the newest token"
    return ""


def _rows(tried: _Tried) -> str:
    (_, together), (want, together_later) = tried.walk[:2]
    for row in (0, 2):
        alone = tried.read([row])
        out, alone_later = tried.step([row], alone, 0)
        for mine, every in ((alone, together), (alone_later, together_later)):
            for i, (here, there) in enumerate(zip(kept_positions(mine), kept_positions(every), strict=True)):
                if not all(map(np.array_equal, here[0], there[row])):
                    return f"row {row} holds other tokens in layer {i} when it is read alone than beside others"
        if not _near(tried, out[0], want[row]):
            return f"row {row} has other logits when it is read alone than beside others"
    return ""


def _near(tried: _Tried, x: np.ndarray, y: np.ndarray) -> bool:
    return np.abs(x - y).max() <= NEAR[tried.model.dtype.itemsize] * np.abs(y).max()


def _exact(tried: _Tried) -> str:
    if not tried.method.traits.exact:
        return ""
    for row, prompt in enumerate(tried.prompts):
        want = np.asarray(logits(tried.model, [prompt + tried.following[row]]), np.float32)[0, len(prompt) :]
        got = np.stack([out[row] for out, _ in tried.walk[1:]])
        if not _near(tried, got, want):
            return f"the logits of row {row} are not those of the full cache, and `traits.exact` is True"
    return ""


def _bytes(tried: _Tried) -> str:
    _, cache = tried.walk[-1]
    held = state_bytes(cache)
    if not any(layer.needs.all_layers for layer in cache.plan):  # which are planned as if all prompts were alike
        sizes = {"capacity": cache.capacity, "batch": 3, "dtype": tried.model.dtype}
        planned = planned_bytes(tried.method, tried.model.config, len(tried.prompts[0]), **sizes)
        planned["device"] += cache.length.nbytes  # of the cache itself, and of no method
        if held != planned:
            return f"{planned} bytes are planned for these prompts and {held} are held"
    if tried.method.traits.constant and state_bytes(tried.read([0, 1, 2], 4 * cache.capacity)) != held:
        return "its bytes grow with the room for more tokens, and `traits.constant` is True"
    return ""


def _loops(tried: _Tried) -> str:
    def tokens(loop: str) -> list[list[int]]:
        how = {"max_new_tokens": STEPS, "eos_ids": (), "loop": loop}
        return generate(tried.model, tried.prompts, tried.method, **how).tokens

    wanted, found = tokens("while"), tokens("layers")
    if wanted != found:
        return f"a compiled loop makes the tokens {wanted}, and step after step {found}: something is kept outside"
    return ""
