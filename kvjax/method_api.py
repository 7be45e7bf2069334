"""The names that a method is written with: the components' base classes and the helpers that methods share."""

from __future__ import annotations

from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.components import (
    Codec,
    HeadBudgets,
    LayerBudgets,
    Policy,
    Reader,
    ReadResult,
    Representatives,
    Scorer,
    Scores,
    SecondStageScorer,
    SideStore,
)
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.decode_policy import check_minimum, evict_lowest, policy_state_at, top_slots
from kvjax.cache.eviction.scorers import head_scores, token_scores
from kvjax.cache.eviction.selection import Selection, make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, LayerState, Needs, Traits
from kvjax.cache.readers.full import Full
from kvjax.cache.readers.retrieval import Index, Retrieve
from kvjax.core.attention_mass import Observation, attention_mass
from kvjax.core.gradients import refuse_gradient
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import GradientThroughBits, IncompatibleMethod, KvjaxError
from kvjax.registry.loading import load_methods
from kvjax.registry.registration import register_method

__all__ = [
    "Array",
    "BoundLayer",
    "Codec",
    "Full",
    "GradientThroughBits",
    "HeadBudgets",
    "Host",
    "IncompatibleMethod",
    "Index",
    "KVBlock",
    "KVMethod",
    "KvjaxError",
    "LayerBudgets",
    "LayerSpec",
    "LayerState",
    "Method",
    "Needs",
    "Observation",
    "Partial",
    "Plain",
    "Policy",
    "ReadResult",
    "Reader",
    "Representatives",
    "Retrieve",
    "Scorer",
    "Scores",
    "SecondStageScorer",
    "Selection",
    "SideStore",
    "TokenBudget",
    "Traits",
    "attention_mass",
    "check_minimum",
    "evict_lowest",
    "head_scores",
    "load_methods",
    "make_selection",
    "over_heads",
    "policy_state_at",
    "refuse_gradient",
    "register_method",
    "token_scores",
    "top_slots",
]
