"""What a new method is written with, in one import: the slots' base classes and the helpers that recipes use."""

from __future__ import annotations

from kvjax.cache.apart import Apart
from kvjax.cache.contract import KVMethod, Layer, LayerSpec, LayerState, Needs, Traits
from kvjax.cache.decode.policy import Policy
from kvjax.cache.hold.codecs import Codec, Host, Plain
from kvjax.cache.method import Method
from kvjax.cache.read.full import Full
from kvjax.cache.read.reader import Reader, Reading
from kvjax.cache.read.retrieve import Index, Retrieve
from kvjax.cache.select.budgets import TokenBudget
from kvjax.cache.select.represent import Represent
from kvjax.cache.select.rescore import Rescore
from kvjax.cache.select.scorers import Scorer, Scores, by_heads, by_tokens
from kvjax.cache.select.select import Select, selecting
from kvjax.cache.select.shares import HeadShares, LayerShares
from kvjax.core.gradients import refuse_gradient
from kvjax.core.mesh import over_heads
from kvjax.core.observe import Obs, mass
from kvjax.core.types import Array, Block, GradientThroughBits, IncompatibleMethod, KvjaxError, Partial
from kvjax.methods.catalogue import recipe
from kvjax.methods.loading import load_methods
from kvjax.methods.trial import Bytes, Sizes, Trial, constant, everything, selected

__all__ = [
    "Apart",
    "Array",
    "Block",
    "Bytes",
    "Codec",
    "Full",
    "GradientThroughBits",
    "HeadShares",
    "Host",
    "IncompatibleMethod",
    "Index",
    "KVMethod",
    "KvjaxError",
    "Layer",
    "LayerShares",
    "LayerSpec",
    "LayerState",
    "Method",
    "Needs",
    "Obs",
    "Partial",
    "Plain",
    "Policy",
    "Reader",
    "Reading",
    "Represent",
    "Rescore",
    "Retrieve",
    "Scorer",
    "Scores",
    "Select",
    "Sizes",
    "TokenBudget",
    "Traits",
    "Trial",
    "by_heads",
    "by_tokens",
    "constant",
    "everything",
    "load_methods",
    "mass",
    "over_heads",
    "recipe",
    "refuse_gradient",
    "selected",
    "selecting",
]
