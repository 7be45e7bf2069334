"""What a call of `attend` gives, checked and brought into the engine's form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.protocol import LayerSpec
from kvjax.core.mesh import check_divides, to_numpy
from kvjax.core.types import Array
from kvjax.custom_decoder.layer_cache import GIVES, WITHOUT_MESH, Empty, ExactPrompt, LayerCache
from kvjax.engine.layer_prompt import LayerInputs
from kvjax.engine.positions import token_positions
from kvjax.errors import KvjaxError

LAYOUTS = "BTNH", "BNTH"
"""Orders of the axes of queries: sequences, tokens, heads, channels; keys and values have K in place of N."""


def arrange(q: Array, k: Array, v: Array, layout: str, spec: LayerSpec) -> tuple[Array, Array, Array]:
    """Returns q [B K G T H], k [B K T H] and v [B K T V]; raises KvjaxError where they contradict the spec."""
    if layout not in LAYOUTS:
        raise KvjaxError(f"layout is one of {', '.join(map(repr, LAYOUTS))}, got {layout!r:.60}")
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    K, G = spec.num_kv_heads, spec.num_groups
    sizes = {"q": (K * G, spec.head_dim), "k": (K, spec.head_dim), "v": (K, spec.value_dim)}

    def fits(layout: str) -> bool:
        if not q.ndim == k.ndim == v.ndim == 4:
            return False
        heads, tokens = layout.index("N"), layout.index("T")
        are_alike = len({(x.shape[0], x.shape[tokens]) for x in (q, k, v)}) == 1
        return are_alike and [(x.shape[heads], x.shape[3]) for x in (q, k, v)] == [*sizes.values()]

    if not fits(layout):
        (other,) = {*LAYOUTS} - {layout}
        axes = "B T {} {}" if layout == "BTNH" else "B {} T {}"
        expected = ", ".join(f"{name} [{axes.format(*size)}]" for name, size in sizes.items())
        remedy = f"they fit the layout {other!r}: say layout={other!r}" if fits(other) else "correct specs_of, or them"
        raise KvjaxError(
            f"q {q.shape}, k {k.shape} and v {v.shape} contradict this layer's spec, by which they are {expected} in "
            f"the layout {layout!r}; {remedy}"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k, v)) or k.dtype != v.dtype:
        raise KvjaxError(f"q, k and v are floats, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.size == 0:
        raise KvjaxError(f"q has no token, its shape is {q.shape}; give one token at least")
    if layout == "BTNH":
        q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))
    return q.reshape(len(q), K, G, *q.shape[2:]), k, v


def check_call(cache: LayerCache, q: Array, k: Array, commit: int, has_cross_layer: bool) -> None:
    """Raises KvjaxError for a call that contradicts what the cache holds, or lacks what its method needs."""
    state, mesh, needs = cache.state, cache.layer.mesh, cache.layer.bound.needs
    B, T, is_step = q.shape[0], q.shape[3], not isinstance(state, Empty | ExactPrompt)
    num_sequences = B if cache.length is None else cache.length.shape[0]
    if num_sequences != B:
        raise KvjaxError(f"the cache holds {num_sequences} sequences and q has {B}; give one row for each")
    if cache.dtype not in ("", k.dtype.name):
        raise KvjaxError(f"the prompt's keys are {cache.dtype} and these are {k.dtype.name}; keep one dtype")
    if isinstance(state, ExactPrompt) and state.start is None:
        raise KvjaxError("this method compresses once all layers have seen the prompt: cache = finish(cache) after it")
    if commit < T and not is_step:
        raise KvjaxError("a prompt has no drafts: leave commit out, or give the drafts in a step after the prompt")
    if needs.draft_tokens and is_step and commit != 0 and (commit, T) != (1, 1 + needs.draft_tokens):
        raise KvjaxError(f"this method takes {GIVES['drafts'].call}; got {T} tokens with commit={commit}")
    if needs.cross_layer and not has_cross_layer:
        raise KvjaxError(f"this method hands a value from layer to layer: {GIVES['cross_layer'].call}")
    if mesh is not None:
        in_use = jax.sharding.get_abstract_mesh()
        if not in_use.empty and in_use.shape != mesh.shape:
            raise KvjaxError(
                f"attach was given the mesh {dict(mesh.shape)} and this program runs on {dict(in_use.shape)}; use one "
                f"mesh for both, or {WITHOUT_MESH}"
            )
        check_divides("B", B, mesh, f"give a number of sequences that does, or {WITHOUT_MESH}")


def read_positions(positions: Array | np.ndarray, B: int, T: int) -> tuple[Array, bool]:
    """Returns positions as i32[B T], and whether padding is known to stand on the right alone."""
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
    if positions.shape != (B, T) or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise KvjaxError(
            f"positions are integers [B T], here {(B, T)}, -1 for padding, got {positions.dtype} of shape "
            f"{positions.shape}; jnp.broadcast_to(positions, (B, T)) repeats one row for all sequences"
        )
    if isinstance(positions, Tracer):
        return positions.astype(jnp.int32), False
    is_padding = to_numpy(positions) < 0
    return jnp.asarray(positions, jnp.int32), bool((is_padding[:, 1:] >= is_padding[:, :-1]).all())


def read_observed(cache: LayerCache, hidden: Any, output_projection: Any, B: int, T: int) -> tuple[Any, Any]:
    """Returns hidden vectors [B T D] and the output projection [1 K G V D] where the method reads them, else None."""
    needs, spec = cache.layer.bound.needs, cache.layer.spec
    is_prompt = isinstance(cache.state, Empty | ExactPrompt) and not needs.prompt_chunk
    needs_hidden = needs.hidden_states if is_prompt else needs.decoded_hidden_states
    needs_projection = is_prompt and needs.output_projection
    x, w = None, None
    if needs_hidden:
        if hidden is None:
            raise KvjaxError(f"this method needs {GIVES['hidden'].call}")
        x = jnp.asarray(hidden)
        if x.ndim != 3 or x.shape[:2] != (B, T):
            raise KvjaxError(f"hidden has shape [B T D], here {(B, T, 'D')}, got {x.shape}")
    if needs_projection:
        if output_projection is None:
            raise KvjaxError(f"this method needs {GIVES['output_projection'].call}")
        w, K, G, V = jnp.asarray(output_projection), spec.num_kv_heads, spec.num_groups, spec.value_dim
        if w.ndim < 2 or w.shape[:-1] not in ((K * G, V), (K, G, V), (K * G * V,)):
            raise KvjaxError(f"output_projection has shape [N V D], here {(K * G, V, 'D')}, got {w.shape}")
        w = w.reshape(1, K, G, V, w.shape[-1])
    return x, w


def read_sinks(sinks: Any, K: int, G: int) -> Array | None:
    """Returns the sinks' logits [1 K G]."""
    if sinks is None:
        return None
    logits = jnp.asarray(sinks)
    if logits.size != K * G:
        raise KvjaxError(f"sinks have one logit for each of the {K * G} query heads, got shape {logits.shape}")
    return logits.reshape(1, K, G)


def find_wrong_sequences(
    cache: LayerCache, inputs: LayerInputs, positions: Array, before: Array, count: Array, length: Array
) -> Array | None:
    """Finds the sequences whose positions do not continue them, that exceed the capacity, or contradict `values_from`.

    Args:
      cache: of the layer, before the call.
      inputs: of the layer; padding stands on the right.
      positions: i32[B T], of the tokens.
      before: i32[B], tokens of each sequence before the call.
      count: i32[B], tokens of the call.
      length: i32[B], tokens of each sequence after the call.

    Returns:
      bool[B], or None where the values are known and no sequence is wrong.

    Raises:
      KvjaxError: a sequence is wrong, where the values are known.
    """
    layer = cache.layer
    expected = token_positions(positions, count)
    expected = jnp.where(expected >= 0, before[:, None] + expected, -1)
    does_not_continue = (positions != expected).any(1)
    # A state of constant size has room for any step, but a prompt is cut at the capacity before it is compressed.
    is_limited = isinstance(cache.state, Empty) or not layer.has_constant_size
    exceeds = (length > layer.capacity) if is_limited else jnp.zeros_like(does_not_continue)
    has_other_values = jnp.zeros_like(exceeds)
    if layer.spec.values_from is not None:  # v is not stored, and is read as these channels of k
        has_other_values = (inputs.v != layer.spec.values_of(inputs.k)).any((1, 2, 3))
    if any(isinstance(x, Tracer) for x in (does_not_continue, exceeds, has_other_values)):
        return does_not_continue | exceeds | has_other_values
    if to_numpy(has_other_values).any():
        raise KvjaxError(
            f"the spec says that values are the channels of the keys from {layer.spec.values_from} on, and v holds "
            "others; give v = k[..., values_from:values_from + value_dim], or leave values_from out of specs_of"
        )
    if to_numpy(does_not_continue).any():
        b = int(np.argmax(to_numpy(does_not_continue)))
        start, got = int(to_numpy(before)[b]), [int(x) for x in to_numpy(positions)[b] if x >= 0][:4]
        raise KvjaxError(
            f"sequence {b} holds {start} tokens, so that positions continue with {start}, got {got}; another prompt "
            "needs a cache of its own: attach(..)"
            if start
            else f"a prompt has the positions 0, 1, 2, .. and -1 for padding; sequence {b} has {got}"
        )
    if to_numpy(exceeds).any():
        raise KvjaxError(
            f"{int(to_numpy(length).max())} tokens exceed the cache's capacity of {layer.capacity}; attach with a "
            "larger capacity, or a method of constant size, such as streaming_llm"
        )
    return None
