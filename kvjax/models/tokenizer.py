"""Text to token ids and back, with the `tokenizers` library and a checkpoint's `tokenizer.json`."""

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
MAKE_TOKENIZER_JSON = """make {file} once, where transformers and sentencepiece are installed:
    from transformers import AutoTokenizer
    AutoTokenizer.from_pretrained("{dir}").save_pretrained("{dir}")"""


class Tokenizer:
    """A `tokenizers.Tokenizer` with truncation and padding turned off: kvjax pads, and never drops a token."""

    def __init__(self, inner: tokenizers.Tokenizer, file: str | Path = FILE):
        inner.no_truncation()
        inner.no_padding()
        self.inner, self.file = inner, file

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads `tokenizer.json`; raises KvjaxError, which says how to make it, if it is absent or damaged."""
        path = Path(directory)
        file = path / FILE
        if not file.is_file():
            for name in SENTENCEPIECE:
                if (path / name).is_file():
                    remedy = MAKE_TOKENIZER_JSON.format(file=FILE, dir=path)
                    raise KvjaxError(f"{path} has only the SentencePiece tokenizer {name}; {remedy}")
            raise KvjaxError(f"{path} has no {FILE}; copy the model's {FILE} there, or pass token ids instead of text")
        return cls.from_bytes(file.read_bytes(), file)

    @classmethod
    def from_bytes(cls, content: bytes, file: str | Path = FILE) -> Tokenizer:
        """Reads the content of a `tokenizer.json`; raises KvjaxError, with the file's name, if it is damaged."""
        import tokenizers  # not on top: a random model and token ids need no tokenizer

        with _convert_errors(f"{file} is not a tokenizer that `tokenizers` can read"):
            return cls(tokenizers.Tokenizer.from_buffer(content), file)

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
        """Encodes a text; `special_tokens` adds those of the tokenizer's post-processor, as bos.

        Raises KvjaxError for a text that is not valid Unicode, and for one at which the tokenizer fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            bad = text[e.start]
            raise KvjaxError(f"a text has {bad!r} as character {e.start}; read it again, from valid UTF-8") from e
        with _convert_errors(
            f"{self.file} fails to encode a text of {len(text):,} characters", "give token ids instead of it"
        ):
            return self.inner.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decodes ids, by default without special tokens."""
        ids = [int(i) for i in ids]
        with _convert_errors(f"{self.file} fails to decode {len(ids):,} ids"):
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int:
        """Returns the id of a token; raises KvjaxError if the vocabulary lacks it."""
        token_id = self.inner.token_to_id(token)
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
