"""Methods at equal bytes: each one's size is chosen so that its cache takes a given fraction of the full cache's.

Bytes are those of a bfloat16 cache, whatever the model computes in: caches are held in 16 bits in practice, and
against a float32 cache every quantizer would look twice as good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from kvjax.errors import KvjaxError
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.config import Config
from kvjax.registry.loading import load_all
from kvjax.registry.registration import Part
from kvjax.registry.strings import format_methods, parse_parts

BITS = (8, 4, 3, 2, 1)
MAX_FRACTION_CHARACTERS = 40
MAX_GUESSES = 6  # of a size, before its range is halved
DTYPE = "bfloat16"  # of keys and values, as bytes are compared


class FittedMethod(NamedTuple):
    """A method at a fraction of the full cache's bytes."""

    asked: str  # the method's string, of any size
    share: Fraction
    method: str  # the same at the greatest size that fits; "" if none does
    bytes: int  # on the device for one prompt, in bfloat16; 0 if none fits
    least_bytes: int  # those of the smallest size that was tried


class _SizeParameters(NamedTuple):
    """The parameters of one part of a method's string that decide its size."""

    parts: tuple[Part, ...]
    index: int
    names: tuple[str, ...]

    def format_at(self, size: int) -> str:
        """The method's string at a size, which several parameters divide among them."""
        part = self.parts[self.index]
        values = part.values | {name: max(size // len(self.names), 1) for name in self.names}
        return format_methods([*self.parts[: self.index], Part(part.name, values), *self.parts[self.index + 1 :]])


def fit_methods(
    methods: Sequence[str], shares: Sequence[Fraction], config: Config, prompt_tokens: int
) -> list[FittedMethod]:
    """Fits every method to every fraction of the bytes that `full` takes for a prompt, in bfloat16.

    Only the size parameters of a method change (`MethodEntry.size_parameters`): tokens, or bits. In a composition
    they are one part's, the first that makes it fit, tokens before bits. A method of one size stays as it is wherever
    it fits.

    Args:
      methods: their strings.
      shares: the fractions.
      config: the model.
      prompt_tokens: length of the prompt.

    Returns:
      For each fraction, each method.

    Raises:
      KvjaxError: this model cannot have a method at the size of its string.
    """

    @functools.cache
    def count_bytes(method: str) -> int:
        return planned_bytes(method, config, prompt_tokens, dtype=DTYPE).held["device"]

    full = count_bytes("full")
    return [_fit(text, share, int(full * share), count_bytes, prompt_tokens) for share in shares for text in methods]


def _fit(
    text: str, share: Fraction, max_bytes: int, count_bytes: Callable[[str], int], prompt_tokens: int
) -> FittedMethod:
    def bytes_at(sizes: _SizeParameters, size: int) -> int | None:
        try:
            tried.append(count_bytes(sizes.format_at(size)))
        except KvjaxError:
            return None  # the method cannot have this size
        return tried[-1]

    unchanged = count_bytes(text)
    tried = [unchanged]
    parts = parse_parts(text)
    parameters = [_SizeParameters(parts, i, load_all()[part.name].size_parameters) for i, part in enumerate(parts)]
    # Numbers of tokens come before numbers of bits.
    for sizes in sorted((p for p in parameters if p.names), key=lambda p: p.names == ("bits",)):
        if sizes.names == ("bits",):
            size = next((bits for bits in BITS if (bytes_at(sizes, bits) or max_bytes + 1) <= max_bytes), 0)
        elif bytes_at(sizes, prompt_tokens) == bytes_at(sizes, prompt_tokens // 2):
            continue  # tokens that are read, and not stored
        else:
            # A size that the method cannot have is too small, so it counts as if it took nothing.
            size = find_largest_size(lambda n, sizes=sizes: bytes_at(sizes, n) or 0, prompt_tokens, max_bytes)
        fitted_bytes = bytes_at(sizes, size) if size else None
        if fitted_bytes is not None:
            return FittedMethod(text, share, sizes.format_at(size), fitted_bytes, min(tried))
    if unchanged <= max_bytes:
        return FittedMethod(text, share, text, unchanged, min(tried))
    return FittedMethod(text, share, "", 0, min(tried))


def find_largest_size(count_bytes: Callable[[int], int], most: int, max_bytes: int) -> int:
    """Finds the largest size, from 1 to `most`, whose bytes are at most `max_bytes`; 0 if there is none.

    Counting the bytes of a method with a table takes seconds, since each layer is planned by itself. Bytes grow with
    the size, nearly in proportion, so that a few guesses find most sizes; what is left of the range is halved.

    Args:
      count_bytes: bytes of a size; they never shrink as it grows.
    """
    too_large_bytes, low_bytes = count_bytes(most), count_bytes(1)
    if too_large_bytes <= max_bytes:
        return most
    if low_bytes > max_bytes:
        return 0
    low, too_large = 1, most
    num_guesses = 0
    while too_large - low > 1:
        size = (low + too_large) // 2
        if num_guesses < MAX_GUESSES:
            # Each guess lies one size further above the proportion: where the one before was right, it is too large.
            in_proportion = (max_bytes - low_bytes) * (too_large - low) // (too_large_bytes - low_bytes)
            size = min(max(low + in_proportion + num_guesses, low + 1), too_large - 1)
            num_guesses += 1
        size_bytes = count_bytes(size)
        if size_bytes <= max_bytes:
            low, low_bytes = size, size_bytes
        else:
            too_large, too_large_bytes = size, size_bytes
    return low


def parse_shares(text: str) -> list[Fraction]:
    """Parses fractions such as "1/2,1/4" or "0.25"; raises KvjaxError for any other text."""
    shares = []
    for word in [word.strip() for word in text.split(",") if word.strip()] or [text]:  # an empty text is no fraction
        exponent = word.lower().partition("e")[2]
        try:
            # Fraction("1e-9999999999") would compute for ever.
            share = Fraction(word if len(word) <= MAX_FRACTION_CHARACTERS and len(exponent) <= 3 else 0)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise KvjaxError(
                "a fraction of the full cache's bytes is above 0 and at most 1, such as 1/4, several with commas, got "
                f"{word!r:.60}"
            )
        shares.append(share)
    return shares
