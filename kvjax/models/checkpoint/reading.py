"""Reading checkpoint directories, part by part and straight to the parameters' places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from kvjax.core.quantized_kernel import check_weights
from kvjax.errors import KvjaxError
from kvjax.models import Config
from kvjax.models.checkpoint.chunks import DamagedChunk, plain_path, read_array
from kvjax.models.checkpoint.manifest import PARTS, WHOLE_PARTS, Manifest, part_digest, part_names, read_manifest
from kvjax.models.quantized_params import find_dtype, quantize_params
from kvjax.utils.arguments import float_type
from kvjax.utils.files import expand_user

Shardings = Callable[[str], jax.sharding.Sharding] | Mapping[str, Any] | jax.sharding.Sharding | None
"""The places of parameters: a function of the path, one sharding for all, or a tree like the parameters."""


def _find_shardings(shardings: Shardings, paths: Iterable[str]) -> dict[str, jax.sharding.Sharding]:
    """Returns the sharding of each parameter by its path."""
    if shardings is None:
        shardings = jnp.zeros(()).sharding  # honors jax.default_device
    if isinstance(shardings, jax.sharding.Sharding):
        return dict.fromkeys(paths, shardings)
    if callable(shardings):
        return {path: shardings(path) for path in paths}
    flat: dict[str, Any] = flatten_dict(nn.unbox(shardings), sep="/")
    return {path: flat[path] for path in paths}


def read_part(
    directory: str | Path, name: str, record: Manifest | None = None, dtype=None, shardings: Shardings = None
) -> Any:
    """Restores the shards of one top-level entry that this process holds, and checks them against their digests.

    Args:
      directory: a checkpoint.
      name: the entry, as "layer_0".
      record: the manifest, if it has been read.
      dtype: of the parameters but codes; None as stored.
      shardings: their places; None for the default device.

    Raises:
      KvjaxError: if the part is missing or damaged, or cannot be restored to this dtype and sharding.
    """
    record = record or read_manifest(directory)
    dtype = None if dtype is None else float_type(dtype)
    folder = expand_user(directory) / PARTS / name
    flat = {path: x for path, x in record.parameters.items() if path.split("/")[0] == name}
    problem = None
    try:
        places, tree = _find_shardings(shardings, flat), functools.partial(unflatten_dict, sep="/")
        types = {path: find_dtype(path, dtype, x["dtype"]) for path, x in flat.items()}
        if not folder.is_dir():
            problem = "is missing"
        elif record.version != WHOLE_PARTS:
            with plain_path(folder) as plain:
                arrays = {path: read_array(plain, path, x, types[path], places[path]) for path, x in flat.items()}
            return tree(arrays)[name]
        elif part_digest(folder, flat) != record.digests.get(name):
            problem = "is damaged (its digest differs)"
        else:
            import orbax.checkpoint as ocp  # not on top: it takes longer than the rest of `import kvjax`

            shapes = {path: jax.ShapeDtypeStruct(tuple(x["shape"]), types[path]) for path, x in flat.items()}
            restore_args = {
                path: ocp.ArrayRestoreArgs(sharding=places[path], global_shape=x.shape, dtype=x.dtype)
                for path, x in shapes.items()
            }
            args = ocp.args.PyTreeRestore(item=tree(shapes), restore_args=tree(restore_args))
            with plain_path(folder) as plain, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(plain, args=args)[name]
    except DamagedChunk as e:
        if "PERMISSION_DENIED" in str(e):  # by tensorstore
            raise KvjaxError(f"part {name!r} of {directory} cannot be read ({e}); allow its files to be read") from e
        problem = f"is damaged ({e})"
    except (ValueError, TypeError, KeyError) as e:
        raise KvjaxError(
            f"part {name!r} of {directory} does not restore so; choose another dtype, or shardings with an entry for "
            f"every parameter: {e}"
        ) from e
    raise KvjaxError(f"part {name!r} of {directory} {problem}; copy the checkpoint again, or convert it again")


def restore(
    directory: str | Path, dtype=None, shardings: Shardings = None, weights: str | None = None
) -> tuple[Config, dict[str, Any]]:
    """Restores a checkpoint directory: (config, parameter tree); the first arguments are those of `read_part`.

    Args:
      directory: a checkpoint.
      dtype: of the parameters but codes; None as stored.
      shardings: places of the parameters as they are stored.
      weights: "int8" or "int4" quantizes the kernels of each part once it is read, where they stand; None as stored.

    Raises:
      KvjaxError: for a foreign, damaged, incomplete or newer directory, and for another kind of weights than it holds.
    """
    record, params = read_manifest(directory), {}
    check_weights(weights)
    if record.weights is not None and weights not in (None, record.weights):
        raise KvjaxError(
            f"{directory} holds {record.weights} weights, and {weights} cannot be made of them; load it without "
            f"weights={weights!r}, or convert its source again: python -m checkpoints_convert convert SRC DST "
            f"--weights {weights}"
        )
    for name in part_names(record.parameters):
        part = {name: read_part(directory, name, record, dtype, shardings)}
        # A part at a time, so that no second copy of the model is ever held.
        params |= part if weights is None or record.weights is not None else quantize_params(part, weights)
    return record.config, params
