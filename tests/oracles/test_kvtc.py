"""KVTC: its bits against all that could be chosen, and a batch against an oracle in NumPy, head by head."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvjax
from kvjax.method_api import lloyd_max_levels
from kvjax.methods.kvtc import allocate_words, level_error
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded
from tests.oracles.lowrank import rotate

ERRORS = {1: 0.3634, 2: 0.1175, 4: 0.009497}
"""Mean squared errors of N(0, 1) at its best levels (Max 1960, table 1)."""


def test_errors_are_those_of_the_literature():
    for bits, expected in ERRORS.items():
        np.testing.assert_allclose(level_error(bits), expected, rtol=2e-3)
    assert level_error(8) < 1e-4 and level_error(0) == 1


def error_of(variances: np.ndarray, words: tuple[int, ...]) -> float:
    by_component = [bits for bits in words for _ in range(32 // bits)][: len(variances)]
    errors = [level_error(bits) for bits in by_component] + [1.0] * (len(variances) - len(by_component))
    return float(variances @ np.array(errors))


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.95, 1.0])
def test_no_other_choice_of_bits_has_a_smaller_error(decay):
    variances = 10 * decay ** np.arange(48.0)
    words = allocate_words(variances, 4)
    every = (error_of(variances, other) for n in range(5) for other in itertools.product((8, 4, 2, 1), repeat=n))
    np.testing.assert_allclose(error_of(variances, words), min(every), rtol=1e-9)
    covered = sum(32 // bits for bits in words)
    assert covered >= 48 if decay == 1.0 else (covered < 48) == (decay < 0.9)  # steep variances leave components out


def test_a_batch_is_its_oracle_and_padding_may_hold_infinity():
    """The sink and the last three tokens are exact; the others are at the nearest levels along the directions."""
    batch, method = layer.random_batch(), kvjax.parse("kvtc:k_bits=4,v_bits=2,sinks=1,recent=3")
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))
    H = layer.H
    shapes = {}
    for name in ("bare_keys", "values"):
        vectors = layer.K, H
        shapes |= {name: (*vectors, H), f"{name}_mean": vectors, f"{name}_deviation": vectors}
    table = kvjax.method_api.Bases.table_file("shipped").layer_arrays(layer.spec(), **shapes)
    table = {name: array.astype(np.float64) for name, array in table.items()}

    def make(name: str, num_words: int, head_of: dict[bytes, int]):
        words = allocate_words(np.square(table[f"{name}_deviation"]).mean(0), num_words)
        widths = [bits for bits in words for _ in range(32 // bits)][:H]

        def restore(x: np.ndarray, prompt: int) -> np.ndarray:
            h = head_of[x[0].tobytes()]
            at = np.arange(len(x))
            plain = rotate(x, at, -1) if name == "bare_keys" else x
            deviation, directions = table[f"{name}_deviation"][h], table[name][h]
            components = (plain - table[f"{name}_mean"][h]) @ directions
            restored = np.zeros_like(components)
            for i, bits in enumerate(widths):
                levels = lloyd_max_levels(1, bits) * deviation[i]  # which the tests of TurboQuant check
                restored[:, i] = levels[np.abs(components[:, i : i + 1] - levels[None]).argmin(1)]
            found = restored @ directions.T + table[f"{name}_mean"][h]
            found = rotate(found, at) if name == "bare_keys" else found
            found[:1], found[-3:] = x[:1], x[-3:]
            return found

        return restore

    heads = list(itertools.product(range(layer.B), range(layer.K)))
    keys, values = ({np.asarray(x[b, h, 0], np.float64).tobytes(): h for b, h in heads} for x in (batch.k, batch.v))
    expected = attend_decoded(batch, make("bare_keys", H * 4 // 32, keys), make("values", H * 2 // 32, values))
    assert np.quantile(np.abs(out - expected), 0.98) < 1e-4
    assert np.abs(attend_decoded(batch, lambda x, _: x, lambda x, _: x) - expected).mean() > 0.01
