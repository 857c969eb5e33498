"""Faster construction of the frozen slotted dataclasses that every allocation creates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Value = TypeVar("Value", bound=type)


def direct_init(cls: Value) -> Value:
    """Replace the class's `__init__` by one of the same signature that assigns its slots directly.

    The `__init__` that `dataclass` generates for a frozen class calls `object.__setattr__` by field name,
    which takes three times as long; grants and releases spend much of their time there. This one gives the
    new instance, until its fields are set, a class with the same slots that is not frozen.
    """
    scope = _scope(cls)
    scope |= {"_missing": MISSING, "_set_class": object.__dict__["__class__"].__set__}
    parameters: list[str] = []
    lines = ["    _set_class(self, _thawed)"]
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
        lines.append(f"    self.{name} = {value}")
    lines.append("    self.__class__ = _frozen")
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    # The source consists of the class's own field names only, as in `dataclasses` itself.
    exec("\n".join([f"def __init__(self, {', '.join(parameters)}):", *lines]), scope)  # nosec B102
    written = scope["__init__"]
    written.__qualname__ = f"{cls.__qualname__}.__init__"
    written.__annotations__ = dict(cls.__init__.__annotations__)  # type: ignore[misc]
    cls.__init__ = written  # type: ignore[misc]
    return cls


def direct_copy(cls: type[Any], changed: str) -> Callable[[Any, Any], Any]:
    """Return a function of (value, other) that copies a value of the class with `changed` set to `other`.

    It copies slot by slot and runs no `__post_init__`, so no derived field may depend on `changed`.
    """
    scope = _scope(cls) | {"_new": object.__new__}
    lines = ["def copy(value, other):", "    made = _new(_thawed)"]
    for each in fields(cls):
        name = each.name
        lines.append(f"    made.{name} = {'other' if name == changed else f'value.{name}'}")
    # The source consists of field names only, as above.
    exec("\n".join([*lines, "    made.__class__ = _frozen", "    return made"]), scope)  # nosec B102
    made: Callable[[Any, Any], Any] = scope["copy"]
    return made


def _scope(cls: type[Any]) -> dict[str, Any]:
    """Return the names of the class for generated code: itself, and one with the same slots, not frozen."""
    return {"_frozen": cls, "_thawed": type(cls.__name__, (), {"__slots__": cls.__slots__})}
