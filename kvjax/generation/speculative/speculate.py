"""Speculative decoding: a draft guesses some tokens ahead, and the model keeps those that it would have said itself.

The draft is the model itself under a cheaper cache (TriForce), a model on a shortened context (RAPID), or another one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.cache.accounting import CacheBytes, state_bytes
from kvjax.cache.protocol import Cache, KVMethod, RewindableLayer
from kvjax.cache.state import missing_ability
from kvjax.core.random import key_from_seed
from kvjax.core.types import Array
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind
from kvjax.engine.sampling import SamplingParams, resolve_sampling
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.generation import calls, stopping
from kvjax.generation.cache_ops.sequences import cropped, mesh_of
from kvjax.generation.compiled import jit_with
from kvjax.generation.inputs import Prompts, token_ids
from kvjax.generation.prompt_runner import run_prompts
from kvjax.generation.result import Result
from kvjax.generation.speculative.acceptance import Shift, shift
from kvjax.generation.speculative.speculation_loop import Rounds, all_rounds
from kvjax.generation.speculative.speculation_loop import start as start_rounds
from kvjax.generation.timing import Timer
from kvjax.methods.strings import method_of, name_of
from kvjax.models.model import Model
from kvjax.utils import arguments

REMEDY = "take one that only appends, token by token, such as 'full', 'int4' or 'quest:budget=256'"


@dataclasses.dataclass(frozen=True)
class Speculation(Result):
    """What `speculate` returns: a `Result`, whose decode steps are calls of the verifier, and how the drafts fared."""

    accepted: list[int]  # drafted tokens of each row that were accepted
    drafted: list[int]  # tokens of each row that were drafted
    draft_bytes: CacheBytes  # of the draft's KV cache

    @property
    def verifier_calls(self) -> int:
        """After the prompt; each reads ahead + 1 tokens of every row."""
        return self.decode_steps

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted, over all rows; 0 when none was drafted."""
        return sum(self.accepted) / max(1, sum(self.drafted))

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all rows per second, their first ones apart; 0 when no round was run."""
        return sum(len(row) - 1 for row in self.tokens) / self.decode_seconds if self.verifier_calls else 0.0


def speculate(
    model: Model,
    prompts: Prompts,
    draft: str | KVMethod = "quest:budget=256",
    method: str | KVMethod = "full",
    *,
    ahead: int = 4,
    draft_model: Model | None = None,
    draft_prompts: Prompts | None = None,
    transfer: float = 0.0,
    alpha: float = 0.1,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    eos_ids: Sequence[int] | int | None = None,
    capacity: int | None = None,
) -> Speculation:
    """Continues each prompt under `method` without loss, from drafts of `ahead` tokens that it verifies in one call.

    Greedy, the tokens are those of `generate`; with a temperature they are distributed as those are, drawn by (seed,
    row index). By default the draft is the same model under another method, as the retrieval cache of TriForce (Sun et
    al. 2024, arXiv 2404.11912, section 4; here the draft keeps its own keys and values of accepted tokens, and no
    smaller model drafts for it). draft_model: another model with the same vocabulary. draft_prompts: what the draft
    reads in place of the prompts, such as the passages of each that a search has found (RAPID, Chen et al. 2025, arXiv
    2502.20330).
    transfer: above 0 (its authors use 5 to 50), RAPID's shift of the logits by which drafts are judged, towards a draft
    that is sure of itself; the tokens are then no longer those of the model alone. alpha: a token is shifted if the
    draft gives it at least alpha times its best (RAPID's code: 0.1). sampling, or temperature, top_k, top_p, min_p and
    seed: as in `generate`. capacity: tokens per row of the verifier's cache,
    default what is needed.
    Raises IncompatibleMethod where a method cannot give rejected tokens back.
    """
    params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    how = shift(transfer, alpha)
    arguments.integer("ahead", ahead)
    arguments.integer("max_new_tokens", max_new_tokens)
    drafter, timer = draft_model or model, Timer()
    ids = token_ids(model, prompts)
    draft_ids = ids if draft_prompts is None else token_ids(drafter, draft_prompts)
    _check_alike(model, drafter, ids, draft_ids)
    extra = max_new_tokens + ahead  # a last round may feed so many more than are wanted
    _, guessing = _read(drafter, draft, draft_ids, calls.room(draft_ids, None, extra), "draft", timer)
    last, cache = _read(model, method, ids, calls.room(ids, capacity, extra), "method", timer)
    read_seconds, first = timer.run_seconds, (last, _unmarked(cache), _unmarked(guessing))
    sizes = {"ahead": ahead, "length": max_new_tokens}
    rounds = _decoded(model, drafter, first, params, how, timer, **sizes, eos_ids=eos_ids)
    _check_never_stuck(rounds, draft, method)
    return _result(model, rounds, read_seconds, timer)


def _decoded(
    model: Model,
    drafter: Model,
    first: tuple[Array, Cache, Cache],
    params: SamplingParams,
    how: Shift,
    timer: Timer,
    *,
    ahead: int,
    length: int,
    eos_ids: Sequence[int] | int | None,
) -> Rounds:
    """All rounds, from what both have read."""
    eos, s = stopping.end_ids(model, eos_ids), params.sampler()
    targets = Target(model.config, model.mesh), Target(drafter.config, drafter.mesh)
    both = {"params": model.params, "draft_params": drafter.params, "targets": targets}
    run_rounds = jit_with(all_rounds, ("ahead", "targets"), ("rounds",))
    with timer.timed():
        last, verifier, draft = first
        rounds = start_rounds(last, key_from_seed(params.seed), eos, s, length=length)
        rounds = dataclasses.replace(rounds, verifier=verifier, draft=draft)
        return jax.block_until_ready(run_rounds(**both, rounds=rounds, sampler=s, how=how, ahead=ahead))


def _unmarked(cache: Cache) -> Cache:
    """The cache without the weights' fingerprint, which compiled rounds would be made anew for."""
    return dataclasses.replace(cache, weights="")


def _check_alike(model: Model, drafter: Model, ids: list[list[int]], draft_ids: list[list[int]]) -> None:
    mine, yours = model.config.vocab_size, drafter.config.vocab_size
    if mine != yours:
        raise KvjaxError(
            f"the draft's model has {yours} tokens in its vocabulary and the verifier {mine}; draft with a model of "
            "the same vocabulary"
        )
    if len(ids) != len(draft_ids):
        raise KvjaxError(
            f"{len(draft_ids)} draft_prompts for {len(ids)} prompts; give one per prompt, or leave them out"
        )


def _read(
    model: Model, method: str | KVMethod, ids: list[list[int]], capacity: int, role: str, timer: Timer
) -> tuple[Array, Cache]:
    """Prompts under a method that can give tokens back: (logits of each row's last token f32[B V], cache)."""
    plan, named = bind(method, model.config), f"{role}={name_of(method_of(method))!r}"
    if num_draft_tokens(plan):
        raise IncompatibleMethod(f"{named} already guesses ahead by itself at each step; {REMEDY}")
    last, cache = run_prompts(model, plan, ids, capacity, timer=timer)
    try:
        _check_goes_back(cache)
    except IncompatibleMethod as error:
        reason = str(error).partition(";")[0]
        raise IncompatibleMethod(f"{named} cannot give rejected tokens back: {reason}; {REMEDY}") from error
    return last, cache


def _check_goes_back(cache: Cache) -> None:
    """Raises IncompatibleMethod for a method whose tokens, once taken, stay."""
    for layer, state in zip(cache.plan, cache.layers, strict=True):
        if not isinstance(layer, RewindableLayer):
            raise missing_ability(layer, "give back tokens")
        layer.max_rollback(state)
    back = functools.partial(cropped, plan=cache.plan, heads=cache.config.kv_heads, mesh=mesh_of(cache))
    jax.eval_shape(back, cache.layers, cache.length)


def _check_never_stuck(rounds: Rounds, draft: str | KVMethod, method: str | KVMethod) -> None:
    """Raises IncompatibleMethod where rejected tokens had been coded in groups before it was known."""
    for role, name, stuck in zip(("method", "draft"), (method, draft), np.asarray(rounds.stuck), strict=True):
        if stuck:
            raise IncompatibleMethod(
                f"{role}={name_of(method_of(name))!r} could not give rejected tokens back in round "
                f"{int(rounds.count)}: they had filled a group, which is coded for good; {REMEDY}"
            )


def _result(model: Model, rounds: Rounds, read_seconds: float, timer: Timer) -> Speculation:
    tokens = [row[row >= 0].tolist() for row in np.asarray(rounds.out)]
    return Speculation(
        tokens=tokens,
        text=None if model.tokenizer is None else [model.tokenizer.decode(t) for t in tokens],
        finish_reasons=["stop" if ended else "length" for ended in np.asarray(rounds.ended)],
        bytes=state_bytes(rounds.verifier),
        prefill_seconds=read_seconds,
        decode_seconds=timer.run_seconds - read_seconds,
        compile_seconds=timer.compile_seconds,
        decode_steps=int(rounds.count),
        rows=len(tokens),
        accepted=np.asarray(rounds.accepted).tolist(),
        drafted=np.asarray(rounds.drafted).tolist(),
        draft_bytes=state_bytes(rounds.draft),
    )
