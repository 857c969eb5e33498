"""Kinds of the fields of a demand, and of what is asked with it."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from numbers import Integral
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints, ValidationInfo
from pydantic_core import PydanticCustomError

from resource_manager.core.gpu_memory import as_gpu_memory
from resource_manager.core.identifiers import MAX_TEXT, UNPRINTABLE
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.manager.cluster_file.durations import as_seconds
from resource_manager.words import Words

MAX_COUNT = 1_000_000
MAX_AMOUNT = 2**53
MAX_DURATION_S = 10 * 365 * 86_400
PRINTABLE = f"^[^{UNPRINTABLE}]*$"
WHOLE = re.compile("-?[0-9]{1,15}")


def _whole(value: object, info: ValidationInfo) -> object:
    if type(value) is int:  # asking the abstract class takes ten times as long
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):  # numpy's, too
        return int(value)
    words = Words("must be a whole number, got {:.100}", repr(value))
    if info.field_name == "gpus" and (milli := milli_of(value)):
        words = Words("{}; that GPU fraction is {gpus}=1, {gpu_milli}={}", words, milli)
    raise PydanticCustomError("whole_number", "{words}", {"words": words})


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


def pairs_of(value: object, info: ValidationInfo) -> object:
    """Return a list of `NAME=VALUE`, as options and queries give them, as a dictionary."""
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for item in value:
        name, equals, text = str(item).partition("=")
        if not name or not equals or name in found:
            got = f"{item!r:.100}"
            raise ValueError(f"names {got} twice" if name in found else f"must be NAME=VALUE, got {got}")
        found[name] = _amount(text) if info.field_name == "resources" else text
    return found


def _amount(text: str) -> object:
    try:
        return int(text) if WHOLE.fullmatch(text) else float(text)
    except ValueError:
        return text


def gpu_memory_of(value: object) -> object:
    return value if value == "" else as_gpu_memory(str(value))


def deadline_of(value: object) -> object:
    """Return the seconds of a duration, or a time that names its zone, from 1970 to 9998."""
    at = value
    if isinstance(value, str):
        with suppress(ValueError):
            at = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
    if isinstance(at, datetime) and at.tzinfo is not None and 1970 <= at.year < 9999:  # in UTC, too
        return at
    with suppress(ValueError):
        seconds = as_seconds(value)
        if isinstance(seconds, int | float) and seconds is not True and 0 < seconds <= MAX_DURATION_S:
            return float(seconds)
    raise ValueError(
        "must be a duration of 10 years at most, such as 6h, or a time with its zone, of the years 1970 to "
        f"9998, such as 2030-01-31T18:00+01:00, got {shown(value)}"
    )


def shown(value: object) -> str:
    """Return a value for an error, its first 100 characters if it is long."""
    try:
        return f"{value!a:.100}"
    except ValueError:
        return "a number of more digits than are shown"


def _one_label(value: object) -> object:
    if isinstance(value, list | tuple) or (isinstance(value, str) and "," in value):
        raise ValueError(f"must name one label, got {value!r:.100}")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=PRINTABLE)]
LeaseId = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=PRINTABLE)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT, pattern=PRINTABLE)]
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0, le=MAX_COUNT)]
ServerRef = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)] | Name
Seconds = Annotated[float, BeforeValidator(as_seconds), Field(gt=0, le=MAX_DURATION_S, allow_inf_nan=False)]
Delay = Annotated[float, BeforeValidator(as_seconds), Field(ge=0, le=MAX_DURATION_S, allow_inf_nan=False)]
Deadline = Annotated[float | datetime, BeforeValidator(deadline_of)]
Worth = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False), BeforeValidator(_number)]
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), BeforeValidator(_number)]
Quantity = (
    Annotated[int, Field(strict=True, ge=0, le=MAX_AMOUNT)]
    | Annotated[float, Field(strict=True, ge=0, le=MAX_AMOUNT, allow_inf_nan=False)]
)
Label = Annotated[Text, BeforeValidator(_one_label)]
Labels = Annotated[dict[Name, Text], BeforeValidator(pairs_of), Field(max_length=50)]


def milli_of(wanted: object) -> int:
    """Return the thousandths of that part of a GPU; 0 if it is none."""
    try:
        milli = round(MILLI_PER_GPU * float(wanted))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 0
    return milli if 0 < milli < MILLI_PER_GPU else 0
