"""Errors name parameters as data: each way in shows its own names, and no text is searched for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from resource_manager.errors import InvalidRequestError, UnknownNodeError
from resource_manager.words import Words
from tests.test_architecture import ROOT

OPTIONS = {"gpus": "--gpus", "gpu_milli": "--gpu-milli", "server": "--server"}


def test_a_sentence_names_the_parameters_of_the_way_in_and_nothing_else() -> None:
    words = Words("{gpu_milli}={} goes with {gpus}=1, got {gpus}={!r:.8}", 500, "gpus={gpus}")
    assert str(words) == "gpu_milli=500 goes with gpus=1, got gpus='gpus={g"
    assert words.named(OPTIONS) == "--gpu-milli 500 goes with --gpus 1, got --gpus 'gpus={g"
    assert words.renamed({"gpus": "required_gpus"}).named({"required_gpus": "-g"}).endswith("got -g 'gpus={g")


def test_a_sentence_in_another_keeps_its_parameters() -> None:
    inner = Words("{} is not {server}", Words.parameter("gpus"))
    assert Words("{}: {}", "task", inner).named(OPTIONS) == "task: --gpus is not --server"


@pytest.mark.parametrize("value", ["a{b}", "{}", "{{x}}", "}{", "=", "{gpus!r:.3}"])
def test_a_template_gives_the_same_sentence_again(value: str) -> None:
    words = Words("{server} {} {gpus}={}", value, value)
    assert Words(words.template) == words
    assert str(words) == f"server {value} gpus={value}"


def test_the_field_of_an_error_is_the_first_parameter_that_it_names() -> None:
    assert InvalidRequestError("a {gpus} beside {cpus}").field == "gpus"
    assert InvalidRequestError("a {gpus} beside {cpus}", field="cpus").field == "cpus"
    assert InvalidRequestError("{}", "no {gpus} here").field is None
    error = UnknownNodeError("x", ["gpu-a"], field="server")
    error.rename({"server": "prefer_server_id"})
    assert (error.field, str(error)) == (
        "prefer_server_id",
        "prefer_server_id 'x' is not in the inventory of 1 server: it has gpu-a",
    )


@pytest.mark.parametrize(
    ("known", "advice"),
    [
        (["gpu-a", "gpu-b", "cpu-1"], ": did you mean gpu-a or gpu-b?"),
        (["north", "south"], ": it has north, south"),
        ([f"node{i}" for i in range(6)], "; gpu-manager status lists them"),
        ([f"gpu-{i}" for i in range(2000)], "; gpu-manager status lists them"),
        ([], ""),
    ],
)
def test_an_unknown_server_is_answered_with_those_that_may_be_meant(known: list[str], advice: str) -> None:
    servers = "server" if len(known) == 1 else "servers"
    text = f"server 'gpu-aa' is not in the inventory of {len(known)} {servers}{advice}"
    error = UnknownNodeError("gpu-aa", known)
    assert (str(error), str(error.words), error.args) == (text, text, (text,))
    error = UnknownNodeError("gpu-aa", known, field="server")
    assert error.words.named(OPTIONS).startswith("--server 'gpu-aa' is not")
    assert Words(error.words.template) == error.words


def templates() -> Iterator[tuple[str, ast.expr]]:
    """Yield the place and the first argument of each `InvalidRequestError(…)` and `Words(…)` of ours."""
    for path in (*ROOT.glob("resource_manager/**/*.py"), *ROOT.glob("simulator/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in ("InvalidRequestError", "Words") and node.args:  # type: ignore[attr-defined]
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0]  # type: ignore[attr-defined]


def test_no_template_is_made_of_values_whose_braces_would_be_read_as_parameters() -> None:
    found = dict(templates())
    assert len(found) > 50
    assert not [place for place, first in found.items() if not isinstance(first, ast.Constant | ast.Name)]
