"""Documents that have been read once: ask of them, feed more, stream, score, count; the cache stays what it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import CacheBytes, kept_positions, state_bytes
from kvjax.cache.protocol import Cache, KVMethod
from kvjax.cache.shared_prefix import SharedPrefixMethod
from kvjax.cache.state import concat_sequences, take_sequences
from kvjax.core.types import Array
from kvjax.engine.plan import bind
from kvjax.engine.sampling import SamplingParams, resolve_sampling
from kvjax.errors import KvjaxError, OtherWeights
from kvjax.generation import calls, checks
from kvjax.generation.cache_ops import edit, extend_prefix, save, sequences
from kvjax.generation.inputs import Prompts, round_up, token_ids
from kvjax.generation.prompt_runner import run_prompts
from kvjax.generation.result import Result, joined
from kvjax.generation.session import DecodeSession, start_decoding
from kvjax.generation.stopping import Stop
from kvjax.generation.timing import Timer
from kvjax.methods.strings import method_of, name_of
from kvjax.models.model import Model
from kvjax.utils import arguments
from kvjax.utils.display import table

ROOM = 512  # tokens per row that may follow the documents, if nothing else is said


class _Options(TypedDict):
    """What `ask` hands on."""

    sampling: SamplingParams
    eos_ids: Sequence[int] | int | None
    stop: Stop
    loop: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """What a model holds of a batch of documents under a method, and what it expects next.

    A value: every call leaves it as it is, and what changes comes back as a new one. Rows are documents.
    """

    model: Model
    cache: Cache
    last: Array  # f32[B V], the logits of each row's last token; f32[B 0] after a crop or an edit: not yet known
    method: KVMethod  # under which the documents were read
    read_seconds: float = 0.0  # of the documents, compilation apart

    def __repr__(self) -> str:
        if self.cache.is_donated:
            return f"Context({name_of(self.method)!r}; used up)"
        tokens = ", ".join(map(str, self.cache.length.tolist()))
        return f"Context({name_of(self.method)!r}; rows of {tokens} tokens; {self.bytes})"

    def _repr_html_(self) -> str | None:
        if self.cache.is_donated:
            return None  # a notebook then shows the line
        held = [[np.mean([len(head) for head in row]) for row in layer] for layer in self.kept_positions()]
        rows = zip(range(self.rows), self.cache.length.tolist(), np.mean(held, 0).tolist(), strict=True)
        title = f"{name_of(self.method)}: {self.bytes}"
        return table(title, ("row", "tokens read", "tokens held by a head"), rows)

    @property
    def rows(self) -> int:
        """B, documents of the batch."""
        return self.last.shape[0]

    @property
    def bytes(self) -> CacheBytes:
        """What the cache takes, for all rows."""
        return state_bytes(self.cache)

    def kept_positions(self) -> list[list[list[np.ndarray]]]:
        """[layer][row][key/value head]: the positions of the tokens that the cache holds."""
        return kept_positions(self.cache)

    def feed(
        self, more: Prompts, *, decoded: bool | Sequence[Sequence[bool]] = False, width: int | None = None
    ) -> Context:
        """The context with more text behind each row; decoded and width as in `kvjax.extend`."""
        ids = token_ids(self.model, more)
        out, cache = calls.extend_padded(self.model, ids, self.cache, decoded, width)
        return dataclasses.replace(self, cache=cache, last=calls.at_row_ends(out, ids))

    def start(
        self,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        eos_ids: Sequence[int] | int | None = None,
        stop: Stop = (),
        loop: str | None = None,
        first_row: int = 0,
        use_up: bool = False,
    ) -> DecodeSession:
        """Decoding behind each row, under way: to be advanced in slices, looked into, and timed; as `generate` has it.

        first_row: the number of the first row; each draws by `seed` and its own. use_up: it works on the context's own
        cache instead of a copy, and the context is of no use afterwards.
        """
        self._check_known()
        arguments.integer("first_row", first_row, 0)
        arguments.integer("max_new_tokens", max_new_tokens)
        self._check_room(max_new_tokens - 1)  # the last token is not fed back
        params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        return start_decoding(
            self.model,
            self.last,
            self.cache,
            params,
            max_new_tokens=max_new_tokens,
            eos_ids=eos_ids,
            stop=stop,
            loop=loop,
            first_row=first_row,
            keep=not use_up,
        )

    def generate(
        self,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        eos_ids: Sequence[int] | int | None = None,
        stop: Stop = (),
        loop: str | None = None,
        first_row: int = 0,
        use_up: bool = False,
    ) -> Result:
        """What comes next in each row; options as in `start`."""
        params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        begun = self.start(
            max_new_tokens=max_new_tokens,
            sampling=params,
            eos_ids=eos_ids,
            stop=stop,
            loop=loop,
            first_row=first_row,
            use_up=use_up,
        )
        return begun.finish(max_new_tokens)

    def stream(
        self,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        eos_ids: Sequence[int] | int | None = None,
        stop: Stop = (),
        loop: str | None = None,
        first_row: int = 0,
        use_up: bool = False,
    ) -> Iterator[list[int | None]]:
        """The same, each step's tokens as they are made, one per row, None for rows that have ended."""
        params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        begun = self.start(
            max_new_tokens=max_new_tokens,
            sampling=params,
            eos_ids=eos_ids,
            stop=stop,
            loop=loop,
            first_row=first_row,
            use_up=use_up,
        )
        return begun.columns(max_new_tokens)

    def ask(
        self,
        questions: Prompts,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        eos_ids: Sequence[int] | int | None = None,
        stop: Stop = (),
        loop: str | None = None,
        first_row: int = 0,
        width: int | None = None,
    ) -> Result:
        """The answer to one question per row, asked as if it were the first; options as in `start`.

        A context of one row may be asked several questions, one after the other, each of what it holds now; they draw
        as the rows of a batch would.
        """
        ids = token_ids(self.model, questions)
        params = resolve_sampling(sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        options: _Options = {"sampling": params, "eos_ids": eos_ids, "stop": stop, "loop": loop}
        if self.rows == 1 < len(ids):
            each = enumerate(ids, arguments.integer("first_row", first_row, 0))
            return joined(
                [self.ask([q], max_new_tokens=max_new_tokens, width=width, first_row=i, **options) for i, q in each]
            )
        fed = self.feed(ids, width=width)
        return fed.generate(max_new_tokens=max_new_tokens, first_row=first_row, use_up=True, **options)

    def score(
        self,
        continuations: Prompts,
        *,
        decoded: bool | Sequence[Sequence[bool]] = True,
        width: int | None = None,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Teacher forcing, one continuation per row: (natural-log probability of each token, the likeliest token).

        decoded and width as in `feed`; unless it is said otherwise, the continuation stands for what is decoded.
        """
        ids = token_ids(self.model, continuations)
        if len(ids) != self.rows:
            raise KvjaxError(f"{len(ids)} continuations for {self.rows} rows; give one per row")
        self._check_known()
        return calls.forced(self.model, self.last, self.cache, ids, decoded, width)

    def crop(self, lengths: int | Sequence[int]) -> Context:
        """The context with only the first so many tokens of each row, exactly.

        `kvjax.cache_ops.crop` says for which methods. What comes next is known only when something is fed: `ask` does
        it, and `feed`.
        """
        return self._before_feeding(sequences.crop(self.cache, lengths))

    def edit(self, start: int | Sequence[int], stop: int | Sequence[int], tokens: Prompts) -> Context:
        """The context of a text in which tokens start..stop-1 have been replaced, without reading on from there (PIE).

        One text per row, an empty one to delete; see `kvjax.cache_ops.splice`. What comes next is known only when
        something is fed: `ask` does it, and `feed`.
        """
        return self._before_feeding(edit.splice(self.model, self.cache, start, stop, tokens))

    def pick(self, which: Sequence[int]) -> Context:
        """The rows of these numbers, in this order, each as often as it is named."""
        chosen = sequences.rows(self.cache, which)
        return dataclasses.replace(self, cache=chosen, last=take_sequences(None, self.last, np.asarray(which)))

    def branch(self, times: int) -> Context:
        """Each row so many times, to go on differently; the copies of a row lie next to each other."""
        return self.pick(sequences.branches(self.rows, times))

    def join(self, *others: Context) -> Context:
        """The rows of this context and of others, of one model, method and capacity, as one batch."""
        for other in others:
            if not isinstance(other, Context):
                raise KvjaxError(f"a context is joined with other contexts, got {other!r:.80}")
            if other.model is not self.model and other.model.fingerprint != self.model.fingerprint:
                raise OtherWeights("these contexts are of models with other weights or types; join those of one model")
        parts = (self, *others)
        known = {x.last.shape[1] for x in parts}
        cache = sequences.join([x.cache for x in parts])
        if len(known) > 1:
            return self._before_feeding(cache)
        return dataclasses.replace(self, cache=cache, last=concat_sequences(None, [x.last for x in parts]))

    def share(
        self,
        documents: Prompts,
        method: str | KVMethod | None = None,
        *,
        of: Sequence[int] | None = None,
        room: int = ROOM,
    ) -> Context:
        """Documents read behind this context, which is held once for all of them (Hydragen, arXiv 2402.05099).

        method: for the documents' own tokens, default that of the context's own. of: the row that each document
        follows, -1 for none; needed where there are several. room: tokens per row that may follow. What comes out may
        be shared again. On a mesh one prefix is shared, as many equal rows as the mesh divides: of=[0, 0, ..].
        """
        ids, timer = token_ids(self.model, documents), Timer()
        own = self.method.own if isinstance(self.method, SharedPrefixMethod) else self.method
        own = own if method is None else method_of(method)
        behind = SharedPrefixMethod(self.method, own)
        last, cache = extend_prefix.read_after_prefix(self.model, self.cache, behind, ids, of, room, timer)
        return Context(self.model, cache, last, behind, timer.run_seconds)

    def _before_feeding(self, cache: Cache) -> Context:
        """A context of which it is not known what comes next."""
        return dataclasses.replace(self, cache=cache, last=jnp.zeros((cache.length.shape[0], 0)))

    def _check_known(self) -> None:
        self.cache.check_usable()
        if not self.last.shape[1]:
            raise KvjaxError(
                "what comes after a crop or an edit is known when something has been fed: use `ask`, or first `feed` "
                "at least one token per row"
            )

    def save(self, path: str | Path) -> Path:
        """Writes the context into one file, from which `kvjax.resume` makes it again; returns the file's path."""
        self.cache.check_usable()
        return save.write(path, self.model, self.method, self.cache, self.last)

    def _check_room(self, more: int) -> None:
        used = int(np.max(np.asarray(self.cache.length)))
        if used + more > self.cache.capacity:
            raise KvjaxError(
                f"the cache has room for {self.cache.capacity} tokens per row and holds {used}; {more} more do not "
                f"fit: read with room={more} or more"
            )


def read(
    model: Model,
    documents: Prompts,
    method: str | KVMethod,
    *,
    room: int = ROOM,
    capacity: int | None = None,
    chunk: int | None = None,
    width: int | None = None,
    progress: bool = False,
) -> Context:
    """Reads documents, texts or lists of ids, once: a `Context` to ask, feed, stream and score.

    room: tokens per row that may follow; or capacity: all tokens per row. chunk: read so many tokens at a time. width:
    what rows are padded to, so that documents of similar length share one compiled program. progress: show a bar.
    """
    ids, timer = token_ids(model, documents), Timer()
    longest = max(map(len, ids))
    if capacity is None:
        capacity = longest + arguments.integer("room", room, 0)
    capacity = calls.room(ids, capacity, 0)
    if width is not None:
        width = round_up(arguments.integer("width", width, longest))
        capacity = max(capacity, width)
    method = method_of(method)
    plan = bind(method, model.config)
    more = {"chunk": chunk, "width": width, "progress": progress, "timer": timer}
    last, cache = run_prompts(model, plan, ids, capacity, **more)
    context = Context(model, cache, last, method, timer.run_seconds)
    checks.warn_of_no_saving(method, context.bytes)
    return context


def resume(model: Model, path: str | Path, method: str | KVMethod | None = None) -> Context:
    """The context that `Context.save` wrote; raises KvjaxError for another model, and for a damaged or foreign file.

    method: needed only for a method of one's own, which no string in the file can name.
    """
    method, cache, last = save.read(path, model, method)
    return Context(model, cache, last, method)
