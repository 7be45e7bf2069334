"""Checkpoint directories: one Orbax checkpoint per top-level entry, and a manifest that says what must be there.

    DIR/kvjax.json       config, dtype, source; shape and dtype of every parameter; a digest of every part and file, and
                         of the manifest itself
    DIR/params/<part>/   one Orbax checkpoint per top-level entry: embedding, layer_0, ..., final_norm, head
    DIR/tokenizer.json   and other files given to the writer

The manifest is written last and the directory renamed into place after it, so a killed write leaves nothing that loads.
"""

from kvjax.models.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    Manifest,
    json_digest,
    parameter_shapes,
    part_names,
    read_manifest,
)
from kvjax.models.checkpoint.reading import Shardings, read_part, restore
from kvjax.models.checkpoint.writing import Writer, refuse_existing, save

__all__ = [
    "MANIFEST",
    "VERSION",
    "Manifest",
    "Shardings",
    "Writer",
    "read_manifest",
    "json_digest",
    "parameter_shapes",
    "read_part",
    "part_names",
    "refuse_existing",
    "restore",
    "save",
]
