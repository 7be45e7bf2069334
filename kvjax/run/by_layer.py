"""Passes run layer by layer: one program for all layers that are alike, called for each of them in turn.

A deep model is compiled in the time that one of its layers takes. A call of a program costs some 50 microseconds, so a
decode step of small layers is faster as a part of one compiled loop (`kvjax.run.loop`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from kvjax.cache.contract import Cache
from kvjax.core import product
from kvjax.core.program import Program
from kvjax.core.types import Array
from kvjax.models import decoder
from kvjax.models.decoder import Angles, Decoder, pick
from kvjax.models.model import Model
from kvjax.run import passes
from kvjax.run.clock import Clock
from kvjax.run.forward import Setting, guesses, positions
from kvjax.run.passes import Advance, Pass, Site


def _embed(params: Any, tokens: Array, pos: Array, setting: Setting) -> tuple[Array, Angles]:
    return _decoder(params, setting).apply({"params": params}, tokens, pos, method=Decoder.embed)


def _behind(
    params: Any, tokens: Array, length: Array, real: Array | None, setting: Setting
) -> tuple[Array, Angles, Array]:
    pos = passes.behind(tokens, length, real)
    return *_embed(params, tokens, jnp.maximum(pos, 0), setting), pos


def _layer(
    params: Any, x: Array, angles: Angles, work: Pass, mine: Any, carry: Any, setting: Setting, site: Site
) -> tuple[Array, Any, Any]:
    """One layer of a pass: (x for the next one, what became of `mine`, the next carry)."""

    def attend(_: int, *made: Array) -> tuple[Array, Any]:
        out, *rest = passes.attention(params, work, site, mine, carry, setting, *made)
        return out, rest

    layer = decoder.Layer(setting.config, 0, x.dtype)
    x, (result, carry) = layer.apply({"params": params}, x, angles, attend, work.wanted(site))
    return x, result, carry


def _finish(params: Any, x: Array, setting: Setting) -> Array:
    return _decoder(params, setting).apply({"params": params}, x, method=Decoder.finish)


def _finish_behind(
    params: Any, x: Array, length: Array, real: Array | None, setting: Setting, commit: int
) -> tuple[Array, Array]:
    return _finish(params, x, setting), length + passes.kept(commit, real)


def _decoder(params: Any, setting: Setting) -> Decoder:
    return Decoder(setting.config, params["embedding"].dtype)


def _pick(x: Array, at: Array) -> Array:
    return pick(x, at[:, None])[:, 0]


def _for_layer(x: Array, setting: Setting, **_: Any) -> dict[str, str]:
    return product.options(x.size // x.shape[-1], setting.config.width, x.dtype)


def _for_head(x: Array, setting: Setting, **_: Any) -> dict[str, str]:
    return product.options(x.size // x.shape[-1], setting.config.width, x.dtype, setting.config.tie_embeddings)


EMBED = Program(_embed, static=("setting",))
BEHIND = Program(_behind, static=("setting",))
LAYER = Program(_layer, static=("setting", "site"), options=_for_layer)
LAYER_IN_PLACE = Program(_layer, static=("setting", "site"), donate=("mine",), options=_for_layer)
PICK = Program(_pick)
FINISH = Program(_finish, static=("setting",), options=_for_head)
FINISH_BEHIND = Program(_finish_behind, static=("setting", "commit"), options=_for_head)


def around(params: Any) -> Any:
    """Of a model's parameters, those outside its layers."""
    return {name: x for name, x in params.items() if not name.startswith("layer_")}


def through(
    model: Model, tokens: Array, pos: Array, work: Pass, sites: Sequence[Site], mine: Sequence[Any], clock: Clock
) -> tuple[Array, tuple[Any, ...]]:
    """A pass of tokens i32[B T] at pos i32[B T]: (what the last layer gives [B T|Q D], what became of `mine`).

    What each layer has of its own, `mine`, is used up.
    """

    def run(_: int, **given: Any) -> Any:
        return clock.start(LAYER_IN_PLACE, **given)

    setting = Setting(model.config, model.mesh)
    embedded = clock.start(EMBED, params=around(model.params), tokens=tokens, pos=pos, setting=setting)
    return _through_layers(model, *embedded, work, sites, mine, run)


def _through_layers(
    model: Model,
    x: Array,
    angles: Angles,
    work: Pass,
    sites: Sequence[Site],
    mine: Sequence[Any],
    run: Callable[..., Any],
) -> tuple[Array, tuple[Any, ...]]:
    """As `through`, from the embedded tokens on; run(i, **arguments) calls the program of layer i."""
    shared = {"angles": angles, "work": work, "setting": Setting(model.config, model.mesh)}
    results, carry = [], None
    for i, (site, own) in enumerate(zip(sites, mine, strict=True)):
        params = model.params[f"layer_{i}"]
        x, result, carry = run(i, params=params, x=x, mine=own, carry=carry, site=site, **shared)
        results.append(result)
    return x, tuple(results)


def logits(model: Model, x: Array, clock: Clock) -> Array:
    """What the last layer gives, [... D] -> logits f32[... V]."""
    return clock.start(FINISH, params=around(model.params), x=x, setting=Setting(model.config, model.mesh))


@dataclasses.dataclass
class Stepper:
    """Fresh tokens on a cache, equally many in every call: the programs are looked up once.

    in_place: the cache is used up.
    """

    model: Model
    clock: Clock
    commit: int
    in_place: bool = False
    programs: list[Any] = dataclasses.field(default_factory=list)

    def advance(self, tokens: Array, cache: Cache, real: Array | None = None) -> tuple[Array, Cache]:
        """Tokens i32[B T], kept up to `commit` -> (logits f32[B T V], cache); real bool[B T], all by default."""
        model, setting = self.model, Setting(self.model.config, self.model.mesh)
        top, length = around(model.params), cache.length
        x, angles, pos = self._run(0, BEHIND, params=top, tokens=tokens, length=length, real=real, setting=setting)
        program = LAYER_IN_PLACE if self.in_place else LAYER

        def run(i: int, **given: Any) -> Any:
            return self._run(i + 1, program, **given)

        where = passes.decode_sites(cache)
        x, layers = _through_layers(model, x, angles, Advance(pos, self.commit), where, cache.layers, run)
        more = {"length": length, "real": real, "commit": self.commit, "setting": setting}
        out, length = self._run(len(layers) + 1, FINISH_BEHIND, params=top, x=x, **more)
        return out, dataclasses.replace(cache, layers=layers, length=length)

    def _run(self, number: int, program: Program, **arguments: Any) -> Any:
        if number == len(self.programs):
            self.programs.append(self.clock.compiled(program, **arguments))
        return self.programs[number](**program.traced(arguments))


def extend(
    model: Model, tokens: Array, lengths: Array, cache: Cache, clock: Clock, told: Array | None = None
) -> tuple[Array, Cache]:
    """tokens i32[B T] after what a cache holds, lengths i32[B] of them real -> (logits f32[B T V], a new cache).

    A method that guesses ahead takes them one by one, each beside the next one where that is told (bool[B T], all by
    default), otherwise and after the last one beside the model's own guess.
    """
    real = positions(tokens, lengths) >= 0
    if not guesses(cache.plan):
        return Stepper(model, clock, tokens.shape[1]).advance(tokens, cache, real)
    first, cache = Stepper(model, clock, 0).advance(tokens[:, :1], cache, real[:, :1])
    guess = first[:, 0].argmax(-1).astype(jnp.int32)
    known = real[:, 1:] if told is None else real[:, 1:] & told[:, :-1]
    steps, out = Stepper(model, clock, 1, in_place=True), []
    for t in range(tokens.shape[1]):
        following = jnp.where(known[:, t], tokens[:, t + 1], guess) if t + 1 < tokens.shape[1] else guess
        both = jnp.stack([tokens[:, t], following], 1)
        logits, cache = steps.advance(both, cache, jnp.stack([real[:, t]] * 2, 1))
        out.append(logits[:, 0])
        guess = logits[:, 1].argmax(-1).astype(jnp.int32)
    return jnp.stack(out, 1), cache
