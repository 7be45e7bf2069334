"""Logits that are not finite: noticed in all that a call returns, by sequence and token.

Every call of `kvjax.generation` ends here before it returns logits, tokens or scores: prompts and fed tokens by
`check_logits`, decoded tokens by a flag that the decode loop carries. Only real tokens count; padding and what follows
the end of a sequence may be anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import memory
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind
from kvjax.engine.prefill import prefill
from kvjax.errors import KvjaxError
from kvjax.models.model import Model

REMEDIES = {
    "float16": "load the model with dtype='bfloat16' or dtype='float32', or take another method",
    "bfloat16": "load the model with dtype='float32', or take another method",
    "float32": "its weights are damaged, or too large: convert its checkpoint again",
}


def check_logits(
    model: Model,
    logits: Array,
    ids: Sequence[Sequence[int]] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    what: str = "prompt",
) -> None:
    """Raises KvjaxError where logits are not finite, naming the first sequence and token with such numbers.

    Args:
      model: that computed them.
      logits: f32[B V] of the last tokens, or f32[B T V].
      ids: of the tokens that were run, where they are known.
      lengths: the tokens of each sequence that are real in f32[B T V]; by default those of `ids`.
      what: what the tokens are, in the message.
    """
    if logits.ndim == 3 and lengths is None:
        assert ids is not None
        lengths = [len(row) for row in ids]
    if not memory.is_on_cpu(logits):
        is_finite = np.array(to_numpy(_is_finite_on_device(logits)))
    elif logits.shape[-1]:
        # The extremes of a token show NaN and infinities, and take no array of booleans as large as the logits.
        x = to_numpy(logits)
        is_finite = np.isfinite(x.min(-1)) & np.isfinite(x.max(-1))
    else:  # unknown logits, after a crop
        return
    if lengths is not None:
        is_finite |= np.arange(logits.shape[1])[None] >= np.asarray(lengths)[:, None]
    if is_finite.all():
        return
    sequence = int(np.argmin(is_finite.reshape(len(is_finite), -1).all(1)))
    token = "" if lengths is None else f", token {np.argmin(is_finite[sequence])} of {lengths[sequence]}"
    raise nonfinite_error(model, f"after {what} {sequence}{token}")


def nonfinite_error(model: Model, place: str) -> KvjaxError:
    """Makes the error for logits at a place, as in "after prompt 0"; it names a parameter that is not finite itself."""
    cause, remedy = f"{model.dtype.name} cannot hold what the model or the method computes", REMEDIES[model.dtype.name]
    if all(x.is_fully_addressable for x in jax.tree.leaves(model.params)):  # one process alone must not wait for others
        for path, x in jax.tree_util.tree_leaves_with_path(model.auto_params):
            if not to_numpy(jnp.isfinite(x).all()):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                return KvjaxError(
                    f"the logits {place} are not finite: the parameter {name} of the model is not; convert its "
                    "checkpoint again, or load it anew"
                )
    return KvjaxError(
        f"the logits {place} are not finite: {cause}; {remedy}. "
        "kvjax.generation.finite.find_layer(model, ids) finds the layer where they begin"
    )


def find_layer(model: Model, ids: Sequence[int]) -> int | None:
    """Runs a text under exact attention, and finds the first layer whose output is not finite.

    Args:
      model: from `kvjax.load`.
      ids: of the text.

    Returns:
      The layer's index from 0 on; None where all outputs are finite, so that the head or the method is the cause.
    """
    target, is_finite = Target(model.config, model.auto_mesh), []

    def watch(*arguments: Any, **static: Any) -> Any:
        outputs = target.run_layer(*arguments, **static)
        is_finite.append(bool(to_numpy(jnp.isfinite(outputs[0]).all())))
        return outputs

    tokens, lengths = jnp.asarray([ids], jnp.int32), jnp.asarray([len(ids)], jnp.int32)
    watched = dataclasses.replace(target, run_layer=watch)
    prefill(model.auto_params, tokens, lengths, bind("full", model.config), watched, len(ids))
    return None if all(is_finite) else is_finite.index(False)


@jax.jit
def _is_finite_on_device(logits: Array) -> Array:
    return jnp.isfinite(logits).all(-1)
