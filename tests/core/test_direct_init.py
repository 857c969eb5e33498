"""The faster constructor behaves exactly like the one that `dataclass` generates."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from resource_manager.core.direct_init import direct_init, direct_new
from resource_manager.core.models import Request
from resource_manager.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Plain:
    name: str
    count: int = 3
    amounts: Mapping[str, int] = field(default_factory=dict)
    total: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("empty")
        object.__setattr__(self, "total", self.count + sum(self.amounts.values()))


@direct_init
@dataclass(frozen=True, slots=True)
class Quick:
    name: str
    count: int = 3
    amounts: Mapping[str, int] = field(default_factory=dict)
    total: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        Plain.__post_init__(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [("a",), ("a", 4), ("a", 4, {"x": 2})])
def test_it_sets_the_same_fields_as_the_dataclass(values: tuple[object, ...]) -> None:
    plain, quick = Plain(*values), Quick(*values)  # type: ignore[arg-type]
    assert repr(quick) == repr(plain).replace("Plain", "Quick")
    assert quick == Quick(*values)  # type: ignore[arg-type]
    assert quick != Quick("b")
    assert pickle.loads(pickle.dumps(quick)) == quick
    assert replace(quick, count=9).total == replace(plain, count=9).total


def test_it_has_the_same_parameters_and_keeps_the_class_frozen() -> None:
    assert list(inspect.signature(Quick).parameters) == list(inspect.signature(Plain).parameters)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        Quick()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="other"):
        Quick("a", other=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="empty"):
        Quick("")
    with pytest.raises(FrozenInstanceError):
        Quick("a").count = 1  # type: ignore[misc]


def test_each_instance_gets_a_default_of_its_own() -> None:
    assert Quick("a").amounts is not Quick("b").amounts


def test_a_copy_for_another_task_equals_a_new_request() -> None:
    request = Request("a", 2, resources={"cpus": 4}, gpu_types=("T4",), priority=3, labels={"x": "y"})
    other = request.for_task("b")
    assert other == replace(request, lease_id="b")
    assert other.shape == request.shape
    assert request.lease_id == "a"
    with pytest.raises(InvalidRequestError, match="lease_id"):
        request.for_task("")


@pytest.mark.parametrize("values", [{}, {"count": 4}, {"count": 4, "amounts": {"x": 2}}])
def test_the_function_makes_what_the_class_makes(values: dict[str, Any]) -> None:
    made = direct_new(Quick)("a", **values)
    assert (type(made), made, made.total) == (Quick, Quick("a", **values), Quick("a", **values).total)
    with pytest.raises(FrozenInstanceError):
        made.count = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="empty"):
        direct_new(Quick)("", **values)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        direct_new(Quick)(**values)
