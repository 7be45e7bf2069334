"""The plan of a conversion: which source tensor becomes which parameter, and all problems before a byte is written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
from einops import rearrange

from checkpoints_convert.families import FAMILIES, IGNORED, Rule, Target
from checkpoints_convert.hf_config import translate
from checkpoints_convert.source import FLOATS, Source
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config
from kvjax.models.checkpoint import parameter_shapes, part_names

TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""With tied embeddings the first may be absent, or repeat the second."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """A source tensor of one layer, and the parameters that it holds."""

    source: str
    targets: tuple[Target, ...]
    sizes: dict[str, int]  # axis letter -> size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the source tensor must have."""
        shapes = [self._source_shape(t) for t in self.targets]
        return (sum(s[0] for s in shapes), *shapes[0][1:])

    def _source_shape(self, target: Target) -> tuple[int, ...]:
        """The shape of a target's rows of the source tensor."""
        groups = re.findall(r"\(.*?\)|\S+", target.axes.split("->")[0])
        return tuple(math.prod(self.sizes[a] for a in group.strip("()").split()) for group in groups)

    def _rearrange(self, x: np.ndarray, axes: str) -> np.ndarray:
        return rearrange(x, axes, **{a: n for a, n in self.sizes.items() if a in axes})

    def split(self, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Splits the source tensor into (path, parameter) pairs, which are views where the layout allows it."""
        ends = np.cumsum([self._source_shape(t)[0] for t in self.targets])
        for target, rows in zip(self.targets, np.split(tensor, ends[:-1]), strict=True):
            yield target.path, self._rearrange(rows, target.axes)

    def join(self, parameters: dict[str, np.ndarray]) -> np.ndarray:
        """Inverts `split`."""
        inverse = {t: "->".join(reversed(t.axes.split("->"))) for t in self.targets}
        return np.concatenate([self._rearrange(parameters[t.path], axes) for t, axes in inverse.items()])


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """The config, and the source tensors that fill each top-level entry of the parameters."""

    config: Config
    parts: dict[str, tuple[Binding, ...]]
    dtype: np.dtype  # of the source tensors

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """All bindings, in the order of the parts."""
        return tuple(b for bindings in self.parts.values() for b in bindings)


def bind(rules: tuple[Rule, ...], config: Config) -> tuple[Binding, ...]:
    """Applies each rule once per layer; a rule whose parameter `config` does not have does not apply."""
    expected, c = parameter_shapes(config), config
    bindings = []
    for rule in rules:
        for i in range(config.layers if "{i}" in rule.source else 1):
            targets = tuple(t._replace(path=t.path.format(i=i)) for t in rule.targets)
            if all(t.path in expected for t in targets):
                a, mlp = c.kind(i).attention, c.kind(i).mlp
                sizes = dict(V=c.vocab_size, D=c.width, F=mlp.width, K=a.kv_heads, G=a.groups, H=a.head_dim)
                bindings.append(Binding(rule.source.format(i=i), targets, sizes))
    return tuple(bindings)


def plan_conversion(source: Source) -> ConversionPlan:
    """Matches names and shapes; raises one KvjaxError that lists all tensors missing, left over or misshapen."""
    config = translate(source.config, source.generation, source.eos_id(), len(source.tensors))
    bindings = bind(FAMILIES[source.config["model_type"]].rules, config)
    if problems := _find_problems(source, bindings, config):
        lines = "\n  ".join(problems)
        raise KvjaxError(f"{len(problems)} problems with the tensors, nothing was written:\n  {lines}")
    parts = {name: [] for name in part_names(parameter_shapes(config))}
    for b in bindings:
        parts[b.targets[0].path.split("/")[0]].append(b)
    # float32 for a mixture of types, and for float64, which JAX does not have unless it is turned on.
    stored = {FLOATS[source.tensors[b.source].dtype] for b in bindings}
    dtype = np.dtype(stored.pop() if len(stored) == 1 and "float64" not in stored else "float32")
    return ConversionPlan(config, {name: tuple(bs) for name, bs in parts.items()}, dtype)


def _find_problems(source: Source, bindings: tuple[Binding, ...], config: Config) -> list[str]:
    expected = {b.source: b.shape for b in bindings}
    found = {name: t for name, t in source.tensors.items() if not IGNORED.search(name)}
    if config.tie_embeddings:
        found.pop(TIED[0], None)
    problems = [f"{name}: missing" for name in expected if name not in found]
    if TIED[0] in expected and TIED[0] not in found:  # the last rule, and so the last problem
        problems[-1] += " (if the model ties its embeddings, config.json must say tie_word_embeddings: true)"
    problems += [
        f"{escape_unprintable(name)}: no such tensor in this family; is config.json the right one?"
        for name in found
        if name not in expected
    ]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            problems.append(f"{name}: shape {list(found[name].shape)}, config.json says {list(shape)}")
        if name in found and found[name].dtype not in FLOATS:
            problems.append(f"{name}: stored as {found[name].dtype}; save it dequantized, as BF16, F16 or F32")
    return problems
