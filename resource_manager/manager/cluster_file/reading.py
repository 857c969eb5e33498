"""Reading of cluster files: one form of several files, and the place in them of every fault."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from resource_manager.core.cluster_settings import HealthRule
from resource_manager.core.models import Node
from resource_manager.core.teams import Teams
from resource_manager.errors import ClusterFileError, InvalidRequestError, place_in
from resource_manager.manager.cluster_file.positions import Positions, dotted, location_of
from resource_manager.manager.cluster_file.sections import ClusterDefinition, ClusterForm, section_of
from resource_manager.manager.demand import in_words


class ClusterFiles:
    """Files that are read as one: their sections joined, and where each part of them is.

    Raises `ClusterFileError` with file, line, column and reason.
    """

    def __init__(self, paths: Iterable[Path | str]) -> None:
        self.paths = [Path(path) for path in paths]
        self._positions: dict[Path, Positions] = {}
        self._sections: dict[str, Path] = {}
        self._first_servers: list[tuple[int, Path]] = []
        """Number of the first server of each file, among those of all."""
        joined: dict[str, Any] = {}
        for path in self.paths:
            self._join(joined, path)
        try:
            self.form = ClusterForm.model_validate(joined)
            self.definition: ClusterDefinition = self.form.definition()
        except ValidationError as error:
            first = _intended(error.errors(include_url=False))
            raise self._at(first["loc"], _in_words(first)) from error
        except InvalidRequestError as error:
            raise self.located(error) from error

    def located(self, error: InvalidRequestError) -> ClusterFileError:
        """Return the error of what the files define, with the place in the file; --remove has none."""
        location = location_of(error.field or "")
        if location and location[0] != "servers" and section_of(str(location[0])) not in self._sections:
            return ClusterFileError(str(error))
        path, line, column = self._place(location)
        return ClusterFileError(f"{path}:{line}:{column}: {error}")

    def _join(self, joined: dict[str, Any], path: Path) -> None:
        text = _text_of(path)
        try:
            value = tomllib.loads(text)
            self._positions[path] = Positions(text)
        except (ValueError, RecursionError) as error:  # ValueError also for a number with too many digits
            place = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
            line, column = place.groups() if place else (1, 1)
            reason = str(error).replace(place[0], "") if place else error
            raise ClusterFileError(f"{path}:{line}:{column}: not TOML: {reason}") from error
        for section in dict.fromkeys(map(section_of, value)):
            if section == "servers":
                continue
            if (other := self._sections.setdefault(section, path)) is not path:
                self._sections[section] = path
                key = next(key for key in value if section_of(key) == section)
                raise self._at((key,), f"{other} has this section too")
        servers = value.get("servers")
        if isinstance(servers, list) and isinstance(joined.get("servers"), list):
            self._first_servers.append((len(joined["servers"]), path))
            servers[:0] = joined["servers"]
        elif "servers" in value:
            self._first_servers.append((0, path))
        joined.update(value)

    def _at(self, location: Sequence[str | int], reason: str) -> ClusterFileError:
        path, line, column = self._place(location)
        return ClusterFileError(f"{path}:{line}:{column}: {dotted(place_in(location))}: {reason}")

    def _place(self, location: Sequence[str | int]) -> tuple[Path, int, int]:
        """Return file, line and column of a part of the joined files."""
        if not location:
            return (self.paths[0], 1, 1)
        first, *rest = location
        path = self._sections.get(section_of(str(first)), self.paths[0])
        if first == "servers" and self._first_servers:
            number = rest[0] if rest and isinstance(rest[0], int) else 0
            start, path = [entry for entry in self._first_servers if entry[0] <= number][-1]
            rest[:1] = [number - start] if rest else []
        return (path, *self._positions[path].of((first, *rest)))


def _intended(errors: list[ErrorDetails]) -> ErrorDetails:
    """Return the first error; of those of a union of types the deepest, which is about the intended one."""
    first = errors[0]
    if first["type"] == "missing":  # perhaps it is there, under a wrong name
        same_table = [error for error in errors if error["loc"][:-1] == first["loc"][:-1]]
        return next((error for error in same_table if error["type"] == "extra_forbidden"), first)
    depth = 2 if errors[0]["loc"][:1] == ("health",) else 3
    same = [error for error in errors if error["loc"][:depth] == errors[0]["loc"][:depth]]
    return max(same, key=lambda error: len(error["loc"]))


def _in_words(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        from difflib import get_close_matches  # no file without a fault needs it

        near = get_close_matches(str(error["loc"][-1])[:100], _keys_at(error["loc"][:-1]), 1)
        return "is not a key of this file" + "".join(f": did you mean {key}?" for key in near)
    return in_words(error)


def _keys_at(location: Sequence[str | int]) -> list[str]:
    """Return the keys that a table there may have, as far as that is known."""
    models: list[type[BaseModel]] = [ClusterForm]
    for part in location:  # numbers, keys of tables that are named freely, and branches of unions are passed
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [model for field in fields for model in _models_in(field.annotation)] or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ClusterFileError(f"{path}: {reason}") from error


def load_inventory(path: Path | str) -> tuple[Node, ...]:
    """Return the servers of a cluster file; raises `ClusterFileError`."""
    found = ClusterFiles([path])
    if found.definition.nodes is None:
        raise ClusterFileError(f"{path}:1:1: it has no [[servers]]")
    return found.definition.nodes


def load_health(path: Path | str) -> tuple[HealthRule, ...]:
    """Return the rules of `[health]` of a cluster file; raises `ClusterFileError`."""
    return ClusterFiles([path]).definition.health or ()


def load_teams(path: Path | str) -> Teams:
    """Return the rules of teams of a cluster file, empty ones if it has none; raises `ClusterFileError`."""
    return ClusterFiles([path]).definition.teams or Teams()
