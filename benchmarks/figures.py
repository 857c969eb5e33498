"""Measure, and write docs/benchmarks.md: `make figures`, or `python benchmarks/figures.py [NAME …]`.

Figures go into benchmarks/results.json with date, machine and command; the page is written from that file.
Benchmarks that are not run keep the figures they have. `--data` is a folder with the public traces (`openb`,
`serverless`, as the pages of the simulators describe them); without it, benchmarks that need it are left
out. `--page` writes the page alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.tables.manager import OF_MANAGER
from benchmarks.tables.row import DATA
from benchmarks.tables.simulators import OF_SIMULATORS
from benchmarks.tables.systems import OF_SYSTEMS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"

INTRODUCTION = """\
# Benchmarks

<!-- Written by `make figures` from benchmarks/results.json: do not edit. -->

Every figure of speed that this project states is on this page, with the date, the machine and the command
that measured it. What [a flood](security.md#what-do-others-feel-of-a-flood) costs others stands apart.
`make figures` measures them again; `make figures FIGURES="core service"` measures some. Clients, Redis and
service share one machine. A target is the limit that the project set itself.

## Targets

| | met | not met | not measured | which are not met |
|---|---|---|---|---|
"""

BENCHMARKS = {each.name: each for each in (*OF_MANAGER, *OF_SYSTEMS, *OF_SIMULATORS)}


def machine() -> str:
    """Return the kind of this machine: cores, processor and memory."""
    described = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", described.read_text() if described.exists() else "", re.M)
    processor = named[1].strip() if named else "unknown processor"
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores, {processor}, {memory_gib:.0f} GiB"


def measure(name: str, data: Path | None) -> dict[str, Any]:
    """Run the benchmark and return its record; raises `RuntimeError` if it fails."""
    command = BENCHMARKS[name].command
    words = [
        word.replace(DATA, str(data), 1) if word.startswith(DATA) else word for word in shlex.split(command)
    ]
    found = Path(sys.executable).parent / words[0]
    words[0] = str(found) if found.exists() else words[0]
    load = os.getloadavg()[0]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    ran = subprocess.run(
        words, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        figures = json.loads(ran.stdout[ran.stdout.index("{") :])
    except ValueError:
        raise RuntimeError(f"{command} gave no figures (exit code {ran.returncode})") from None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load": round(load, 1),
        "command": command,
        "figures": figures,
    }


def page(results: Mapping[str, Any]) -> str:
    """Return the text of docs/benchmarks.md."""
    targets, parts = INTRODUCTION, []
    for name, benchmark in BENCHMARKS.items():
        if name not in results:
            continue
        record = results[name]
        parts.append(f"## {benchmark.title}\n\n{benchmark.about}\n")
        lines = ["| | measured | target |", "|---|---|---|"]
        verdicts: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for row in benchmark.rows:
            value = row.value(record["figures"])
            lines.append(f"| {row.label} | {value} | {row.target} |")
            if row.target:
                verdicts[row.is_met(value)].append(f"{row.label}: {value} ({row.target})")
        if any(verdicts.values()):
            counts = f"{len(verdicts[True])} | {len(verdicts[False])} | {len(verdicts[None])}"
            anchor = re.sub(r"[^a-z0-9 -]", "", benchmark.title.lower()).replace(" ", "-")
            targets += f"| [{benchmark.title}](#{anchor}) | {counts} | {'; '.join(verdicts[False])} |\n"
        parts.append("\n".join(lines) + "\n")
        where = f"{record['date']}, {record['machine']}, load {record['load']:g} at the start"
        parts.append(f"{where}: `{record['command']}`\n")
    return "\n".join([targets, *parts])


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Public traces.")
@click.option("--page", "only_page", is_flag=True, help="Measure nothing.")
def main(names: tuple[str, ...], data: Path | None, only_page: bool) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for name in () if only_page else names or tuple(BENCHMARKS):
        if data is None and DATA in BENCHMARKS[name].command:
            click.echo(f"{name}: left out, it needs --data", err=True)
            continue
        click.echo(f"{name}: {BENCHMARKS[name].command}", err=True)
        try:
            results[name] = measure(name, None if data is None else data.resolve())
        except RuntimeError as error:
            click.echo(f"{name}: {error}", err=True)
            failed = True
            continue
        # After each one, so that nothing is lost if a later one is interrupted.
        ordered = {key: results[key] for key in BENCHMARKS if key in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(results))
    sys.exit(failed)


if __name__ == "__main__":
    main()
