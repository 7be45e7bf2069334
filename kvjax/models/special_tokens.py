"""The special tokens of a checkpoint: the ones with a name, and all that its `tokenizer.json` lacks.

They stand in three more files, which transformers reads in this order (`tokenization_utils_base.py`):

- `tokenizer_config.json`, with names ("bos_token") and, since 2023, the table `added_tokens_decoder` of added tokens;
- without that table also `special_tokens_map.json`, whose names take precedence,
- and `added_tokens.json`, ids by text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import KvjaxError
from kvjax.utils.files import parse_json_object

if TYPE_CHECKING:
    import tokenizers

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Fields = Mapping[str, Any]
"""The "content" of a token, and those of FLAGS that a file gives."""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens in the other files of a tokenizer, which complete `tokenizer.json`."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {"bos_token": "<s>"}
    by_id: Mapping[int, Fields] = dataclasses.field(default_factory=dict)
    without_flags: frozenset[int] = frozenset()  # those of `by_id` whose flags in `tokenizer.json` are the right ones
    without_id: tuple[Fields, ...] = ()  # special tokens, which are added last if the vocabulary lacks them
    file: str = ""  # that gives the ids

    @classmethod
    def from_directory(cls, directory: Path | Traversable) -> SpecialTokens:
        """Reads the files of a directory, as `from_files` does."""
        files = {name: directory / name for name in (CONFIG, MAP, ADDED)}
        return cls.from_files({name: f.read_bytes() for name, f in files.items() if f.is_file()}, directory)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], directory: Path | Traversable | str) -> SpecialTokens:
        """Reads the three files, as far as they are there.

        Args:
          files: contents by name; others are left alone.
          directory: where they are, for messages.

        Raises:
          KvjaxError: for a damaged file.
        """

        def read(name: str) -> dict[str, Any]:
            return parse_json_object(files[name], f"{directory}/{name}") if name in files else {}

        config, where = read(CONFIG), f"{directory}/{CONFIG}"
        table = config.get("added_tokens_decoder")
        special_map = {} if table is not None else read(MAP)
        named = {key: x for key, x in (config | special_map).items() if key.endswith("_token")}
        further = [config.get("extra_special_tokens") or config.get("additional_special_tokens")]
        further.append(special_map.get("extra_special_tokens"))
        if not any(further):
            further = [special_map.get("additional_special_tokens")]
        extra = []
        for tokens in further:
            if isinstance(tokens, dict):
                named |= tokens
            elif isinstance(tokens, list):
                extra += [fields for x in tokens if (fields := _parse_token(x)) is not None]
        # {"bos_token": "<s>"} and {"bos_token": {"content": "<s>"}} mean the same; "add_bos_token" holds no token.
        named = {key: fields for key, x in named.items() if (fields := _parse_token(x)) is not None}
        has_flags = table is not None
        if has_flags:
            entries = [(i, _parse_token(x)) for i, x in (table.items() if isinstance(table, dict) else [(table, None)])]
        else:
            table, where = read(ADDED), f"{directory}/{ADDED}"
            texts = {fields["content"] for fields in (*named.values(), *extra)}
            entries = [(i, {"content": text, "special": text in texts}) for text, i in table.items()]
        by_id = {}
        for i, fields in entries:
            problem = None
            if isinstance(i, bool) or not isinstance(i, int | str) or not str(i).isdecimal():
                problem = f"{where} gives a token the id {i!r:.80}, which is no number"
            elif fields is None:
                problem = f"the token {i} of {where} has no text"
            if problem is not None:
                raise KvjaxError(f"{problem}; copy it again")
            by_id[int(i)] = fields
        names = {key: fields["content"] for key, fields in named.items()}
        # Tokens without an id get the next ones, so their order is that of transformers.
        order = sorted(
            named, key=lambda key: NAMES.index(key) if key in NAMES else len(NAMES) + isinstance(config.get(key), str)
        )
        special = (*(named[key] for key in order), *extra)
        return cls(names, dict(sorted(by_id.items())), frozenset(() if has_flags else by_id), special, where)

    def add_to(self, inner: tokenizers.Tokenizer) -> None:
        """Adds the tokens that a tokenizer lacks, at their ids, and makes those special that have a name.

        Raises:
          KvjaxError: for an id that the tokenizer would give to another token.
        """
        from tokenizers import AddedToken  # not on top: a random model and token ids need no tokenizer

        def flags(token: tokenizers.AddedToken) -> tuple:
            return (token.content, *(getattr(token, flag) for flag in FLAGS))

        present = inner.get_added_tokens_decoder()
        wanted = {i: AddedToken(**fields) for i, fields in self.by_id.items()}
        lacking = [
            token
            for i, token in wanted.items()
            if i not in present
            or present[i].content != token.content
            or (flags(present[i]) != flags(token) and i not in self.without_flags)
        ]
        if lacking:
            first = inner.get_vocab_size()
            inner.add_tokens(lacking)
            for i, token in wanted.items():
                found = inner.token_to_id(token.content)
                if found == i:
                    continue
                remedy = "copy both files again, from one checkpoint"
                if found is not None and found >= first:
                    remedy = f"give the tokens before it there too, since no file has any for the ids from {found} on"
                raise KvjaxError(
                    f"{self.file} gives the token {token.content!r:.80} the id {i}, which would be {found} after those "
                    f"of tokenizer.json; {remedy}, or remove its entry if the model was trained without it"
                )
        present = {token.content: token for token in inner.get_added_tokens_decoder().values()}
        special = []
        for fields in self.without_id:
            token = present.get(fields["content"]) or AddedToken(**{"normalized": False, **fields, "special": True})
            if fields["content"] not in present or not token.special:
                token.special = True
                special.append(token)
        if special:
            inner.add_special_tokens(special)


def _parse_token(raw: Any) -> Fields | None:
    """Parses a token's text, or an object with its text and flags; None for anything else."""
    fields = {"content": raw} if isinstance(raw, str) else raw
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str) or not fields["content"]:
        return None
    return {"content": fields["content"], **{flag: bool(fields[flag]) for flag in FLAGS if flag in fields}}
