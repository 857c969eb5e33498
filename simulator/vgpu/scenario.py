"""Scenarios as data: a pool, task profiles, scheduling, sandbox and guard, read from TOML and checked."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from resource_manager.manager.cluster_file.servers import MAX_GPUS_OF_SERVER
from simulator.errors import InputError
from simulator.io.documents import first_error
from simulator.io.rows import MAX_VALUE
from simulator.vgpu.tasks import GRID_S, Fluctuation, NotNegative, Positive, Profile

ADMISSIONS = ("quota", "usage", "max")
PROGRESS = ("compute", "bottleneck")
ARBITRATIONS = ("heavy_first", "light_first")
ARRIVALS = ("poisson", "burst", "poisson_burst", "wave")

MAX_TASKS = 10_000
MAX_TICKS = 10_000_000
"""Upper bounds: more would exhaust the memory before the first tick, or run for days."""

Count = Annotated[int, Field(ge=1)]
Ticks = Annotated[int, Field(ge=1, le=MAX_TICKS)]
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Card:
    """Type of accelerator: raw figures, the coefficients that make them comparable, and its slices."""

    vendor: str
    compute_tflops: Positive
    memory_gb: Positive
    bandwidth_gbps: Positive
    coefficients: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)
    slices: Count = 1


@dataclass(frozen=True, slots=True)
class PoolNode:
    """Server with `cards` cards of one type; its link is reported and has no effect."""

    name: Annotated[str, Field(min_length=1)]
    card: str
    cards: Annotated[Count, Field(le=MAX_GPUS_OF_SERVER)]
    link_gbps: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Settings of the placement of tasks on nodes.

    `partition` is none (nodes are shared), node (a task has its node alone) or slices (a task has whole
    slices of one card). `admission` is the amount allocated to a running task: its quota, the amount
    granted in the last tick (usage), or the larger of the two (max).
    """

    interval_ticks: Ticks = 4
    oversubscription: Positive = 1.05
    partition: Literal["none", "node", "slices"] = "none"
    admission: Literal["quota", "usage", "max"] = "quota"
    balance: Annotated[float, Field(ge=0, le=1)] = 0.6
    vendor_fallback: bool = True
    retry_every_tick: bool = False
    performance: Mapping[str, Positive] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Settings of the three gates; a demand up to `limit_threshold` times the quota always passes."""

    memory_gate: bool = False
    bandwidth_gate: bool = False
    compute_gate: bool = False
    limit_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.05
    bandwidth_refill: NotNegative = 1.0
    compute_ceiling: Positive = 1.0


@dataclass(frozen=True, slots=True)
class Guard:
    """Settings of the SLO guard on the compute gate."""

    enabled: bool = False
    adjust_interval_ticks: Ticks = 15
    boost_step: NotNegative = 0.05
    max_boost: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.4
    decay: NotNegative = 0.015


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of a run except its seed."""

    title: str
    duration_s: Positive
    tasks: Annotated[int, Field(ge=0, le=MAX_TASKS)]
    cards: Mapping[str, Card]
    nodes: Annotated[tuple[PoolNode, ...], Field(min_length=1)]
    profiles: Annotated[tuple[Profile, ...], Field(min_length=1)]
    name: str = ""
    title_zh: str = ""
    delta_t_s: Positive = GRID_S
    arrival: Literal["poisson", "burst", "poisson_burst", "wave"] = "poisson"
    arbitration: Literal["heavy_first", "light_first"] = "heavy_first"
    progress: Literal["compute", "bottleneck"] = "compute"
    scheduling: Scheduling = field(default_factory=Scheduling)
    sandbox: Sandbox = field(default_factory=Sandbox)
    guard: Guard = field(default_factory=Guard)

    @property
    def ticks(self) -> int:
        return round(self.duration_s / self.delta_t_s)


_parts: tuple[Any, ...] = (Card, PoolNode, Scheduling, Sandbox, Guard, Profile, Fluctuation, Scenario)
for _part in _parts:  # set here, because only reading TOML needs it
    _part.__pydantic_config__ = STRICT

_READER = TypeAdapter(Scenario)
_FOLDER = files("simulator.vgpu") / "scenarios"
_REFERENCE = "reference"


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the simulator."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in _FOLDER.iterdir()
        if entry.name.endswith(".toml") and entry.name != f"{_REFERENCE}.toml"
    )


def load_scenario(name: str, changes: Mapping[str, object] | None = None) -> Scenario:
    """Load the scenario of that name (also the original's, `A3-sandbox`), or of that TOML file.

    A file may name another scenario as its `base` and give only the differences. `changes` override it,
    by dotted name (`{"scheduling.admission": "usage"}`). Raises `InputError`.
    """
    source = Path(name) if name.endswith(".toml") else _known(name)
    tables = _read_with_base(source, ())
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InputError(f"{key}: {part} is not a table", path=name)
        table[last] = value
    try:
        # As JSON, because strict validation accepts an array as a tuple only in JSON.
        scenario = _READER.validate_json(json.dumps({"name": Path(source).stem, **tables}, default=str))
    except ValidationError as error:
        raise InputError(first_error(error), path=name) from error
    complaint = next(chain(_wrong_names(scenario), _wrong_times(scenario)), None)
    if complaint is not None:
        raise InputError(complaint, path=name)
    return scenario


def _known(name: str) -> str:
    known = scenario_names()
    names = dict(zip(known, known, strict=True)) | ORIGIN_NAMES
    by_folded = {alias.casefold(): each for alias, each in names.items()}
    if name.casefold() not in by_folded:
        raise InputError(f"unknown scenario {name!r}; known are {', '.join(known)}, or give a .toml file")
    return by_folded[name.casefold()]


ORIGIN_NAMES = {
    "A1-baseline": "A1",
    "A2-hard-split": "A2",
    "A2P-parvagpu": "A2P",
    "A3-sandbox": "A3",
    "A4-no-link-gate": "A4",
    "A5-no-slo-guard": "A5",
}
"""Scenario name of the original -> name here."""


def _read_with_base(source: str | Path, seen: tuple[str, ...]) -> dict[str, Any]:
    if str(source) in seen:
        raise InputError(f"base {str(source)!r} leads back to itself", path=seen[0])
    try:
        file = source if isinstance(source, Path) else _FOLDER / f"{source}.toml"
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(error.strerror or str(error), path=str(source)) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not TOML: {error}", path=str(source)) from error
    if "name" in tables:
        raise InputError("name: not allowed, a scenario has the name of its file", path=str(source))
    base = tables.pop("base", None)
    if source == _REFERENCE:
        return tables
    if base is None:
        base = _REFERENCE
    elif not isinstance(base, str):
        raise InputError(f"base: must be the name of a scenario, got {base!r}", path=str(source))
    elif base.endswith(".toml") and isinstance(source, Path):
        base = source.parent / base
    else:
        base = _known(base)
    return _merge(_read_with_base(base, (*seen, str(source))), tables)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key; replace anything else, lists included."""
    joined = dict(base)
    for key, value in over.items():
        below = joined.get(key)
        joined[key] = (
            _merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
        )
    return joined


def _wrong_names(scenario: Scenario) -> Iterator[str]:
    vendors = {card.vendor for card in scenario.cards.values()}
    names: set[str] = set()
    for node in scenario.nodes:
        if node.card not in scenario.cards:
            yield f"node {node.name!r} has the unknown card {node.card!r}"
        if node.name in names:
            yield f"two nodes have the name {node.name!r}"
        names.add(node.name)
    for profile in scenario.profiles:
        for vendor in profile.vendors:
            if vendor not in vendors:
                known = ", ".join(sorted(vendors))
                yield f"profile {profile.name!r} names the unknown vendor {vendor!r}; known are {known}"
    if len({profile.name for profile in scenario.profiles}) < len(scenario.profiles):
        yield "two profiles have the same name"
    for vendor in scenario.scheduling.performance:
        if vendor not in vendors:
            yield f"scheduling.performance names the unknown vendor {vendor!r}"


def _wrong_times(scenario: Scenario) -> Iterator[str]:
    duration_s, delta_t_s = scenario.duration_s, scenario.delta_t_s
    for profile in scenario.profiles:
        for key in (each.name for each in fields(Fluctuation)):
            low, high = getattr(profile.fluctuation, key)
            if low > high:
                yield f"profile {profile.name!r}: {key} = [{low:g}, {high:g}] ends before it begins"
        if not 1 / MAX_VALUE <= profile.ideal_duration_s <= MAX_VALUE:
            ideal = f"workload_tflop / compute_tflops is {profile.ideal_duration_s:g} s"
            yield f"profile {profile.name!r}: {ideal}, not within {1 / MAX_VALUE:g} to {MAX_VALUE:g}"
        if profile.window is not None and profile.window[0] > profile.window[1]:
            yield f"profile {profile.name!r}: window ends before it begins"
    ticks = duration_s / delta_t_s
    if ticks > MAX_TICKS:
        yield f"duration_s = {duration_s:g} is {ticks:.3g} ticks, above {MAX_TICKS:,}"
    elif round(ticks) < 1 or abs(ticks - round(ticks)) > 1e-6:
        yield f"duration_s = {duration_s:g} is not a multiple of delta_t_s = {delta_t_s:g}"
    ratio = delta_t_s / GRID_S
    if min(abs(ratio - round(ratio)), abs(1 / ratio - round(1 / ratio))) > 1e-6:
        yield (
            f"delta_t_s = {delta_t_s:g} must be a multiple or a whole fraction of"
            f" the {GRID_S:g} s grid on which spikes are drawn"
        )


def without_profiles_except(scenario: Scenario, names: tuple[str, ...]) -> Scenario:
    """Return the scenario with only those task profiles; raise `InputError` for an unknown name."""
    known = {profile.name: profile for profile in scenario.profiles}
    for name in names:
        if name not in known:
            raise InputError(f"unknown profile {name!r}; known are {', '.join(known)}", path=scenario.name)
    return replace(scenario, profiles=tuple(known[name] for name in dict.fromkeys(names)))


def have_same_load(scenarios: Iterable[Scenario]) -> bool:
    """Return whether the scenarios are equal in tasks, arrivals and length."""
    return len({(each.tasks, each.arrival, each.duration_s) for each in scenarios}) <= 1


def with_card_factor(scenario: Scenario, factor: float) -> Scenario:
    """Return the scenario with the coefficients (alpha, beta, gamma) times the factor, raw cards excepted.

    Raises `InputError` for a factor of 0.
    """
    if factor <= 0:
        raise InputError(f"card_factor must be above 0, got {factor:g}", path=scenario.name)
    cards = dict(scenario.cards)
    for name, card in cards.items():
        if card.coefficients != (1.0, 1.0, 1.0):
            alpha, beta, gamma = card.coefficients
            cards[name] = replace(card, coefficients=(alpha * factor, beta * factor, gamma * factor))
    return replace(scenario, cards=cards)
