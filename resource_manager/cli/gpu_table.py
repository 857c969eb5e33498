"""Terminal table of GPUs: bars of utilization and memory, temperature, power, lease, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from resource_manager.cli.tables import STATE_STYLES, Row
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.manager.answer_words import duration, name_in_words
from resource_manager.rest.console.colours import Colour, Holder, assign

BAR = 8
"""Width of a bar in characters, each of eight steps."""

STEPS = " ▏▎▍▌▋▊▉█"
STALE_S = 60.0
HIGH_PERCENT, HOT_C = 90, 85


def servers(rows: Sequence[Row]) -> Group:
    """Return one table for each server, each at most 80 columns wide."""
    colours = _colours(rows)
    return Group(*(part for server in rows for part in (_head(server), _table(server, colours))))


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


def _table(server: Row, colours: Mapping[str, Colour]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=80, show_header=False)
    for width, justify in ((3, "right"), (13, "left"), (17, "left"), (4, "right"), (5, "right")):
        table.add_column(width=width, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for gpu in server["gpus"]:
        used, total = gpu["memory_used_mib"], gpu["memory_mib"]
        share = None if used is None or not total else 100 * used / total
        temperature, power = gpu["temperature_c"], gpu["power_w"]
        table.add_row(
            str(gpu["gpu_id"]),
            _bar(gpu["utilization_percent"], _percent(gpu["utilization_percent"])),
            _bar(share, _memory(used, total)),
            Text("–" if temperature is None else f"{temperature}°", _heat(temperature)),
            "–" if power is None else f"{power:.0f}W",
            _who(gpu, server, colours),
        )
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
