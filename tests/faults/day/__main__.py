"""Entry point: `python -m tests.faults.day [--jobs 300] [--minutes 10] [--page FILE]`."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx

from demo.stack import REPOSITORY, StackError, wait_until
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.cluster_file.reading import load_teams
from resource_manager.rest import tokens
from resource_manager.rest.tokens import Role, TokenFile
from tests.builders import redefine
from tests.e2e.bench import Bench
from tests.e2e.servers import Service
from tests.faults.airflow_on_postgres import airflow_on, what_is_missing
from tests.faults.day import plan
from tests.faults.day.by_hand import Desks
from tests.faults.day.course import Course
from tests.faults.day.fleet import Fleet
from tests.faults.day.gaps import gaps, unexplained
from tests.faults.day.page import page_of
from tests.faults.day.plan import name_of
from tests.faults.day.proof import Evidence, broken, not_shown, remarks, spans
from tests.faults.redis_servers import SentinelGroup
from tests.slurm_cluster import PROGRAMS, SlurmCluster, slurm_at
from tests.sql_servers import Postgres

TASK_SLOTS = 10
"""Tasks that workers run at once: those of `with_gpus` and `@task.gpu` stay there while they compute."""

CONFIRMATION_S = 30
"""Time for which owners confirm their leases after the fail-over."""


class Day(Bench):  # the benches of the end-to-end tests are not typed
    """Airflow with the day's jobs on a fleet, a service, and a Redis that fails over."""

    def __init__(
        self,
        home: Path,
        jobs: list[plan.DayJob],
        fleet: Fleet,
        service: Any,
        postgres: Postgres,
        slurm: SlurmCluster,
    ) -> None:
        self.jobs, self.window_s = jobs, CONFIRMATION_S
        dags = home / "day"
        shutil.copytree(Path(__file__).parent / "dags", dags)
        shutil.copy(REPOSITORY / "dags" / "gpu_reconcile.py", dags)
        plan.write(jobs, home / "plan.json")
        super().__init__(
            home,
            servers=fleet.inventory(),
            DAY_PLAN=str(home / "plan.json"),
            AIRFLOW__CORE__DAGS_FOLDER=str(dags),
            AIRFLOW__CORE__PARALLELISM=str(TASK_SLOTS),
            AIRFLOW_CONN_GPU_SERVICE=service.connection,
            window_s=CONFIRMATION_S,
            GPU_MANAGER_BACKFILL="true",
            **{**airflow_on(postgres, home), "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO"},
            **slurm.environment,
        )
        self.group: SentinelGroup | None = None

    def start_redis(self) -> Any:
        """Start a primary, its replica and the sentinel that promotes it."""
        self.group = SentinelGroup(self.home / "redis", dead_after_ms=5000)
        self.group.wait_until_joined()
        self.store_url = self.group.url()
        self.environment |= {"GPU_MANAGER_STORE": self.store_url, "GPU_MANAGER_REDIS_URL": self.store_url}
        self.environment["GPU_MANAGER_JOBS_DIR"] = str(self.home / "jobs")

    def stop(self) -> None:
        super().stop()
        if self.group is not None:
            self.group.stop()

    def restart_airflow(self) -> None:
        """End all components of Airflow with what their workers run, and start them again."""
        self.kill("standalone")
        self.api.forget_token()
        self.start_airflow()

    def ended(self, runs: dict[str, str]) -> bool:
        return all(
            self.api.run_state(dag_id, run_id) in ("success", "failed") for dag_id, run_id in runs.items()
        )

    def tasks(self, runs: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Return the task instance of each job, and which of its earlier tries Airflow does not know."""
        return {
            task["task_id"]: {
                **task,
                "unrecorded": self._unrecorded(task),
                "began": float(run_id.removeprefix("run-")),  # as the API that triggers it names it
                "ended": _seconds(task["end_date"]),
            }
            for dag_id, run_id in runs.items()
            for task in self.api.task_instances(dag_id, run_id)
        }

    def _unrecorded(self, task: dict[str, Any]) -> list[int]:
        place = f"/dags/{task['dag_id']}/dagRuns/{task['dag_run_id']}/taskInstances/{task['task_id']}/tries"
        return [number for number in range(1, task["try_number"]) if not self._exists(f"{place}/{number}")]

    def _exists(self, path: str) -> bool:
        try:
            self.api.call("GET", path)
        except StackError as error:
            if f"{path}: 404 " not in str(error):
                raise
            return False
        return True


def _seconds(moment: str | None) -> float:
    """Return Airflow's time as seconds since 1970; what has not come is at the end of all times."""
    return math.inf if moment is None else datetime.fromisoformat(moment).timestamp()


def live(jobs: list[plan.DayJob], day_s: float, home: Path) -> Evidence:
    """Run the day; return what is known of it at its end."""
    fleet, postgres = Fleet(home / "fleet"), Postgres()
    service = Service(home / "service")
    kept = TokenFile(service.tokens)
    service.token = tokens.create(kept, "airflow of the day", Role.USER, run_jobs=True)
    people = [
        *(tokens.create(kept, f"person {n}", Role.USER, run_jobs=True) for n in range(plan.PEOPLE)),
        tokens.create(kept, "operator", Role.OPERATOR, run_jobs=True),
    ]
    fleet.give_tokens(
        [tokens.create(kept, f"agent {n}", Role.AGENT, server=name_of(n)) for n in range(plan.SERVERS)]
    )
    (home / "slurm").mkdir(mode=0o711)
    try:
        with (
            slurm_at(home / "slurm") as slurm,
            Day(home / "airflow", jobs, fleet, service, postgres, slurm) as day,
        ):
            rules = home / "teams.toml"
            rules.write_text(plan.TEAMS)
            redefine(day.manager, teams=load_teams(rules))
            service.start(day)
            day.switch_the_reconciler_on()
            fleet.start(service.url)
            wait_until(
                lambda: all(day.manager.agent_state(name_of(n))["place"] for n in range(plan.SERVERS)),
                day.start_timeout_s,
                "not every agent reported",
            )

            def restart() -> None:
                """Stop service, agents and Airflow, and start them again; the jobs go on."""
                service.kill()
                service.start(day)
                fleet.start(service.url)
                day.restart_airflow()

            desks = Desks(day.environment, day.ledger, day.home, day.manager, service.url, people)
            try:
                return Course(day, fleet, restart, desks, day_s).live()
            finally:
                desks.give_up()
    finally:
        fleet.close()
        postgres.stop()


@click.command()
@click.option("--jobs", default=300, show_default=True, help="Number of jobs.")
@click.option("--minutes", default=10.0, show_default=True, help="Length of the day.")
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--page", type=click.Path(dir_okay=False, path_type=Path), default=Path("day.html"), show_default=True
)
def main(jobs: int, minutes: float, seed: int, page: Path) -> None:
    """Live through a day of faults; write its page; fail if anything that was promised was lost."""
    has_slurm = all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in PROGRAMS)
    missing = what_is_missing() or (
        "" if has_slurm and os.geteuid() == 0 else "needs Slurm (Debian: slurm-wlm), and root"
    )
    if missing:
        sys.exit(f"the day {missing}")
    for number in (signal.SIGINT, signal.SIGTERM):  # what is stopped leaves no process behind
        signal.signal(number, signal.default_int_handler)
    home = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    (home / "service").mkdir()
    day_s = 60.0 * minutes
    try:
        found = live(plan.draw(seed, jobs, day_s), day_s, home)
    except (StackError, ResourceManagerError, OSError, httpx.HTTPError, KeyboardInterrupt) as error:
        sys.exit(f"the day did not come to its end: {str(error) or 'interrupted'}; its logs are in {home}")
    page.with_suffix(".pickle").write_bytes(pickle.dumps(found))
    idle = unexplained(gaps(found, spans(found.changes, found.lost)))
    problems = [
        *broken(found),
        *(
            f"GPUs of {gap.node} idled for {gap.seconds:.1f} s until {gap.name} was granted them"
            for gap in idle
        ),
    ]
    for line in not_shown(found):
        print(f"not shown: {line}", file=sys.stderr)
    for line in remarks(found):
        print(f"remark: {line}", file=sys.stderr)
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
