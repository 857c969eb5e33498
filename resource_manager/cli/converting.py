"""`gpu-manager convert-dags`: rewrite the tasks of a pool so that they ask for GPUs."""

from __future__ import annotations

import difflib
import io
import os
import stat
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from resource_manager.cli.base import BAD_INPUT, REFUSED, Failure, harmless, one_line, print_json
from resource_manager.cli.program import json_option, main
from resource_manager.cli.target import exit_codes
from resource_manager.errors import how_to_install
from resource_manager.manager.plurals import counted

if TYPE_CHECKING:
    from resource_manager.cli.pool_tasks import Conversion

MAX_FILE_BYTES = 512 * 1024
"""Limit of a source: its tree takes up to two thousand times as much memory, and 50 µs of time a byte."""

MAX_GPUS_A_SLOT = 1024


class PoolGPUs(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Pool and the GPUs of each of its slots: gpu=1."""

    name = "pool=gpus"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        pool, _, gpus = str(value).rpartition("=")
        if not pool or not (gpus.isascii() and gpus.isdigit() and 1 <= int(gpus[:9]) <= MAX_GPUS_A_SLOT):
            self.fail(
                f"{value!r} is not POOL=GPUS, as gpu=1 for a pool with one slot for each GPU", param, ctx
            )
        return pool, int(gpus)


@main.command("convert-dags")
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--pool",
    "pools",
    type=PoolGPUs(),
    multiple=True,
    required=True,
    help="Pool, and GPUs of each of its slots.",
)
@click.option("--write", is_flag=True, help="Write the files; without it, only print the differences.")
@json_option
@exit_codes
def convert_dags(folder: Path, pools: tuple[tuple[str, int], ...], write: bool, as_json: bool) -> None:
    """Find the tasks of a pool in FOLDER, and let with_gpus ask for their GPUs instead.

    The files are read, never imported; every other byte stays. A task that has to be rewritten by hand is one
    line on standard error. The exit code is 1 if there is one, or if no task is converted.
    """
    wanted = dict(pools)
    files: list[dict[str, Any]] = []
    left = 0
    for path in _python_files(folder):
        try:
            source, encoding = _read(path, folder)
            done = _converted(source, wanted)
            if write and done.converted:
                _write(path, source.encode(encoding), done.source.encode(encoding))
        except (OSError, ValueError) as error:
            files.append({"path": str(path), "converted": 0, "unconverted": [], "problem": str(error)})
            left += 1
            click.echo(one_line(f"{path}: not converted: {error}"), err=True)
            continue
        if not as_json:
            _show(path, source, done.source)
        for task in done.unconverted:
            click.echo(one_line(f"{path}:{task.line}: not converted: {task.reason}"), err=True)
        if done.converted or done.unconverted:
            lines = [{"line": task.line, "reason": task.reason} for task in done.unconverted]
            files.append(
                {"path": str(path), "converted": done.converted, "unconverted": lines, "problem": ""}
            )
            left += len(lines)
    converted = sum(file["converted"] for file in files)
    if as_json:
        print_json({"converted": converted, "unconverted": left, "written": write, "files": files})
    else:
        how = "converted" if write else "would be converted (--write does it)"
        click.echo(f"{counted(converted, 'task')} {how}, {left} not", err=True)
    if left or not converted:
        raise Exit(REFUSED)


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder once each, or the one file, in order, without hidden folders."""
    if not folder.is_dir():
        yield folder
        return
    seen = set()
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for path in (Path(root, name) for name in sorted(names) if name.endswith(".py")):
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path


def _read(path: Path, folder: Path) -> tuple[str, str]:
    """Return source and encoding; raises `ValueError` or `OSError` for what is no source of this folder."""
    if folder.is_dir() and not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError("it is a link out of the folder")
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    content = path.read_bytes()
    if b"pool" not in content:
        return "", "utf-8"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        source = content.decode(encoding)
        is_kept = source.encode(encoding) == content
    except (SyntaxError, LookupError, UnicodeError) as error:  # a codec that is none of text, or fails
        raise ValueError(f"it is not text: {error}") from None
    if not is_kept:
        raise ValueError(f"a file in {encoding} cannot be written again as it is")
    return source, encoding


def _converted(source: str, pools: Mapping[str, int]) -> Conversion:
    try:
        from resource_manager.cli.pool_tasks import convert
    except ModuleNotFoundError as error:
        raise Failure(f"convert-dags needs libcst: {how_to_install('convert')}", BAD_INPUT) from error
    return convert(source, pools)


def _write(path: Path, before: bytes, content: bytes) -> None:
    """Replace a file in one step, unless it has changed; a link stays one, and root leaves it its owner."""
    path = path.resolve()
    if path.read_bytes() != before:
        raise ValueError("it was changed meanwhile: run convert-dags again")
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            found = path.stat()
            with suppress(PermissionError):
                os.fchown(file.fileno(), found.st_uid, found.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _show(path: Path, before: str, after: str) -> None:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(path), f"{path} (with leases)", lineterm=""
    )
    for line in lines:
        click.echo(harmless(line))
