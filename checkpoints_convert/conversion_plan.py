"""The plan of a conversion: which source tensors become which parameter, and all problems before a byte is written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from einops import rearrange

from checkpoints_convert.families import (
    Family,
    Table,
    TargetParameter,
    TensorRule,
    find_family,
    find_prefixes,
    is_buffer,
    is_later_layer,
    is_unread_projection,
    rename,
)
from checkpoints_convert.hf_config import translate
from checkpoints_convert.source import FLOATS, Source, Tensor
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config
from kvjax.models.checkpoint import parameter_shapes, part_names
from kvjax.models.quantized_params import IN_FLOAT32

HEAD, EMBEDDING = "head/kernel", "embedding"
"""With tied embeddings the tensor of the first may be absent, or repeat that of the second."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """Source tensors of one layer, one or those of all experts, and the parameters that they hold."""

    sources: tuple[str, ...]
    rule: TensorRule
    targets: tuple[TargetParameter, ...]
    sizes: dict[str, int]  # axis letter -> size

    @property
    def is_stacked(self) -> bool:
        """Whether the source tensors are those of the experts."""
        return "{e}" in self.rule.source

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that each source tensor must have."""
        if self.rule.unpack:
            shape = _source_shape(self.rule.unpack, self.sizes)
        else:
            shapes = [_source_shape(target.axes, self.sizes) for target in self.targets]
            shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        return shape[1:] if self.is_stacked else shape

    @property
    def num_values(self) -> int:
        """The numbers in all source tensors."""
        return math.prod(self.shape) * len(self.sources)

    def split(self, tensors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Splits the source tensors into parameters by path, which are views where the layout allows it."""
        x = np.stack(tensors) if self.is_stacked else tensors[0]
        if self.rule.unpack:
            x = _rearrange(x, self.rule.unpack, self.sizes)
        if self.rule.unrotated:
            x = x[_turned_channels(len(x), self.sizes[self.rule.unrotated])]
        ends = np.cumsum([_source_shape(target.axes, self.sizes)[0] for target in self.targets])
        parts = zip(self.targets, np.split(x, ends[:-1]), strict=True)
        return {target.path: _rearrange(rows, target.axes, self.sizes) for target, rows in parts}

    def join(self, parameters: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Inverts `split`."""
        rows = [_rearrange(parameters[target.path], _invert(target.axes), self.sizes) for target in self.targets]
        x = np.concatenate(rows)
        if self.rule.unrotated:
            x = x[np.argsort(_turned_channels(len(x), self.sizes[self.rule.unrotated]))]
        if self.rule.unpack:
            x = _rearrange(x, _invert(self.rule.unpack), self.sizes)
        return list(x) if self.is_stacked else [x]


def _source_shape(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of an array with the axes before the arrow, groups in parentheses."""
    groups = re.findall(r"\(.*?\)|\S+", axes.split("->")[0])
    return tuple(math.prod(sizes[a] for a in group.strip("()").split()) for group in groups)


def _invert(axes: str) -> str:
    return "->".join(reversed(axes.split("->")))


def _rearrange(x: np.ndarray, axes: str, sizes: Mapping[str, int]) -> np.ndarray:
    return rearrange(x, axes, **{letter: sizes[letter] for letter in _find_letters(axes)})


def _find_letters(*axes: str) -> set[str]:
    return set(re.findall(r"\w+", " ".join(axes)))


def _turned_channels(count: int, num_unrotated: int) -> np.ndarray:
    """Returns for each of our channels its index in a source, which has those without position first, then pairs."""
    pairs = np.arange(num_unrotated, count).reshape(-1, 2)
    return np.concatenate([pairs.T.reshape(-1), np.arange(num_unrotated)])


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """The config, and the source tensors that fill each top-level entry of the parameters."""

    config: Config
    parts: dict[str, tuple[Binding, ...]]
    dtype: np.dtype  # of the source tensors
    tied_head: str | None = None  # the head's source tensor, if the checkpoint has one and the model ties it
    num_left_out: int = 0  # source tensors that are no part of the decoder: of images, or of layers after it

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """All bindings, in the order of the parts."""
        return tuple(b for bindings in self.parts.values() for b in bindings)


def bind(table: Table, config: Config) -> tuple[Binding, ...]:
    """Applies each rule once per layer; a rule whose parameters or axes a layer does not have does not apply to it."""
    expected = parameter_shapes(config)
    sizes = [_read_sizes(config, i) for i in range(config.layers)]
    bindings = []
    for rule in table:
        letters = _find_letters(rule.unpack, *(target.axes for target in rule.targets))
        for i in range(config.layers if "{i}" in rule.source else 1):
            targets = tuple(t._replace(path=t.path.format(i=i)) for t in rule.targets)
            has_parameters = all(t.path in expected for t in targets)
            if not has_parameters or rule.unless.format(i=i) in expected or letters - sizes[i].keys():
                continue
            experts = range(sizes[i]["E"]) if "{e}" in rule.source else (0,)
            sources = tuple(rule.source.format(i=i, e=e) for e in experts)
            bindings.append(Binding(sources, rule, targets, sizes[i]))
    return tuple(bindings)


def _read_sizes(config: Config, layer: int) -> dict[str, int]:
    """Returns the sizes of the axes of one layer's parameters, by the letters of `families`."""
    attention, mlp = config.kind(layer).attention, config.kind(layer).mlp
    sizes = {"V": config.vocab_size, "D": config.width, "F": mlp.width, "one": 1, "two": 2}
    if (own := config.per_layer_embedding) is not None:
        sizes |= {"L": own.layers, "J": own.width}
    sizes |= {"K": attention.kv_heads, "G": attention.groups, "H": attention.head_dim, "W": attention.value_dim}
    if attention.recurrence is not None:
        keys, values = attention.head_dim, attention.groups * attention.value_dim
        sizes |= {"C": attention.kv_heads * (2 * keys + values), "X": 2 * keys + 2 * values}
        sizes["N"] = attention.recurrence.kernel_tokens
    if mlp.experts is not None:
        sizes |= {"E": mlp.experts.count, "S": mlp.experts.shared_width}
    if (latent := attention.latent) is not None:
        rotated = 0 if attention.rope is None else attention.rope.dim
        sizes |= {"P": rotated, "U": latent.unrotated, "R": latent.rank, "W": latent.value}
        sizes |= {"X": rotated + latent.unrotated, "Y": rotated + latent.rank, "Z": latent.unrotated + latent.value}
        if latent.query_rank is not None:
            sizes["Q"] = latent.query_rank
    return sizes


def choose_table(family: Family, config: Config, tensors: Mapping[str, Tensor]) -> tuple[Table, tuple[Binding, ...]]:
    """Returns that table of a family which fits the most of these tensors, with their prefix, and its bindings.

    One that only names a tensor, whose shape is another, comes after one that has its shape, too.
    """
    decoder, head = find_prefixes(tensors)
    tables = [rename(table, (r"^model\.", decoder), (r"^lm_head\.", head)) for table in family.tables]
    candidates = [(table, bind(table, config)) for table in tables]
    fits = []
    for _, bindings in candidates:
        named = [tensors[name].shape == b.shape for b in bindings for name in b.sources if name in tensors]
        fits.append((len(named), sum(named)))
    return candidates[fits.index(max(fits))]


def plan_conversion(source: Source) -> ConversionPlan:
    """Matches names and shapes; raises one KvjaxError that lists all tensors missing, left over or misshapen."""
    config = translate(source.config, source.generation, source.eos_id(), len(source.tensors))
    family = find_family(source.config)
    assert family is not None
    table, bindings = choose_table(family, config, source.tensors)
    head = next(rule.source for rule in table if rule.targets[0].path == HEAD)
    tied_head = head if config.tie_embeddings and head in source.tensors else None
    left_out = {name for name in source.tensors if family.left_out is not None and family.left_out.search(name)}
    left_out |= {name for name in source.tensors if is_later_layer(name, source.config, family)}
    left_out |= {name for name in source.tensors if is_unread_projection(name, config)}
    found = {name: t for name, t in source.tensors.items() if not is_buffer(name, t.shape) and name not in left_out}
    if problems := _find_problems(found, bindings, head, tied_head):
        lines = "\n  ".join(problems)
        raise KvjaxError(f"{len(problems)} problems with the tensors, nothing was written:\n  {lines}")
    parts = {name: [] for name in part_names(parameter_shapes(config))}
    for b in bindings:
        parts[b.targets[0].path.split("/")[0]].append(b)
    # float32 for a mixture of types, and for float64, which JAX does not have unless it is turned on.
    # Some have a dtype of their own; the norm of a recurrence may be stored in float32 as well.
    cast = (b for b in bindings if not b.targets[0].path.endswith((*IN_FLOAT32, "recurrence/norm/scale")))
    stored = {FLOATS[source.tensors[name].dtype] for b in cast for name in b.sources}
    dtype = np.dtype(stored.pop() if len(stored) == 1 and "float64" not in stored else "float32")
    return ConversionPlan(config, {name: tuple(bs) for name, bs in parts.items()}, dtype, tied_head, len(left_out))


def _find_problems(
    found: Mapping[str, Tensor], bindings: tuple[Binding, ...], head: str, tied_head: str | None
) -> list[str]:
    expected = {name: b.shape for b in bindings for name in b.sources}
    problems = []
    for name in expected:
        hint = ""
        if name == head:
            hint = (
                " (if the model ties its embeddings, config.json must say tie_word_embeddings: true; if it was saved "
                "without its head, save it as ..ForCausalLM)"
            )
        if name not in found:
            problems.append(f"{name}: missing{hint}")
    problems += [
        f"{escape_unprintable(name)}: no such tensor in this family; is config.json the right one?"
        for name in found
        if name not in expected and name != tied_head
    ]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            problems.append(f"{name}: shape {list(found[name].shape)}, config.json says {list(shape)}")
        if name in found and found[name].dtype not in FLOATS:
            problems.append(f"{name}: stored as {found[name].dtype}; save it dequantized, as BF16, F16 or F32")
    return problems
