"""One function per published method; the only home of a paper's default constants."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from kvjax.cache.hold.codecs import Host, Plain
from kvjax.cache.hold.groups import Kivi
from kvjax.cache.method import Method
from kvjax.cache.read.readers import Full, TopV
from kvjax.cache.select import budgets, scorers
from kvjax.cache.select.eviction import Eviction, unit_of
from kvjax.methods.h2o import H2O
from kvjax.methods.infllm import InfLLM
from kvjax.methods.kmeans import KMeans
from kvjax.methods.kvcrush import KVCrush
from kvjax.methods.scissorhands import Scissorhands
from kvjax.methods.specache import Speculative
from kvjax.methods.streaming_llm import StreamingLLM


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published method: how to make it, and where it comes from."""

    name: str
    make: Callable[..., Any]
    source: str

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its parameters with types and defaults."""
        return dict(inspect.signature(self.make, eval_str=True).parameters)

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return inspect.getdoc(self.make).splitlines()[0]


RECIPES: dict[str, Recipe] = {}


def recipe(source: str):
    """Registers a function that returns a method, with its citation, under the function's name."""

    def register(make):
        @functools.wraps(make)
        def named(*args, **kwargs):
            given = inspect.signature(make).bind(*args, **kwargs).arguments
            text = ",".join(f"{k}={v}" for k, v in given.items())
            return dataclasses.replace(make(*args, **kwargs), name=make.__name__ + (f":{text}" if text else ""))

        RECIPES[make.__name__] = Recipe(make.__name__, named, source)
        return named

    return register


@recipe("Vaswani et al. 2017, arXiv 1706.03762; Pope et al. 2022, arXiv 2211.05102")
def full() -> Method:
    """All keys and values on the device, all of them read: the exact reference."""
    return Method()


@recipe("FlexGen, Sheng et al. 2023, arXiv 2303.06865; what transformers calls the offloaded cache")
def offload() -> Method:
    """All keys and values in pinned host memory, brought back layer by layer: exact, and slow by the bus."""
    return Method(k=Host(Plain()), v=Host(Plain()))


@recipe("KCache, He & Wu 2024, arXiv 2404.18057, sections 3.1 and 4.1")
def kcache(n: int = 128, device_layers: int = 1, renormalise: bool = False, granularity: str = "query") -> Method:
    """Keys on the device, values in pinned host memory; exact scores, and only the n heaviest values are fetched.

    n: values per head and step (the paper: 32, 64, 128). device_layers: so many first layers keep their values on
    the device and read all of them (the paper: 0..3, and 1 in its detailed table). renormalise: divide by the
    weight of the n chosen slots (the paper's formula does not, its text suggests it). granularity: "query", one set
    per query head (the paper), or "kv", one per key/value head.
    """
    return Method(v=Host(Plain()), read=TopV(n, renormalise, granularity), device_layers=device_layers)


@recipe("KIVI, Liu et al. 2024, arXiv 2402.02750; one bit: SpeCache, arXiv 2503.16163, section 3.4")
def kivi(
    bits: int = 2, group: int = 32, residual: int = 128, one_bit: str = "improved", kernel: str = "auto"
) -> Method:
    """Keys in groups of tokens per channel and values in groups of channels per token, in 1, 2, 4 or 8 bits.

    group: elements that share a scale and a minimum (the paper: 32). residual: recent tokens in full precision (the
    paper: 128). one_bit: levels of one-bit codes, "improved" (SpeCache, eq. 3) or "original" (KIVI's rule). Attention
    in the prompt is exact; a residual as long as prompt and answer makes all of it exact. kernel: "auto", "xla" or
    "pallas", see `readers.Full`.
    """
    low = lambda axis: Kivi(bits, group, axis, residual, one_bit)  # noqa: E731
    return Method(k=low("channel"), v=low("token"), read=Full(kernel))


@recipe("SpeCache, Jie et al. 2025, arXiv 2503.16163, section 3.3 and Algorithms 1-3")
def specache(
    bits: int = 1,
    group: int = 32,
    topk: int = 64,
    residual: int = 64,
    speculative: bool = True,
    one_bit: str = "improved",
    reduce: str = "mean",
) -> Method:
    """Everything exact in pinned host memory, a KIVI copy on the device, and the topk rows that count fetched ahead.

    bits, group, residual, one_bit: of the copy, as in `kivi` (the paper: 1 or 2 bits, groups of 32 or 64, 64 recent
    tokens, so that 64 fetched rows make the 128 of its KIVI). topk: rows per key/value head and step (the paper: 64).
    speculative: each step also runs a guess of the next token, which chooses the rows of the next step, so that they
    come while this one computes; False: each query chooses its own and waits. Only true tokens are ever kept (the
    paper's Algorithm 3 would append the guess too). Candidates are slots held in low bits; recent tokens are exact.
    reduce: over the query heads of a key/value head, "mean" or "max".
    """
    low = lambda axis: Kivi(bits, group, axis, residual, one_bit)  # noqa: E731
    read = Speculative(topk, low("channel"), low("token"), reduce, speculative)
    return Method(k=Host(Plain()), v=Host(Plain()), read=read)


def _evict(scorer, budget, sinks: int, recent: int, unit: str, per: str) -> Method:
    budget = budgets.Uniform(budget) if isinstance(budget, int) else budget
    return Method(select=Eviction(scorer, budget, sinks, recent, unit_of(unit), per))


@recipe("SnapKV, Li et al. 2024, arXiv 2404.14469, section 4; constants of its LongBench runs")
def snapkv(
    budget: int = 1024,
    window: int = 32,
    kernel: int = 7,
    pool: str = "max",
    reduce: str = "mean",
    reduce_first: bool = False,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
) -> Method:
    """After the prompt each head keeps its window and the tokens that the window's queries attend to most, pooled.

    budget: prompt tokens kept per layer and key/value head, the window included; what is decoded is kept too, one row a
    token. window, kernel, pool: the last queries, and the pooling over neighbours, "max" or "avg" (the class in the
    authors' code: 64, 5, avg). reduce, reduce_first: over a key/value head's query heads, mean or max, before or
    after pooling. unit: "token", or "chunk8", "page32" and the like. per: "head", or "layer" for one set for all heads.
    """
    return _evict(scorers.Window(window, kernel, pool, reduce, reduce_first), budget, sinks, window, unit, per)


@recipe("PyramidKV, Cai et al. 2024, arXiv 2406.02069, section 4; constants of the authors' scripts")
def pyramidkv(
    budget: int = 1024,
    window: int = 8,
    kernel: int = 7,
    pool: str = "max",
    beta: int = 20,
    rule: str = "authors",
    reduce: str = "mean",
    reduce_first: bool = False,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
) -> Method:
    """SnapKV's choice with many tokens in the first layers and few in the last, `budget` a layer on average.

    beta: how much steeper than flat. rule: "authors", integers as in their code (rounding lets the sum exceed the
    budget), or "peer", kvpress' floating-point form. The others as in `snapkv`.
    """
    scorer = scorers.Window(window, kernel, pool, reduce, reduce_first)
    return _evict(scorer, budgets.Pyramid(budget, window, beta, rule), sinks, window, unit, per)


@recipe("H2O in its prompt form (KVCache-Factory, kvpress); Zhang et al. 2023, arXiv 2306.14048; A2SF, 2407.20485")
def accumulated(
    budget: int = 1024,
    recent: int = 8,
    normalise: str = "none",
    decay: float = 1.0,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
) -> Method:
    """After the prompt each head keeps the tokens that received most attention in it, and the recent ones.

    normalise: "none", the sum over all queries (KVCache-Factory's H2O), or "visible", divided by the number of queries
    that could see the token (kvpress' observed attention; there with recent=0). decay: A2SF's forgetting factor.
    budget, unit, per as in `snapkv`. The method of the H2O paper evicts at every step: `h2o`.
    """
    return _evict(scorers.Accumulated(normalise, decay), budget, sinks, recent, unit, per)


@recipe("Devoto et al. 2024, arXiv 2406.11430")
def keynorm(budget: int = 1024, sinks: int = 0, recent: int = 0, unit: str = "token", per: str = "head") -> Method:
    """After the prompt each head keeps the tokens with the smallest keys; budget, unit, per as in `snapkv`."""
    return _evict(scorers.KeyNorm(), budget, sinks, recent, unit, per)


@recipe("the baseline of chance")
def random(budget: int = 1024, sinks: int = 0, recent: int = 0, seed: int = 0, unit: str = "token") -> Method:
    """After the prompt each head keeps tokens drawn by seed, head and position."""
    return _evict(scorers.Random(seed), budget, sinks, recent, unit, "head")


@recipe("StreamingLLM as a prompt-only baseline (KVCache-Factory, kvpress)")
def sinks_and_recent(budget: int = 1024, sinks: int = 4) -> Method:
    """After the prompt only its first and last tokens stay, at their true positions; all that is decoded stays too."""
    return _evict(scorers.Random(), budget, sinks, max(budget - sinks, 0), "token", "layer")


@recipe("KVCrush, Jha et al. 2025, arXiv 2503.00022, sections III-A to III-C")
def kvcrush(
    share: float = 0.25, anchor: str = "random", rule: str = "buckets", bits: str = "heads", seed: int = 0
) -> Method:
    """Over an eviction method: a share of its budget goes to tokens that stand for the evicted ones.

    Use it as in 'snapkv:budget=256 + kvcrush'. share: of what the budget leaves beside sinks and recents (the paper:
    0.25 on LongBench, 0.2 to 0.5 best). anchor: "random", "mean", "alternate", "zeros" or "ones". rule: "buckets",
    "stride" or "bins"; bits: "heads" (the paper) or "positions" (OpenVINO); both are explained in `crush.KVCrush`.
    """
    return Method(rest=KVCrush(share, anchor, rule, bits, seed))


@recipe("the baseline of KVCrush's Figure 6, arXiv 2503.00022, section IV-C")
def kmeans(share: float = 0.25, iterations: int = 10, features: str = "keys", seed: int = 0) -> Method:
    """Over an eviction method: as `kvcrush`, with representatives from k-means over the evicted tokens.

    features: "keys", or "bits", those of kvcrush. The paper does not say which.
    """
    return Method(rest=KMeans(share, iterations, features, seed))


@recipe("periodic compression while decoding, as kvpress' DecodingPress does it")
def recompress(every: int = 128) -> Method:
    """Over an eviction method: back to its budget whenever `every` tokens have been decoded, in constant memory.

    Use it as in 'snapkv:budget=256 + kvcrush + recompress:every=128'. The scorer looks at the latest queries.
    """
    return Method(again=every)


@recipe("StreamingLLM, Xiao et al. 2023, arXiv 2309.17453, section 3.2")
def streaming_llm(recent: int = 2000, sinks: int = 4, reindex: bool = True) -> StreamingLLM:
    """The first and the most recent tokens, in constant memory for a text without end.

    reindex: positions are indices inside the cache (the paper); False: true positions. A prompt is attended in full.
    """
    return StreamingLLM(recent, sinks, reindex)


@recipe("H2O, Zhang et al. 2023, arXiv 2306.14048, section 4; decay: A2SF, arXiv 2407.20485")
def h2o(
    heavy: int = 512, recent: int = 512, decay: float = 1.0, normalise: str = "none", granularity: str = "kv"
) -> H2O:
    """Heavy hitters and recent tokens, chosen again at every step, in constant memory.

    heavy, recent: tokens (the paper: a tenth of the prompt each). decay: of all scores, each step. normalise: "none"
    (the paper) or "visible-count". granularity: "kv", each key/value head its own tokens, or "layer".
    """
    return H2O(heavy, recent, decay, normalise, granularity)


@recipe("Scissorhands, Liu et al. 2023, arXiv 2305.17118, section 4")
def scissorhands(budget: int = 1024, history: int = 400, recent: int = 10, drop: float = 0.5) -> Scissorhands:
    """Drops, in batches, the tokens whose attention was below the mean most often, in constant memory.

    history: so many last steps count. recent: tokens that always stay. drop: share of the budget that goes at a time.
    """
    return Scissorhands(budget, history, recent, drop)


@recipe("InfLLM, Xiao et al. 2024, arXiv 2402.04617, section 3")
def infllm(
    block: int = 128,
    sinks: int = 128,
    local: int = 4096,
    topk: int = 16,
    representatives: int = 4,
    chunk: int = 512,
    per_head: bool = False,
) -> InfLLM:
    """Sinks, a window, and the topk most relevant blocks of the past, which live in pinned host memory.

    block: tokens of a block. local: the window. representatives: tokens whose mean key stands for a block. chunk:
    tokens processed at a time; the attention of the prompt is restricted too. per_head: a choice of blocks per
    key/value head instead of one per layer.
    """
    return InfLLM(block, sinks, local, topk, representatives, chunk, per_head)
