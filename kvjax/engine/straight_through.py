"""Gradients through a cache: codes are stored with the exact vectors, which carry the gradient.

`bind(.., differentiable=True)` binds `make_differentiable(method)`. A codec that stores codes is wrapped in
`StraightThrough`; a smooth one (plain vectors, low rank, fewer channels) keeps its own gradient. All that a layer
packs, its reader's copies and its side store included, stays floats in device memory. The forward pass computes the
same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

import jax
from jax import lax
from jaxtyping import Float

from kvjax.cache.binding import map_fields
from kvjax.cache.codecs.plain import CodecWrapper, in_window
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveKeys
from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, Traits
from kvjax.cache.readers.full import Full
from kvjax.cache.shared_prefix import SharedPrefixMethod
from kvjax.cache.storage import Codec, encode_prompt
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.gradients import with_gradient_of
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class StraightThroughState:
    """The wrapped codec's storage, and the exact vectors that carry the gradient."""

    inner: Any
    exact: Float[Array, "B K S H"]


@dataclasses.dataclass(frozen=True)
class StraightThrough(CodecWrapper, PromptAdaptiveKeys):
    """Computes the wrapped codec's numbers with the gradient of the exact ones (Bengio et al. 2013, arXiv 1308.3432).

    x' = x + stop_gradient(coded - x), in the bits of `coded`. Scores and mixed values are computed by the codec, and
    differentiated as those of x'. The exact vectors cost the bytes of an exact cache: use it to differentiate, not to
    save memory.
    """

    inner: Codec

    is_smooth: ClassVar[bool] = True

    def encode(self, x: Array, pos: Array, observation: Observation | None = None) -> StraightThroughState:
        return StraightThroughState(encode_prompt(self.inner, *_constant(x, pos, observation)), x)

    def fit_prompt(self, x: Array, pos: Array, observation: Observation) -> Array:
        return cast(PromptAdaptiveKeys, self.inner).fit_prompt(*_constant(x, pos, observation))

    def encode_with(self, x: Array, pos: Array, params: Array) -> StraightThroughState:
        return StraightThroughState(cast(PromptAdaptiveKeys, self.inner).encode_with(*_constant(x, pos, params)), x)

    def decode(self, stored: StraightThroughState) -> Array:
        coded = self.inner.decode(_constant(stored.inner))
        return with_gradient_of(coded, stored.exact.astype(coded.dtype))

    def append(self, stored: StraightThroughState, x: Array, at: Array) -> StraightThroughState:
        inner = self.inner.append(*_constant(stored.inner, x, at))
        return StraightThroughState(inner, memory.put(stored.exact, x.astype(stored.exact.dtype), at))

    def gather(self, stored: StraightThroughState, idx: Array) -> Array:
        # A codec clips indices outside the cache; the exact vectors must follow it.
        exact = memory.take(stored.exact, idx.clip(0, max(stored.exact.shape[2] - 1, 0)))
        coded = self.inner.gather(*_constant(stored.inner, idx))
        return with_gradient_of(coded, exact.astype(coded.dtype))

    def scores(self, q: Array, stored: StraightThroughState) -> Array:
        value = self.inner.scores(*_constant(q, stored.inner))
        return with_gradient_of(value, attention.scores(q, self.decode(stored)))

    def mix(self, p: Array, stored: StraightThroughState) -> Array:
        value = self.inner.mix(*_constant(p, stored.inner))
        return with_gradient_of(value, attention.mix(p, self.decode(stored)))

    def in_window(self, by_token: Codec) -> Codec:
        return dataclasses.replace(self, inner=in_window(self.inner, by_token))

    def in_pages(self, page: int) -> Codec | None:
        inner = self.inner.in_pages(page)
        return None if inner is None else StraightThrough(inner)


def _constant(*trees: Any) -> Any:
    """Stops the gradient of several trees, or of one."""
    constants = jax.tree.map(lax.stop_gradient, trees)
    return constants if len(trees) > 1 else constants[0]


@dataclasses.dataclass(frozen=True)
class Differentiable:
    """A `Method` through whose cache gradients pass."""

    method: Method

    @property
    def traits(self) -> Traits:
        """The traits of the method, with everything on the device."""
        return dataclasses.replace(self.method.traits, host=False)

    @property
    def string(self) -> str:
        """The string that made the method."""
        return self.method.string

    def bind(self, spec: LayerSpec) -> BoundLayer:
        """Binds the method to one layer; raises KvjaxError where it cannot serve the model."""
        return dataclasses.replace(_wrap_codecs(self.method).bind(spec), is_differentiable=True)


def make_differentiable(method: KVMethod) -> KVMethod:
    """Makes a method through whose cache gradients pass; its forward pass computes the same numbers.

    Nothing is placed in host memory, codes are stored with the exact vectors (see `StraightThrough`), and 16-bit floats
    are not packed as bits. A codec's result has the gradient of the exact vectors, at the values of the codes.
    Everything else has its own gradient. Discrete choices have none: the tokens that are kept and read are constants.

    Args:
      method: a `kvjax.Method`, or one behind a shared prefix.

    Returns:
      The method to bind in its place.

    Raises:
      KvjaxError: for a method that is not assembled from components; it has to hold floats itself.
    """
    if isinstance(method, Differentiable):
        return method
    if isinstance(method, Method):
        return Differentiable(method)
    if isinstance(method, SharedPrefixMethod):
        return SharedPrefixMethod(make_differentiable(method.prefix), make_differentiable(method.own))
    raise KvjaxError(
        f"differentiable=True wraps the components of a kvjax.Method, and {type(method).__name__} has none: such a "
        "method passes gradients where its own state is of floats; bind it with differentiable=False"
    )


def _wrap_codecs(component: Any) -> Any:
    """Moves every codec of a method or component to the device, and wraps each one that is not smooth."""
    if isinstance(component, Codec):
        codec = component.on_device()
        return codec if codec.is_smooth else StraightThrough(codec)
    if isinstance(component, Full):
        return Full("xla")  # kernels read the codes alone, without the vectors that carry the gradient
    return map_fields(_wrap_codecs, component)
