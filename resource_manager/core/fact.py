"""What a fact of a refusal is: a value with shared methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class")


def _fields(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, name) for name in value.__match_args__)


def _equals(value: Any, other: Any) -> bool:
    return type(value) is type(other) and _fields(value) == _fields(other)


def _hash(value: Any) -> int:
    return hash((type(value), _fields(value)))


def _text(value: Any) -> str:
    fields = zip(value.__match_args__, _fields(value), strict=True)
    return f"{type(value).__name__}({', '.join(f'{name}={field!r}' for name, field in fields)})"


@dataclass_transform(frozen_default=True)
def fact(cls: type[Class]) -> type[Class]:
    """Make the class a slotted value, frozen for the type checker.

    The methods are shared, since those that `dataclass` writes for each of fifty classes take a tenth of the
    time in which a command starts.
    """
    for name, method in (("__eq__", _equals), ("__hash__", _hash), ("__repr__", _text)):
        setattr(cls, name, method)
    return dataclass(eq=False, repr=False, slots=True)(cls)
