"""A GGUF file, or several parts of one, as a `Source`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ml_dtypes import bfloat16

from checkpoints_convert.families import FAMILIES
from checkpoints_convert.gguf import config_json, header, tokenizer_files
from checkpoints_convert.gguf.architectures import ARCHITECTURES
from checkpoints_convert.gguf.config_json import ROPE_FACTORS
from checkpoints_convert.gguf.header import StoredTensor
from checkpoints_convert.gguf.stacks import Stack, list_stacks
from checkpoints_convert.source import Tensor
from kvjax.errors import KvjaxError

PLAIN_TYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(bfloat16)}
"""Types that hold weights as they are; all others are blocks of codes, which become float32."""

SINGLE_EXPERT = re.compile(r"blk\.(?P<i>\d+)\.ffn_(?P<part>gate|up|down)\.(?P<e>\d+)\.weight$")
"""The tensor of one expert in the oldest files of Mixtral; in all others those of a layer are stacked."""

PART_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufSource:
    """The tensors of a GGUF file by the names that Hugging Face gives them.

    Args:
      file: of a model in several parts, any one.

    Raises:
      KvjaxError: for a file that is damaged, cut short or not supported, and for missing parts.
    """

    def __init__(self, file: str | Path):
        self.path = Path(file)
        parts, self.metadata, self.stored = _read_parts(self.path)
        self.format = f"GGUF, {len(parts)} file" + ("s" if len(parts) > 1 else "")
        shapes = {name: stored.shape for name, stored in self.stored.items()}
        factors = {name: read_weights(self.stored[name]) for name in ROPE_FACTORS if name in self.stored}
        self.config = config_json.make_config(self.metadata, shapes, factors)
        self.generation: dict[str, Any] | None = None
        # `translate` refuses a config of more layers than tensors; until then nothing is listed for each of them.
        num_layers = min(self.config["num_hidden_layers"], len(self.stored))
        self.stacks = self._list_stacks(num_layers)
        self.names = self._map_names(num_layers)
        self.tensors = {}
        for name, own_name in self.names.items():
            stored = self.stored[own_name]
            self.tensors[name] = Tensor(stored.shape, _dtype_name(stored), stored.file, stored.kind.name, stored.bytes)
        for name, (stack, own_names) in self.stacks.items():
            members = [self.stored[own_name] for own_name in own_names]
            dtypes = {_dtype_name(member) for member in members}
            self.tensors[name] = Tensor(
                stack.shape(*(member.shape for member in members)),
                dtypes.pop() if len(dtypes) == 1 else "F32",
                members[0].file,
                " and ".join(sorted({member.kind.name for member in members})),
                sum(member.bytes for member in members),
            )

    def _list_stacks(self, num_layers: int) -> dict[str, tuple[Stack, tuple[str, ...]]]:
        """Lists the tensors that are made of others in the file, by Hugging Face's names."""
        found, stacks = {}, list_stacks(self.config)
        for i in range(num_layers):
            for stack in stacks:
                own_names = tuple(name.format(i=i) for name in stack.own_names)
                name = stack.name.format(i=i)
                if name not in found and all(own_name in self.stored for own_name in own_names):
                    found[name] = stack, own_names
        return found

    def _map_names(self, num_layers: int) -> dict[str, str]:
        """Maps Hugging Face's name of each tensor to the file's; a tensor that the family lacks keeps its own."""
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.metadata["general.architecture"])
        known = gguf.get_tensor_name_map(arch, num_layers)
        names: dict[str, str] = {}
        tables = FAMILIES[self.config["model_type"]].tables
        # "gate", "up" and "down" -> Hugging Face's name of that tensor of one expert.
        sources = {rule.targets[0].path.split("/")[2]: rule.source for rule in tables[0] if "{e}" in rule.source}
        for own_name, match in ((own_name, SINGLE_EXPERT.match(own_name)) for own_name in self.stored):
            if match is not None and match["part"] in sources:
                names[sources[match["part"]].format(i=match["i"], e=match["e"])] = own_name
        found = set(names.values())
        # Of several tables the first is that of single experts, and the last that of stacked ones.
        tables = tables if found else reversed(tables)
        for rule in (rule for table in tables for rule in table):
            for i in range(num_layers if "{i}" in rule.source else 1):
                name = rule.source.format(i=i, e="{e}")
                # The one bias that is no parameter of a module, for which the package has the name of a module.
                module = name.replace("e_score_correction_bias", "e_score_correction.bias")
                own_name = known.get_name(module, try_suffixes=(".weight", ".bias"))
                # A tensor that Hugging Face names without a suffix, such as gpt-oss' sinks, has one in the file.
                own_name = own_name if own_name in self.stored else f"{own_name}.weight"
                if own_name in self.stored and own_name not in found:
                    names[name] = own_name
                    found.add(own_name)
        # Types of few bits have a scale for each tensor, which says nothing where it is one.
        scales = (name for name in self.stored if name.endswith((".scale", ".input_scale")))
        ones = (name for name in scales if (read_weights(self.stored[name]) == 1).all())
        stacked = (own_name for _, own_names in self.stacks.values() for own_name in own_names)
        taken = {*ROPE_FACTORS, *found, *ones, *stacked}
        return names | {name: name for name in self.stored if name not in taken}

    def tokenizer_files(self) -> dict[str, bytes]:
        """Makes the tokenizer's files from the metadata."""
        return tokenizer_files.make_files(self.metadata)

    def eos_id(self) -> int | None:
        """Returns None: the metadata hold all ends."""
        return None

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor in Hugging Face's layout; codes are dequantized to float32."""
        if name in self.stacks:
            stack, own_names = self.stacks[name]
            return stack.restore(stack.join(*(read_weights(self.stored[own_name]) for own_name in own_names)))
        x = read_weights(self.stored[self.names[name]])
        architecture = ARCHITECTURES[self.metadata["general.architecture"]]
        if architecture.adds_one and name.endswith("norm.weight") and ".linear_attn." not in name:
            # Rounds nothing that was not rounded when one was added.
            return x - x.dtype.type(1)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if not architecture.swaps_halves or heads is None:
            return x
        # The two halves of a head are interleaved, because llama.cpp rotates neighboring channels of these.
        interleaved = x.reshape(self.config[heads], -1, 2, *x.shape[1:])
        return interleaved.swapaxes(1, 2).reshape(x.shape)


def _dtype_name(stored: StoredTensor) -> str:
    """The dtype in which a tensor is read, as safetensors spells it."""
    return stored.kind.name if stored.kind.name in PLAIN_TYPES else "F32"


def _read_parts(file: Path) -> tuple[list[Path], dict[str, Any], dict[str, StoredTensor]]:
    """Reads the headers of all files of a model, from any one of them.

    Returns:
      The files in order, the metadata of the first, and the tensors of all.

    Raises:
      KvjaxError: unless the files are the parts of one model.
    """
    match, files = PART_NAME.search(file.name), [file]
    if match is not None:
        count = int(match[2])
        names = [f"{file.name[: match.start()]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
        files = [file.parent / name for name in names]
    absent = [part.name for part in files if match is not None and not part.is_file()]
    headers = [] if absent else [header.read_header(part) for part in files]
    metadata, problems = headers[0].metadata if headers else {}, []
    tensors: dict[str, StoredTensor] = {}
    for i, (part, (own, part_tensors)) in enumerate(zip(files, headers, strict=False)):
        number = own.get("split.no", i)
        if number != i:
            problems.append(f"{part} is part {number + 1} by its metadata and {i + 1} by its name")
        twice = [name for name in part_tensors if name in tensors]
        problems += [f"the tensor {x!r:.80} stands in {tensors[x].file.name} and in {part.name}" for x in twice]
        tensors |= part_tensors
    num_tensors = metadata.get("split.tensors.count", len(tensors))
    if num_tensors != len(tensors) and not problems:
        problems.append(f"the parts of {files[0].name} hold {len(tensors)} tensors, and the first says {num_tensors}")
    count, refusal = metadata.get("split.count", 0), None
    if absent:
        refusal = f"missing parts: {', '.join(absent[:8])}; copy them to {file.parent}"
    elif len(files) == 1 and isinstance(count, int) and count > 1:
        number = metadata.get("split.no", 0) + 1
        refusal = (
            f"{file} is part {number} of {count}, and its name does not say so: put all parts into one folder and "
            f"call them NAME-{1:05}-of-{count:05}.gguf to NAME-{count:05}-of-{count:05}.gguf, this one "
            f"NAME-{number:05}-of-{count:05}.gguf"
        )
    elif problems:
        refusal = (
            f"these are not the parts of one model: {'; '.join(problems)}; copy all parts of one model into an empty "
            "folder, or convert the safetensors checkpoint instead"
        )
    if refusal is not None:
        raise KvjaxError(refusal)
    return files, metadata, tensors


def read_weights(stored: StoredTensor) -> np.ndarray:
    """Reads the weights of a tensor; the file is mapped for this call only."""
    data = np.memmap(stored.file, np.uint8, "r", stored.start, (stored.bytes,))
    plain_type = PLAIN_TYPES.get(stored.kind.name)
    if plain_type is not None:
        return data.view(plain_type).reshape(stored.shape)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[stored.kind]
    rows = data.reshape(-1, stored.shape[-1] // per_block * block_bytes)
    try:
        return gguf.dequantize(rows, stored.kind).reshape(stored.shape)
    except NotImplementedError as e:
        raise KvjaxError(
            f"{stored.file} stores weights as {stored.kind.name}, which the installed `gguf` does not read; upgrade it "
            "(pip install --upgrade gguf), or use a file in another type"
        ) from e
