"""Text to token ids and back, with the `tokenizers` library and a checkpoint's `tokenizer.json`."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.errors import KvjaxError
from kvjax.models.special_tokens import SpecialTokens

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
MAKE_TOKENIZER_JSON = """make {file} once, where transformers and sentencepiece are installed:
    from transformers import AutoTokenizer
    AutoTokenizer.from_pretrained("{dir}").save_pretrained("{dir}")"""


class Tokenizer:
    """A `tokenizers.Tokenizer` with truncation and padding turned off: kvjax pads, and never drops a token.

    Args:
      inner: the tokenizer; the special tokens are added to it.
      file: that it was read from, for messages.
      special_tokens: of the other files of the tokenizer.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, file: str | Path = FILE, special_tokens: SpecialTokens | None = None
    ):
        inner.no_truncation()
        inner.no_padding()
        self.inner, self.file = inner, file
        self.special_tokens = special_tokens or SpecialTokens()
        if special_tokens is not None:
            special_tokens.add_to(inner)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads `tokenizer.json` and the tokens that other files add to it.

        Raises KvjaxError, which says how to make it, if it is absent or damaged.
        """
        path = Path(directory)
        file = path / FILE
        if not file.is_file():
            remedy = f"copy the model's {FILE} there, or pass token ids instead of text"
            if found := [name for name in SENTENCEPIECE if (path / name).is_file()]:
                remedy = f"of its SentencePiece tokenizer {found[0]} {MAKE_TOKENIZER_JSON.format(file=FILE, dir=path)}"
            raise KvjaxError(f"{path} has no {FILE}; {remedy}")
        return cls.from_bytes(file.read_bytes(), file, SpecialTokens.from_directory(path))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], directory: str | Path) -> Tokenizer:
        """Reads what `from_directory` reads, from contents by name; `directory` is for messages."""
        return cls.from_bytes(files[FILE], Path(directory) / FILE, SpecialTokens.from_files(files, directory))

    @classmethod
    def from_bytes(
        cls, content: bytes, file: str | Path = FILE, special_tokens: SpecialTokens | None = None
    ) -> Tokenizer:
        """Reads the content of a `tokenizer.json`; raises KvjaxError, with the file's name, if it is damaged."""
        import tokenizers  # not on top: a random model and token ids need no tokenizer

        with _convert_errors(f"{file} is not a tokenizer that `tokenizers` can read"):
            inner = tokenizers.Tokenizer.from_buffer(content)
        return cls(inner, file, special_tokens)

    @property
    def eos_id(self) -> int | None:
        """The id of the checkpoint's `eos_token`, None if it has none."""
        eos = self.special_tokens.names.get("eos_token")
        return None if eos is None else self.inner.token_to_id(eos)

    def check_works(self) -> None:
        """Raises KvjaxError unless it encodes a text of its own vocabulary: some files load and fail only then."""
        texts = (self.decode([i]) for i in sorted(self.inner.get_vocab().values()))
        # Special tokens decode to "", and a byte that is no character by itself to a replacement character.
        self.encode(next((text for text in texts if text and "\ufffd" not in text), ""))

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        return self.inner.get_vocab_size()

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Encodes a text as transformers does; `special_tokens` adds all of the post-processor's, as bos and eos.

        What a model is to continue is encoded by `encode_prompt`, and what follows other tokens by
        `encode_continuation`.

        Raises:
          KvjaxError: a text that is not valid Unicode, or one at which the tokenizer fails.
        """
        return self._encode(text, special_tokens).ids

    def encode_prompt(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Encodes a text that begins a sequence and that a model is to continue.

        The tokens that the post-processor puts before a text, as bos, are added, unless the text spells them itself, as
        those of chat templates do. The tokens that it puts after one, as eos, are not.

        Args:
          text: any text.
          parse_special: whether a special token that is spelled in the text, such as "<s>", becomes that token;
            otherwise it is plain text.

        Raises:
          KvjaxError: as `encode` does.
        """
        return self.prompt_encoding(text, parse_special=parse_special).ids

    def prompt_encoding(self, text: str, *, parse_special: bool = True) -> tokenizers.Encoding:
        """`encode_prompt` with what the library knows about each token, such as its characters."""
        encoding = self._encode(text, True, parse_special)
        # The mask holds what the post-processor has added, and not the special tokens that a text spells.
        added = encoding.special_tokens_mask
        num_tokens = next((i for i in range(len(added), 0, -1) if not added[i - 1]), 0)
        if not num_tokens and added:  # a text without tokens, whose opening and closing ones stand side by side
            num_tokens = len(self.opening_ids)
        encoding.truncate(num_tokens)
        num_opening = next((i for i, is_added in enumerate(encoding.special_tokens_mask) if not is_added), 0)
        if parse_special and num_opening and encoding.ids[num_opening] == encoding.ids[0]:  # the text spells them
            encoding.truncate(num_tokens - num_opening, direction="left")
        return encoding

    def _encode(self, text: str, special_tokens: bool, parse_special: bool = True) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise KvjaxError(f"a text is a str, got {text!r:.80}; decode bytes, and give each text of a list by itself")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            bad = text[e.start]
            raise KvjaxError(f"a text has {bad!r} as character {e.start}; read it again, from valid UTF-8") from e
        with _convert_errors(
            f"{self.file} fails to encode a text of {len(text):,} characters", "give token ids instead of it"
        ):
            inner = self.inner if parse_special else self._plain
            return inner.encode(text, add_special_tokens=special_tokens)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer to which a special token that a text spells is plain text.

        It is a copy, since the option belongs to a tokenizer and not to a call, and other threads use the first one.
        """
        plain = copy.deepcopy(self.inner)
        plain.encode_special_tokens = True
        return plain

    def encode_continuation(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Encodes a text that follows other tokens: no special tokens are added, and no space before its first word.

        Tokenizers of the SentencePiece kind mark the beginning of a text as they mark a space, so that the text alone
        would come with a space too many. The text is encoded after a short one, which is then cut off. It is encoded
        alone where that says the same, and where a token spans both texts whatever the short one is.

        Args:
          text: any text.
          parse_special: as in `encode_prompt`.

        Raises:
          KvjaxError: as `encode` does.
        """
        alone = self._encode(text, False, parse_special).ids
        for anchor, before in self._anchors:
            both = self._encode(anchor + text, False, parse_special).ids
            if both[: len(before)] == before:
                is_same = both == before + alone or self.decode(before + alone, False) == self.decode(both, False)
                return alone if is_same else both[len(before) :]
        return alone

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decodes the ids of a whole text, by default without special tokens."""
        with _convert_errors(f"{self.file} fails to decode ids", "give a flat list of ids of its vocabulary"):
            return self.inner.decode([operator.index(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def decode_continuation(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decodes ids that follow other tokens, by default without special tokens.

        Decoders of the SentencePiece kind drop the space before the first word of a text. The ids are decoded after an
        ordinary token, whose text is then cut off, so that prompt and continuation add up to the text of both.
        """
        if self._word is None:
            return self.decode(ids, skip_special_tokens)
        word, text = self._word
        return self.decode(itertools.chain([word], ids), skip_special_tokens)[len(text) :]

    @functools.cached_property
    def opening_ids(self) -> list[int]:
        """The ids that the post-processor puts before a text, as bos."""
        if self._word is None:
            return []
        encoding = self.inner.encode(self._word[1])
        return encoding.ids[: next((i for i, is_added in enumerate(encoding.special_tokens_mask) if not is_added), 0)]

    @functools.cached_property
    def _word(self) -> tuple[int, str] | None:
        """An id of letters or digits with its text, which is the same whatever follows it; None without one."""
        for i in sorted(self.inner.get_vocab(with_added_tokens=False).values()):
            text, token = self.decode([i]), self.inner.id_to_token(i) or ""
            # The sign of a single byte, <0x41>, is no such id: with the next ones it may make another character.
            is_word = text.isascii() and text.strip().isalnum() and text.strip() in token and not token.startswith("<")
            if is_word and self.decode([i, i]).startswith(text):
                return i, text
        return None

    @functools.cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        """Short texts to encode others after, each with its ids; only those that the tokenizer can write."""
        # A line break seldom shares a token with what follows it; for a text that begins with one, take other signs.
        texts = ["\n", "|", ":", ".", "a", "1"] + ([] if self._word is None else [self._word[1].strip()])
        ids = [self.encode(text, False) for text in texts]
        return [(text, x) for text, x in zip(texts, ids, strict=True) if x and self.decode(x).lstrip(" ") == text]

    def token_id(self, token: str) -> int:
        """Returns the id of a token; raises KvjaxError if the vocabulary lacks it."""
        token_id = self.inner.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise KvjaxError(f"{token!r} is not in the vocabulary of {self.vocab_size} tokens; spell it as {FILE} does")
        return token_id


@contextlib.contextmanager
def _convert_errors(what: str, otherwise: str = "") -> Iterator[None]:
    """Raises whatever the library raises as a KvjaxError that begins with `what`."""
    try:
        yield
    except BaseException as e:
        # A panic of the Rust library is no Exception, and its class cannot be imported.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        remedy = f"copy it again, or {otherwise}" if otherwise else "copy it again"
        raise KvjaxError(f"{what} ({e}); {remedy}") from e
