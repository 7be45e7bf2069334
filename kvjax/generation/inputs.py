"""From prompts to left-aligned, padded token arrays."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.protocol import Cache
from kvjax.core.mesh import check_divides, named_sharding
from kvjax.core.types import Array
from kvjax.errors import KvjaxError, TracedCall
from kvjax.models.model import Model

Prompts = str | Sequence[str | Sequence[int] | np.ndarray] | np.ndarray

BUCKET_TOKENS = 64  # lengths are rounded up to a multiple of this, so that similar prompts share one compiled program


def round_up(n: int, to: int = BUCKET_TOKENS) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-n // to) * to


def place(model: Model, x: np.ndarray, axes: str) -> Array:
    """Places an input array on the model's mesh, if it has one; raises KvjaxError for sequences that do not divide."""
    if model.mesh is None:
        return jnp.asarray(x)
    for letter, size in zip(axes.split(), x.shape, strict=False):
        check_divides(letter, size, model.mesh, "give a number of sequences that does, or another mesh")
    return jax.device_put(x, named_sharding(axes, model.mesh))


def token_ids(model: Model, prompts: Prompts, *, begins: bool | Sequence[bool]) -> list[list[int]]:
    """Encodes texts, or checks lists of ids, which stay as they are: lists of ids.

    Args:
      model: its tokenizer encodes the texts.
      prompts: texts, or lists of ids.
      begins: whether a text begins a sequence, and gets the special tokens that stand before one, or continues one, and
        gets none; for all of them, or for each (`are_empty`). None gets the tokens that close a text.

    Raises:
      KvjaxError: an empty batch or prompt, ids outside the vocabulary, or prompts of another type.
      TracedCall: within a JAX transformation.
    """
    if not isinstance(model, Model):
        raise KvjaxError(f"the model comes first, as kvjax.load gives it; got {model!r:.80}")
    arrays = prompts if isinstance(prompts, (list, tuple, np.ndarray, jax.Array)) else ()
    leaves = [model.params["embedding"], *jax.tree.leaves(arrays), jnp.asarray(np.int32(0))]
    if any(isinstance(x, Tracer) for x in leaves):  # the last one is traced where results alone are hidden
        raise TracedCall(
            "this call reads and measures values, and a JAX transformation (jit, grad, vmap, scan) hides them: use the "
            "functions of kvjax.functional there, logits, prefill, extend and decode"
        )
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping):
        raise KvjaxError(
            f'prompts are texts or lists of ids, got a mapping with {list(prompts)}; give its ["input_ids"]'
        )
    if not hasattr(prompts, "__len__") or isinstance(prompts, Set) or getattr(prompts, "ndim", 1) == 0:
        raise KvjaxError(f"prompts are texts or lists of ids, in a list or an array, got {prompts!r:.80}")
    if len(prompts) == 0:
        raise KvjaxError("no prompts were given; pass a list with at least one text or list of token ids")
    # Whole numbers of Python, NumPy or JAX.
    if all(
        isinstance(x, numbers.Integral)
        or (getattr(x, "ndim", 1) == 0 and np.issubdtype(np.asarray(x).dtype, np.integer))
        for x in prompts
    ):
        shown = ", ".join(map(str, list(prompts)[:3])) + (", .." if len(prompts) > 3 else "")
        raise KvjaxError(f"[{shown}] looks like the ids of one prompt; give a list of prompts: [[{shown}]]")
    ids = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            tokenizer = model.text_tokenizer()
            # Callers compare the numbers of texts and sequences later; one sequence may be asked several questions.
            is_first = begins if isinstance(begins, bool) else begins[min(i, len(begins) - 1)]
            ids.append(tokenizer.encode_prompt(prompt) if is_first else tokenizer.encode_continuation(prompt))
            if not ids[-1] and not is_first:
                raise KvjaxError(
                    f"text {i}, {prompt!r:.60}, has no tokens to continue with; give a text or ids with at least one"
                )
            continue
        x = np.asarray(prompt)
        if x.size and (x.ndim != 1 or not np.issubdtype(x.dtype, np.integer)):
            raise KvjaxError(f"a prompt is a text or a flat list of integer ids, got shape {x.shape} of {x.dtype}")
        ids.append(x.ravel().tolist())
    for i, prompt in enumerate(ids):
        if not prompt:
            raise KvjaxError(f"prompt {i} is empty; a prompt needs at least one token")
        bad = next((t for t in prompt if not 0 <= t < model.config.vocab_size), None)
        if bad is not None:
            raise KvjaxError(f"prompt {i} has token id {bad}, outside the vocabulary 0..{model.config.vocab_size - 1}")
    return ids


def are_empty(cache: Cache) -> list[bool]:
    """Whether each sequence of a cache has no tokens yet, as after a crop to 0: a text after it begins the sequence."""
    cache.check_usable()
    return (np.asarray(jax.device_get(cache.length)) == 0).tolist()


def pad(ids: Sequence[Sequence[int]], width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Pads lists of ids with 0 on the right: tokens i32[B T], lengths i32[B]."""
    # In NumPy, as JAX would compile a program for each shape.
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    tokens = np.zeros((len(ids), width or round_up(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths
