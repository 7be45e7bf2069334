"""Text to token ids and back, through the `tokenizers` library and a directory's `tokenizer.json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
REMEDY = """make {file} once, where transformers and sentencepiece are installed:
    from transformers import AutoTokenizer
    AutoTokenizer.from_pretrained("{dir}").save_pretrained("{dir}")"""


class Tokenizer:
    """A `tokenizers.Tokenizer` without truncation and padding, which a cache must never see."""

    def __init__(self, inner: tokenizers.Tokenizer, file: str | Path = FILE):
        inner.no_truncation()
        inner.no_padding()
        self.inner, self.file = inner, file

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads `tokenizer.json`; raises KvjaxError if it is damaged or absent, and says how to make it."""
        path = Path(directory)
        file = path / FILE
        if not file.is_file():
            for name in SENTENCEPIECE:
                if (path / name).is_file():
                    remedy = REMEDY.format(file=FILE, dir=path)
                    raise KvjaxError(f"{path} has only the SentencePiece tokenizer {name}; {remedy}")
            raise KvjaxError(f"{path} has no {FILE}; copy the model's {FILE} there, or pass token ids instead of text")
        return cls.from_bytes(file.read_bytes(), file)

    @classmethod
    def from_bytes(cls, content: bytes, file: str | Path = FILE) -> Tokenizer:
        """Reads what a `tokenizer.json` holds; raises KvjaxError, by the file's name, if it is damaged."""
        import tokenizers  # here, as a random model and token ids need no tokenizer

        with _told(f"{file} is not a tokenizer that `tokenizers` can read"):
            return cls(tokenizers.Tokenizer.from_buffer(content), file)

    def try_out(self) -> None:
        """Raises KvjaxError where it cannot encode a text of its own vocabulary: some files load and fail then."""
        texts = (self.decode([i]) for i in sorted(self.inner.get_vocab().values()))
        # Special tokens decode to nothing, and a byte that is no character alone to a replacement.
        self.encode(next((text for text in texts if text and "\ufffd" not in text), ""))

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return self.inner.get_vocab_size()

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Text -> ids; with `special_tokens`, those that the tokenizer's own post-processor adds (bos, say).

        Raises KvjaxError for a text that is no Unicode, and for one at which the tokenizer fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            bad = text[e.start]
            raise KvjaxError(f"a text has {bad!r} as character {e.start}; read it again, from valid UTF-8") from e
        with _told(f"{self.file} fails to encode a text of {len(text):,} characters", "give token ids instead of it"):
            return self.inner.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Ids -> text; special tokens are left out unless asked for."""
        listed = [int(i) for i in ids]
        with _told(f"{self.file} fails to decode {len(listed):,} ids"):
            return self.inner.decode(listed, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int:
        """The id of one token of the vocabulary; raises KvjaxError if there is none."""
        found = self.inner.token_to_id(token)
        if found is None:
            raise KvjaxError(f"{token!r} is not in the vocabulary of {self.vocab_size} tokens; spell it as {FILE} does")
        return found


@contextlib.contextmanager
def _told(what: str, otherwise: str = "") -> Iterator[None]:
    """Whatever the library raises as a KvjaxError; its panics are no Exceptions, and known by their name alone."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        remedy = f"copy it again, or {otherwise}" if otherwise else "copy it again"
        raise KvjaxError(f"{what} ({e}); {remedy}") from e
