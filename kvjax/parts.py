"""What a new method is written with, in one import: the slots' base classes and the helpers that recipes use."""

from __future__ import annotations

from kvjax.cache.decode.policy import Policy
from kvjax.cache.hold.codecs import Codec, Host, Plain
from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, LayerState, Needs, Traits
from kvjax.cache.read.full import Full
from kvjax.cache.read.reader import Reader, ReadResult
from kvjax.cache.read.retrieve import Index, Retrieve
from kvjax.cache.select.budget_allocation import HeadBudgets, LayerBudgets
from kvjax.cache.select.budgets import TokenBudget
from kvjax.cache.select.representatives import Representatives
from kvjax.cache.select.rescoring import SecondStageScorer
from kvjax.cache.select.scorers import Scorer, Scores, head_scores, token_scores
from kvjax.cache.select.selection import Selection, make_selection
from kvjax.cache.side_store import SideStore
from kvjax.core.attention_mass import Observation, attention_mass
from kvjax.core.gradients import refuse_gradient
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, GradientThroughBits, IncompatibleMethod, KVBlock, KvjaxError, Partial
from kvjax.methods.catalogue import recipe
from kvjax.methods.loading import load_methods
from kvjax.methods.trial import Bytes, Sizes, Trial, constant, everything, selected

__all__ = [
    "Array",
    "BoundLayer",
    "Bytes",
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
    "Sizes",
    "TokenBudget",
    "Traits",
    "Trial",
    "attention_mass",
    "constant",
    "everything",
    "head_scores",
    "load_methods",
    "make_selection",
    "over_heads",
    "recipe",
    "refuse_gradient",
    "selected",
    "token_scores",
]
