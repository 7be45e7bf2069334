"""One function per published method; the only home of a paper's default constants."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

from kvjax.kv.codecs import Host, Plain
from kvjax.kv.kivi import Kivi
from kvjax.kv.method import Method
from kvjax.kv.readers import TopV
from kvjax.kv.specache import Speculative


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published method: how to make it, and where it comes from."""

    name: str
    make: Callable[..., Method]
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
    """Registers a function that returns a Method, with its citation, under the function's name."""

    def register(make):
        @functools.wraps(make)
        def named(*args, **kwargs) -> Method:
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
def kivi(bits: int = 2, group: int = 32, residual: int = 128, one_bit: str = "improved") -> Method:
    """Keys in groups of tokens per channel and values in groups of channels per token, in 1, 2, 4 or 8 bits.

    group: elements that share a scale and a minimum (the paper: 32). residual: recent tokens in full precision (the
    paper: 128). one_bit: levels of one-bit codes, "improved" (SpeCache, eq. 3) or "original" (KIVI's rule). Attention
    in the prompt is exact; a residual as long as prompt and answer makes all of it exact.
    """
    return Method(k=Kivi(bits, group, "channel", residual, one_bit), v=Kivi(bits, group, "token", residual, one_bit))


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
