"""Sources of weights: the interface of a checkpoint to be converted, and Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import chat_template, tokenizer
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


DEFAULT_TEMPLATE = "additional_chat_templates/default.jinja"
"""The file in which transformers finds the template of a checkpoint with several, without a `chat_template.jinja`."""


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

    def independent_read(self) -> Callable[[str], np.ndarray]:
        """Returns another implementation of `read`, if there is one, for comparisons."""
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
        if not self.directory.is_dir():
            raise KvjaxError(
                f"there is no directory {directory}; give the directory that holds config.json and the weights"
            )
        config = self._read_json("config.json")
        if config is None:
            raise KvjaxError(f"{directory} has no config.json; copy it from where the weights came from")
        self.config: dict[str, Any] = config
        self.generation = self._read_json("generation_config.json")
        self.tensors = self._read_headers()

    def _read_json(self, name: str) -> dict[str, Any] | None:
        file = self.directory / name
        return parse_json_object(file.read_bytes(), file) if file.is_file() else None

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files as they are.

        Raises:
          KvjaxError: for a link that leads out of the checkpoint, and for a chat template that would not load.
        """
        files = {name: f for name in TOKENIZER_FILES if (f := self.directory / name).is_file()}
        if chat_template.FILE not in files and (default := self.directory / DEFAULT_TEMPLATE).is_file():
            files[chat_template.FILE] = default
        # A link may lead to any file of the user, whose content would be copied. Hugging Face's cache is the exception:
        # models--OWNER--NAME/snapshots/REVISION is full of links into models--OWNER--NAME/blobs.
        own = self.directory.resolve()
        cached = [f.parent for f in own.parents if f.name == "snapshots" and f.parent.name.startswith("models--")]
        allowed = [own, *(model / "blobs" for model in cached)]
        for file in files.values():
            target = file.resolve()
            if not any(target.is_relative_to(folder) for folder in allowed):
                raise KvjaxError(
                    f"{file} is a link to {target}, outside of the checkpoint; if that is the tokenizer that you want, "
                    "put a copy of it in the place of the link"
                )
        chat_template.ChatTemplate.from_directory(self.directory)
        return {name: file.read_bytes() for name, file in files.items()}

    def eos_id(self) -> int | None:
        """Returns the id of the tokenizer's `eos_token`; raises KvjaxError for a tokenizer that does not load."""
        files = self.tokenizer_files()
        return Tokenizer.from_files(files, self.directory).eos_id if tokenizer.FILE in files else None

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor as stored; the file is mapped for this call only, so nothing else stays in memory."""
        with safe_open(self.tensors[name].file, framework="np") as f:
            return f.get_tensor(name)

    def independent_read(self) -> Callable[[str], np.ndarray]:
        """Returns `read`: safetensors has no second reader."""
        return self.read

    def _read_headers(self) -> dict[str, Tensor]:
        if (self.directory / SINGLE).is_file():
            return read_header(self.directory / SINGLE)
        index = self._read_json(INDEX)
        if index is None:
            names = sorted(f.name for f in self.directory.iterdir())
            for end, remedy in REMEDIES.items():
                if found := [n for n in names if n.endswith(end)]:
                    raise KvjaxError(f"{self.directory} has {found[0]} but neither {SINGLE} nor {INDEX}: {remedy}")
            raise KvjaxError(f"{self.directory} has neither {SINGLE} nor {INDEX}; download the weights as safetensors")
        shard_of = index.get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of or any(Path(str(s)).name != s for s in shard_of.values()):
            raise KvjaxError(
                f"{self.directory / INDEX} has no usable weight_map from tensor to file name; copy it again"
            )
        return self._read_shards(shard_of)

    def _read_shards(self, shard_of: dict[str, str]) -> dict[str, Tensor]:
        shards = sorted(set(shard_of.values()))
        if absent := [s for s in shards if not (self.directory / s).is_file()]:
            names = ", ".join(map(escape_unprintable, absent))
            raise KvjaxError(f"missing shards: {names}; copy them to {self.directory}")
        headers, problems = {}, []
        for shard in shards:
            try:
                headers[shard] = read_header(self.directory / shard)
            except KvjaxError as e:
                problems.append(str(e))
        # A damaged shard has been listed once already: its tensors count as present.
        problems += [
            f"{escape_unprintable(n)}: not in {escape_unprintable(s)}, where {INDEX} says it is"
            for n, s in shard_of.items()
            if n not in headers.get(s, shard_of)
        ]
        others = [(n, s) for s, header in headers.items() for n in header if shard_of.get(n) != s]
        twice = [(n, shard_of[n], s) for n, s in others if n in shard_of and n in headers.get(shard_of[n], {})]
        stray = [(n, s) for n, s in others if n not in {name for name, _, _ in twice}]
        problems += [f"{escape_unprintable(n)}: in {escape_unprintable(s)} but not in {INDEX}" for n, s in stray]
        if twice and not problems:
            raise self._repeated_error(twice, headers)
        if problems:
            raise KvjaxError("the shards and their index disagree; copy them again:\n  " + "\n  ".join(problems))
        return {name: headers[shard][name] for name, shard in shard_of.items()}

    def _repeated_error(self, twice: list[tuple[str, str, str]], headers: dict[str, dict[str, Tensor]]) -> KvjaxError:
        """Tells of tensors in two shards, given as (name, the index's shard, another); the remedy is for that case."""
        problems, differ = [], False
        for name, shard, other in twice:
            copies = []
            for file in (shard, other):
                with safe_open(headers[file][name].file, framework="np") as f:
                    copies.append(f.get_tensor(name))
            first, second = ((x.dtype, x.shape, x.tobytes()) for x in copies)
            is_equal = first == second
            differ |= not is_equal
            names = " and in ".join(map(escape_unprintable, (shard, other)))
            problems.append(f"{escape_unprintable(name)}: in {names}, {'equal' if is_equal else 'with other numbers'}")
        remedy = "write each once: AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(NEW)"
        if differ:
            remedy = "they are of two versions of the model: download one version into an empty folder"
        return KvjaxError(f"tensors stand in two shards; {remedy}:\n  " + "\n  ".join(problems))


def read_header(file: Path) -> dict[str, Tensor]:
    """Reads names, shapes and types of a safetensors file; raises KvjaxError if it is cut short or damaged."""
    try:
        with safe_open(file, framework="np") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}
            return {n: Tensor(tuple(s.get_shape()), s.get_dtype(), file) for n, s in slices.items()}
    except (SafetensorError, OSError) as e:
        lost = ", ".join(map(escape_unprintable, _truncated_tensors(file)))
        what = f"is truncated: it ends before {lost}" if lost else f"is damaged ({e})"
        raise KvjaxError(f"{file} {what}; copy it again") from e


def _truncated_tensors(file: Path) -> list[str]:
    """The tensors that a truncated safetensors file no longer holds whole; none if its header is damaged too."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            # The layout of safetensors: the header's length in 8 bytes, the header in JSON, the data.
            start = 8 + int.from_bytes(f.read(8), "little")
            entries = json.loads(f.read(min(start - 8, size)))
        return [n for n, e in entries.items() if n != "__metadata__" and e["data_offsets"][1] > size - start]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError):
        return []
