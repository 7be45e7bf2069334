"""Every published method by its name: `kvjax.methods.snapkv(budget=256)`. Each has a file, imported on first use."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time a method needs no line here
    from kvjax.methods.a2ats import a2ats as a2ats
    from kvjax.methods.a_shape import a_shape as a_shape
    from kvjax.methods.accumulated import accumulated as accumulated
    from kvjax.methods.adakv import adakv as adakv
    from kvjax.methods.arkvale import arkvale as arkvale
    from kvjax.methods.attention_gate import attention_gate as attention_gate
    from kvjax.methods.bfp import bfp as bfp
    from kvjax.methods.cake import cake as cake
    from kvjax.methods.cam import cam as cam
    from kvjax.methods.chunkkv import chunkkv as chunkkv
    from kvjax.methods.criticalkv import criticalkv as criticalkv
    from kvjax.methods.cskv import cskv as cskv
    from kvjax.methods.cur import cur as cur
    from kvjax.methods.d2o import d2o as d2o
    from kvjax.methods.double_sparsity import double_sparsity as double_sparsity
    from kvjax.methods.duo_attention import duo_attention as duo_attention
    from kvjax.methods.elastic_cache import elastic_cache as elastic_cache
    from kvjax.methods.ems import ems as ems
    from kvjax.methods.expected_attention import expected_attention as expected_attention
    from kvjax.methods.fp8 import fp8 as fp8
    from kvjax.methods.full import full as full
    from kvjax.methods.gear import gear as gear
    from kvjax.methods.h2o import h2o as h2o
    from kvjax.methods.head_shares import head_shares as head_shares
    from kvjax.methods.headkv import headkv as headkv
    from kvjax.methods.infllm import infllm as infllm
    from kvjax.methods.int4 import int4 as int4
    from kvjax.methods.int8 import int8 as int8
    from kvjax.methods.kcache import kcache as kcache
    from kvjax.methods.keydiff import keydiff as keydiff
    from kvjax.methods.keyformer import keyformer as keyformer
    from kvjax.methods.keynorm import keynorm as keynorm
    from kvjax.methods.kivi import kivi as kivi
    from kvjax.methods.kmeans import kmeans as kmeans
    from kvjax.methods.kvcrush import kvcrush as kvcrush
    from kvjax.methods.kvmerger import kvmerger as kvmerger
    from kvjax.methods.kvquant import kvquant as kvquant
    from kvjax.methods.kvzip import kvzip as kvzip
    from kvjax.methods.lagkv import lagkv as lagkv
    from kvjax.methods.lococo import lococo as lococo
    from kvjax.methods.locret import locret as locret
    from kvjax.methods.lookm import lookm as lookm
    from kvjax.methods.matryoshka import matryoshka as matryoshka
    from kvjax.methods.merged_heads import merged_heads as merged_heads
    from kvjax.methods.merging import merging as merging
    from kvjax.methods.mikv import mikv as mikv
    from kvjax.methods.minicache import minicache as minicache
    from kvjax.methods.offload import offload as offload
    from kvjax.methods.pyramidkv import pyramidkv as pyramidkv
    from kvjax.methods.quest import quest as quest
    from kvjax.methods.random import random as random
    from kvjax.methods.razor_attention import razor_attention as razor_attention
    from kvjax.methods.recompress import recompress as recompress
    from kvjax.methods.rekv import rekv as rekv
    from kvjax.methods.retrieval_attention import retrieval_attention as retrieval_attention
    from kvjax.methods.rkv import rkv as rkv
    from kvjax.methods.rocketkv import rocketkv as rocketkv
    from kvjax.methods.rotatekv import rotatekv as rotatekv
    from kvjax.methods.saq import saq as saq
    from kvjax.methods.scissorhands import scissorhands as scissorhands
    from kvjax.methods.shadowkv import shadowkv as shadowkv
    from kvjax.methods.sinks_and_recent import sinks_and_recent as sinks_and_recent
    from kvjax.methods.snapkv import snapkv as snapkv
    from kvjax.methods.specache import specache as specache
    from kvjax.methods.streaming_llm import streaming_llm as streaming_llm
    from kvjax.methods.think import think as think
    from kvjax.methods.tidal_decode import tidal_decode as tidal_decode
    from kvjax.methods.tova import tova as tova
    from kvjax.methods.triattention import triattention as triattention
    from kvjax.methods.turboquant import turboquant as turboquant
    from kvjax.methods.turned_queries import turned_queries as turned_queries
    from kvjax.methods.zipcache import zipcache as zipcache
    from kvjax.methods.zipvl import zipvl as zipvl


class _MethodsPackage(types.ModuleType):
    """A package in which a method and the module that defines it have the same name, and the method wins."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return dir(self)
        module = f"{__name__}.{name}"
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import of a submodule ends with setattr(package, name, submodule).
        if isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(self.__path__))


sys.modules[__name__].__class__ = _MethodsPackage
