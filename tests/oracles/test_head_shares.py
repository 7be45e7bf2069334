"""A budget divided by a calibrated table, against its oracle: counts, tokens, bytes, programs, and errors.

Head shares in exact fractions, one prompt at a time, from kvjax's own rule (`kvjax/methods/head_shares.py`).

A table gives the fraction of a text that each head keeps when the heads of the model keep a given fraction in the mean.
Between these fractions, and to nothing at 0 and everything at 1, a head's fraction is interpolated linearly. One amount
is then added to all heads until the model's budget is met; no head goes below the tokens that always stay, or above the
prompt. Units are whole: the largest remainders are rounded up, and ties (to a millionth) go to the lower layer, then to
the lower head.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import calibrate, functional
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.budgets import PromptFraction, Uniform
from kvjax.cache.protocol import TabulatedLayer
from kvjax.engine import prefill as engine_prefill
from kvjax.engine.plan import bind, specs
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.generation.inputs import pad
from kvjax.methods.head_shares import CalibratedShares, ModelAllocation
from kvjax.reuse.full_kv import read_exactly
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import keydiff


def head_fraction(head_fractions: list[float], fractions: list[float], mean_fraction: Fraction) -> Fraction:
    """The fraction that a head keeps when all heads keep `mean_fraction` in the mean."""
    known = [
        (Fraction(0), Fraction(0)),
        *((Fraction(f), Fraction(s)) for f, s in zip(fractions, head_fractions, strict=True)),
    ]
    known.append((Fraction(1), Fraction(1)))
    for (left, low), (right, high) in zip(known, known[1:], strict=False):
        if left <= mean_fraction <= right:
            return low + (high - low) * (mean_fraction - left) / (right - left)
    raise AssertionError(mean_fraction)


def match_total(targets: list[Fraction], total: int, most: int) -> list[Fraction]:
    """Adds one amount to all targets, within 0..most, so that they sum to `total`."""

    def shift(amount: Fraction) -> list[Fraction]:
        return [min(max(target + amount, Fraction(0)), Fraction(most)) for target in targets]

    breakpoints = sorted({-target for target in targets} | {most - target for target in targets})
    for left, right in zip(breakpoints, breakpoints[1:], strict=False):
        low, high = sum(shift(left)), sum(shift(right))
        if low <= total <= high:
            amount = left if low == high else left + (right - left) * (total - low) / (high - low)
            return shift(amount)
    return shift(breakpoints[-1] if total else breakpoints[0])


def split_prompt(n: int, budget: int, sinks: int, recent: int, unit_tokens: int) -> tuple[int, int, int]:
    """Splits a prompt -> (tokens always kept, whole units between them, units that a head keeps in the mean)."""
    budget = min(n, max(budget, sinks + recent))
    front = min(sinks, budget)
    back = min(recent, budget - front)
    between = n - front - back
    always = front + back + min(between % unit_tokens, budget - front - back)
    return always, between // unit_tokens, (budget - always) // unit_tokens


def head_tokens(
    table, fractions, n: int, budget: int, sinks: int = 0, recent: int = 0, unit_tokens: int = 1
) -> np.ndarray:
    """The tokens that each head keeps of n, i64[L K], by a table [L][K][R]."""
    always, units, mean_units = split_prompt(n, budget, sinks, recent, unit_tokens)
    mean_fraction = Fraction(always + mean_units * unit_tokens, n)
    targets = [
        (head_fraction(head, fractions, mean_fraction) * n - always) / unit_tokens for heads in table for head in heads
    ]
    shifted = [round(x, 6) for x in match_total(targets, mean_units * len(targets), units)]
    num_units = [int(x) for x in shifted]
    order = sorted(range(len(num_units)), key=lambda i: (num_units[i] - shifted[i], i))
    for i in order[: mean_units * len(targets) - sum(num_units)]:
        num_units[i] += 1
    return always + unit_tokens * np.array(num_units).reshape(len(table), -1)


def select_tokens(scores: list[float], num_kept: int, sinks: int, recent: int) -> list[int]:
    """Selects `num_kept` tokens of a head by its scores; ties go to the earlier token."""
    n = len(scores)
    ends = [*range(min(sinks, n)), *range(max(n - recent, min(sinks, n)), n)]
    between = sorted(set(range(n)) - set(ends), key=lambda s: (-scores[s], s))
    return sorted([*ends, *between[: num_kept - len(ends)]])


LAYERS, HEADS = 3, 2
FRACTIONS = (0.125, 0.25, 0.5)
PROMPTS = [list(range(60)), [5, 9, 5, 5, 1, 7, 3], list(range(30, 70))]


def random_shares(seed: int = 0, spread: float = 0.9, layers: int = LAYERS, heads: int = HEADS) -> np.ndarray:
    """Fractions f32[L K R] of very unequal heads with the given means."""
    rng = np.random.default_rng(seed)
    lean = rng.uniform(-1, 1, (layers, heads, 1))
    lean = (lean - lean.mean()) / np.abs(lean - lean.mean()).max()
    at = np.array(FRACTIONS)
    return (at + spread * lean * np.minimum(at, 1 - at)).astype(np.float32)


def write_table(path, fractions_kept, fractions=FRACTIONS, spec=None, **other) -> str:
    """Writes a table of fractions [L K R] and returns its path."""
    spec = specs(toy_model(kv_heads=HEADS).config)[0] if spec is None else spec
    tables = [
        {"shares": np.asarray(s, np.float32), "fractions": np.asarray(fractions, np.float32)} for s in fractions_kept
    ]
    return str(table_file.write(path / "head_shares.safetensors", "head_shares", spec, [b | other for b in tables]))


@pytest.fixture(scope="module")
def model():
    return toy_model(kv_heads=HEADS)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    return write_table(tmp_path_factory.mktemp("table"), random_shares())


def num_kept(context: kvjax.Context) -> np.ndarray:
    """The number of tokens that each head keeps, i64[B L K]."""
    counts = [[[len(head) for head in b] for b in heads] for heads in context.kept_positions()]
    return np.array(counts).transpose(1, 0, 2)


def test_the_example_by_hand(tmp_path):
    """A quarter of 40 tokens is 10 for each of a layer's two heads; the table gives them 15 and 5."""
    shares = [[[0.375], [0.125]]]
    assert head_tokens(shares, [0.25], 40, 10).tolist() == [[15, 5]]
    # An eighth is half of a quarter; 5/8 is half way from a quarter to everything.
    assert head_tokens(shares, [0.25], 40, 5).tolist() == [[8, 2]]  # 7.5 and 2.5: the lower head is rounded up
    assert head_tokens(shares, [0.25], 40, 25).tolist() == [[28, 22]]  # 27.5 and 22.5
    # Eight tokens always stay, so the second head takes 3 more, and the first one has 3 fewer.
    assert head_tokens(shares, [0.25], 40, 10, sinks=4, recent=4).tolist() == [[12, 8]]
    assert head_tokens(shares, [0.25], 8, 10).tolist() == [[8, 8]]
    assert select_tokens([0, 5, 1, 9, 5, 0], 4, 1, 1) == [0, 1, 3, 5]
    table = TableFile(write_table(tmp_path, shares, [0.25], layer.spec()), "head_shares")
    allocation = ModelAllocation(table, layer.spec(), Uniform(10), 4, 4, 1, 0.0)
    assert allocation.tokens(40)[40].tolist() == [[12, 8]]


@pytest.mark.parametrize(
    "budget", [Uniform(16), Uniform(41), PromptFraction(0.25), PromptFraction(0.6), PromptFraction(0.03)]
)
@pytest.mark.parametrize(("sinks", "recent", "size"), [(0, 0, 1), (4, 8, 1), (1, 2, 4), (0, 3, 5)])
@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_numbers_are_the_oracles_for_every_length(budget, sinks, recent, size, spread, tmp_path):
    shares, spec = random_shares(3, spread), dataclasses.replace(layer.spec(), num_layers=LAYERS, method_layers=None)
    table = TableFile(write_table(tmp_path, shares, spec=spec), "head_shares")
    found = ModelAllocation(table, spec, budget, sinks, recent, size, 0.0).tokens(150)
    for n in [*range(1, 48), 97, 150]:
        base = budget.num_kept(n)
        expected = head_tokens(shares.tolist(), FRACTIONS, n, base, sinks, recent, size)
        np.testing.assert_array_equal(found[n], expected, f"{n} tokens")
        always, _, mean = split_prompt(n, base, sinks, recent, size)
        assert found[n].sum() == LAYERS * HEADS * (always + size * mean)
    assert not found[0].any()


@pytest.mark.parametrize("budget", [Uniform(16), PromptFraction(0.6), PromptFraction(0.03)])
def test_layers_without_windows_divide_as_a_ranking_of_themselves(budget, tmp_path):
    """A table ranks the heads of all layers; those with windows take no part in the budget, nor in its mean."""
    shares, spec = random_shares(3), dataclasses.replace(layer.spec(), num_layers=LAYERS, method_layers=(0, 2))
    table, own = TableFile(write_table(tmp_path, shares, spec=spec), "head_shares"), shares[[0, 2]].astype(np.float64)
    own_fractions = own.mean((0, 1)).tolist()
    assert not np.allclose(own_fractions, FRACTIONS, rtol=0.1)
    found = ModelAllocation(table, spec, budget, 1, 2, 1, 0.0).tokens(150)
    for n in (*range(4, 48), 150):
        expected = head_tokens(own.tolist(), own_fractions, n, budget.num_kept(n), 1, 2)
        np.testing.assert_array_equal(found[n], expected, f"{n} tokens")


def test_a_window_model_divides_a_text_as_the_ranking_that_made_the_table(tmp_path):
    model, n = toy_model(layers=4, windows=(8, None, 8, None)), 64
    text = np.random.default_rng(0).integers(1, 90, n).tolist()
    tables = calibrate.count_arrays(model, "head_shares:method=turned_queries:sinks=0,recent=0", [text])
    path = write_table(tmp_path, [x["shares"] for x in tables], tables[0]["fractions"], specs(model.config)[0])
    row = 3  # a quarter of all layers' tokens
    kept = np.array([tables[i]["shares"][:, row] * n for i in (1, 3)])
    budget = round(kept.mean())
    context = kvjax.read(
        model, [text], f"turned_queries:budget={budget},sinks=0,recent=0,level=head + head_shares:page=1,table={path}"
    )
    np.testing.assert_allclose(num_kept(context)[0, [1, 3]], kept, atol=1)


@pytest.mark.parametrize("budget", ["12", "30%"])
def test_heads_keep_what_the_oracle_keeps_of_their_keys(budget, model, table):
    """Keys are read off the exact cache; 3 recent tokens stay in every head."""
    context = kvjax.read(model, PROMPTS, f"keydiff:budget={budget},recent=3 + head_shares:page=4,table={table}")
    exact = kvjax.read(model, PROMPTS, "full").cache.layers
    unequal = 0
    for b, prompt in enumerate(PROMPTS):
        n = len(prompt)
        mean = min(n, 12) if budget == "12" else max(1, int(n * 0.3))
        numbers = head_tokens(random_shares().tolist(), FRACTIONS, n, mean, recent=3)
        for i, (state, heads) in enumerate(zip(exact, context.kept_positions(), strict=True)):
            keys = np.asarray(state.k.data, np.float64)[b, :, :n]
            for head in range(HEADS):
                scores = keydiff.scores(keys[head]).tolist()
                assert heads[b][head].tolist() == select_tokens(scores, numbers[i, head], 0, 3)
                unequal += numbers[i, head] != mean
    assert unequal > 5


def test_layers_have_budgets_of_their_own_and_need_not_see_each_other(model, table):
    plan = bind(f"keydiff:budget=12 + head_shares:table={table}", model.config)
    assert not any(part.needs.global_budget for part in plan)
    layer_tokens = [part.num_kept(60) for part in plan]
    # Each is rounded up by less than a token.
    assert len(set(layer_tokens)) > 1 and sum(layer_tokens) - 12 * LAYERS < LAYERS


@pytest.mark.parametrize(
    "method",
    [
        "keydiff:budget=12,recent=2",
        "keydiff:budget=25%,recent=2 + int8",
        "snapkv:budget=14,window=2,kernel=3,unit=chunk4",
        "kvzip:budget=25%,sinks=2,level=head + offload",
        "keydiff:budget=40%,recent=2 + kvcrush:share=0.5",
        "snapkv:budget=12,window=4 + criticalkv",
        "keydiff:budget=12,recent=2 + merging",
        "kvmerger:budget=24,heavy=6,recent=6",
    ],
)
@pytest.mark.parametrize("length", [7, 133])
def test_a_plan_says_exactly_what_is_held_and_allocated(method, length, model, table):
    prompt = np.random.default_rng(length).integers(0, 60, length).tolist()
    text = f"{method} + head_shares:page=4,table={table}"
    context = kvjax.read(model, [prompt], text, headroom=16)
    planned = kvjax.planned_bytes(text, model, length, capacity=context.cache.capacity)
    assert (planned.held, planned.reserved) == (context.bytes.held, context.bytes.reserved)
    known = [part.method.side_store.head_budgets.num_kept_by_length(length)[length] for part in context.cache.plan]
    np.testing.assert_array_equal(num_kept(context)[0], known)


def test_a_budget_as_long_as_the_prompt_keeps_everything(model, table):
    for budget in ("100", "60", "100%"):
        context = kvjax.read(model, PROMPTS, f"keydiff:budget={budget} + head_shares:page=4,table={table}", headroom=8)
        assert (num_kept(context) == np.array([60, 7, 40])[:, None, None]).all()
        full = kvjax.read(model, PROMPTS, "full", headroom=8)
        assert context.generate(max_new_tokens=6).tokens == full.generate(max_new_tokens=6).tokens


def test_prompts_of_one_width_share_all_programs_and_shapes(model, table):
    """Nothing is compiled for the second batch of prompts, neither to read them nor to answer."""
    text = f"turned_queries:budget=25%,level=head + head_shares:page=4,table={table}"
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, 60, n).tolist() for n in sizes] for sizes in ((60, 33), (57, 60))]
    seconds, shapes = [], []
    for batch in batches:
        result = kvjax.generate(model, batch, text, max_new_tokens=4)
        context = kvjax.read(model, batch, text, capacity=80)
        seconds.append(result.compile_seconds)
        shapes.append([part.side_store.pos.shape for part in context.cache.layers])
    assert shapes[0] == shapes[1] and seconds[1] < 0.1 * seconds[0]


def test_layers_of_a_table_share_the_program_that_reads_a_prompt(tmp_path, traced_calls):
    """Each head of each layer keeps another number of tokens, in slots of its layer's own number."""
    model = toy_model(kv_heads=HEADS, head_dim=40)  # no other test has this head size
    table = write_table(tmp_path, random_shares(), spec=specs(model.config)[0])
    text = f"turned_queries:budget=25%,level=head + head_shares:page=4,table={table}"
    context = kvjax.read(model, PROMPTS, text)
    assert len(set(context.cache.plan)) == LAYERS and len(traced_calls) == 1
    assert len({state.side_store.pos.shape[2] for state in context.cache.layers}) > 1


SHARING = (
    "keydiff:budget=12,recent=2 + merging",
    "turned_queries:budget=25%,level=head + int4",
    "kvzip:budget=25%,sinks=2,level=head + offload",
    "snapkv:budget=14,window=2,kernel=3,unit=chunk4 + kivi:bits=2,group=4,residual=4",
)
AT_ONCE = "keydiff:budget=40%,recent=2 + kvcrush:share=0.5"  # selects in places that the layer's own budget leaves


@pytest.mark.parametrize(
    ("method", "windows"),
    [*((method, None) for method in (*SHARING, AT_ONCE)), (SHARING[0], (None, 8, None))],
)
def test_layers_that_share_a_program_hold_what_they_hold_by_themselves(method, windows, tmp_path, monkeypatch):
    model = toy_model(kv_heads=HEADS, windows=windows)
    text = f"{method} + head_shares:page=4,table={write_table(tmp_path, random_shares())}"
    plan = bind(text, model.config)
    selectors = {part.selector for part in plan if isinstance(part, TabulatedLayer)} - {None}
    assert len(selectors) == (0 if method == AT_ONCE else 1)
    tokens, lengths = pad(PROMPTS, 64)

    def read():
        """At once, layer by layer in chunks, and compressed from exact prompts."""
        prefill = functional.prefill
        whole, chunked = (
            prefill(model.params, tokens, lengths, plan, model.config, 80, chunk=chunk) for chunk in (None, 24)
        )
        return whole, chunked, read_exactly(model, PROMPTS, width=64).compress(text, 80).cache

    shared = read()
    monkeypatch.setattr(engine_prefill, "share_selections", lambda *_: {})
    by_themselves = read()
    assert jax.tree.map(jax.typeof, shared) == jax.tree.map(jax.typeof, by_themselves)
    # To the bit, but for the means of merged tokens, which another program may round otherwise.
    rounding = 1e-6 if "merging" in method else 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=rounding), shared, by_themselves)


def test_a_callers_program_reads_what_layers_that_share_theirs_do(model, table):
    text = f"turned_queries:budget=25%,level=head + head_shares:page=4,table={table}"
    tokens, lengths = pad(PROMPTS, 64)

    def read(params, tokens, lengths):
        return functional.prefill(params, tokens, lengths, bind(text, model.config), model.config, 80)

    logits, cache = read(model.params, tokens, lengths)
    expected_logits, expected = jax.jit(read)(model.params, tokens, lengths)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4)
    assert jax.tree.map(jax.typeof, cache) == jax.tree.map(jax.typeof, expected)
    for state, other in zip(cache.layers, expected.layers, strict=True):
        np.testing.assert_array_equal(state.side_store.pos, other.side_store.pos)
        np.testing.assert_array_equal(state.side_store.owner, other.side_store.owner)
    new = np.array([[3], [5], [7]], np.int32)
    next_logits = [functional.extend(model.params, new, x)[0] for x in (cache, expected)]
    np.testing.assert_allclose(*next_logits, atol=1e-3)


def test_a_budget_that_differs_between_layers_is_not_divided_again(model, table):
    method = f"pyramidkv:budget=40,window=2 + head_shares:table={table}"
    with pytest.raises(IncompatibleMethod, match=r"Pyramid \(component `select`\) has divided it already; give all"):
        bind(method, model.config)


def test_a_budget_below_what_always_stays_is_refused_as_without_a_table(model, table):
    with pytest.raises(KvjaxError, match="budget=6 .* less than the 8 tokens that always stay, .*=8; give budget>=8"):
        kvjax.read(model, PROMPTS, f"snapkv:budget=6,window=8 + head_shares:table={table}")


@pytest.mark.parametrize(
    ("shares", "fractions", "says"),
    [
        (
            random_shares(spread=0.5) * 1.1,
            FRACTIONS,
            r"at the fraction 0.125 the shares .* have the mean 0.1375, and it ",
        ),
        (random_shares()[..., ::-1], FRACTIONS[::-1], "must ascend between 0 and 1 and be the same in every layer"),
        (random_shares()[..., :0], (), "must ascend between 0 and 1"),
        (random_shares() + [[[0.5], [-0.5]]], FRACTIONS, r"lie in \[0, 1\], got -"),
        (random_shares()[..., :2], FRACTIONS, r"`0.shares` of .* has shape \(2, 2\), expected \(2, 3\)"),
    ],
)
def test_a_table_that_cannot_be_says_why(shares, fractions, says, model, tmp_path):
    with pytest.raises(KvjaxError, match=says):
        bind(f"keydiff:budget=12 + head_shares:table={write_table(tmp_path, shares, fractions)}", model.config)


def test_a_table_of_another_model_or_without_arrays_is_refused(model, tmp_path):
    path = write_table(tmp_path, random_shares(layers=1), spec=layer.spec())
    with pytest.raises(KvjaxError, match="was made for a model of layers=1, and this one has layers=3"):
        bind(f"keydiff:budget=12 + head_shares:table={path}", model.config)
    tables = [{"shares": x} for x in random_shares()]
    path = table_file.write(tmp_path / "bare", "head_shares", specs(model.config)[0], tables)
    with pytest.raises(KvjaxError, match="has no array `0.fractions`; make the table anew"):
        bind(f"keydiff:budget=12 + head_shares:table={path}", model.config)
    with pytest.raises(KvjaxError, match="kvjax ships no table of head_shares for a model of layers=3"):
        bind("keydiff:budget=12 + head_shares", model.config)


DOCUMENTS = [np.random.default_rng(seed).integers(0, 60, 64).tolist() for seed in range(3)]


@pytest.mark.parametrize("method", ["turned_queries:sinks=1", "kvzip:sinks=1", "keydiff:unit=chunk2"])
def test_calibrated_shares_are_what_a_ranking_of_each_text_keeps(method, model):
    """The same texts under `adakv:scope=model`, budget by budget: its counts, over the tokens of the texts."""
    arrays = calibrate.count_arrays(model, f"head_shares:method={method}", DOCUMENTS, rows=2)
    budgets = [2, 4, 8, 16, 32, 48]
    for layer_arrays in arrays:
        np.testing.assert_allclose(layer_arrays["fractions"], np.array(budgets) / 64)
    for r, budget in enumerate(budgets):
        name = method.partition(":")[0]
        equal = f"{method},budget={budget}" + (",level=head" if name in ("turned_queries", "kvzip") else "")
        ranked = kvjax.read(model, DOCUMENTS, f"{equal} + adakv:alpha=0,scope=model,page=4")
        expected = num_kept(ranked).sum(0) / (64 * len(DOCUMENTS))
        np.testing.assert_allclose([layer_arrays["shares"][:, r] for layer_arrays in arrays], expected, atol=1e-6)
        assert np.std(expected) > 0 or budget == 2


def test_texts_of_unequal_lengths_count_by_their_tokens(model):
    """Budgets of 33 tokens in texts of 33 and 64: they are whole numbers, and fractions are those really kept."""
    texts = [DOCUMENTS[0], DOCUMENTS[1][:33]]
    together, *single = (
        calibrate.count_arrays(model, "head_shares:method=keydiff", which) for which in (texts, *zip(texts))
    )
    for i, arrays in enumerate(together):
        for name in ("shares", "fractions"):
            expected = (single[0][i][name] * 64 + single[1][i][name] * 33) / 97
            np.testing.assert_allclose(arrays[name], expected, rtol=1e-5)
    np.testing.assert_allclose(single[1][0]["fractions"], np.array([1, 2, 4, 8, 16, 24]) / 33)


def test_texts_too_short_for_a_budget_are_refused(model):
    with pytest.raises(KvjaxError, match="do not leave room for what always stays at a budget of 1/32.*longer texts"):
        calibrate.count_arrays(model, "head_shares", DOCUMENTS)  # turned queries keep four sinks of 64 tokens


def test_from_the_command_line_to_a_method(tmp_path, capsys):
    from kvjax.cli import main

    text, out = tmp_path / "text", tmp_path / "table"
    text.write_text("def f(x):\n    return x\n" * 60)
    arguments = ["testbed", str(out), "--text", str(text), "--tokens=512", "--context=256"]
    assert main(["calibrate", "head_shares:method=keydiff", *arguments]) == 0
    assert "head_shares:method=keydiff of testbed, from 512 tokens" in capsys.readouterr().out
    bind(f"snapkv:budget=64 + head_shares:table={out}", kvjax.load("testbed").config)
    assert main(["calibrate", "head_shares:method=", *arguments]) == 2
    assert "head_shares has method=NAME" in capsys.readouterr().err
    assert main(["calibrate", "head_shares:method=keynorm", *arguments]) == 2
    assert "cannot be ranked by 'keynorm'" in capsys.readouterr().err


def test_an_example_is_a_table():
    spec = layer.spec()
    arrays = CalibratedShares().example(spec, np.random.default_rng(1))
    np.testing.assert_allclose(arrays["shares"].mean(0), arrays["fractions"], atol=1e-6)
    assert jnp.asarray(arrays["shares"]).shape == (layer.K, 6)
