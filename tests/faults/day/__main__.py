"""Entry point: `python -m tests.faults.day [--jobs 300] [--minutes 10] [--page FILE]`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx

from demo.stack import REPOSITORY, StackError, wait_until
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.maintenance import WindowForm
from resource_manager.manager.teams_file import load_teams
from resource_manager.rest import tokens
from resource_manager.rest.tokens import Role, TokenFile
from tests.e2e.bench import Bench
from tests.e2e.servers import SSHD, Service
from tests.faults.airflow_on_postgres import airflow_on, what_is_missing
from tests.faults.day import plan
from tests.faults.day.fleet import Agents, Fleet, name_of
from tests.faults.day.page import page_of
from tests.faults.day.proof import Evidence, broken, not_shown
from tests.faults.redis_servers import SentinelGroup
from tests.sql_servers import Postgres

WINDOW = range(40, 45)
"""Servers of the maintenance window; those before them may lose a GPU, or vanish."""

CONFIRMATION_S = "30"
"""Time for which owners confirm their leases after the fail-over."""

LIMIT_FACTOR = 3.0
"""Times the length of the day after which what still runs counts as lost."""


class Day(Bench):  # type: ignore[misc]  # the benches of the end-to-end tests are not typed
    """Airflow with the day's jobs on a fleet, a service, and a Redis that fails over."""

    def __init__(
        self, home: Path, jobs: list[plan.DayJob], fleet: Fleet, service: Any, postgres: Postgres
    ) -> None:
        self.jobs = jobs
        dags = home / "day"
        shutil.copytree(Path(__file__).parent / "dags", dags)
        shutil.copy(REPOSITORY / "dags" / "gpu_reconcile.py", dags)
        plan.write(jobs, home / "plan.json")
        super().__init__(
            home,
            servers=fleet.inventory(),
            DAY_PLAN=str(home / "plan.json"),
            AIRFLOW__CORE__DAGS_FOLDER=str(dags),
            AIRFLOW__CORE__PARALLELISM="4",
            AIRFLOW_CONN_DAY_SSH=fleet.connection,
            AIRFLOW_CONN_GPU_SERVICE=service.connection,
            GPU_MANAGER_LEASE_CONFIRMATION_WINDOW_S=CONFIRMATION_S,
            GPU_MANAGER_BACKFILL="true",
            **{**airflow_on(postgres, home), "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO"},
        )
        self.group: SentinelGroup | None = None

    def start_redis(self) -> Any:
        """Start a primary, its replica and the sentinel that promotes it."""
        self.group = SentinelGroup(self.home / "redis")
        self.group.wait_until_joined()
        self.store_url = self.group.url()
        self.environment |= {"GPU_MANAGER_STORE": self.store_url, "GPU_MANAGER_REDIS_URL": self.store_url}
        self.environment["GPU_MANAGER_JOBS_DIR"] = str(self.home / "jobs")

    def stop(self) -> None:
        super().stop()
        if self.group is not None:
            self.group.stop()

    def ended(self, runs: dict[str, str]) -> bool:
        return all(
            self.api.run_state(dag_id, run_id) in ("success", "failed") for dag_id, run_id in runs.items()
        )

    def tasks(self, runs: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Return the task instance of each job."""
        return {
            task["task_id"]: task
            for dag_id, run_id in runs.items()
            for task in self.api.task_instances(dag_id, run_id)
        }


def live(jobs: list[plan.DayJob], day_s: float, home: Path) -> Evidence:
    """Run the day; return what is known of it at its end."""
    service, fleet = Service(home / "service"), Fleet(home / "fleet")  # type: ignore[no-untyped-call]
    postgres = Postgres()
    kept = TokenFile(service.tokens)
    agent_tokens = [
        tokens.create(kept, f"agent {n}", Role.AGENT, server=name_of(n)) for n in range(plan.SERVERS)
    ]
    try:
        with Day(home / "airflow", jobs, fleet, service, postgres) as day:
            rules = home / "teams.toml"
            rules.write_text(plan.TEAMS)
            day.manager.apply_teams(load_teams(rules))
            service.start(day)  # type: ignore[no-untyped-call]
            day.switch_the_reconciler_on()
            agents = Agents(fleet, service.url, agent_tokens)
            agents.start()
            try:
                return _through(day, fleet, service, agents, day_s)
            finally:
                agents.stop()
    finally:
        fleet.stop()
        postgres.stop()


def _through(day: Day, fleet: Fleet, service: Any, agents: Agents, day_s: float) -> Evidence:
    runs: dict[str, str] = {}
    faults: list[tuple[float, str]] = []
    dead: list[tuple[int, int]] = []
    vanished: list[int] = []
    began = time.time()
    window = (began + 0.5 * day_s, began + 0.65 * day_s)

    def arrive(wave: int) -> None:
        dag_id = f"day_{wave:02}"
        if any(job.dag_id == dag_id for job in day.jobs):
            runs[dag_id] = day.api.trigger(dag_id)

    def announce() -> None:
        times = {
            name: datetime.fromtimestamp(at, UTC) for name, at in zip(("from", "until"), window, strict=True)
        }
        day.manager.add_maintenance(
            WindowForm.of(servers=[name_of(n) for n in WINDOW], reason="new fans", preempt=True, **times)
        )

    def fail_over() -> None:
        assert day.group is not None
        day.group.primary.kill()
        day.group.wait_until_led()

    def in_use() -> tuple[int, int]:
        """Return a server and a GPU there that a job holds, if there is one."""
        for lease in day.manager.leases():
            number, gpus = int(lease["server_name"].rpartition("-")[2]), lease["gpu_ids"]
            if number < WINDOW[0] and number not in fleet.vanished and gpus[0] in fleet.gpus[number]:
                return number, gpus[0]
        return 7, 0

    def lose_gpu() -> None:
        dead.append(in_use())
        fleet.lose_gpu(*dead[-1])

    def vanish() -> None:
        vanished.append(in_use()[0])
        fleet.vanish(vanished[0])

    def drain() -> None:
        name = name_of(vanished[0])
        day.manager.drain(name, failed=True, reason="it does not answer")
        for lease in day.manager.leases():  # its jobs are known to be gone
            if {member["server_name"] for member in lease["members"]} == {name}:
                day.manager.release_resources(lease["task_id"], fencing_token=lease["fencing_token"])

    def restart_service() -> None:
        service.kill()
        service.start(day)

    happening: list[tuple[float, str, Callable[[], object]]] = [
        *((at, "", lambda wave=wave: arrive(wave)) for wave, at in enumerate(plan.arrivals(day_s))),
        (0.1 * day_s, "a maintenance window is announced", announce),
        (0.2 * day_s, "a GPU dies", lose_gpu),
        (0.3 * day_s, "Redis fails over", fail_over),
        (0.4 * day_s, "a server vanishes", vanish),
        (0.44 * day_s, "an operator drains it as failed, and releases its leases", drain),
        (0.47 * day_s, "the service is killed and started again", restart_service),
        (0.6 * day_s, "another GPU dies", lose_gpu),
    ]
    for at, what, act in sorted(happening, key=lambda each: each[0]):
        time.sleep(max(began + at - time.time(), 0.0))
        if what:
            faults.append((time.time(), what))
            print(f"{time.time() - began:6.1f} s  {what}", flush=True)
        act()
    left_s = began + LIMIT_FACTOR * day_s - time.time()
    try:
        wait_until(lambda: day.ended(runs), left_s, "not every job ended", pause_s=2.0)
    except StackError as error:
        print(error, file=sys.stderr)
    ended = time.time()
    print(f"{ended - began:6.1f} s  the last job ends", flush=True)
    return Evidence(
        jobs=day.jobs,
        began=began,
        ended=ended,
        faults=[
            *faults,
            (window[0], "the maintenance window begins"),
            (window[1], "the maintenance window ends"),
        ],
        tasks=day.tasks(runs),
        beats=day.beats(),
        changes=[change for _, change in day.manager.store.history(0, 1_000_000)],
        left=[
            *(
                lease["task_id"]
                for lease in day.manager.leases()
                if {member["server_name"] for member in lease["members"]} != {name_of(vanished[0])}
            ),
            *(entry["task_id"] for entry in day.manager.queue()),
        ],
        dead_gpus=[(name_of(server), gpu) for server, gpu in dead],
        vanished=name_of(vanished[0]),
        window=([name_of(n) for n in WINDOW], *window),
        reports=(agents.sent, agents.refused),
    )


@click.command()
@click.option("--jobs", default=300, show_default=True, help="Number of jobs.")
@click.option("--minutes", default=10.0, show_default=True, help="Length of the day.")
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path), default=Path("day.html"), show_default=True
)
def main(jobs: int, minutes: float, seed: int, page: Path) -> None:
    """Live through a day of faults; write its page; fail if anything that was promised was lost."""
    missing = what_is_missing() or (
        "" if SSHD and os.geteuid() == 0 else "needs sshd (Debian: openssh-server), and root"
    )
    if missing:
        sys.exit(f"the day {missing}")
    os.environ["GPU_MANAGER_LEASE_CONFIRMATION_WINDOW_S"] = CONFIRMATION_S
    home = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    (home / "service").mkdir()
    day_s = 60.0 * minutes
    try:
        found = live(plan.draw(seed, jobs, day_s), day_s, home)
    except (StackError, ResourceManagerError, OSError, httpx.HTTPError, KeyboardInterrupt) as error:
        sys.exit(f"the day did not come to its end: {error or 'interrupted'}; its logs are in {home}")
    problems = broken(found)
    for line in not_shown(found):
        print(f"not shown: {line}", file=sys.stderr)
    page.write_text(page_of(found, problems), encoding="utf-8")
    for problem in problems:
        print(f"broken: {problem}", file=sys.stderr)
    print(f"{page}: {len(found.tasks)} jobs in {timedelta(seconds=round(found.ended - found.began))}")
    if problems:
        sys.exit(f"{len(problems)} promises were broken; the logs are in {home}")
    shutil.rmtree(home)
    print("nothing that was promised was lost")


if __name__ == "__main__":
    main()
