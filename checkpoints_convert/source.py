"""Sources of weights: the interface of a checkpoint to be converted, and Hugging Face directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_convert import fp8, mxfp4
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import chat_template, checkpoint, tokenizer
from kvjax.models.tokenizer import Tokenizer
from kvjax.utils.files import parse_json_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Stored types that are weights; any other is a quantized checkpoint or a buffer."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
REMEDIES = {
    **dict.fromkeys(
        PICKLES,
        "pickle files can run any code when opened and are not read; write safetensors from a model that you trust: "
        "AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(NEW)",
    ),
    ".gguf": "give the GGUF file itself in place of its directory",
    "adapter_model.safetensors": "this is an adapter; merge it into its base model and save that",
    "consolidated.safetensors": "this is the publisher's own layout; use the Hugging Face layout of the model",
    ".safetensors": f"copy {INDEX} of the shards there too, or call the one file of a model {SINGLE}",
}
"""End of a file's name -> remedy, for files that lie where the weights should be."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
)


class Tensor(NamedTuple):
    """A stored tensor, as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str  # of the array that `read` returns, as safetensors spells it: "BF16"
    file: Path
    stored: str = ""  # the type in the file, where that is another
    bytes: int | None = None  # in the file, where they differ from those of shape and dtype


class Source(Protocol):
    """A checkpoint to be converted: its tensors by Hugging Face's names, each read into memory on its own."""

    format: str
    config: dict[str, Any]  # config.json
    generation: dict[str, Any] | None  # generation_config.json
    tensors: dict[str, Tensor]

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the files to copy into the converted directory, contents by name."""
        ...

    def eos_id(self) -> int | None:
        """Returns the id of the tokenizer's own end, None if `config` and `generation` have all ends."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor; no more of the file than that stays in memory."""
        ...


class Directory:
    """A Hugging Face checkpoint with safetensors.

    Raises:
      KvjaxError: if there are no safetensors, with the remedy for what is there instead; or a list of all missing
        shards, missing tensors and truncated files.
    """

    format = "Hugging Face"

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        config = self._read_json("config.json")
        if config is None:
            what = f"{directory} has no config.json"
            if not os.path.isdir(self.directory):
                what = f"{directory} is a file" if os.path.isfile(directory) else f"there is no directory {directory}"
            elif checkpoint.is_checkpoint(self.directory):
                what = f"{directory} is a kvjax checkpoint already"
            problem = f"{what}; give the directory that holds config.json and the weights"
        else:
            self.config: dict[str, Any] = config
            self.generation = self._read_json("generation_config.json")
            self.stored, problem = self._read_headers()
            self.block = fp8.read_block(config)
            self.tensors = mxfp4.list_tensors(self.stored) if mxfp4.is_used(config) else self.stored
            if self.block is not None:
                self.tensors = fp8.list_tensors(self.stored, self.block)
        if problem is not None:
            raise KvjaxError(problem)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        file = self.directory / name
        return parse_json_object(file.read_bytes(), file) if os.path.isfile(file) else None

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files as they are.

        Raises:
          KvjaxError: for a link that leads out of the checkpoint, and for a chat template that would not load.
        """
        templates = sorted(f.name for f in (self.directory / chat_template.FOLDER).glob("*.jinja"))
        names = (*TOKENIZER_FILES, *(f"{chat_template.FOLDER}/{name}" for name in templates))
        files = {name: f for name in names if (f := self.directory / name).is_file()}
        # A link may lead to any file of the user, whose content would be copied. Hugging Face's cache is the exception:
        # models--OWNER--NAME/snapshots/REVISION is full of links into models--OWNER--NAME/blobs.
        own = self.directory.resolve()
        allowed = (own, own.parent.parent / "blobs") if own.parent.name == "snapshots" else (own,)
        if outside := [f for f in files.values() if not any(f.resolve().is_relative_to(folder) for folder in allowed)]:
            raise KvjaxError(
                f"{outside[0]} is a link to {outside[0].resolve()}, outside of the checkpoint; if that is the "
                "tokenizer that you want, put a copy of it in the place of the link"
            )
        chat_template.ChatTemplate.from_directory(self.directory)
        return {name: file.read_bytes() for name, file in files.items()}

    def eos_id(self) -> int | None:
        """Returns the id of the tokenizer's `eos_token`; raises KvjaxError for a tokenizer that does not load."""
        files = self.tokenizer_files()
        return Tokenizer.from_files(files, self.directory).eos_id if tokenizer.FILE in files else None

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor; the file is mapped for this call only, so nothing else stays in memory."""
        if name not in self.stored:
            return mxfp4.dequantize(*(self.read(name + end) for end in (mxfp4.BLOCKS, mxfp4.SCALES)))
        if self.block is not None and self.tensors[name].dtype != self.stored[name].dtype:
            codes = fp8.read_codes(self.stored[name], name)
            return fp8.dequantize(codes, self._load(name + fp8.SCALES), self.block)
        return self._load(name)

    def _load(self, name: str) -> np.ndarray:
        with safe_open(self.stored[name].file, framework="np") as f:
            return f.get_tensor(name)

    def _read_headers(self) -> tuple[dict[str, Tensor], str | None]:
        """Reads the tensors of one file or of shards, which must hold what the index says, each tensor once.

        Returns:
          The tensors, and what is wrong with the files.
        """
        if (self.directory / SINGLE).is_file():
            return read_header(self.directory / SINGLE), None
        index = self._read_json(INDEX)
        if index is None:
            names = sorted(f.name for f in self.directory.iterdir())
            found = [(name, remedy) for end, remedy in REMEDIES.items() for name in names if name.endswith(end)]
            name, remedy = found[0] if found else ("no weights", "download the weights as safetensors")
            return {}, f"{self.directory} has {name} but neither {SINGLE} nor {INDEX}: {remedy}"
        shard_of = index.get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of or any(Path(str(s)).name != s for s in shard_of.values()):
            return {}, f"{self.directory / INDEX} has no usable weight_map from tensor to file name; copy it again"
        shards = sorted(set(shard_of.values()))
        problems = [f"{shard}: no such file" for shard in shards if not (self.directory / shard).is_file()]
        headers = {} if problems else {shard: read_header(self.directory / shard) for shard in shards}
        problems += [
            f"{name}: not in {shard}, where {INDEX} says it is"
            for name, shard in shard_of.items()
            if shard in headers and name not in headers[shard]
        ]
        for name, shard in [(n, s) for s, header in headers.items() for n in header if shard_of.get(n) != s]:
            known = shard_of.get(name)
            where = f"in {known} and in {shard}" if known in headers else f"in {shard} but not in {INDEX}"
            problems.append(f"{name}: {where}")
        if problems:
            listed = "\n  ".join(map(escape_unprintable, problems))
            remedy = "download one version of the model into an empty folder"
            return {}, f"the shards and their index disagree; {remedy}:\n  {listed}"
        return {name: headers[shard][name] for name, shard in shard_of.items()}, None


def read_header(file: Path) -> dict[str, Tensor]:
    """Reads names, shapes and types of a safetensors file; raises KvjaxError if it is cut short or damaged."""
    try:
        with safe_open(file, framework="np") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}
            return {n: Tensor(tuple(s.get_shape()), s.get_dtype(), file) for n, s in slices.items()}
    except (SafetensorError, OSError) as e:
        raise KvjaxError(f"{file} is damaged or cut short ({e}); copy it again") from e
