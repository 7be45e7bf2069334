"""Uses of a layer's cache beyond its own sequences, and the components that rule them out: one table for each use."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvjax.errors import IncompatibleMethod

CONTEXT_REMEDY = "a context is a value: keep the one of before, or fork it, instead of taking tokens back"


class Use(NamedTuple):
    """A use of a layer's cache."""

    error: str  # that refuses it, with the remedy
    # Each component that may rule it out; where it does, a path of attributes of `Components` that is true then; why.
    refusals: tuple[tuple[str, str, str], ...]

    def check(self, components: Any) -> None:
        """Raises IncompatibleMethod for `Components` of which one rules out this use."""
        for name, path, reason in self.refusals:
            cause = components
            for attribute in path.split("."):
                cause = None if cause is None else getattr(cause, attribute)  # a method need not have each component
            if cause:
                value = getattr(components, name)
                component = f"component `{name}`, {value if isinstance(value, str) else type(value).__name__},"
                raise IncompatibleMethod(self.error.format(component=component, reason=reason))


SHARED_BY_SEQUENCES = Use(
    "a prefix that sequences share is read in full, layer by layer, and never changes, and {component} {reason}; read "
    "the prefix under another method, such as 'full', and its documents under this one",
    (
        ("side_store", "side_store.paired_layer", "holds what two layers share once for both"),
        ("decode", "decode", "chooses anew at every step"),
        ("read", "read.chooses_slots", "chooses anew at every step"),
    ),
)
AFTER_SHARED_PREFIX = Use(
    "{component} cannot work behind a prefix that sequences share: {reason}; read the documents whole, or under a "
    "method without it",
    (
        ("positions", "indexed_by", "those inside the cache would be those of the shared tokens too"),
        ("decode", "decode.prompt_chunk", "the prompt's own attention would be to the tokens that it keeps"),
        ("read", "prompt_chunk", "the prompt's own attention would go through it"),
        ("attend", "attend", "it says what of the whole prompt its queries read"),
        ("select", "select.scorer.replay", "the whole prompt would be read a second time"),
        ("side_store", "side_store.paired_layer", "two layers would have to see each other's whole prompts"),
        ("layer_budgets", "layer_budgets", "layers would measure a part of the text alone (level=head divides none)"),
    ),
)
READ_BY_OTHER_LAYERS = Use(
    "layers of this model read the cache of another layer, and {component} {reason}; use a method without it, such as "
    "'full', 'snapkv', 'int8' or 'quest'",
    (
        ("side_store", "side_store.paired_layer", "holds what two layers share, and is opened for each step"),
        ("read", "read.prompt_chunk", "reads prompts too, by the queries of the layer that holds them"),
        (
            "decode",
            "decode.prompt_chunk",
            "evicts tokens while a prompt is read, before the other layers have read them",
        ),
        ("read", "read.draft_tokens", "carries drafts, whose keys and values no state holds"),
        ("read", "read.cross_layer", "hands the choice of tokens from layer to layer"),
        ("read", "read.remembers_queries", "depends on the queries of earlier steps, which are one layer's"),
    ),
)
ROLLBACK = Use(
    f"{{component}} {{reason}}, so that this cache cannot give back tokens; {CONTEXT_REMEDY}",
    tuple((name, name, "has made its choice among the tokens") for name in ("decode", "select", "side_store")),
)
EDIT = Use(
    "{component} {reason}, and cannot be edited; edit the text under `full`, which any method can then be made of "
    "(`kvjax.reuse.read_exactly`)",
    tuple((x, f"{x}.sequential_writes", "takes tokens one by one, as they are read") for x in ("k", "v", "read")),
)
