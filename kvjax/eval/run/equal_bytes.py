"""Methods at equal bytes: each one's size is chosen so that its cache takes a given share of the full cache's.

Bytes are those of a bfloat16 cache, whatever the model computes in: caches are held in 16 bits in practice, and beside
a float32 cache every quantizer would look twice as good.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from kvjax.errors import KvjaxError
from kvjax.generation.memory_plan import planned_bytes
from kvjax.methods.registry import load_all
from kvjax.methods.strings import Part, format_methods, parse_parts
from kvjax.models.config import Config

BITS = (8, 4, 3, 2, 1)
LONGEST = 40  # letters of a share
DTYPE = "bfloat16"  # of keys and values, as bytes are compared


class Fitted(NamedTuple):
    """A method at a share of the full cache's bytes."""

    asked: str  # the method's string, of any size
    share: Fraction
    method: str  # the same at the greatest size that fits; "" if none does
    bytes: int  # that it holds on the device for one prompt, in bfloat16


def fitted(methods: Sequence[str], shares: Sequence[Fraction], config: Config, prompt: int) -> list[Fitted]:
    """Every method at every share of the bytes that `full` holds of a prompt of so many tokens, in bfloat16.

    The size parameters of a method change (`MethodEntry.size_parameters`): numbers of tokens or of bits. In a
    composition it is one part's, the first that makes it fit, tokens before bits. A method of one size is taken as it
    is wherever it fits. Raises KvjaxError for a method that this model cannot have at the size that it is given.
    """
    full = _bytes("full", config, prompt)
    assert full is not None
    return [_fit(text, share, int(full * share), config, prompt) for share in shares for text in methods]


def shares_of(text: str) -> list[Fraction]:
    """Shares such as "1/2,1/4" or "0.25"; raises KvjaxError for what is none."""
    words = [word.strip() for word in text.split(",") if word.strip()] or [text]  # an empty text is no share
    return [_share(word) for word in words]


def _share(word: str) -> Fraction:
    exponent = word.lower().partition("e")[2]
    try:
        share = Fraction(word if len(word) <= LONGEST and len(exponent) <= 3 else 0)  # 1e-9999999999 takes for ever
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise KvjaxError(f"a share of the full cache's bytes is above 0 and at most 1, such as 1/4, got {word!r:.60}")
    return share


class _Dial(NamedTuple):
    """What is turned to change a method's size: some parameters of one of its parts."""

    parts: tuple[Part, ...]
    index: int
    names: tuple[str, ...]

    def at(self, size: int) -> str:
        """The method's string at a size; several parameters share it."""
        part = self.parts[self.index]
        values = part.values | {name: max(size // len(self.names), 1) for name in self.names}
        return format_methods([*self.parts[: self.index], Part(part.name, values), *self.parts[self.index + 1 :]])


def _fit(text: str, share: Fraction, most: int, config: Config, prompt: int) -> Fitted:
    def taken(method: str) -> int | None:
        return _bytes(method, config, prompt)

    as_it_is = planned_bytes(text, config, prompt, dtype=DTYPE).held["device"]
    for dial in _dials(text):
        if dial.names == ("bits",):
            size = next((bits for bits in BITS if (taken(dial.at(bits)) or most + 1) <= most), 0)
        elif taken(dial.at(prompt)) == taken(dial.at(prompt // 2)):
            continue  # tokens that are read, and not held
        else:
            # What cannot be made so small counts as if it took nothing.
            size = bisect.bisect_right(range(1, prompt + 1), most, key=lambda size, at=dial.at: taken(at(size)) or 0)
        bytes_there = taken(dial.at(size)) if size else None
        if bytes_there is not None:
            return Fitted(text, share, dial.at(size), bytes_there)
    return Fitted(text, share, text, as_it_is) if as_it_is <= most else Fitted(text, share, "", 0)


def _dials(text: str) -> list[_Dial]:
    """What may be turned of a method, numbers of tokens before numbers of bits."""
    parts = parse_parts(text)
    dials = [_Dial(parts, i, load_all()[part.name].size_parameters) for i, part in enumerate(parts)]
    return sorted((dial for dial in dials if dial.names), key=lambda dial: dial.names == ("bits",))


def _bytes(method: str, config: Config, prompt: int) -> int | None:
    """Held on the device for one prompt, in bfloat16; None where a method cannot be made at this size."""
    try:
        return planned_bytes(method, config, prompt, dtype=DTYPE).held["device"]
    except KvjaxError:
        return None
