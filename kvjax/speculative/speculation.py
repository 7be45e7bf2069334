"""Speculative decoding: a draft proposes tokens, and the model accepts them or replaces the first that it rejects.

The draft is the model itself under a cheaper cache (TriForce), a model on a shortened context (RAPID), or another one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Unpack

import jax
import numpy as np

from kvjax.cache.accounting import CacheBytes, state_bytes
from kvjax.cache.protocol import Cache, KVMethod, RewindableLayer
from kvjax.cache.sequences import missing_ability
from kvjax.cache_ops import crop_layers, mesh_of
from kvjax.core.mesh import to_numpy
from kvjax.core.random import key_from_seed
from kvjax.core.types import Array
from kvjax.engine import decode
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.generation.finite import nonfinite_error
from kvjax.generation.inputs import Prompts, token_ids
from kvjax.generation.model_calls import capacity_for, model_for, run_prompts
from kvjax.generation.options import DecodeOptions, GenerateOptions, resolve_options
from kvjax.generation.programs import Timer, jit_with
from kvjax.generation.result import Result, logprob_fields
from kvjax.generation.stopping import AnswerText
from kvjax.models.model import Model
from kvjax.registry.strings import method_of, name_of
from kvjax.speculative.acceptance import make_shift
from kvjax.speculative.speculation_loop import SpeculationState, init_state, run_rounds
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

REMEDY = "take one that only appends, token by token, such as 'full', 'int4' or 'quest:budget=256'"


@dataclasses.dataclass(frozen=True)
class Speculation(Result):
    """The result of `speculate`: a `Result` whose decode steps are calls of the verifier, and counts of drafts."""

    accepted: list[int]  # drafted tokens of each sequence that were accepted
    drafted: list[int]  # tokens of each sequence that were drafted
    draft_bytes: CacheBytes  # of the draft's KV cache

    @property
    def verifier_calls(self) -> int:
        """Calls after the prompt; each reads num_draft_tokens + 1 tokens of every sequence."""
        return self.decode_steps

    @property
    def acceptance(self) -> float:
        """Fraction of drafted tokens that were accepted, over all sequences; 0 when none was drafted."""
        return sum(self.accepted) / max(1, sum(self.drafted))


@checks_keywords
def speculate(
    model: Model,
    prompts: Prompts,
    draft: str | KVMethod = "quest:budget=256",
    method: str | KVMethod = "full",
    *,
    num_draft_tokens: int = 4,
    draft_model: Model | None = None,
    draft_prompts: Prompts | None = None,
    transfer: float = 0.0,
    alpha: float = 0.1,
    capacity: int | None = None,
    **options: Unpack[GenerateOptions],
) -> Speculation:
    """Continues each prompt under `method` without loss: a draft proposes tokens, one call verifies them.

    Greedy tokens are those of `generate`; with a temperature they are distributed as those are, drawn by (seed, index
    in the batch). By default the draft is the same model under another method, as the retrieval cache of TriForce (Sun
    et al. 2024, arXiv 2404.11912, section 4; here the draft keeps its own keys and values of accepted tokens, and no
    smaller model drafts for it).

    Args:
      model: from `kvjax.load`; it verifies.
      prompts: texts, or lists of ids.
      draft: the draft's method, or its string.
      method: the verifier's method, or its string.
      num_draft_tokens: tokens that are drafted in each round.
      draft_model: another model with the same vocabulary, which drafts.
      draft_prompts: prompts of the draft in place of `prompts`, such as the passages that a search has found (RAPID,
        Chen et al. 2025, arXiv 2502.20330).
      transfer: above 0 (its authors use 5 to 50), RAPID's shift of the verifier's logits towards a confident draft; the
        tokens are then no longer those of the model alone.
      alpha: a token is shifted if the draft gives it at least alpha times its highest probability (RAPID's code: 0.1).
      capacity: as in `generate`.
      **options: those of `generate` but `stop`, `loop` and the penalties. Log-probabilities are the verifier's.

    Raises:
      KvjaxError: an option that speculation does not have.
      IncompatibleMethod: a method that cannot give rejected tokens back.
    """
    resolved = _resolve_options(model, options)
    max_new_tokens, params = resolved.max_new_tokens, resolved.sampling
    shift = make_shift(transfer, alpha)
    arguments.integer("num_draft_tokens", num_draft_tokens)
    drafter, timer = draft_model or model, Timer()
    ids = token_ids(model, prompts, begins=True)
    draft_ids = ids if draft_prompts is None else token_ids(drafter, draft_prompts, begins=True)
    vocabularies = drafter.config.vocab_size, model.config.vocab_size
    if len(set(vocabularies)) > 1 or len(ids) != len(draft_ids):
        problem = f"{len(draft_ids)} draft_prompts for {len(ids)} prompts; give one per prompt, or leave them out"
        if len(set(vocabularies)) > 1:
            problem = (
                f"the draft's model has {vocabularies[0]} tokens in its vocabulary and the verifier {vocabularies[1]}; "
                "draft with a model of the same vocabulary"
            )
        raise KvjaxError(problem)
    num_new = max_new_tokens + num_draft_tokens  # the last round may feed more tokens than are generated
    draft_capacity, rounded = capacity_for(draft_ids, None, num_new), capacity_for(ids, capacity, num_new)
    # No text grows to the last new token, which is not fed, or to tokens that are drafted after it.
    drafter = model_for(drafter, draft_ids, max(map(len, draft_ids)) + max_new_tokens - 1)
    model = model_for(model, ids, capacity or max(map(len, ids)) + max_new_tokens - 1)
    _, draft_cache = _prefill_rewindable(drafter, draft, draft_ids, draft_capacity, "draft", timer)
    last, cache = _prefill_rewindable(model, method, ids, rounded, "method", timer)
    prefill_seconds = timer.run_seconds
    eos, sampler = resolved.eos, params.sampler()
    # Compiled rounds serve all models of a configuration, so the caches must not carry the weights' fingerprints.
    cache, draft_cache = (dataclasses.replace(x, weights="") for x in (cache, draft_cache))
    targets = Target(model.config, model.auto_mesh), Target(drafter.config, drafter.auto_mesh)
    run = jit_with(run_rounds, ("num_draft_tokens", "targets"), ("state",), ())
    with timer.timed():
        state = init_state(
            last, key_from_seed(params.seed), eos, sampler, max_new_tokens, resolved.num_top, model.auto_mesh
        )
        state = dataclasses.replace(state, verifier=cache, draft=draft_cache)
        state = run(
            params=model.auto_params,
            draft_params=drafter.auto_params,
            state=state,
            sampler=sampler,
            shift=shift,
            num_draft_tokens=num_draft_tokens,
            targets=targets,
        )
        jax.block_until_ready(state)
    for role, name, failed in zip(("method", "draft"), (method, draft), to_numpy(state.rollback_failed), strict=True):
        if failed:
            raise IncompatibleMethod(
                f"{role}={name_of(method_of(name))!r} could not give rejected tokens back in round "
                f"{int(to_numpy(state.count))}: they had filled a group, which is coded for good; {REMEDY}"
            )
    # The draft's numbers come first: its tokens are what the verifier reads.
    for role, side_model, side in (("draft", drafter, 1), ("verifier", model, 0)):
        for row in np.flatnonzero(~to_numpy(state.is_finite[side]))[:1]:
            raise nonfinite_error(side_model, f"of the {role} in sequence {row}")
    return _to_result(model, state, resolved, prefill_seconds, timer)


def _resolve_options(model: Model, options: GenerateOptions) -> DecodeOptions:
    """Checks the options; raises KvjaxError for those of `generate` that rounds of speculation do not have."""
    resolved = resolve_options(model, options)
    unknown = [name for name in ("stop", "loop") if options.get(name)]
    # Each drafted token would change the logits of those after it, which are verified at once.
    unknown += ["penalties"] if resolved.sampling.has_penalties else []
    if unknown:
        raise KvjaxError(f"speculate knows no {', '.join(unknown)}; leave it out, or use kvjax.generate")
    return resolved


def _prefill_rewindable(
    model: Model, method: str | KVMethod, ids: list[list[int]], capacity: int, role: str, timer: Timer
) -> tuple[Array, Cache]:
    """Runs prompts under a method that can give tokens back: logits of their last tokens f32[B V], and the cache.

    Raises IncompatibleMethod, naming the method by its role, for any other method.
    """
    plan, label = bind(method, model.config), f"{role}={name_of(method_of(method))!r}"
    if len(model.config.attention_layers) < model.config.layers:
        raise IncompatibleMethod(
            f"{label} cannot give rejected tokens back: layers of this model hold a recurrent state, a sum over all "
            "tokens so far; use kvjax.generate, or a model whose layers all have attention"
        )
    if decode.num_draft_tokens(plan):
        raise IncompatibleMethod(f"{label} already guesses ahead by itself at each step; {REMEDY}")
    last, cache = run_prompts(model, plan, ids, capacity, timer=timer)
    try:
        for layer, state in zip(cache.plan, cache.layers, strict=True):
            if not isinstance(layer, RewindableLayer):
                raise missing_ability(layer, "give back tokens")
            layer.max_rollback(state)
        crop = functools.partial(crop_layers, plan=cache.plan, config=cache.config, mesh=mesh_of(cache))
        jax.eval_shape(crop, cache.layers, cache.length)  # traces without running: it only has to be possible
    except IncompatibleMethod as error:
        reason = str(error).partition(";")[0]
        raise IncompatibleMethod(f"{label} cannot give rejected tokens back: {reason}; {REMEDY}") from error
    return last, cache


def _to_result(
    model: Model, state: SpeculationState, options: DecodeOptions, prefill_seconds: float, timer: Timer
) -> Speculation:
    tokens, text = [row[row >= 0].tolist() for row in to_numpy(state.out)], None
    if model.tokenizer is not None:
        eos_ids = to_numpy(state.eos).tolist()
        answer = AnswerText(model.tokenizer, eos_ids, skip_special_tokens=options.skip_special_tokens)
        text = [answer.text(row) for row in tokens]
    return Speculation(
        tokens=tokens,
        text=text,
        finish_reasons=["stop" if ended else "length" for ended in to_numpy(state.ended)],
        bytes=state_bytes(state.verifier),
        prefill_seconds=prefill_seconds,
        decode_seconds=timer.run_seconds - prefill_seconds,
        compile_seconds=timer.compile_seconds,
        decode_steps=int(to_numpy(state.count)),
        num_sequences=len(tokens),
        **logprob_fields(state.logprobs, tokens),
        accepted=to_numpy(state.accepted).tolist(),
        drafted=to_numpy(state.drafted).tolist(),
        draft_bytes=state_bytes(state.draft),
    )
