"""Kinds of tables: what each is made of, and the register in which `kvjax calibrate` finds them.

A kind of table is a class, in the file that knows its maths; `table` registers it, and nothing else has to be touched.
A method whose recipe gets a path finds its arrays with `TheKind.given(path).of(spec, name=shape)`. What ships with
kvjax is made by `python -m experiments.tables.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.calibration.table_file import Given
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


class Kind:
    """One kind of table: statistics of texts, added up over tokens, rows and texts, and the arrays made of the sums.

    A kind whose arrays no statistics give, such as learned weights, has an `example` instead of `count` and `arrays`.
    """

    name: ClassVar[str]
    num_queries: int | None = 0  # of a text's last queries, as in `Needs`, that `count` wants to see
    needs_output = False  # whether `count` wants to see the layer's output projection
    needs_hidden = False  # whether it wants to see the hidden states
    placed = False  # whether `count` reads `spec.index`: each layer then has a compiled program of its own

    @classmethod
    def given(cls, path: str) -> Given:
        """The table of this kind in a file; "shipped" for those that ship with kvjax."""
        return Given(path, cls.name)

    def documents(self, vocabulary: int, positions: int) -> list[list[int]] | None:
        """Texts that the kind brings itself, as lists of ids below `vocabulary`, for a model of so many positions.

        None: it is counted on the texts that it is given.
        """
        return None

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        """Of one layer's texts, block [B K S H], the statistics: any pytree of arrays [B K ...]; padding never counts.

        Raises KvjaxError for a kind that no text can give.
        """
        raise KvjaxError(
            f"a table of {self.name} holds what no statistics of a text give; train it, and write the file with "
            "kvjax.cache.calibration.table_file.write"
        )

    @property
    def measured_by(self) -> str:
        """The string of a method whose scores are ranked over all layers for `count_layers`.

        Empty: each layer is counted by itself.
        """
        return ""

    def count_layers(self, layer: MethodLayer, measures: Any, lengths: Array) -> Any:
        """The statistics of texts whose layers have to be seen together: any pytree of arrays [L B K ...].

        Args:
          layer: one of the layers under the method of `measured_by`, for what all have in common.
          measures: what `measure` of all layers gives, arrays [L B ...].
          lengths: i32[B], of the texts.
        """
        raise NotImplementedError

    def join(self, before: np.ndarray, more: np.ndarray) -> np.ndarray:
        """The statistics of two texts as those of both."""
        return before + more

    def arrays(self, counted: Any, spec: LayerSpec) -> Mapping[str, np.ndarray]:
        """The sums f64[K ...] in the same pytree -> the table's arrays of this layer, by name."""
        raise NotImplementedError

    def example(self, spec: LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        """The arrays of a small table, for tests and as an example of the format: here, of random tokens."""
        counted = self.count(*_random(spec, rng), spec)
        return self.arrays(jax.tree.map(lambda x: np.asarray(x[0], np.float64), counted), spec)


KINDS: dict[str, Kind] = {}


def table(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Registers a kind of table under the name that its files have."""

    def register(kind: type[Kind]) -> type[Kind]:
        kind.name = name
        KINDS[name] = kind()
        return kind

    return register


def _random(spec: LayerSpec, rng: np.random.Generator, tokens: int = 64) -> tuple[KVBlock, Observation]:
    """Random tokens with all of their queries; their channels are unlike, as those of a model are."""
    K, G, H = spec.num_kv_heads, spec.num_groups, spec.head_dim
    mixed = rng.normal(size=(2, K, H, H)) * 0.9 ** np.arange(H)[:, None]
    k, v = (jnp.asarray(rng.normal(size=(1, K, tokens, H)) @ m, jnp.float32) for m in mixed)
    pos = jnp.arange(tokens, dtype=jnp.int32)[None]
    hidden = jnp.asarray(rng.normal(size=(1, 1, tokens, H)), jnp.float32)
    output = jnp.asarray(rng.normal(size=(1, K, G, H, H)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(1, K, G, tokens, H)), jnp.float32)
    return KVBlock(k, v, pos[:, None]), Observation(q, pos, output_projection=output, hidden_states=hidden)
