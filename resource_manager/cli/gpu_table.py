"""Terminal table of GPUs: bars of utilization and memory, temperature, power, lease, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from resource_manager.cli.tables import STATE_STYLES, Row
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.manager.answer_words import duration, name_in_words
from resource_manager.manager.plurals import counted
from resource_manager.rest.console.colours import Colour, Holder, assign

BAR = 8
"""Width of a bar in characters, each of eight steps."""

WIDTH = 80
Widths = Sequence[tuple[int, Literal["left", "right"]]]
COLUMNS: Widths = ((3, "right"), (13, "left"), (17, "left"), (4, "right"), (5, "right"))
NARROW_COLUMNS: Widths = ((3, "right"), (4, "right"), (8, "right"))
"""Widths of the columns before the leases: in a terminal of `WIDTH`, and in a narrower one."""

STEPS = " ▏▎▍▌▋▊▉█"
STALE_S = 60.0
HIGH_PERCENT, HOT_C = 90, 85


def servers(rows: Sequence[Row], width: int, height: int | None = None) -> Group:
    """Return a table for each server, those that fit into so many lines, and a line about the rest."""
    colours = _colours(rows)
    hidden = ["temperature", "power"] if width < WIDTH else []
    ends = [*accumulate(1 + len(server["gpus"]) for server in rows)]
    if height is not None and ends and ends[-1] + bool(hidden) > height:
        rows = rows[: max(sum(end < height for end in ends), 1)]
        if more := len(ends) - len(rows):
            hidden.insert(0, f"{counted(more, 'more server')} (gpu-manager top SERVER)")
    parts: list[Text | Table] = [part for row in rows for part in (_head(row), _table(row, colours, width))]
    if hidden and rows:
        line = f"not shown: {', '.join(hidden)}"
        parts.append(Text(line, "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _colours(rows: Sequence[Row]) -> dict[str, Colour]:
    """Return the colour of each lease, as in the console, whose GPUs are all shown."""
    holders: dict[str, Holder] = {}
    for server in rows:
        for gpu in server["gpus"]:
            for lease in gpu["leases"]:
                name, milli, token = lease["task_id"], lease["gpu_milli"], lease["fencing_token"]
                holders.setdefault(name, Holder(name, server["server_id"], (gpu["gpu_id"],), milli, token))
    return assign(holders.values())


def _head(server: Row) -> Text:
    """Return `gpu-a  PARTIAL  8 × A100  550.54, reported 3 s ago`."""
    types = Counter(gpu["type"] or "GPU" for gpu in server["gpus"])
    text = Text(server["server_name"], "bold", no_wrap=True, overflow="ellipsis")
    text.append(f"  {server['state']}", STATE_STYLES.get(server["state"], ""))
    text.append(f"  {', '.join(f'{count} × {name}' for name, count in types.items()) or 'no GPU'}", "dim")
    if server["age_s"] is None:
        text.append("  no report", "yellow")
    else:
        text.append(f"  {duration(server['age_s'])} ago", "yellow" if server["age_s"] > STALE_S else "dim")
    for problem in (server["error"], server["drain_reason"]):
        if problem:
            text.append(f"  {problem}", "red")
    return text


def _table(server: Row, colours: Mapping[str, Colour], width: int) -> Table:
    is_narrow = width < WIDTH
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=min(width, WIDTH), show_header=False)
    for size, justify in NARROW_COLUMNS if is_narrow else COLUMNS:
        table.add_column(width=size, justify=justify, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for gpu in server["gpus"]:
        used, total = gpu["memory_used_mib"], gpu["memory_mib"]
        share = None if used is None or not total else 100 * used / total
        temperature, power = gpu["temperature_c"], gpu["power_w"]
        percent, memory = _percent(gpu["utilization_percent"]), _memory(used, total)
        figures: tuple[str | Text, ...] = (percent, memory)
        if not is_narrow:
            figures = (
                _bar(gpu["utilization_percent"], percent),
                _bar(share, memory),
                Text("–" if temperature is None else f"{temperature}°", _heat(temperature)),
                "–" if power is None else f"{power:.0f}W",
            )
        table.add_row(str(gpu["gpu_id"]), *figures, _who(gpu, server, colours))
    return table


def _bar(percent: float | None, label: str) -> Text:
    if percent is None:
        return Text(f"{' ' * BAR} {label}", "dim")
    steps = round(min(max(percent, 0), 100) / 100 * BAR * 8)
    full, rest = divmod(steps, 8)
    bar = "█" * full + STEPS[rest].strip()
    text = Text(bar, "red" if percent >= HIGH_PERCENT else "green", no_wrap=True)
    return text.append("·" * (BAR - len(bar)), "dim").append(f" {label}", "default")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}%"


def _memory(used: int | None, total: int | None) -> str:
    if used is None:
        return "–" if not total else f"–/{total / 1024:.0f}G"
    return f"{used / 1024:.0f}/{total / 1024:.0f}G" if total else f"{used / 1024:.0f}G"


def _heat(temperature: int | None) -> str:
    return "red" if temperature is not None and temperature >= HOT_C else ""


def _who(gpu: Row, server: Row, colours: Mapping[str, Colour]) -> Text:
    """Return what is wrong first, then the leases with their teams."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if gpu["rogue"]:
        named = ", ".join(
            f"{each['pid']} {each['user'] or '?'}" for each in gpu["processes"] if each["rogue"]
        )
        text.append(f"ROGUE {named} ", "bold red")
    elif gpu["closed"]:
        text.append(f"CLOSED {gpu['closed']} ", "bold red")
    if gpu["cleaning"]:
        text.append(f"cleaning {', '.join(gpu['cleaning'])} ", "yellow")
    if gpu["idle"]:
        text.append("idle ", "bold yellow")
    for lease in gpu["leases"]:
        text.append(name_in_words(lease), colours[lease["task_id"]].rgb)
        part = "" if lease["gpu_milli"] == MILLI_PER_GPU else f" {lease['gpu_milli']}m"
        text.append(f"{part}{' ' + lease['team'] if lease['team'] else ''} ", "dim")
        if walls := lease["walls"]:
            text.append(*(("no walls ", "yellow") if walls.startswith("none") else ("walled ", "dim")))
    if gpu["sharing"].startswith("accounted"):
        text.append("soft", "yellow")
    if not text:
        text.append("free" if server["is_open"] else "closed", "dim")
    return text
