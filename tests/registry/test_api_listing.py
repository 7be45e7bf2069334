"""`kvjax methods --api` lists the names of `kvjax.method_api`, and prints the contract of each."""

from __future__ import annotations

import inspect
import json

import pytest

from kvjax import cli, method_api
from kvjax.registry.api_listing import list_names


def run(capsys, *words: str) -> str:
    assert cli.main(["methods", "--api", *words]) == 0
    return capsys.readouterr().out


def test_every_name_has_a_component_and_a_line():
    names = list_names(method_api)
    assert [x.name for x in names] == method_api.__all__
    assert all(x.component and x.meaning for x in names)


def test_the_names_are_printed_below_their_components(capsys):
    lines = run(capsys).splitlines()
    for x in list_names(method_api):
        (line,) = [i for i, line in enumerate(lines) if line.split(maxsplit=1) == [x.name, x.meaning]]
        heading = next(line for line in reversed(lines[:line]) if not line.startswith(" "))
        assert heading == x.component
    assert "--api NAME" in lines[-1]


@pytest.mark.parametrize("name", method_api.__all__)
def test_every_name_has_a_contract(name, capsys):
    head, contract = run(capsys, name).split("\n\n", 1)
    (entry,) = [x for x in list_names(method_api) if x.name == name]
    assert head == f"{name} ({entry.component}): {entry.meaning}"
    value = getattr(method_api, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        first = (inspect.getdoc(value) or "").partition("\n")[0]
        assert first in contract or value is method_api.Array
    assert contract.strip()


def test_a_contract_has_members_shapes_and_flags_and_no_code(capsys):
    text = run(capsys, "Policy", "attention_rows")
    for part in (
        "def after_token(",
        'Float32[Array, "B K G S"] | None',
        "needs_weights = False  # whether",
        "B K G Q S",
    ):
        assert part in text
    assert "jnp." not in text and "return " not in text
    private = run(capsys, "KVStorage")
    assert "def decode_keys(" in private and "_rotate" not in private


def test_json_and_an_unknown_name(capsys):
    names = json.loads(run(capsys, "--json"))
    assert [x["name"] for x in names] == method_api.__all__ and set(names[0]) == {"name", "component", "meaning"}
    assert [x["name"] for x in json.loads(run(capsys, "--json", "Codec"))] == ["Codec"]
    assert cli.main(["methods", "--api", "Polcy"]) == 2
    assert "'Polcy'; did you mean 'Policy'?" in capsys.readouterr().err
