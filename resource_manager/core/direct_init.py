"""Faster construction of the frozen slotted dataclasses that every allocation creates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any, ParamSpec, TypeVar, cast

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")
Parameters = ParamSpec("Parameters")


def direct_init(cls: Class) -> Class:
    """Replace the class's `__init__` by one of the same signature that assigns its slots directly.

    The `__init__` that `dataclass` generates for a frozen class calls `object.__setattr__` by field name,
    which takes three times as long; grants and releases spend much of their time there. This one gives the
    new instance, until its fields are set, a class with the same slots that is not frozen.
    """
    scope = _scope(cls) | {"_set_class": object.__dict__["__class__"].__set__}
    parameters, lines = _assignments(cls, scope)
    written = _written("__init__", ["self", *parameters], ["_set_class(self, _thawed)", *lines], scope)
    written.__qualname__ = f"{cls.__qualname__}.__init__"
    written.__annotations__ = dict(cls.__init__.__annotations__)  # type: ignore[misc]
    cls.__init__ = written  # type: ignore[misc]
    return cls


def direct_new(cls: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """Return a function that makes a value as a call of the class does, in two thirds of the time.

    Python calls a function without a detour through C, and here the class changes once, not twice.
    """
    scope = _scope(cls) | {"_new": object.__new__}
    parameters, lines = _assignments(cls, scope)
    new: Callable[Parameters, Value] = _written(
        "new", parameters, ["self = _new(_thawed)", *lines, "return self"], scope
    )
    return new


def direct_copy(cls: type[Value], changed: str) -> Callable[[Value, Any], Value]:
    """Return a function of (value, other) that copies a value of the class with `changed` set to `other`.

    It copies slot by slot and runs no `__post_init__`, so no derived field may depend on `changed`.
    """
    scope = _scope(cls) | {"_new": object.__new__}
    lines = ["made = _new(_thawed)"]
    for each in fields(cast(Any, cls)):
        name = each.name
        lines.append(f"made.{name} = {'other' if name == changed else f'value.{name}'}")
    lines += ["made.__class__ = _frozen", "return made"]
    copy: Callable[[Value, Any], Value] = _written("copy", ["value", "other"], lines, scope)
    return copy


def _scope(cls: Any) -> dict[str, Any]:
    """Return the names of the class for generated code: itself, and one with the same slots, not frozen."""
    return {"_frozen": cls, "_thawed": type(cls.__name__, (), {"__slots__": cls.__slots__})}


def _assignments(cls: Any, scope: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the constructor's parameters, and lines that set up `self`; adds the defaults to the scope."""
    scope["_missing"] = MISSING
    parameters: list[str] = []
    lines: list[str] = []
    for each in fields(cls):
        name = each.name
        if not each.init:
            continue
        value = name
        if each.default_factory is not MISSING:
            scope[f"_make_{name}"] = each.default_factory
            value = f"_make_{name}() if {name} is _missing else {name}"
            parameters.append(f"{name}=_missing")
        elif each.default is not MISSING:
            scope[f"_default_{name}"] = each.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        lines.append(f"self.{name} = {value}")
    lines.append("self.__class__ = _frozen")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    return parameters, lines


def _written(name: str, parameters: Iterable[str], lines: Iterable[str], scope: dict[str, Any]) -> Any:
    """Return the function; its source has only field names of the class, as in `dataclasses` itself."""
    exec("\n    ".join([f"def {name}({', '.join(parameters)}):", *lines]), scope)  # nosec B102
    return scope[name]
