"""Where weights come from: a Hugging Face checkpoint directory, its JSON files, and its tensors read one at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models.chat import ChatTemplate
from kvjax.utils import json_documents

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Stored types that are weights; any other is a quantised checkpoint or a buffer."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INSTEAD = {
    **dict.fromkeys(
        PICKLES,
        "pickle files can run any code when opened and are not read; write safetensors from a model that you trust: "
        "AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(NEW)",
    ),
    ".gguf": "give the GGUF file itself in place of its directory",
    "adapter_model.safetensors": "this is an adapter; merge it into its base model and save that",
    "consolidated.safetensors": "this is the publisher's own layout; use the Hugging Face layout of the model",
}
"""What may lie in the place of the weights, by the end of its name, and what to do then."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)


class Tensor(NamedTuple):
    """Where a tensor is and what it looks like."""

    shape: tuple[int, ...]
    dtype: str  # of what `read` gives, as safetensors spells it: "BF16"
    file: Path
    stored: str = ""  # the type in the file, where that is another
    bytes: int | None = None  # in the file, where they are others than those of the shape and dtype


class Source(Protocol):
    """Names, shapes and types of a checkpoint's tensors, by Hugging Face's names; `read` brings one into memory."""

    format: str
    config: dict[str, Any]  # config.json
    generation: dict[str, Any] | None  # generation_config.json
    tensors: dict[str, Tensor]

    def tokenizer_files(self) -> dict[str, bytes]:
        """What belongs beside the converted weights."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor; no more of the file than that stays in memory."""
        ...

    def peer(self) -> Callable[[str], np.ndarray]:
        """What `read` does, by another reader of the same files where there is one: for comparisons."""
        ...


def opened(path: str | Path) -> Source:
    """A Hugging Face directory, or a GGUF file; raises KvjaxError with the remedy for what is neither."""
    if Path(path).suffix != ".gguf":
        return Directory(path)
    if not Path(path).is_file():
        raise KvjaxError(f"there is no file {path}; give a GGUF file, or a Hugging Face directory")
    if importlib.util.find_spec("gguf") is None:
        raise KvjaxError('GGUF files are read with the package `gguf`; install it: pip install "kvjax[gguf]"')
    from checkpoints_convert.gguf.gguf_source import GgufSource

    return GgufSource(path)


class Directory:
    """A Hugging Face checkpoint with safetensors.

    Raises KvjaxError when there are no safetensors (with the remedy for what is there instead), and lists every
    missing shard, missing tensor and truncated file.
    """

    format = "Hugging Face"

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise KvjaxError(
                f"there is no directory {directory}; give the directory that holds config.json and the weights"
            )
        config = self.json("config.json")
        if config is None:
            raise KvjaxError(f"{directory} has no config.json; copy it from where the weights came from")
        self.config: dict[str, Any] = config
        self.generation = self.json("generation_config.json")
        self.tensors = self._tensors()

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the directory, or None if there is no such file."""
        file = self.directory / name
        return json_documents.parse_object(file.read_bytes(), file) if file.is_file() else None

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files, which belong beside the converted weights, as they are.

        Raises KvjaxError for a link to a file of which nothing says that it belongs to the checkpoint (`homes`): what
        it holds would be copied, whatever it is. And for a chat template with which the model would not load.
        """
        files = [f for name in TOKENIZER_FILES if (f := self.directory / name).is_file()]
        allowed = homes(self.directory)
        for file in files:
            target = file.resolve()
            if not any(target.is_relative_to(home) for home in allowed):
                raise KvjaxError(
                    f"{file} is a link to {target}, outside of the checkpoint; if that is the tokenizer that you want, "
                    "put a copy of it in the place of the link"
                )
        ChatTemplate.from_directory(self.directory)
        return {file.name: file.read_bytes() for file in files}

    def read(self, name: str) -> np.ndarray:
        """One tensor, as stored. The file is mapped for this call only, so no more than the tensor stays in memory."""
        with safe_open(self.tensors[name].file, framework="np") as f:
            return f.get_tensor(name)

    def peer(self) -> Callable[[str], np.ndarray]:
        """There is no other reader."""
        return self.read

    def _tensors(self) -> dict[str, Tensor]:
        if (self.directory / SINGLE).is_file():
            return header(self.directory / SINGLE)
        index = self.json(INDEX)
        if index is None:
            raise self._no_weights()
        placed = index.get("weight_map")
        if not isinstance(placed, dict) or not placed or any(Path(str(s)).name != s for s in placed.values()):
            raise KvjaxError(
                f"{self.directory / INDEX} has no usable weight_map from tensor to file name; copy it again"
            )
        return self._sharded(placed)

    def _sharded(self, placed: dict[str, str]) -> dict[str, Tensor]:
        shards = sorted(set(placed.values()))
        if absent := [s for s in shards if not (self.directory / s).is_file()]:
            raise KvjaxError(
                f"missing shards: {', '.join(map(escape_unprintable, absent))}; copy them to {self.directory}"
            )
        headers, problems = {}, []
        for shard in shards:
            try:
                headers[shard] = header(self.directory / shard)
            except KvjaxError as e:
                problems.append(str(e))
        # a shard that could not be read has been told of already: its tensors count as there
        problems += [
            f"{escape_unprintable(n)}: not in {escape_unprintable(s)}, where {INDEX} says it is"
            for n, s in placed.items()
            if n not in headers.get(s, placed)
        ]
        problems += [
            f"{escape_unprintable(n)}: in {escape_unprintable(s)} but not in {INDEX}"
            for s, h in headers.items()
            for n in h
            if placed.get(n) != s
        ]
        if problems:
            raise KvjaxError("the shards and their index disagree; copy them again:\n  " + "\n  ".join(problems))
        return {name: headers[shard][name] for name, shard in placed.items()}

    def _no_weights(self) -> KvjaxError:
        names = sorted(f.name for f in self.directory.iterdir())
        for end, remedy in INSTEAD.items():
            if found := [n for n in names if n.endswith(end)]:
                return KvjaxError(f"{self.directory} has {found[0]} but neither {SINGLE} nor {INDEX}: {remedy}")
        return KvjaxError(f"{self.directory} has neither {SINGLE} nor {INDEX}; download the weights as safetensors")


def homes(directory: Path) -> list[Path]:
    """Where the files of a checkpoint may lie: in its directory, or where Hugging Face's cache keeps their contents.

    That cache has models--OWNER--NAME/snapshots/REVISION full of links into models--OWNER--NAME/blobs.
    """
    own = directory.resolve()
    cached = [f.parent for f in own.parents if f.name == "snapshots" and f.parent.name.startswith("models--")]
    return [own, *(model / "blobs" for model in cached)]


def header(file: Path) -> dict[str, Tensor]:
    """Names, shapes and types of a safetensors file; raises KvjaxError if it is cut short or damaged."""
    try:
        with safe_open(file, framework="np") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}
            return {n: Tensor(tuple(s.get_shape()), s.get_dtype(), file) for n, s in slices.items()}
    except (SafetensorError, OSError) as e:
        lost = beyond_the_end(file)
        what = (
            f"is truncated: it ends before {', '.join(map(escape_unprintable, lost))}" if lost else f"is damaged ({e})"
        )
        raise KvjaxError(f"{file} {what}; copy it again") from e


def beyond_the_end(file: Path) -> list[str]:
    """The tensors whose data a truncated safetensors file no longer holds; empty if not even its header is whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            start = 8 + int.from_bytes(f.read(8), "little")
            entries = json_documents.loads(f.read(min(start - 8, size)))
        held = size - start
        return [n for n, e in entries.items() if n != "__metadata__" and e["data_offsets"][1] > held]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError):
        return []
