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

SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
"""The ids that llama.cpp assumes where a SentencePiece vocabulary does not give them."""

END_KEYS = {
    "eos": "tokenizer.ggml.eos_token_id",  # a text
    "eot": "tokenizer.ggml.eot_token_id",  # a turn
    "eom": "tokenizer.ggml.eom_token_id",  # a message
    "fim_pad": "tokenizer.ggml.fim_pad_token_id",
    "fim_rep": "tokenizer.ggml.fim_rep_token_id",
    "fim_sep": "tokenizer.ggml.fim_sep_token_id",
}
"""Keys of the ids at which llama.cpp stops, by what the token ends."""

END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Tokens at which llama.cpp stops whatever the keys and the token's type say (src/llama-vocab.cpp)."""

INFILL_END_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of further such tokens: llama.cpp takes the first that there is where the key of END_KEYS is missing."""

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


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Reads tokens, types and roles."""
    tokens = _read_tokens(metadata)
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, n in Counter(tokens).items() if n > 1)
        raise KvjaxError(f"tokenizer.ggml.tokens has {twice!r:.80} twice; {DAMAGE_REMEDY}")
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = read_array(metadata, "tokenizer.ggml.token_type", int, len(tokens))
    roles = read_roles(metadata)
    for role, i in roles.items():
        if not 0 <= i < len(tokens):
            raise KvjaxError(f"{ROLE_KEYS[role]} is {i}, but there are {len(tokens)} tokens; {DAMAGE_REMEDY}")
    return Vocabulary(tokens, types, roles)


def _read_tokens(metadata: Metadata) -> list[str]:
    stored = read_array(metadata, "tokenizer.ggml.tokens", str)
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(stored)]  # llama.cpp's name for a token without text


def read_roles(metadata: Metadata) -> dict[str, int]:
    """Reads the ids of the tokens with a role; SentencePiece has some where the metadata have none."""
    roles = {}
    if read_value(metadata, "tokenizer.ggml.model", str) == "llama":
        num_tokens = len(metadata.get("tokenizer.ggml.tokens") or ())
        roles = {role: i for role, i in SENTENCEPIECE_IDS.items() if i < num_tokens}
    given = {role: read_value(metadata, key, int) for role, key in ROLE_KEYS.items()}
    return roles | {role: i for role, i in given.items() if i is not None}


def read_end_ids(metadata: Metadata) -> list[int]:
    """Reads the ids at which an answer ends: those of keys, then those of tokens by their text, as llama.cpp does.

    Answers of a chat end with a turn, which few files name by a key.
    """
    ids = {end: read_value(metadata, key, int) for end, key in END_KEYS.items()}
    ids["eos"] = read_roles(metadata).get("eos")
    tokens = _read_tokens(metadata) if "tokenizer.ggml.tokens" in metadata else []
    found = {token: i for i, token in enumerate(tokens) if token in END_TEXTS}
    for end, texts in INFILL_END_TEXTS.items():
        if ids[end] is None:
            ids[end] = next((i for i, token in enumerate(tokens) if token in texts), None)
    # Tokens that llama.cpp takes back: those end a part of a message where these others end the message.
    calls, message = {"<|call|>", "<|calls|>"} & found.keys(), {"<|return|>", "<|flush|>"} & found.keys()
    without = {found.get("<|end|>")} if calls and message else set()
    if "<|tool_response>" in found:
        without.add(found.get("</s>"))
    in_order = (*(i for i in ids.values() if i is not None), *found.values())
    return [i for i in dict.fromkeys(in_order) if i not in without]


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
