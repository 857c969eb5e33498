"""Faster construction of the frozen slotted dataclasses that every allocation creates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Value = TypeVar("Value", bound=type)


def direct_init(cls: Value) -> Value:
    """Replace the class's `__init__` by one of the same signature that sets each slot by its descriptor.

    The `__init__` that `dataclass` generates for a frozen class calls `object.__setattr__` by field name,
    which takes more than twice as long; grants and releases spend much of their time there.
    """
    scope: dict[str, Any] = {"_missing": MISSING}
    parameters: list[str] = []
    lines: list[str] = []
    for each in fields(cls):
        name = each.name
        scope[f"_set_{name}"] = cls.__dict__[name].__set__
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
        lines.append(f"    _set_{name}(self, {value})")
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
    scope: dict[str, Any] = {"_new": object.__new__, "_class": cls}
    lines = ["def copy(value, other):", "    made = _new(_class)"]
    for each in fields(cls):
        name = each.name
        scope[f"_set_{name}"] = cls.__dict__[name].__set__
        lines.append(f"    _set_{name}(made, {'other' if name == changed else f'value.{name}'})")
    # The source consists of field names only, as above.
    exec("\n".join([*lines, "    return made"]), scope)  # nosec B102
    made: Callable[[Any, Any], Any] = scope["copy"]
    return made
