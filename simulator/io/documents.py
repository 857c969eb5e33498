"""JSON files read by a pydantic model; an error names file, position and reason."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from simulator.errors import InputError
from simulator.io.rows import read_json

Model = TypeVar("Model", bound=BaseModel)


class Document(BaseModel):
    """Base of every part of a file: exact types, finite numbers, no unknown key."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def read_document(path: Path, model: type[Model]) -> Model:
    """Return the file's document; raise `InputError`."""
    value = read_json(path)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InputError(first_error(error), path=path) from error


def first_error(error: ValidationError) -> str:
    """Return the first error as one line, with the number of further errors."""
    complaints = error.errors(include_url=False)
    first = complaints[0]
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place}: unknown key{more}"
    if first["type"] == "value_error" and not place:  # a rule of the whole document
        return first["msg"].removeprefix("Value error, ") + more
    got = first["input"]
    shown = f", got {got!r}" if isinstance(got, int | float | str) else ""
    rule = first["msg"].replace("valid tuple", "valid list")
    return f"{place or 'document'}: {rule}{shown}{more}"
