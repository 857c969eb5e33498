"""Entry point: `python -m demo` runs and checks the demo; `python -m demo up` runs until Ctrl-C."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import httpx
import rich
from rich.console import Console
from rich.live import Live
from rich.table import Table

from demo.evidence import problems_of, reports_of
from demo.stack import DAGS_READ_EVERY_S, REPOSITORY, Stack, StackError, next_free_port
from demo.timeline import Holding, draw, holdings, live_view
from resource_manager import GPUResourceManager, ResourceManagerError
from resource_manager.cli.signals import ended_in_order
from resource_manager.cli.tables import usage
from resource_manager.manager.answer_words import name_in_words, ranges
from resource_manager.manager.cluster_results import ServerSummary
from resource_manager.manager.results import Allocation, QueueEntry
from resource_manager.storage.history_file import collect, write_file

DAG_ID = "train_digits"
GANG, GANG_CONF = "train_gang", {"nodes": 2, "gpus": 4}
RUN_TIMEOUT_S = 180.0
AIRFLOW_PORT = 8080
SERVICE_PORT = 5000
INVENTORY = REPOSITORY / "resource_manager" / "deploy" / "servers.toml"
SETTINGS = {"GPU_MANAGER_INVENTORY": str(INVENTORY)}
DOCKER_S = 30.0

READ_ONCE: dict[str, Any] = {
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
    "AIRFLOW__DAG_PROCESSOR__STALE_DAG_THRESHOLD": "7200",
}
"""Settings of an Airflow that reads its DAGs once: each time costs the jobs seconds of the cores."""


@click.group(invoke_without_command=True)
@click.option("--picture", type=click.Path(path_type=Path), help="Also draw a timeline into this file.")
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the manager's history into this file, for gpu-simulate replay --history.",
)
@click.option(
    "--store",
    type=click.Choice(["redis", "postgresql"]),
    default="redis",
    show_default=True,
    help="Where the state is; postgresql needs no Redis.",
)
@click.pass_context
def main(context: click.Context, picture: Path | None, history: Path | None, store: str) -> None:
    """Train six models on granted GPUs, and one on two servers; check that no GPU was allocated twice."""
    context.with_resource(ended_in_order())
    context.obj = store
    if context.invoked_subcommand is None:
        sys.exit(exit_code(lambda: run(picture, history, store)))


def exit_code(demo: Callable[[], list[str]]) -> int:
    """Run the demo, print its problems and errors a line each, and return the exit code."""
    try:
        problems = demo()
    except (StackError, ResourceManagerError, OSError, ValueError, KeyboardInterrupt) as error:
        problems = [str(error) or "interrupted"]
    except httpx.TransportError as error:  # of a machine too busy for Airflow to answer in time
        problems = [f"Airflow does not answer: {error}; run it again on a less busy machine"]
    for problem in problems:
        print(f"demo failed: {problem}", file=sys.stderr)
    if not problems:
        print("no GPU was ever allocated twice, all are free again, no process is left")
    return 1 if problems else 0


@main.command()
@click.pass_obj
def up(store: str) -> None:
    """Start the same stack and keep it running until Ctrl-C."""
    try:
        with _stack(
            store,
            api_port=port_near("Airflow", AIRFLOW_PORT),
            service_port=port_near("the GPU console", SERVICE_PORT),
            AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION="False",
        ) as stack:
            print("\n".join(places_of(stack)))
            if not docker_answers():
                print("the DAG docker_step needs a Docker engine; none answers here")
            print("Ctrl-C stops everything", flush=True)
            with suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1.0)
        print("stopped")
    except KeyboardInterrupt:
        print("stopped before everything was started")
    except StackError as error:
        sys.exit(f"up failed: {error}")
    except httpx.TransportError as error:
        sys.exit(f"up failed: Airflow does not answer: {error}; run it again on a less busy machine")


def places_of(stack: Stack) -> Iterator[str]:
    """Yield the lines that say where the parts of a running stack are."""
    user, password = stack.api.login
    yield f"Airflow      {stack.url}   user {user}, password {password}"
    yield f"GPU console  {stack.service_url}   and in Airflow, {stack.url}/gpu/"
    yield f"store        {stack.store_url}"
    yield f"DAGs         {stack.dags}, read every {DAGS_READ_EVERY_S} s"
    yield f"logs         {stack.home}"


def port_near(what: str, wanted: int) -> int:
    """Return the wanted port, or the next free one, which is printed in one line."""
    port = next_free_port(wanted)
    if port != wanted:
        print(f"port {wanted} is taken: {what} is on {port}")
    return port


def docker_answers(timeout_s: float = DOCKER_S) -> bool:
    """Return True if a Docker engine answers here in time."""
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=timeout_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def _stack(
    store: str,
    *,
    only: Sequence[str] = (),
    api_port: int | None = None,
    service_port: int | None = None,
    **settings: str,
) -> Iterator[Stack]:
    """Run the stack in a temporary folder, with all example DAGs, or `only` these."""
    home = Path(tempfile.mkdtemp(prefix="gpu-manager-demo-"))
    dags = REPOSITORY / "dags"
    if only:
        shutil.copytree(dags / "jobs", home / "dags" / "jobs")
        for dag_id in only:
            shutil.copy(dags / f"{dag_id}.py", home / "dags")
        dags = home / "dags"
    print(
        f"starting {'Redis' if store == 'redis' else 'PostgreSQL'} and Airflow in {home} (half a minute)",
        flush=True,
    )
    stack = Stack(
        home,
        dags=dags,
        settings={**SETTINGS, **settings},
        api_port=api_port,
        service_port=service_port,
        store=store,
    )
    with in_folder(home, stack):
        yield stack


@contextmanager
def in_folder(home: Path, stack: AbstractContextManager[object]) -> Iterator[None]:
    """Run the stack inside; its folder is kept only if it fails to start or stop."""
    with ExitStack() as running:
        running.enter_context(stack)
        try:
            yield
        finally:
            running.close()
            shutil.rmtree(home)


def run(picture: Path | None, history: Path | None, store: str = "redis") -> list[str]:
    """Run the demo; return the problems found."""
    with _stack(store, only=(DAG_ID, GANG), **READ_ONCE) as stack:
        manager = GPUResourceManager.from_url(stack.store_url)
        runs = {DAG_ID: stack.api.trigger(DAG_ID), GANG: stack.api.trigger(GANG, GANG_CONF)}
        states = _watch(stack, manager, runs)
        summary = manager.get_resource_summary()
        held = holdings(manager.history(limit=100_000))
        reports = {
            name: report
            for dag_id, run_id in runs.items()
            for name, report in reports_of(stack.api, dag_id, run_id).items()
        }
        if history:
            write_file(collect(manager), history)
        manager.close()
        for dag_id, state in states.items():
            if state != "success":
                print(_logs_of_failures(stack, dag_id, runs[dag_id]), file=sys.stderr)
    if held:
        rich.print(_table(held, reports))
        if picture:
            draw(held, summary["servers"], picture)
    return [
        *(
            f"the run of {dag_id} ended as {state!r}"
            for dag_id, state in states.items()
            if state != "success"
        ),
        *problems_of(held, [reports], summary["servers"]),
        *_nothing_shown(held),
    ]


def _watch(stack: Stack, manager: GPUResourceManager, runs: dict[str, str]) -> dict[str, str]:
    """Show leases and pending requests until all runs, by DAG, have ended; return their states."""
    console = Console()
    started, news = time.monotonic(), _Progress()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            servers, leases = manager.get_resource_summary()["servers"], manager.leases()
            queue = manager.queue()
            if console.is_terminal:
                live.update(live_view(servers, leases, queue), refresh=True)
            else:
                for line in news.lines(servers, leases, queue):
                    print(f"{time.monotonic() - started:5.1f} s  {line}", flush=True)
            states = {dag_id: stack.api.run_state(dag_id, run_id) for dag_id, run_id in runs.items()}
            if all(state in ("success", "failed") for state in states.values()):
                return states
            if time.monotonic() - started > RUN_TIMEOUT_S:
                return {dag_id: f"{state} after {RUN_TIMEOUT_S:g} s" for dag_id, state in states.items()}
            time.sleep(0.5)


class _Progress:
    """Lines of at most 80 columns about jobs that wait, start or end, and the GPUs that are free then."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def lines(
        self, servers: list[ServerSummary], leases: list[Allocation], queue: list[QueueEntry]
    ) -> Iterator[str]:
        """Yield the changes since the last call."""
        now = {
            **{name_in_words(entry): "waits" for entry in queue},
            **{name_in_words(lease): f"on {' '.join(map(_place, lease['members']))}" for lease in leases},
        }
        ended = {task: "ended" for task in self._shown if task not in now}
        news = [f"{task} {what}" for task, what in {**ended, **now}.items() if self._shown.get(task) != what]
        self._shown = now
        yield from news
        if news:
            yield f"GPUs: {usage(servers, 'gpus')}"


def _place(member: Mapping[str, Any]) -> str:
    return f"{member['server_name']}[{ranges(member['gpu_ids'])}]"


def _logs_of_failures(stack: Stack, dag_id: str, run_id: str) -> str:
    return "\n".join(
        f"--- {task['task_id']}\n{stack.api.log(dag_id, run_id, task['task_id'], task['try_number'])}"
        for task in stack.api.task_instances(dag_id, run_id)
        if task["state"] != "success"
    )


def _table(held: list[Holding], reports: dict[str, dict[str, Any]]) -> Table:
    table = Table("task", "server", "GPUs", title="Jobs", title_justify="left")
    for column in ("waited", "ran", "accuracy"):
        table.add_column(column, justify="right")
    for item in held:
        report = reports.get(item.name, {})
        table.add_row(
            item.name,
            item.server,
            str(len(item.gpu_ids)),
            f"{item.granted_at - item.queued_at:.1f} s",
            "-" if item.released_at is None else f"{item.released_at - item.granted_at:.1f} s",
            f"{report['accuracy']:.2%}" if report else "-",
        )
    return table


def _nothing_shown(held: list[Holding]) -> Iterator[str]:
    """Yield the reasons why the run, though without an error, proves nothing."""
    if len(held) < 2:
        yield f"{len(held)} leases were granted"
    if not any(item.granted_at > item.queued_at for item in held):
        yield "no task had to wait, so nothing was shown"


if __name__ == "__main__":
    main()
