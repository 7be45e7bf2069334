"""Contexts: documents that are read once, then asked, fed, edited, forked and saved; each call returns a new value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from kvjax import cache_ops
from kvjax.cache.accounting import CacheBytes, kept_positions, state_bytes
from kvjax.cache.protocol import Cache, KVMethod
from kvjax.cache.sequences import concat_sequences, take_sequences
from kvjax.cache.shared_prefix import SharedPrefixMethod
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation import save, user_warnings
from kvjax.generation.extend_prefix import read_after_prefix
from kvjax.generation.inputs import Prompts, are_empty, check_cache, check_room, round_up, token_ids
from kvjax.generation.model_calls import (
    Decoded,
    capacity_for,
    extend_padded,
    last_logits,
    model_for,
    run_prompts,
    teacher_force,
)
from kvjax.generation.options import GenerateOptions, check_streamed, resolve_options
from kvjax.generation.programs import Timer
from kvjax.generation.result import Result, concat_results
from kvjax.generation.session import DecodeSession, start_decoding
from kvjax.models.model import Model
from kvjax.registry.strings import method_of, name_of
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

DEFAULT_HEADROOM_TOKENS = 512  # default headroom per sequence after the documents


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """A batch of documents that a model has read under a method.

    A value: no call changes it, and calls that extend or edit it return a new one. Each document is one sequence of the
    batch.
    """

    model: Model
    cache: Cache
    last_logits: Array  # f32[B V], logits of each sequence's last token; f32[B 0], unknown, after a crop or an edit
    method: KVMethod  # under which the documents were read
    read_seconds: float = 0.0  # to read the documents, without compilation
    # Of all tokens read, where they are known: a repetition penalty counts them.
    ids: Sequence[Sequence[int]] | None = None

    def __repr__(self) -> str:
        if self.cache.is_donated:
            return f"Context({name_of(self.method)!r}; used up)"
        if not self.cache.length.is_fully_addressable:  # its values would take a collective, which not all may reach
            return f"Context({name_of(self.method)!r}; {self.num_sequences} sequences on devices of several processes)"
        tokens = ", ".join(map(str, to_numpy(self.cache.length).tolist()))
        return f"Context({name_of(self.method)!r}; sequences of {tokens} tokens; {self.bytes})"

    @property
    def num_sequences(self) -> int:
        """Number of documents in the batch."""
        return self.last_logits.shape[0]

    @property
    def bytes(self) -> CacheBytes:
        """Bytes of the cache, of all sequences."""
        return state_bytes(self.cache)

    def kept_positions(self) -> list[list[list[np.ndarray]]]:
        """Returns the positions of the tokens that the cache holds, as [layer][sequence][key/value head]."""
        return kept_positions(self.cache)

    @checks_keywords
    def feed(self, more: Prompts, *, decoded: Decoded = False, width: int | None = None) -> Context:
        """Appends text to each sequence.

        Args:
          more: texts, or lists of ids, one per sequence. A sequence whose text is empty stays as it is.
          decoded: whether the tokens stand for decoded ones, as in `kvjax.extend`.
          width: tokens that the texts are padded to, so that texts of many lengths share one compiled program.
        """
        begins = are_empty(check_cache(self.model, self.cache))
        ids = token_ids(self.model, more, begins=begins, count=self.num_sequences, may_be_empty=True)
        out, cache = extend_padded(self.model, ids, self.cache, decoded, width)
        last = last_logits(self.model, out, ids, self.cache, self.last_logits)
        known = None if self.ids is None else [[*before, *new] for before, new in zip(self.ids, ids, strict=True)]
        return dataclasses.replace(self, cache=cache, last_logits=last, ids=known)

    @checks_keywords
    def start(
        self, *, first_sequence: int = 0, donate: bool = False, **options: Unpack[GenerateOptions]
    ) -> DecodeSession:
        """Starts to decode after each sequence: a session that can be advanced in slices, inspected and timed.

        Args:
          first_sequence: number of the first sequence; each draws by `seed` and its number.
          donate: whether to decode in the context's own cache instead of a copy; the context is unusable afterwards.
          **options: max_new_tokens, temperature, stop and the others of `kvjax.GenerateOptions`.
        """
        resolved = resolve_options(self.model, options, knows_tokens=self.ids is not None)
        self._check_known()
        arguments.integer("first_sequence", first_sequence, 0)
        check_room(self.cache, resolved.max_new_tokens - 1)  # the last token is not fed
        return start_decoding(
            self.model,
            self.last_logits,
            self.cache,
            resolved,
            prompt_ids=self.ids,
            first_sequence=first_sequence,
            keep=not donate,
        )

    @checks_keywords
    def generate(self, *, first_sequence: int = 0, donate: bool = False, **options: Unpack[GenerateOptions]) -> Result:
        """Generates the continuation of each sequence; arguments are those of `start`."""
        return self.start(first_sequence=first_sequence, donate=donate, **options).finish()

    @checks_keywords
    def stream(
        self, *, first_sequence: int = 0, donate: bool = False, **options: Unpack[GenerateOptions]
    ) -> Iterator[list[int | None]]:
        """Streams tokens, in each step one per sequence, None after its end; arguments are those of `start`."""
        check_streamed(options)
        return self.start(first_sequence=first_sequence, donate=donate, **options).columns()

    @checks_keywords
    def ask(
        self,
        questions: Prompts,
        *,
        first_sequence: int = 0,
        width: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Answers one question per sequence; the context stays as it is, so that each question is the first one.

        A context of one document may be asked several questions. They are answered one after the other, and draw as the
        sequences of a batch would.

        Args:
          questions: texts, or lists of ids.
          first_sequence: as in `start`.
          width: tokens that the questions are padded to.
          **options: as in `start`.
        """
        ids = token_ids(self.model, questions, begins=are_empty(self.cache))
        resolve_options(self.model, options, knows_tokens=self.ids is not None)  # errors come before anything is run
        if self.num_sequences == 1 < len(ids):
            each = enumerate(ids, arguments.integer("first_sequence", first_sequence, 0))
            return concat_results([self.ask([q], first_sequence=i, width=width, **options) for i, q in each])
        return self.feed(ids, width=width).generate(first_sequence=first_sequence, donate=True, **options)

    @checks_keywords
    def score(
        self, continuations: Prompts, *, decoded: Decoded = True, width: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores one continuation per sequence by teacher forcing; the context stays as it is.

        Args:
          continuations: texts, or lists of ids.
          decoded: as in `feed`; here the tokens stand for decoded ones by default.
          width: as in `feed`.

        Returns:
          For each sequence the natural-log probability of each token f32[T], and the likeliest token in its place.
        """
        ids = token_ids(self.model, continuations, begins=False, count=self.num_sequences)
        self._check_known()
        return teacher_force(self.model, self.last_logits, self.cache, ids, decoded, width)

    @checks_keywords
    def crop(self, lengths: int | Sequence[int]) -> Context:
        """Keeps only the first tokens of each sequence: `lengths`, one number or one per sequence.

        See `kvjax.cache_ops.crop`. The logits of the new last tokens are unknown: continue with `ask` or `feed`.
        """
        cache = cache_ops.crop(self.cache, lengths)
        known = self.ids and [row[:n] for row, n in zip(self.ids, to_numpy(cache.length).tolist(), strict=True)]
        return self._without_last(cache, known)

    @checks_keywords
    def edit(self, start: int | Sequence[int], stop: int | Sequence[int], tokens: Prompts) -> Context:
        """Replaces tokens start..stop-1 of each sequence without running the text after them again (PIE).

        See `kvjax.cache_ops.edit`. The logits of the last tokens are unknown: continue with `ask` or `feed`.

        Args:
          start: first token that is replaced, one number or one per sequence.
          stop: the token after the last one that is replaced; equal to `start` for an insertion.
          tokens: one text or list of ids per sequence, an empty one to delete.
        """
        return self._without_last(cache_ops.edit(self.model, self.cache, start, stop, tokens), None)

    @checks_keywords
    def take(self, which: Sequence[int]) -> Context:
        """Takes the sequences with these indices, in this order, each as often as it is listed."""
        cache, known = cache_ops.take(self.cache, which), self.ids and [self.ids[i] for i in which]
        return dataclasses.replace(
            self, cache=cache, last_logits=take_sequences(None, self.last_logits, np.asarray(which)), ids=known
        )

    @checks_keywords
    def fork(self, times: int) -> Context:
        """Copies each sequence `times` times, to continue in several ways; its copies are adjacent."""
        return self.take(np.repeat(np.arange(self.num_sequences), arguments.integer("times", times)).tolist())

    @checks_keywords
    def join(self, *others: Context) -> Context:
        """Joins the sequences of several contexts of one model, method and capacity into one batch."""
        contexts = (self, *others)
        if wrong := [x for x in others if not isinstance(x, Context)]:
            raise KvjaxError(f"a context is joined with other contexts, got {wrong[0]!r:.80}")
        cache = cache_ops.join([x.cache for x in contexts])
        known = [x.ids for x in contexts if x.ids is not None]
        ids = [row for rows in known for row in rows] if len(known) == len(contexts) else None
        if len({x.last_logits.shape[1] for x in contexts}) > 1:  # the last logits of some are unknown
            return self._without_last(cache, ids)
        return dataclasses.replace(
            self, cache=cache, last_logits=concat_sequences(None, [x.last_logits for x in contexts]), ids=ids
        )

    @checks_keywords
    def extend_prefix(
        self,
        documents: Prompts,
        method: str | KVMethod | None = None,
        *,
        of: Sequence[int] | None = None,
        headroom: int = DEFAULT_HEADROOM_TOKENS,
    ) -> Context:
        """Reads documents after this context, a shared prefix that is stored once (Hydragen, arXiv 2402.05099).

        The result may be a prefix again. On a mesh all documents share one prefix, which the context holds as many
        times as the mesh divides sequences: of=[0, 0, ..].

        Args:
          documents: texts, or lists of ids.
          method: of the documents' own tokens; by default that of the context's own.
          of: index of the sequence that each document follows, -1 for none; needed where the context has several.
          headroom: tokens per sequence that may follow.
        """
        # `read_after_prefix` checks `of`, when the number of documents is known.
        alone = are_empty(self.cache) if of is None else [isinstance(x, int) and x < 0 for x in np.ravel(of).tolist()]
        ids, timer = token_ids(self.model, documents, begins=alone or False), Timer()
        own = self.method.own if isinstance(self.method, SharedPrefixMethod) else self.method
        both = SharedPrefixMethod(self.method, own if method is None else method_of(method))
        last, cache = read_after_prefix(self.model, self.cache, both, ids, of=of, headroom=headroom, timer=timer)
        known = self.ids
        if known is not None:
            followed = [0] * len(ids) if of is None else of
            known = [[*(known[i] if i >= 0 else ()), *row] for i, row in zip(followed, ids, strict=True)]
        return Context(self.model, cache, last, both, timer.run_seconds, known)

    def _without_last(self, cache: Cache, ids: Sequence[Sequence[int]] | None) -> Context:
        """Replaces the cache and its tokens; the logits of its last tokens are unknown."""
        return dataclasses.replace(self, cache=cache, last_logits=jnp.zeros((cache.length.shape[0], 0)), ids=ids)

    def _check_known(self) -> None:
        check_cache(self.model, self.cache)
        if not self.last_logits.shape[1]:
            raise KvjaxError(
                "the logits after a crop or an edit are known when something has been fed: use `ask`, or first `feed` "
                "at least one token per sequence"
            )

    @checks_keywords
    def save(self, path: str | Path) -> Path:
        """Writes the context to one file, which `kvjax.resume` reads; returns the file's path."""
        check_cache(self.model, self.cache)
        return save.write(path, self.model, self.method, self.cache, self.last_logits)


@checks_keywords
def read(
    model: Model,
    documents: Prompts,
    method: str | KVMethod,
    *,
    headroom: int | None = None,
    capacity: int | None = None,
    chunk: int | None = None,
    prompt_memory: str = "device",
    width: int | None = None,
    progress: bool = False,
) -> Context:
    """Reads documents once, under a method: a `Context` to ask, feed, stream and score.

    Args:
      model: from `kvjax.load`.
      documents: texts, or lists of ids.
      method: a method or its string.
      headroom: tokens per sequence that may follow the documents; 512 by default.
      capacity: tokens that a sequence may grow to, in place of `headroom`.
      chunk: tokens run at a time; None for all at once, or as the method asks.
      prompt_memory: "host" keeps in pinned host memory what would fill the device under methods that compress no layer
        before all have read the prompt, such as budgets over the model: exact keys and values. "device" by default.
      width: tokens that documents are padded to, so that those of similar length share one compiled program.
      progress: whether to show a bar over the chunks.
    """
    ids, timer = token_ids(model, documents, begins=True), Timer()
    longest = max(map(len, ids))
    if capacity is None and headroom is not None:
        capacity = longest + arguments.integer("headroom", headroom, 0)
    rounded = capacity_for(ids, longest + DEFAULT_HEADROOM_TOKENS if capacity is None else capacity, 0)
    chosen = model_for(model, ids, capacity or 0)
    if width is not None:
        width = round_up(arguments.integer("width", width, longest))
        rounded = max(rounded, width)
    method = method_of(method)
    plan = bind(method, chosen.config)
    options: dict[str, Any] = {"chunk": chunk, "prompt_memory": prompt_memory, "progress": progress}
    last, cache = run_prompts(chosen, plan, ids, rounded, width=width, timer=timer, **options)
    context = Context(model, cache, last, method, timer.run_seconds, ids)
    user_warnings.warn_of_windows(model, method)
    user_warnings.warn_of_no_saving(method, context.bytes)
    return context


@checks_keywords
def resume(model: Model, path: str | Path, method: str | KVMethod | None = None) -> Context:
    """Reads a context that `Context.save` wrote.

    Args:
      model: the model that read the documents.
      path: of the file.
      method: needed only for a method of your own, which no string in the file can name.

    Raises:
      KvjaxError: another model, or a damaged or foreign file.
    """
    method, cache, last = save.read(path, model, method)
    return Context(model, cache, last, method)
