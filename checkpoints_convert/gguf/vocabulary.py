"""The vocabulary in the metadata of a GGUF file, and the checks of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
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


TEMPLATE = "tokenizer.chat_template"

VALUE_TYPES: dict[str, type] = {
    **dict.fromkeys(("general.architecture", "general.name", TEMPLATE), str),
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), str),
    **dict.fromkeys((f"tokenizer.ggml.add_{x}" for x in ("bos_token", "eos_token", "space_prefix")), bool),
    **dict.fromkeys((*ROLE_KEYS.values(), *END_KEYS.values()), int),
}
"""Key -> the type of its value."""

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
MERGES, SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
LIST_TYPES: dict[str, type | tuple[type, ...]] = {TOKENS: str, TYPES: int, MERGES: str, SCORES: (float, int)}
"""Key -> the type of each value in its list."""

NEEDED_LISTS = {"gpt2": (TOKENS, MERGES), "llama": (TOKENS, SCORES)}
"""Kind of tokenizer -> the lists that it is made of."""


def check_metadata(metadata: Metadata) -> None:
    """Raises KvjaxError unless the keys of the tokenizer have the right types, and agree with each other."""
    if problems := list(_find_damage(metadata)):
        raise KvjaxError(f"{'; '.join(problems)}; {DAMAGE_REMEDY}")


def _find_damage(metadata: Metadata) -> Iterator[str]:
    wrong = {key: kind for key, kind in VALUE_TYPES.items() if not isinstance(metadata.get(key), kind | None)}
    for key, kind in wrong.items():
        yield f"{key} is {metadata[key]!r:.80}, which is no {kind.__name__}"
    for name, template in read_named_templates(metadata).items():
        if not isinstance(template, str):
            yield f"{TEMPLATE}.{name} is {template!r:.80}, which is no str"
        elif not re.fullmatch(r"\w[\w.-]*", name):  # it becomes the name of a file
            yield f"{TEMPLATE}.{name!r:.80} is no name of a template"
    needed = () if wrong else NEEDED_LISTS.get(metadata.get("tokenizer.ggml.model", ""), ())
    lists: dict[str, Any] = {key: metadata.get(key) for key in (*needed, TYPES) if key in needed or key in metadata}
    for key, x in lists.items():
        if not isinstance(x, list) or not x or not all(isinstance(value, LIST_TYPES[key]) for value in x):
            yield f"{key} {'is missing' if x is None else 'is not a list of what belongs there'}"
            return
    if not needed:
        return
    tokens, roles = _read_tokens(metadata), read_roles(metadata)
    known, num_tokens = set(tokens), len(tokens)
    if len(known) != num_tokens:
        twice = next(token for token, n in Counter(tokens).items() if n > 1)
        yield f"{TOKENS} has {twice!r:.80} twice"
    for key in (TYPES, SCORES):
        if key in lists and len(lists[key]) != num_tokens:
            yield f"{key} has {len(lists[key])} values for {num_tokens} tokens"
    for role, i in roles.items():
        if not 0 <= i < num_tokens:
            yield f"{ROLE_KEYS[role]} is {i}, but there are {num_tokens} tokens"
    for role in ("bos", "eos"):
        if metadata.get(f"tokenizer.ggml.add_{role}_token") and role not in roles:
            yield f"tokenizer.ggml.add_{role}_token is true, but {ROLE_KEYS[role]} is missing"
    for merge in lists.get(MERGES, ()):
        parts = merge.split(" ")
        if len(parts) != 2 or any(token not in known for token in (*parts, "".join(parts))):
            yield f"{MERGES} has {merge!r:.80}, which joins no two tokens"
            return


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Reads tokens, types and roles of metadata that `check_metadata` has accepted."""
    tokens = _read_tokens(metadata)
    return Vocabulary(tokens, metadata.get(TYPES) or [NORMAL] * len(tokens), read_roles(metadata))


def _read_tokens(metadata: Metadata) -> list[str]:
    # llama.cpp's name for a token without text
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(metadata.get(TOKENS) or ())]


def read_roles(metadata: Metadata) -> dict[str, int]:
    """Reads the ids of the tokens with a role; SentencePiece has some where the metadata have none."""
    roles = {}
    if metadata.get("tokenizer.ggml.model") == "llama":
        num_tokens = len(metadata.get(TOKENS) or ())
        roles = {role: i for role, i in SENTENCEPIECE_IDS.items() if i < num_tokens}
    return roles | {role: metadata[key] for role, key in ROLE_KEYS.items() if metadata.get(key) is not None}


def read_named_templates(metadata: Metadata) -> dict[str, Any]:
    """Reads the chat templates that have a name, such as "tool_use"."""
    keys = [key for key in metadata if key.startswith(f"{TEMPLATE}.")]
    return {key.removeprefix(f"{TEMPLATE}."): metadata[key] for key in keys}


def read_end_ids(metadata: Metadata) -> list[int]:
    """Reads the ids at which an answer ends: those of keys, then those of tokens by their text, as llama.cpp does.

    Answers of a chat end with a turn, which few files name by a key.
    """
    ids = {end: metadata.get(key) for end, key in END_KEYS.items()}
    ids["eos"] = read_roles(metadata).get("eos")
    tokens = _read_tokens(metadata)
    found = {token: i for i, token in enumerate(tokens) if token in END_TEXTS}
    for end, texts in INFILL_END_TEXTS.items():
        if ids[end] is None:
            ids[end] = next((i for i, token in enumerate(tokens) if token in texts), None)
    # Tokens that llama.cpp takes back: those end a part of a message where these others end the message.
    calls, message = {"<|call|>", "<|calls|>"} & found.keys(), {"<|return|>", "<|flush|>"} & found.keys()
    without = {found.get("<|end|>")} if calls and message else set()
    # Gemma's vocabulary has "</s>" as a tag of HTML, in addition to an end of its own.
    if "<|tool_response>" in found or ("<eos>" in found and "<end_of_turn>" in found):
        without.add(found.get("</s>"))
    in_order = (*(i for i in ids.values() if i is not None), *found.values())
    return [i for i in dict.fromkeys(in_order) if i not in without]
