"""The values that users give to a call, checked once: texts and ids, which become padded arrays, and caches."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.core.mesh import check_divides, is_shared, named_sharding, put, to_numpy
from kvjax.core.types import Array
from kvjax.engine.forward import BoundLayers
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError, OtherWeights, TracedCall
from kvjax.models.model import Model
from kvjax.processes import require_agreement
from kvjax.registry.method_hash import method_hash
from kvjax.registry.strings import method_of, name_of

Prompts = str | Sequence[str | Sequence[int] | np.ndarray] | np.ndarray

BUCKET_TOKENS = 64  # lengths are rounded up to a multiple of this, so that similar prompts share one compiled program


def round_up(n: int, to: int = BUCKET_TOKENS) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-n // to) * to


def place(model: Model, x: np.ndarray, axes: str) -> Array:
    """Places an input array on the model's mesh, if it has one; raises KvjaxError for sequences that do not divide."""
    mesh = model.auto_mesh
    if mesh is None:
        return jnp.asarray(x)
    for letter, size in zip(axes.split(), x.shape, strict=False):
        check_divides(letter, size, mesh, "give a number of sequences that does, or another mesh")
    return put(np.asarray(x), named_sharding(axes, mesh))


def require_same_call(model: Model, plan: BoundLayers, ids: Sequence[Sequence[int]], **what: Any) -> None:
    """Raises KvjaxError, in all processes that share the model's mesh, unless they are about to compute the same.

    Each of them would otherwise wait for others that never come. `what` is further values by name.
    """
    if not is_shared(model.mesh):
        return
    assert model.mesh is not None
    names = dict.fromkeys(repr(getattr(layer, "method", layer)) for layer in plan)
    method = f"{' and '.join(names)} ({method_hash(plan)})"
    devices = f"{dict(model.mesh.shape)} of devices {[device.id for device in model.mesh.devices.flat]}"
    # The fingerprint is computed by all of them together, and so comes after what that needs.
    model_text = f"{model.name or 'model'} in {model.dtype}, {model.config}"
    require_agreement(mesh=devices, model=model_text, method=method, token_ids=ids, **what)
    require_agreement(weights=model.fingerprint)


def token_ids(
    model: Model,
    prompts: Prompts,
    *,
    begins: bool | Sequence[bool],
    count: int | None = None,
    may_be_empty: bool = False,
) -> list[list[int]]:
    """Encodes texts, or checks lists of ids, which stay as they are: lists of ids.

    Args:
      model: its tokenizer encodes the texts.
      prompts: texts, or lists of ids.
      begins: whether a text begins a sequence, and gets the special tokens that stand before one, or continues one, and
        gets none; for all of them, or for each (`are_empty`). None gets the tokens that close a text.
      count: number of sequences, one prompt for each; None for any number of prompts.
      may_be_empty: whether prompts may be empty, as long as one is not.

    Raises:
      KvjaxError: an empty batch or prompt, ids outside the vocabulary, or prompts of another type.
      TracedCall: within a JAX transformation.
    """
    embedding = model.params["embedding"] if isinstance(model, Model) else None
    arrays = prompts if isinstance(prompts, (list, tuple, np.ndarray, jax.Array)) else ()
    leaves = [embedding, *jax.tree.leaves(arrays), jnp.asarray(np.int32(0))]
    if any(isinstance(x, Tracer) for x in leaves):  # the last one is traced where results alone are hidden
        raise TracedCall(
            "this call reads and measures values, and a JAX transformation (jit, grad, vmap, scan) hides them: use the "
            "functions of kvjax.functional there, logits, prefill, extend and decode"
        )
    prompts = [prompts] if isinstance(prompts, str) else prompts
    problem = f"the model comes first, as kvjax.load gives it; got {model!r:.80}"
    if isinstance(model, Model):
        problem = _find_batch_problem(prompts, count)
    ids = []
    for i, prompt in enumerate(prompts if problem is None else ()):
        # Callers compare the numbers of texts and sequences later; one sequence may be asked several questions.
        is_first = begins if isinstance(begins, bool) else begins[min(i, len(begins) - 1)]
        empty = f"prompt {i} is empty; a prompt needs at least one token"
        if isinstance(prompt, str) and is_first and (prompt or not may_be_empty):
            prompt = model.text_tokenizer().encode_prompt(prompt)
        elif isinstance(prompt, str):
            empty = f"text {i}, {prompt!r:.60}, has no tokens to continue with; give a text or ids with at least one"
            prompt = model.text_tokenizer().encode_continuation(prompt)
        x = np.asarray(prompt)
        if not x.size:
            problem = None if may_be_empty and x.ndim == 1 else empty
        elif x.ndim != 1 or not np.issubdtype(x.dtype, np.integer):
            problem = f"a prompt is a text or a flat list of integer ids, got shape {x.shape} of {x.dtype}"
        elif (unknown := x[(x < 0) | (x >= model.config.vocab_size)]).size:
            last = model.config.vocab_size - 1
            problem = f"prompt {i} has token id {unknown[0]}, outside the vocabulary 0..{last}"
        if problem is not None:
            break
        ids.append(x.tolist())
    if problem is None and not any(ids):
        problem = f"all {len(ids)} texts are empty, and there is nothing to feed; give one of them a token at least"
    if problem is not None:
        raise KvjaxError(problem)
    return ids


def _find_batch_problem(prompts: Any, count: int | None) -> str | None:
    """Says why a value is no batch of `count` prompts, or of any number; None for one that may be."""
    if isinstance(prompts, Mapping):
        return f'prompts are texts or lists of ids, got a mapping with {list(prompts)}; give its ["input_ids"]'
    if not hasattr(prompts, "__len__") or isinstance(prompts, Set) or getattr(prompts, "ndim", 1) == 0:
        return f"prompts are texts or lists of ids, in a list or an array, got {prompts!r:.80}"
    if len(prompts) == 0:
        return "no prompts were given; pass a list with at least one text or list of token ids"
    # Whole numbers of Python, NumPy or JAX.
    if all(
        isinstance(x, numbers.Integral)
        or (getattr(x, "ndim", 1) == 0 and np.issubdtype(np.asarray(x).dtype, np.integer))
        for x in prompts
    ):
        shown = ", ".join(map(str, list(prompts)[:3])) + (", .." if len(prompts) > 3 else "")
        return f"[{shown}] looks like the ids of one prompt; give a list of prompts: [[{shown}]]"
    if count not in (None, len(prompts)):
        return f"{len(prompts)} texts were given for {count} sequences; give one per sequence"
    return None


def check_cache(model: Model, cache: Cache, method: str | KVMethod | None = None, capacity: int | None = None) -> Cache:
    """Returns the cache of this model.

    Args:
      model: of the call.
      cache: the value to check.
      method: that the call names, if it names one.
      capacity: that the call names, which a cache has already.

    Raises:
      OtherWeights: a cache of another model, or of `kvjax.functional`, which names none.
      KvjaxError: a cache of another method, or no cache; a capacity.
    """
    error, problem = KvjaxError, None
    if not isinstance(cache, Cache):
        problem = f"a cache is what kvjax.prefill returns, got {type(cache).__name__}"
    else:
        cache.check_usable()
        others = [
            (
                cache.config not in model.config.variants,
                "this cache was filled by another model; prefill the prompt with this one",
            ),
            (
                cache.dtype != model.dtype.name,
                f"this cache was filled by a model in {cache.dtype} and this one is in {model.dtype}; prefill the "
                f"prompt with this one, or load it with dtype={cache.dtype!r}",
            ),
            (
                not cache.weights,
                "this cache does not say which weights filled it, as kvjax.functional is given parameters and no "
                "model; if they are those of this model, say so: cache = dataclasses.replace(cache, "
                "weights=model.fingerprint)",
            ),
            (
                cache.weights != model.fingerprint,
                "this cache was filled by a model of equal configuration and other weights; prefill the prompt with "
                "this one, or use the model that filled it",
            ),
        ]
        problem = next((text for is_wrong, text in others if is_wrong), None)
        if problem is not None:
            error = OtherWeights
        elif method is not None and bind(method, cache.config) != cache.plan:
            problem = (
                f"this cache was filled under another method than {name_of(method_of(method))}; go on without naming a "
                "method, or prefill the prompt under this one"
            )
        elif capacity is not None:
            problem = "capacity is the given cache's; leave it out, or prefill with a larger one"
    if problem is not None:
        raise error(problem)
    return cache


def check_room(cache: Cache, num_tokens: int) -> int:
    """Returns the tokens of a cache's longest sequence; raises KvjaxError unless `num_tokens` more fit in each."""
    used = int(to_numpy(cache.length).max(initial=0))
    need = used + num_tokens
    if need > cache.capacity:
        raise KvjaxError(
            f"the cache has room for {cache.capacity} tokens per sequence and holds {used}; {num_tokens} more do not "
            f"fit: prefill with capacity={need} or more, or read with that, or with a larger headroom="
        )
    return used


def are_empty(cache: Cache) -> list[bool]:
    """Whether each sequence of a cache has no tokens yet, as after a crop to 0: a text after it begins the sequence."""
    cache.check_usable()
    return (to_numpy(cache.length) == 0).tolist()


def pad(ids: Sequence[Sequence[int]], width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Pads lists of ids with 0 on the right: tokens i32[B T], lengths i32[B]."""
    # In NumPy, as JAX would compile a program for each shape.
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    tokens = np.zeros((len(ids), width or round_up(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths
