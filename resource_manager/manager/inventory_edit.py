"""Replacement of one server's GPUs in an inventory file, which leaves the rest of its text as it is."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from resource_manager.core.models import Gpu
from resource_manager.errors import InventoryError
from resource_manager.manager.inventory_file import load_inventory
from resource_manager.storage.draft_file import create_draft

SERVER = re.compile(r"^\s*\[\[\s*servers\s*\]\]")
GPUS = re.compile(r"^\s*\[\[\s*servers\.gpus\s*\]\]")
HEADER = re.compile(r"^\s*\[\[?[\w\s.\"'-]+\]?\]\s*(#.*)?$")
OF_GPUS = re.compile(r"^\s*((gpus|gpu_type|gpu_memory_mib)\s*=|# GPU \d+ is left out: )")


@contextmanager
def gpus_replaced(path: Path, server: str, gpus: Sequence[Gpu]) -> Iterator[None]:
    """Write the file with these GPUs of the server when the block ends without an error.

    Raises `InventoryError` before the block if the file cannot be written, or does not describe the server in
    a table of its own.
    """
    try:
        before = path.read_text(encoding="utf-8")
        handle, draft = create_draft(path, path.stat().st_mode & 0o777)
    except OSError as error:
        raise InventoryError(f"{path}: {error.strerror}: it cannot get the GPUs of {server!r}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(_edited(before, server, gpus))
        _check(path, draft, server, gpus)
        yield
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _check(path: Path, draft: Path, server: str, gpus: Sequence[Gpu]) -> None:
    """Raise `InventoryError` unless the draft differs from the file by the server's GPUs alone."""
    expected = [
        replace(node, gpus=tuple(gpus)) if node.name == server else node for node in load_inventory(path)
    ]
    try:
        found = list(load_inventory(draft))
    except InventoryError:
        found = []
    if found != expected or server not in {node.name for node in found}:
        raise InventoryError(
            f"{path}: {server!r} is not described by a table of its own: put its GPUs there by hand"
        )


def _edited(text: str, server: str, gpus: Sequence[Gpu]) -> str:
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if SERVER.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        table = lines[start:end]
        if _name_of(table) == server:
            kept = [line for line in _without_gpus(table) if not OF_GPUS.match(line)]
            while kept and not kept[-1].strip():
                kept.pop()
            tail = [""] if end < len(lines) else []
            lines[start:end] = [*kept, *_tables(gpus), *tail]
            break
    return "\n".join(lines) + "\n"


def _name_of(table: Sequence[str]) -> str:
    try:
        [found] = tomllib.loads("\n".join(table))["servers"]
    except (ValueError, KeyError):
        return ""
    return str(found.get("name", ""))


def _without_gpus(table: Sequence[str]) -> Iterator[str]:
    inside = False
    for line in table:
        if HEADER.match(line):
            inside = GPUS.match(line) is not None
        if not inside:
            yield line


def _tables(gpus: Sequence[Gpu]) -> Iterator[str]:
    def kind(gpu: Gpu) -> tuple[object, ...]:
        return gpu.gpu_type, gpu.vendor, gpu.memory_mib, not gpu.uuid

    for _, found in groupby(gpus, key=kind):
        group = list(found)
        yield ""
        yield "[[servers.gpus]]"
        yield f"ids = {[gpu.gpu_id for gpu in group]}"
        yield f"type = {json.dumps(group[0].gpu_type, ensure_ascii=False)}"
        if group[0].vendor != "nvidia":
            yield f"vendor = {json.dumps(group[0].vendor)}"
        if group[0].memory_mib:
            yield f"memory_mib = {group[0].memory_mib}"
        if group[0].uuid:
            yield "uuids = ["
            yield from (f"  {json.dumps(gpu.uuid)}," for gpu in group)
            yield "]"
