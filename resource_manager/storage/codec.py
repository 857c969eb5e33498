"""Conversion to and from JSON, with the validation of stored data.

Defaults are not written, which keeps changes small and infinite times out of JSON. A newer version wrote a
change or a field that this one does not know: it is refused, so that nothing is granted on a state that is
understood only in part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from resource_manager import STORED_FORMAT
from resource_manager.core.changes import Change
from resource_manager.core.cluster import Snapshot
from resource_manager.core.models import Request
from resource_manager.errors import CorruptStateError, InvalidRequestError, NewerFormatError
from resource_manager.words import Words

MAX_REQUEST_BYTES = 8 * 1024
"""Limit of a whole request as JSON: it is stored in the state and, with its changes, in the history."""

_CHANGES: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Change)}
_TAGS = {kind: tag for tag, kind in _CHANGES.items()}
_TAG_KEY = '{"change":"'
_UNKNOWN_FIELD = "unexpected_keyword_argument"


_skips: ContextVar[bool] = ContextVar("skips what a newer version wrote", default=False)


@contextmanager
def skipping() -> Iterator[None]:
    """Read, inside, what is known of a state: kinds of changes and fields that are not known are left out.

    Nothing may be granted on such a state, and it must not be written.
    """
    before = _skips.set(True)
    try:
        yield
    finally:
        _skips.reset(before)


def is_known(text: str | bytes) -> bool:
    """Return whether this software knows the kind of that change."""
    return _parse(text if isinstance(text, str) else text.decode()).get("change") in _CHANGES


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    """Return the adapter of a class, once it is needed: creation takes a millisecond."""
    # Dataclasses of `core` know nothing of pydantic; the classes inside this one inherit the setting.
    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return TypeAdapter(kind)


def change_to_json(change: Change) -> str:
    """Return a change as one line of JSON; its first key, `change`, is the kind in lower case."""
    tag = _TAGS[type(change)]
    try:
        body = _adapter(_CHANGES[tag]).serializer.to_json(change, exclude_defaults=True, warnings="error")
    except PydanticSerializationError as error:  # nobody could read it back
        why = " ".join(str(error).split())[:300]
        raise InvalidRequestError("{}", f"a {tag} change cannot be stored: {why}") from error
    return f'{_TAG_KEY}{tag}",{body[1:].decode()}'


def change_from_json(text: str | bytes) -> Change:
    """Return the change that `change_to_json` wrote; raises `CorruptStateError`."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise CorruptStateError(f"not a change: {error}") from error
    if text.startswith(_TAG_KEY):
        tag = text[len(_TAG_KEY) : text.find('"', len(_TAG_KEY))]
        if tag in _CHANGES:
            try:
                body = "{" + text[len(_TAG_KEY) + len(tag) + 2 :]
                return _adapter(_CHANGES[tag]).validate_json(body)  # type: ignore[no-any-return]
            except ValidationError as error:
                if not _skips.get():
                    raise _unreadable(f"a {tag} change", error) from error
    return change_from_dict(_parse(text))


def change_to_dict(change: Change) -> dict[str, Any]:
    """Return a change as plain values; `change` is its kind in lower case."""
    tag = _TAGS[type(change)]
    return {"change": tag, **_adapter(_CHANGES[tag]).dump_python(change, mode="json", exclude_defaults=True)}


def change_from_dict(value: Mapping[str, Any]) -> Change:
    """Return the change that `change_to_dict` wrote; raises `CorruptStateError`."""
    tag = value.get("change") if isinstance(value, Mapping) else None
    if not isinstance(tag, str):
        raise CorruptStateError(f"not a change: {str(value)[:120]}")
    if tag not in _CHANGES:
        raise _unknown(tag)
    kind = _CHANGES[tag]
    try:
        body = {key: item for key, item in value.items() if key != "change"}
        return _validated(kind, body)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _unreadable(f"a {tag} change", error) from error


def check_kinds(tags: Iterable[str]) -> None:
    """Raise `NewerFormatError` unless this software knows all these kinds of changes, or skips others."""
    for tag in tags:
        if tag not in _CHANGES and not _skips.get():
            raise _unknown(tag)


def snapshot_to_dict(snapshot: Snapshot) -> dict[str, Any]:
    """Return a whole state as plain values, with the format version."""
    return {
        "format": STORED_FORMAT,
        **_adapter(Snapshot).dump_python(snapshot, mode="json", exclude_defaults=True),
    }


def snapshot_from_dict(value: Mapping[str, Any]) -> Snapshot:
    """Return the state that `snapshot_to_dict` wrote; raises `CorruptStateError`, also for a newer format."""
    check_format(value.get("format"), "the snapshot")
    try:
        stored = {key: item for key, item in value.items() if key != "format"}
        return _validated(Snapshot, stored)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _unreadable("a snapshot", error) from error


def as_stored(request: Request) -> Request:
    """Return the request as it is read back; raises `InvalidRequestError` if unreadable or too large."""
    try:
        text = _adapter(Request).dump_json(request, exclude_defaults=True, warnings=False)
        again: Request = _adapter(Request).validate_json(text, strict=True)
    except ValidationError as error:
        where = error.errors(include_url=False)[0]["loc"]
        raise InvalidRequestError("{}", _first(error), field=str(where[0]) if where else None) from error
    except PydanticSerializationError as error:
        raise InvalidRequestError("the request cannot be stored: {}", error) from error
    if len(text) > MAX_REQUEST_BYTES:
        sizes = {name: len(to_json(value)) for name, value in json.loads(text).items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidRequestError(
            "{} is too large: {:,} bytes, the whole request {:,}; a request may take {:,} as JSON",
            *(Words.parameter(largest), sizes[largest], len(text), MAX_REQUEST_BYTES),
        )
    if again != request:
        name = next(f.name for f in fields(Request) if getattr(again, f.name) != getattr(request, f.name))
        raise InvalidRequestError(
            "{} {!a:.100} would be read back as {!a:.100}",
            *(Words.parameter(name), getattr(request, name), getattr(again, name)),
        )
    return again


def check_format(version: object, where: str) -> None:
    """Raise `CorruptStateError` unless this version of the software can read that format."""
    try:
        number = int(str(version))
    except ValueError:
        raise CorruptStateError(f"{where} names no format version (found {version!r})") from None
    if number > STORED_FORMAT:
        raise NewerFormatError(
            f"{where} was written in format {number}; this software reads up to {STORED_FORMAT}: upgrade it"
        )


def _validated(kind: type, value: dict[str, Any]) -> Any:
    """Return the value as that class, where they are skipped without the fields that it does not know."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors(include_url=False) if each["type"] == _UNKNOWN_FIELD]
        if not _skips.get() or not unknown:
            raise
    for *way, name in unknown:
        place: Any = value
        for step in way:
            place = place[step]
        del place[name]
    return _validated(kind, value)


def _unknown(tag: str) -> NewerFormatError:
    return NewerFormatError(f"this software does not know the change {tag[:40]!a}: upgrade it")


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(f"not a change: {error}") from error
    if not isinstance(value, dict):
        raise CorruptStateError(f"not a change: {text[:120]!a}")
    return value


def _unreadable(what: str, error: ValidationError) -> CorruptStateError:
    """Return the error for stored data: newer if it only has more fields than this software knows."""
    found = error.errors(include_url=False)
    if all(each["type"] == _UNKNOWN_FIELD for each in found):
        fields_unknown = ", ".join(ascii(str(each["loc"][-1])[:40]) for each in found)
        return NewerFormatError(f"this software does not know {fields_unknown} of {what}: upgrade it")
    return CorruptStateError(f"not {what}: {_first(error)}")


def _first(error: ValidationError) -> str:
    """Return the first message of a validation error, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
