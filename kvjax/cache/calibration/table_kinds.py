"""Kinds of tables: the arrays that each consists of, and the register in which `kvjax calibrate` finds them.

A kind of table is a class in the file that has its math, and `register_table_kind` is all that makes it known. A method
whose string names a path reads its arrays with `TheKind.table_file(path).layer_arrays(spec, name=shape)`. The tables
that ship with kvjax are made by `python -m experiments.tables.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.calibration.table_file import PUBLISHED_READERS, PublishedReader, TableFile
from kvjax.cache.components import LayerBudgets, PromptSelection
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.utils.abstract import abstract


class TableKind:
    """One kind of table: statistics of texts, summed over tokens, sequences and texts, and the arrays made of the sums.

    A kind whose arrays no statistics give, such as learned weights, has an `example` instead of `count` and `arrays`.
    """

    name: ClassVar[str]
    num_queries: int | None = 0  # a text's last queries that `count` observes, as in `Needs`
    needs_output = False  # whether `count` reads the layer's output projection
    needs_hidden = False  # whether `count` reads the hidden states
    needs_layer_index = False  # whether `count` reads `spec.index`: each layer then has a compiled program of its own
    # A method whose scores `count_layers` ranks over all layers; empty: each layer is on its own.
    measuring_method: str = ""
    # Makes the arrays of all layers from a file in the form that the method's authors publish; None: there is none.
    read_published: ClassVar[PublishedReader | None] = None

    @classmethod
    def table_file(cls, path: str) -> TableFile:
        """Returns the table of this kind in a file; "shipped" for those of KVJAX_TABLES and those that ship."""
        return TableFile(path, cls.name)

    def documents(self, vocabulary: int, positions: int) -> list[list[int]] | None:
        """Returns the texts that the kind brings itself, or None where it is counted on the user's texts.

        Args:
          vocabulary: number of token ids.
          positions: longest text of the model, in tokens.
        """
        return None

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        """Computes the statistics of texts in one layer.

        Args:
          block: keys and values [B K S H] of the texts; padding must not count.
          observation: what the class attributes ask for, None if nothing.
          spec: the layer.

        Returns:
          Any pytree of arrays [B K ...].

        Raises:
          KvjaxError: for a kind that no text can give.
        """
        raise KvjaxError(
            f"a table of {self.name} holds what no statistics of a text give; train it, and write the file with "
            "kvjax.cache.calibration.table_file.write"
        )

    @abstract
    def count_layers(
        self, selection: PromptSelection, layer_budgets: LayerBudgets, measures: Any, lengths: Array
    ) -> Any:
        """Computes the statistics of texts whose layers have to be seen together: a pytree of arrays [L B K ...].

        Args:
          selection: of one of the layers under the `measuring_method`, for what all have in common.
          layer_budgets: that method's component.
          measures: what `LayerBudgets.measure` returns in all layers, arrays [L B ...].
          lengths: i32[B], of the texts.
        """
        ...

    def join(self, before: np.ndarray, more: np.ndarray) -> np.ndarray:
        """Combines the statistics of two sets of texts."""
        return before + more

    @abstract
    def arrays(self, counted: Any, spec: LayerSpec) -> Mapping[str, np.ndarray]:
        """Makes the table's arrays of one layer, by name, from the sums: f64[K ...] in the pytree of `count`."""
        ...

    def example(self, spec: LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        """Makes the arrays of a small table from random tokens, for tests and as an example of the format."""
        K, G, H, num_tokens = spec.num_kv_heads, spec.num_groups, spec.head_dim, 64
        # Channels of unequal variance, as those of a model are: a calibration has something to find.
        mixing = [rng.normal(size=(K, n, n)) * 0.9 ** np.arange(n)[:, None] for n in (H, spec.value_dim)]
        k, v = (jnp.asarray(rng.normal(size=(1, K, num_tokens, m.shape[1])) @ m, jnp.float32) for m in mixing)
        pos = jnp.arange(num_tokens, dtype=jnp.int32)[None]
        hidden = jnp.asarray(rng.normal(size=(1, 1, num_tokens, H)), jnp.float32)
        output = jnp.asarray(rng.normal(size=(1, K, G, spec.value_dim, H)), jnp.float32)
        q = jnp.asarray(rng.normal(size=(1, K, G, num_tokens, H)), jnp.float32)
        observation = Observation(q, pos, output_projection=output, hidden_states=hidden)
        counted = self.count(KVBlock(k, v, pos[:, None]), observation, spec)
        return self.arrays(jax.tree.map(lambda x: np.asarray(x[0], np.float64), counted), spec)


TABLE_KINDS: dict[str, TableKind] = {}


def register_table_kind(name: str) -> Callable[[type[TableKind]], type[TableKind]]:
    """Registers a kind of table under the name that its files have."""

    def register(kind: type[TableKind]) -> type[TableKind]:
        kind.name = name
        TABLE_KINDS[name] = kind()
        if kind.read_published is not None:
            PUBLISHED_READERS[name] = kind.read_published
        return kind

    return register
