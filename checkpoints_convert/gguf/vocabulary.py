"""The vocabulary in the metadata of a GGUF file, and checked reads of metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.errors import KvjaxError

Metadata = Mapping[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens; any other has no effect here."""

ROLE_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}
"""Role -> key of the token's id."""

DAMAGE_REMEDY = "the file is damaged: copy it again, or convert the safetensors checkpoint instead"


class Vocabulary(NamedTuple):
    """Tokens by id, their types, and the ids of those with a role (bos, eos, unk, pad)."""

    tokens: list[str]
    types: list[int]
    roles: dict[str, int]

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: i for i, token in enumerate(self.tokens)}

    def token(self, role: str) -> str | None:
        """Returns the token of a role, None if there is none."""
        return self.tokens[self.roles[role]] if role in self.roles else None


def read_vocabulary(metadata: Metadata, defaults: Mapping[str, int]) -> Vocabulary:
    """Reads tokens, types and roles; `defaults` are ids of roles that the metadata do not give."""
    stored = read_array(metadata, "tokenizer.ggml.tokens", str)
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(stored)]  # llama.cpp's name for a token without text
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, n in Counter(tokens).items() if n > 1)
        raise KvjaxError(f"tokenizer.ggml.tokens has {twice!r:.80} twice; {DAMAGE_REMEDY}")
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = read_array(metadata, "tokenizer.ggml.token_type", int, len(tokens))
    roles = {role: i for role, i in defaults.items() if i < len(tokens)}
    for role, key in ROLE_KEYS.items():
        if (i := read_value(metadata, key, int)) is not None:
            if not 0 <= i < len(tokens):
                raise KvjaxError(f"{key} is {i}, but there are {len(tokens)} tokens; {DAMAGE_REMEDY}")
            roles[role] = i
    return Vocabulary(tokens, types, roles)


def read_value(metadata: Metadata, key: str, kind: type, default: Any = None) -> Any:
    """Returns the value of a key, or the default; raises KvjaxError if it has another type."""
    found = metadata.get(key, default)
    if found is not None and not isinstance(found, kind):
        raise KvjaxError(f"{key} is {found!r:.80}, which is no {kind.__name__}; {DAMAGE_REMEDY}")
    return found


def read_array(metadata: Metadata, key: str, kind: type | tuple[type, ...], length: int | None = None) -> list:
    """Returns the list of a key; raises KvjaxError if it is missing, empty, or of another length or type."""
    found = metadata.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(x, kind) for x in found):
        what = "is missing" if found is None else "is not a list of what belongs there"
        raise KvjaxError(f"{key} {what}; {DAMAGE_REMEDY}")
    if length is not None and len(found) != length:
        raise KvjaxError(f"{key} has {len(found)} values for {length} tokens; {DAMAGE_REMEDY}")
    return found
