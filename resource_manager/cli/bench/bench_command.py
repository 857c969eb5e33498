"""`gpu-manager bench`: benchmark on this machine."""

from __future__ import annotations

from typing import Any

import click

from resource_manager.cli.base import BAD_INPUT, Failure, FiniteRange, print_json
from resource_manager.cli.lazy_tables import tables
from resource_manager.cli.program import main, on_target
from resource_manager.cli.signals import ended_in_order
from resource_manager.cli.target import Target


@main.command()
@click.option("--http", "over_http", is_flag=True, help="Measure the REST service instead of the core.")
@click.option(
    "--redis",
    "redis_url",
    help="Redis URL, used in separate namespaces; default: embedded. Its user needs the rights of "
    "docs/stores.md, with +scan +script|load, on ~{gpu_manager_bench_* ~gpu_manager_bench_lock.",
)
@click.option("--seconds", type=FiniteRange(0.2, 60), default=3.0, show_default=True, help="Time per figure.")
@on_target
def bench(target: Target, over_http: bool, redis_url: str | None, seconds: float, as_json: bool) -> None:
    """Measure allocations per second, latencies and memory on this machine."""
    from resource_manager.storage.redis import SCHEMES

    if target.store:
        raise Failure("bench measures a Redis of its own, or that of --redis: leave out --store", BAD_INPUT)
    if redis_url is not None and redis_url.partition("://")[0] not in SCHEMES:
        raise Failure(f"--redis must be a Redis URL, got {redis_url!r}", BAD_INPUT)
    with ended_in_order():  # a service and a Redis of its own are started
        if over_http:
            from resource_manager.cli.bench import service

            results = service.run(redis_url, seconds=seconds)
        else:
            from resource_manager.cli.bench import store

            results = store.run(redis_url, seconds=seconds)
    if as_json:
        print_json(results)
        return
    from rich.table import Table

    table = Table("figure", "value")
    for name, value in _flat(results):
        table.add_row(name, str(value))
    tables.console().print(table)


def _flat(results: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in results.items():
        rows += _flat(value, f"{prefix}{name} · ") if isinstance(value, dict) else [(prefix + name, value)]
    return rows
