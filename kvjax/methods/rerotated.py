"""The word in a method's string that gives the tokens which stay new positions, without gaps."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(example="snapkv:budget=512 + rerotated", family="eviction after the prompt")
def rerotated() -> kv.Method:
    """Gives the tokens that another method leaves of a prompt the positions 0, 1, 2, .., and continues behind them.

    The other method evicts once, when the prompt ends, as in 'snapkv:budget=512 + rerotated'. A text may then be longer
    than the positions that the model was trained on by the tokens that left. Keys are stored before RoPE and rotated
    where they are read, in float32.

    Formula:
      the i-th token that a head keeps is rotated to i, and the t-th token after the prompt to n + t, for n kept tokens

    Differs:
      kvpress rotates the keys once, by the difference of positions; keys then lie rotated in the cache.

    Reference:
      KeyRerotationPress of NVIDIA's kvpress; FINCH, Corallo and Papotti 2024, TACL 12, section 3
    """
    return kv.Method(positions="cache")
