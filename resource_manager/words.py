"""Sentences that name parameters, each as the users of a way in name it."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

_FORMAT = Formatter()


class Words:
    """A sentence that names parameters: `{gpus}` in its template; `{}`, `{:g}` and `{!r}` stand for `values`.

    Each way in names the parameters as its users do. A value may be such a sentence itself.
    """

    __slots__ = ("_parts",)

    def __init__(self, template: str, *values: object) -> None:
        self._parts = [["", ""]]  # a text, and the parameter after it
        rest = iter(values)
        for literal, parameter, spec, conversion in _FORMAT.parse(template):
            self._parts[-1][0] += literal
            if parameter:
                self._name(parameter)
            elif parameter is not None:
                value = next(rest)
                if isinstance(value, Words):
                    self._splice(value)
                else:
                    shown: Any = _FORMAT.convert_field(value, conversion)
                    self._parts[-1][0] += format(shown, spec or "")

    @classmethod
    def parameter(cls, name: str) -> Words:
        """Return a parameter, for a template whose place for it is `{}`."""
        found = cls("")
        found._name(name)
        return found

    def _name(self, parameter: str) -> None:
        self._parts[-1][1] = parameter
        self._parts.append(["", ""])

    def _splice(self, other: Words) -> None:
        for text, parameter in other._parts:
            self._parts[-1][0] += text
            if parameter:
                self._name(parameter)

    @property
    def first(self) -> str | None:
        """The parameter that the sentence names first."""
        return self._parts[0][1] or None

    @property
    def template(self) -> str:
        """The sentence with its values, and `{gpus}` where it names a parameter."""
        return "".join(
            text.replace("{", "{{").replace("}", "}}") + (f"{{{parameter}}}" if parameter else "")
            for text, parameter in self._parts
        )

    def named(self, names: Mapping[str, str]) -> str:
        """Return the sentence with the caller's own names, `--gpus 2` for the `gpus=2` of an option.

        A place in a parameter, such as `by.0`, is named as the parameter.
        """
        found, option = "", False
        for text, parameter in self._parts:
            found += f" {text[1:]}" if option and text.startswith("=") else text
            own = names.get(parameter) or names.get(parameter.partition(".")[0], parameter)
            found, option = found + own, own.startswith("-")
        return found

    def renamed(self, names: Mapping[str, str]) -> Words:
        """Return the sentence with other names, which the caller may name again."""
        found = Words("")
        found._parts = [[text, names.get(parameter, parameter)] for text, parameter in self._parts]
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Words) and self._parts == other._parts

    def __str__(self) -> str:
        return self.named({})

    def __repr__(self) -> str:
        return f"Words({self.template!r})"
