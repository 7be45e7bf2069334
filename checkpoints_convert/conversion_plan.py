"""Which source tensor becomes which parameter: decided, and every problem found, before anything is written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
from einops import rearrange

from checkpoints_convert.families import IGNORED, Rule, Target, family
from checkpoints_convert.hf_config import refuse_missing_layers, translate
from checkpoints_convert.source import FLOATS, Source
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config
from kvjax.models.checkpoint import parameter_shapes, part_names

TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""With tied embeddings the first may be absent, or repeat the second."""


def _axes(config: Config) -> dict[str, int]:
    c = config
    return dict(V=c.vocab_size, D=c.width, F=c.mlp_width, K=c.kv_heads, G=c.groups, H=c.head_dim)


def _rows(target: Target, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of a target's rows in its source tensor."""
    source = target.axes.split("->")[0]
    return tuple(math.prod(sizes[a] for a in group.strip("()").split()) for group in re.findall(r"\(.*?\)|\S+", source))


@dataclasses.dataclass(frozen=True)
class Binding:
    """One source tensor and the parameters that it holds, with the layer number filled in."""

    source: str
    targets: tuple[Target, ...]
    sizes: dict[str, int]

    @property
    def part(self) -> str:
        """The top-level entry that the parameters belong to."""
        return self.targets[0].path.split("/")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the source tensor must have."""
        shapes = [_rows(t, self.sizes) for t in self.targets]
        return (sum(s[0] for s in shapes), *shapes[0][1:])

    def _used(self, target: Target) -> dict[str, int]:
        return {a: n for a, n in self.sizes.items() if a in target.axes}

    def split(self, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The source tensor as (path, parameter) pairs; views, where the layout allows it."""
        ends = np.cumsum([_rows(t, self.sizes)[0] for t in self.targets])
        for target, rows in zip(self.targets, np.split(tensor, ends[:-1]), strict=True):
            yield target.path, rearrange(rows, target.axes, **self._used(target))

    def join(self, parameters: dict[str, np.ndarray]) -> np.ndarray:
        """The inverse of `split`."""
        back = {t: "->".join(reversed(t.axes.split("->"))) for t in self.targets}
        return np.concatenate([rearrange(parameters[t.path], axes, **self._used(t)) for t, axes in back.items()])


@dataclasses.dataclass(frozen=True)
class Plan:
    """The config, and for every top-level entry of the parameters the source tensors that fill it."""

    config: Config
    parts: dict[str, tuple[Binding, ...]]
    dtype: np.dtype  # what the source tensors are stored in

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """All of them, in the order of the parts."""
        return tuple(b for bindings in self.parts.values() for b in bindings)


def bind(rules: tuple[Rule, ...], config: Config) -> tuple[Binding, ...]:
    """The rules that apply to `config`, once per layer."""
    wanted, sizes = parameter_shapes(config), _axes(config)
    result = []
    for rule in rules:
        for i in range(config.layers if "{i}" in rule.source else 1):
            targets = tuple(t._replace(path=t.path.format(i=i)) for t in rule.targets)
            if all(t.path in wanted for t in targets):
                result.append(Binding(rule.source.format(i=i), targets, sizes))
    return tuple(result)


def plan(source: Source) -> Plan:
    """Matches names and shapes; raises one KvjaxError listing all that is missing, left over or misshapen."""
    refuse_missing_layers(source.config, len(source.tensors))
    config = translate(source.config, source.generation)
    bindings = bind(family(source.config).rules, config)
    _refuse(_problems(source, bindings, config))
    parts = {name: [] for name in part_names(parameter_shapes(config))}
    for b in bindings:
        parts[b.part].append(b)
    return Plan(config, {name: tuple(bs) for name, bs in parts.items()}, _dtype(source, bindings))


def _dtype(source: Source, bindings: tuple[Binding, ...]) -> np.dtype:
    """The type that all weights are stored in, if JAX has it; float32 holds any mixture."""
    stored = {FLOATS[source.tensors[b.source].dtype] for b in bindings}
    return np.dtype(stored.pop() if len(stored) == 1 and "float64" not in stored else "float32")


def _problems(source: Source, bindings: tuple[Binding, ...], config: Config) -> list[str]:
    expected = {b.source: b.shape for b in bindings}
    found = {name: t for name, t in source.tensors.items() if not IGNORED.search(name)}
    if config.tie_embeddings:
        found.pop(TIED[0], None)
    problems = [f"{name}: missing" for name in expected if name not in found]
    if TIED[0] in expected and TIED[0] not in found:
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
            problems.append(f"{name}: stored as {found[name].dtype}; save it dequantised, as BF16, F16 or F32")
    return problems


def _refuse(problems: list[str], shown: int = 40) -> None:
    if problems:
        more = [f"... and {len(problems) - shown} more"] if len(problems) > shown else []
        lines = "\n  ".join(problems[:shown] + more)
        raise KvjaxError(f"{len(problems)} problems with the tensors, nothing was written:\n  {lines}")
