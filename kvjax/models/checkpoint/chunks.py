"""Arrays in chunks: each is stored, digested and read alone, so that a process reads the chunks that it holds.

A part is one database of tensorstore (OCDBT: a few files, however many chunks) with a Zarr array per parameter. Orbax,
which wrote the parts of version 2, stores an array as one chunk, and a process must read all of it for any shard.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.core.mesh import RULES
from kvjax.models.config import Config
from kvjax.models.sharding import divided_sizes

MAX_CHUNK_BYTES = 16 << 20
READ_AHEAD = 2  # chunks that are read while one is digested
UNREADABLE = re.compile(r"[\\\udc80-\udcff]|\.__lock(/|$)")
"""Parts of paths that tensorstore reads as others or refuses: backslashes, bytes that are no UTF-8, names of locks."""


class DamagedChunk(Exception):
    """A chunk that cannot be read, or whose digest differs."""


@contextlib.contextmanager
def plain_path(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path of the folder, without `..`, that tensorstore takes as it is: a temporary link where need be."""
    path = os.path.realpath(folder)
    if not UNREADABLE.search(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="kvjax-") as links:
        link = Path(links) / "folder"
        link.symlink_to(path)
        yield link


def choose_chunk_shape(shape: tuple[int, ...], letters: tuple[str, ...], itemsize: int, config: Config) -> list[int]:
    """Chooses the shape of an array's chunks, so that the shards of every mesh that the model can lie on are chunks.

    A mesh must divide the key/value heads, the MLP width and the vocabulary, so the number of its devices divides their
    greatest common divisor, and the axis that is spread over devices is cut into that number of chunks.

    Args:
      shape: of the array.
      letters: of its axes, as in `kvjax.core.types`; empty for an array that `config` does not have.
      itemsize: bytes per number.
      config: of the model.

    Returns:
      The length of a chunk along each axis. Chunks that would exceed `MAX_CHUNK_BYTES` are halved where they divide.
    """
    num_pieces, chunk = math.gcd(*(size for _, size in divided_sizes(config))), list(shape)
    for axis, letter in enumerate(letters[: len(shape)]):
        if letter in RULES and chunk[axis] % num_pieces == 0:
            chunk[axis] //= num_pieces
    while math.prod(chunk) * itemsize > MAX_CHUNK_BYTES and (even := [n for n in chunk if n % 2 == 0]):
        chunk[chunk.index(max(even))] //= 2
    return chunk


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], chunks: Mapping[str, list[int]]) -> dict[str, Any]:
    """Writes the arrays of a part into a new folder.

    Returns:
      By path: the shape, the dtype, the shape of a chunk, and the SHA-256 of every chunk's numbers (in C order, as the
      chunks are). They describe the content and not its files, so that equal arrays have equal digests.

    Raises:
      ValueError: if the disk is full, as tensorstore has it.
    """
    import tensorstore  # not on top: it takes longer than the rest of `import kvjax`

    # One transaction in one context: otherwise each write that happens to finish alone adds three files.
    transaction, context, entries, writes = tensorstore.Transaction(), tensorstore.Context(), {}, []
    for path, x in arrays.items():
        chunk = chunks[path]
        digests = [_digest(x[_slices(cell, chunk, x.shape)]) for cell in np.ndindex(*_grid(x.shape, chunk))]
        entries[path] = {"shape": list(x.shape), "dtype": x.dtype.name, "chunk": chunk, "digests": digests}
        zarr = {"shape": x.shape, "chunks": chunk, "compressor": {"id": "zstd", "level": 1}}
        spec = _spec(folder, path) | {
            "metadata": zarr,
            "dtype": x.dtype.name,
            "store_data_equal_to_fill_value": True,  # -0.0 equals it, and would be read as 0.0
        }
        array = tensorstore.open(spec, create=True, transaction=transaction, context=context).result()
        writes.append(array.write(x, can_reference_source_data_indefinitely=True))
    for write in writes:
        write.result()
    transaction.commit_sync()
    return entries


def has_all_digests(entry: Mapping[str, Any]) -> bool:
    """Tells whether the entry of a parameter, whose shape has been checked, has a digest for each chunk."""
    shape, chunk, digests = entry["shape"], entry.get("chunk"), entry.get("digests")
    if not (isinstance(chunk, list) and isinstance(digests, list) and len(chunk) == len(shape)):
        return False
    is_sized = all(isinstance(n, int) and n > 0 for n in chunk)
    return is_sized and len(digests) == math.prod(_grid(shape, chunk)) and all(isinstance(x, str) for x in digests)


def read_array(folder: Path, path: str, entry: Mapping[str, Any], dtype: Any, sharding: Any) -> jax.Array:
    """Reads the shards of one array that this process holds, and checks the chunks that they lie in.

    Args:
      folder: of the part.
      path: of the parameter.
      entry: its entry in the manifest, as `write_arrays` returned it.
      dtype: of the result.
      sharding: of the result.

    Raises:
      DamagedChunk: with the chunk, if it cannot be read or its digest differs.
    """
    import tensorstore  # not on top: it takes longer than the rest of `import kvjax`

    shape, chunk = tuple(entry["shape"]), entry["chunk"]
    grid = _grid(shape, chunk)
    digests = dict(zip(np.ndindex(*grid), entry["digests"], strict=True))
    try:
        array = tensorstore.open(_spec(folder, path), open=True, read=True).result()
    except ValueError as e:
        raise DamagedChunk(f"{path} cannot be read: {e}") from e
    if array.shape != shape or array.dtype.name != entry["dtype"]:
        raise DamagedChunk(f"{path} is {array.dtype.name} of shape {list(array.shape)}")

    def read_chunks(cells: Iterator[tuple[int, ...]]) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields the place and the numbers of each chunk. Few are in memory at a time, or all of a large array were."""
        reads = collections.deque()
        for cell in itertools.chain(cells, [None] * READ_AHEAD):
            if cell is not None:
                place = _slices(cell, chunk, shape)
                reads.append((cell, place, array[place].read()))
            if reads and (cell is None or len(reads) > READ_AHEAD):
                done, place, read = reads.popleft()
                try:
                    x = read.result()
                except ValueError as e:
                    raise DamagedChunk(f"chunk {done} of {path} cannot be read: {e}") from e
                if _digest(x) != digests[done]:
                    raise DamagedChunk(f"the digest of chunk {done} of {path} differs")
                yield place, x

    @functools.cache  # devices of one process that hold the same shard share one read of it
    def read_shard(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        shard = np.empty([stop - start for start, stop in bounds], dtype)
        cells = itertools.product(
            *(range(start // c, -(-stop // c)) for (start, stop), c in zip(bounds, chunk, strict=True))
        )
        for place, x in read_chunks(cells):
            # Where a mesh of the caller's own does not follow the chunks, a part of a chunk is of use.
            common = [(max(p.start, start), min(p.stop, stop)) for p, (start, stop) in zip(place, bounds, strict=True)]
            into = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))
            of = tuple(slice(a - p.start, b - p.start) for (a, b), p in zip(common, place, strict=True))
            shard[into] = x[of]
        return shard

    def read_index(index: Any) -> np.ndarray:
        return read_shard(tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True)))

    return jax.make_array_from_callback(shape, sharding, read_index)


def _spec(folder: Path, path: str) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{path}/"},
    }


def _grid(shape: Any, chunk: Any) -> list[int]:
    """Returns the number of chunks along each axis."""
    return [-(-n // c) for n, c in zip(shape, chunk, strict=True)]


def _slices(cell: tuple[int, ...], chunk: Any, shape: Any) -> tuple[slice, ...]:
    """Returns where in the array a chunk lies."""
    return tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(cell, chunk, shape, strict=True))


def _digest(x: np.ndarray) -> str:
    # As bytes: bfloat16 is a type that `hashlib` does not take. A code of 4 bits is widened, as `fingerprint` does.
    x = x.astype(np.int8) if x.dtype.name == "int4" else x
    return hashlib.sha256(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data).hexdigest()
