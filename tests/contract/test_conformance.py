"""A method with exactly the members of the protocol runs wherever kvjax takes a method."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import protocol
from kvjax.cache.protocol import LayerSpec, Needs, Traits
from kvjax.core.attention import attend_dense, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.eval import Case, Spec, compare
from kvjax.eval.page import report
from kvjax.eval.tasks import suite
from kvjax.generation.inputs import check_cache
from kvjax.registry.strings import method_of
from kvjax.testing import toy_model

PROMPTS = [list(range(1, 13)), [8], [40, 41, 42, 43, 44]]
ROOT = Path(kvjax.__file__).parent


@functools.cache
def make_half() -> kvjax.Model:
    return kvjax.random_model(toy_model(windows=(None, 5), layers=2).config, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class LastTokens:
    """Keeps the last `count` tokens of a text."""

    count: int
    traits: ClassVar[Traits] = Traits(evicts=True, constant=True)

    def bind(self, spec: LayerSpec) -> LastTokensLayer:
        return LastTokensLayer(self.count, spec)


@dataclasses.dataclass(frozen=True)
class LastTokensLayer:
    """Keeps the last tokens of one layer; its state is a block of `count` slots, the newest token last."""

    count: int
    spec: LayerSpec
    needs: ClassVar[Needs] = Needs()

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        return self.count

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> KVBlock:
        k, v = (jnp.zeros((*x.shape[:2], num_slots, x.shape[3]), x.dtype) for x in (block.k, block.v))
        return self._last(KVBlock(k, v, jnp.full((k.shape[0], 1, num_slots), -1, jnp.int32)), block)

    def extend(
        self, state: KVBlock, q: Array, new: KVBlock, commit: int, cross_layer: Any, outside: Partial | None = None
    ) -> tuple[Array, KVBlock, Any]:
        new = new.clean()
        q_pos = new.pos[:, 0]
        parts = [attend_dense(q, block, q_pos, self.spec.rule) for block in (state, new)]
        parts += [] if outside is None else [outside]
        return merge(parts), self._last(state, new.first(commit)), cross_layer

    def positions(self, state: KVBlock) -> Array:
        return state.pos

    def _last(self, *blocks: KVBlock) -> KVBlock:
        k, v, pos = (jnp.concatenate(x, 2) for x in zip(*((b.k, b.v, b.pos) for b in blocks), strict=True))
        newest = jnp.argsort(pos, axis=2)[:, :, -self.count :].astype(jnp.int32)
        return gather_tokens(KVBlock(k, v, pos).clean(), newest)


def public_members(cls: type) -> set[str]:
    """Public attributes of a class without the fields of a dataclass."""
    names = {*vars(cls), *inspect.get_annotations(cls)}
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return {name for name in names - fields if not name.startswith("_")}


def test_the_toy_has_the_contracts_members_and_no_others():
    assert public_members(LastTokens) == public_members(protocol.KVMethod) == {"traits", "bind"}
    assert (
        public_members(LastTokensLayer)
        == public_members(protocol.BoundLayer)
        == {"needs", "num_slots", "prefill", "extend", "positions"}
    )


@pytest.fixture(scope="module")
def model():
    return toy_model(windows=(None, 5), layers=2)


def test_with_room_for_all_it_makes_the_tokens_of_the_full_cache(model):
    expected = kvjax.generate(model, PROMPTS, "full", max_new_tokens=5).tokens
    out = kvjax.generate(model, PROMPTS, LastTokens(40), max_new_tokens=5)
    assert out.tokens == expected
    streamed = list(kvjax.stream(model, PROMPTS, LastTokens(40), max_new_tokens=5))
    assert [list(row) for row in zip(*streamed, strict=True)] == expected
    few_tokens = kvjax.generate(model, PROMPTS, LastTokens(3), max_new_tokens=5).tokens
    assert few_tokens != expected


def test_prefill_extend_and_accounts(model):
    method = LastTokens(4)
    last, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    np.testing.assert_allclose(last[1], kvjax.logits(model, PROMPTS[1:2])[0, -1], atol=1e-5)
    for rows in kvjax.kept_positions(cache):
        assert [heads[0].tolist() for heads in rows] == [[8, 9, 10, 11], [0], [1, 2, 3, 4]]
    _, cache = kvjax.extend(model, [[5], [6], [7]], cache, method)
    assert [heads[1].tolist() for heads in kvjax.kept_positions(cache)[0]] == [[9, 10, 11, 12], [0, 1], [2, 3, 4, 5]]
    config = model.config
    a = config.kind(0).attention
    bytes_per_layer = 2 * a.kv_heads * 4 * a.head_dim * 4 + 4 * 4  # keys and values, and a position per slot
    planned = kvjax.planned_bytes(method, config, 12, capacity=64, batch=3, dtype=jnp.float32)
    assert planned.total == {"device": config.layers * 3 * bytes_per_layer + 4 * 3, "pinned_host": 0}
    assert kvjax.state_bytes(cache).total == planned.total


def test_scores_and_contexts(model):
    continuations = [[3, 1], [1, 4], [5, 9]]
    scores, expected = (kvjax.score(model, PROMPTS, continuations, method) for method in (LastTokens(40), "full"))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    context, full = (kvjax.read(model, PROMPTS, method) for method in (LastTokens(40), "full"))
    questions = [[5, 6], [7, 8], [9, 10]]
    assert context.ask(questions, max_new_tokens=4).tokens == full.ask(questions, max_new_tokens=4).tokens
    assert context.bytes == kvjax.state_bytes(context.cache) and context.kept_positions()[0][1][0].tolist() == [0]


def test_it_is_called_by_its_value_and_composes_with_nothing(model):
    assert kvjax.name_of(LastTokens(3)) == "LastTokens(count=3)"
    for pair in ((LastTokens(3), kvjax.methods.offload()), (kvjax.methods.offload(), LastTokens(3))):
        with pytest.raises(IncompatibleMethod, match="LastTokens.count=3. is no kvjax.Method, so offload.*leave one"):
            kvjax.compose(*pair)


def test_it_is_evaluated_beside_others_and_shown_on_the_page(model, monkeypatch, tmp_path):
    def cases(model, spec):
        """Yields tasks that predict the last third of a random text."""
        text = np.random.default_rng(0).integers(0, 97, (2, 24))
        for i, row in enumerate(text):
            yield Case("ppl", f"ppl/{i}", row[:16], follows=row[16:], bytes=8, about={"length": 16})

    monkeypatch.setattr(suite, "makers", lambda: {"ppl": cases})
    rows = compare(model, [LastTokens(3), "full"], "ppl", Spec(lengths=(16,)), tmp_path)
    assert [row["method"] for row in rows] == ["LastTokens(count=3)", "full"]
    assert rows[0]["bits"] != rows[1]["bits"]
    assert "LastTokens(count=3)" in report.write(tmp_path).read_text().replace("<wbr>", "")


def test_a_foreign_cache_is_an_error_with_its_remedy(model):
    _, cache = kvjax.prefill(model, [[1, 2]], "kcache:n=3 + in_windows", capacity=64)
    other = toy_model(layers=3)
    for call in (
        lambda m, **more: kvjax.extend(m, [[1]], cache, **more),
        lambda m, **more: kvjax.generate(m, [[1]], cache=cache, max_new_tokens=2, **more),
        lambda m, **more: kvjax.stream(m, [[1]], cache=cache, max_new_tokens=2, **more),
    ):
        with pytest.raises(KvjaxError, match="filled by another model; prefill the prompt with this one"):
            call(other)
        with pytest.raises(KvjaxError, match="under another method than kcache:n=4 .*; go on without naming a method"):
            call(model, method="kcache:n=4 + in_windows")
    with pytest.raises(KvjaxError, match="a cache is what kvjax.prefill returns, got tuple"):
        kvjax.extend(model, [[1]], cache.layers)


@pytest.mark.parametrize(
    "method",
    [
        "full",
        "offload",
        "kcache:n=3",
        "kivi:bits=2,group=8,residual=8",
        "h2o:heavy=8,recent=8",
        "accumulated:budget=6,recent=2 + cam:window=2",
    ],
)
def test_a_cache_of_another_dtype_is_refused(model, method):
    caches = [kvjax.prefill(m, [[1, 2]], method, capacity=64)[1] for m in (model, make_half())]
    for this, other, cache in ((make_half(), "float32", caches[0]), (model, "bfloat16", caches[1])):
        says = f"filled by a model in {other} and this one is in {this.dtype}; prefill the prompt with this one"
        with pytest.raises(KvjaxError, match=says):
            kvjax.extend(this, [[1]], cache)
        with pytest.raises(KvjaxError, match=says):
            kvjax.generate(this, [[1]], cache=cache, max_new_tokens=2)
    assert check_cache(model, caches[0]) is caches[0] and check_cache(make_half(), caches[1]) is caches[1]


def test_a_shared_cache_of_another_dtype_is_refused(model):
    shared = [
        kvjax.read(m, [[1, 2]], "full").extend_prefix([[3], [4]], "int4", headroom=8).cache
        for m in (model, make_half())
    ]
    assert check_cache(model, shared[0]) is shared[0] and check_cache(make_half(), shared[1]) is shared[1]
    with pytest.raises(KvjaxError, match="filled by a model in float32 and this one is in bfloat16"):
        check_cache(make_half(), shared[0])


def test_a_cache_of_codes_knows_the_dtype_of_its_model_too(model):
    caches = [kvjax.prefill(m, [[1, 2]], "bfp:block=8", capacity=64)[1] for m in (model, make_half())]
    types = [[jax.typeof(x) for x in jax.tree.leaves(cache)] for cache in caches]
    assert types[0] == types[1]
    assert check_cache(make_half(), caches[1]) is caches[1]
    with pytest.raises(KvjaxError, match="filled by a model in float32 and this one is in bfloat16"):
        check_cache(make_half(), caches[0])


def test_strings_and_values_are_taken_alike(model):
    text, value = (kvjax.generate(model, PROMPTS, m, max_new_tokens=3) for m in ("kcache:n=3", kvjax.methods.kcache(3)))
    assert text.tokens == value.tokens and text.bytes == value.bytes
    assert method_of("kcache:n=3") == method_of(kvjax.methods.kcache(n=3))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (kvjax.methods.kcache, r"kcache is a function that makes a method: call it, as in kvjax.methods.kcache\(\)"),
        (None, "a method is a value such as .* or a string such as 'kcache:n=64', got None"),
        (["full"], r"a method is a value .* got \['full'\]"),
        (LastTokens, "a method is a value .* got <class"),
    ],
)
def test_what_is_no_method_says_what_is(model, wrong, says):
    with pytest.raises(KvjaxError, match=says):
        kvjax.prefill(model, [[1]], wrong)


def test_a_changed_value_is_not_called_by_the_string_that_made_it():
    method = kvjax.methods.kcache(n=64)
    assert (
        kvjax.name_of(method) == "kcache:n=64" and kvjax.name_of(kvjax.parse("offload + kcache")) == "offload + kcache"
    )
    changed = dataclasses.replace(method, device_layers=3)
    assert "kcache:" not in kvjax.name_of(changed) and "device_layers=3" in kvjax.name_of(changed)
    assert kvjax.name_of(dataclasses.replace(changed, device_layers=1)) == "kcache:n=64"
    assert kvjax.name_of(kvjax.Method()) == "full"


FLOORS = ("core", "models", "cache", "methods", "engine", "generation", "eval", "explore")
"""Folders from the lowest up; modules outside them, such as the command line, may import all."""


def imported_modules(path: Path) -> set[str]:
    """The modules of kvjax that a file imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in modules if name.split(".")[0] == "kvjax"}


@pytest.mark.parametrize("floor", FLOORS)
def test_an_import_never_goes_up(floor):
    above = FLOORS[FLOORS.index(floor) + 1 :]
    forbidden = {*above, "cli", *({"models"} if floor in ("cache", "methods") else ())}
    files = sorted((ROOT / floor).rglob("*.py"))
    assert files, f"kvjax has no folder {floor}"
    for path in files:
        up = {name for name in imported_modules(path) if name.split(".")[1:2] and name.split(".")[1] in forbidden}
        assert not up, f"{path.relative_to(ROOT)} imports {', '.join(sorted(up))}"
