"""One function per published method; the only home of a paper's default constants."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

from kvjax.kv.codecs import Host, Plain
from kvjax.kv.method import Method
from kvjax.kv.readers import TopV


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
