"""Checkpoint directories: one database of arrays per top-level entry, and a manifest that says what must be there.

    DIR/kvjax.json       config, dtype, source; shape, dtype and chunks of every parameter; a digest of every chunk,
                         part and file, and of the manifest itself
    DIR/params/<part>/   one tensorstore database per top-level entry: embedding, layer_0, ..., final_norm, head
    DIR/tokenizer.json   and other files given to the writer

An array is stored in chunks that follow the meshes it may lie on (`chunks`), and a process reads and checks the chunks
that it holds. A directory of version 2 is read as well: its parts are checkpoints of Orbax, with one digest for all
files of a part, so that each process reads all of it, once to check it and once to restore it.

The manifest is written last and the directory renamed into place after it, so a killed write leaves nothing that loads.
"""

from kvjax.models.checkpoint.chunks import choose_chunk_shape
from kvjax.models.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    WHOLE_PARTS,
    Manifest,
    is_checkpoint,
    json_digest,
    parameter_axes,
    parameter_shapes,
    part_names,
    read_manifest,
)
from kvjax.models.checkpoint.reading import Shardings, read_part, restore
from kvjax.models.checkpoint.writing import Writer, refuse_existing, save

__all__ = [
    "MANIFEST",
    "VERSION",
    "WHOLE_PARTS",
    "Manifest",
    "Shardings",
    "Writer",
    "read_manifest",
    "choose_chunk_shape",
    "is_checkpoint",
    "json_digest",
    "parameter_axes",
    "parameter_shapes",
    "read_part",
    "part_names",
    "refuse_existing",
    "restore",
    "save",
]
