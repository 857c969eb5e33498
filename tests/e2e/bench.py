"""Real Airflow and Redis for the fault tests, and a ledger that the jobs themselves write."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing, suppress
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from demo.stack import REPOSITORY, Stack, StackError
from resource_manager import GPUResourceManager
from tests import eventually
from tests.airflow.examples import readable_examples
from tests.eventually import TIMEOUT_FACTOR

HERE = Path(__file__).parent
TTL_S = 15
BEAT_S = 0.2
"""Interval at which a job of the tests writes into the ledger."""

INVENTORY = """
[[servers]]
name = "here"
gpus = 8
gpu_type = "local"
cpus = 64

[[servers]]
name = "by-ssh"
gpus = 8
gpu_type = "ssh"
cpus = 64
address = "127.0.0.1:{ssh_port}"

[[servers]]
name = "by-docker"
gpus = 8
gpu_type = "docker"
cpus = 64
address = "{docker}"
"""


def wait_for(condition, timeout_s=90.0, what="it", every_s=0.25):
    """Wait as Airflow needs it: for long, and asking now and then."""
    return eventually.wait_for(condition, timeout_s, what, every_s)


class Bench(Stack):
    """Stack of the demo with the tests' DAGs, and methods that break it."""

    def __init__(self, home, ssh_port=0, servers=INVENTORY, store="redis", window_s=TTL_S, **settings):
        dags = home / "dags"
        shutil.copytree(REPOSITORY / "dags", dags)
        shutil.copytree(HERE / "dags", dags / "tests")
        (dags / "provider").mkdir()
        for example in readable_examples():
            shutil.copy(example, dags / "provider")
        (dags / ".airflowignore").write_text("jobs/\nbeat.py\n")
        self.runs = []
        self.ledger = home / "ledger" / "beats"
        self.ledger.parent.mkdir()
        self.ledger.parent.chmod(0o777)
        inventory = home / "inventory.toml"
        docker = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        cluster = f"\n[cluster]\nconfirmation_window = {window_s}\n"
        inventory.write_text(servers.format(ssh_port=ssh_port, docker=docker) + cluster)
        self.inventory = inventory
        super().__init__(
            home,
            dags=dags,
            store=store,
            start_timeout_s=600.0 * TIMEOUT_FACTOR,
            answer_timeout_s=30.0 * TIMEOUT_FACTOR,
            settings={
                "LEDGER": str(self.ledger),
                "TEST_TTL_S": str(TTL_S),
                "GPU_MANAGER_INVENTORY": str(inventory),
                "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
                "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",  # the DAGs never change
                "AIRFLOW__DAG_PROCESSOR__STALE_DAG_THRESHOLD": "7200",
                "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": str(5.0 * TIMEOUT_FACTOR),
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
                **settings,
            },
        )

    program = str(Path(sys.executable).parent / "airflow")

    @cached_property
    def manager(self):
        return GPUResourceManager.from_url(self.store_url)

    @cached_property
    def instance(self):
        """Instance id of this Airflow, as its API server published it."""
        return self.api.call("GET", "/variables/gpu_manager_instance")["value"]

    def stop(self):
        if "manager" in self.__dict__:
            self.manager.close()
        super().stop()

    def command(self, *words):
        """Run Airflow's command line in this stack; an error says what it wrote."""
        done = subprocess.run([self.program, *words], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"airflow {' '.join(words)}: {(done.stderr or done.stdout)[-4000:]}"

    def switch_the_reconciler_on(self):
        wait_for(lambda: self.api.knows("gpu_reconcile"), what="gpu_reconcile")
        self.api.call("PATCH", "/dags/gpu_reconcile", {"is_paused": False})

    def of_component(self, name):
        """Return the processes of `airflow <name>` in the order of their start."""
        found = []
        for process in self.processes():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if name in words or any(name in word for word in words[:2]):
                found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def kill(self, name):
        """Kill a component and then its children with SIGKILL; some children may have ended by themselves."""
        victims = self.with_children(name)
        assert victims, f"no {name} runs"
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()

    def suspend(self, name):
        """Suspend a component with its children, while none of them holds Airflow's database; return them."""

        def is_suspended():
            for process in found:
                process.suspend()
            try:
                with closing(sqlite3.connect(self.home / "airflow.db", timeout=1.0)) as database:
                    database.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError:
                for process in found:
                    process.resume()
                return False

        found = self.with_children(name)
        wait_for(is_suspended, what=f"{name} without a lock on the database")
        return found

    def with_children(self, name):
        """Return the processes of a component, and then their children."""
        roots = self.of_component(name)
        return [*roots, *(child for root in roots for child in children_of(root))]

    def ports_of(self, name):
        """Return the local ports of a component's connections as strings."""
        found = set()
        for process in self.with_children(name):
            with suppress(psutil.NoSuchProcess):
                found |= {str(connection.laddr.port) for connection in process.net_connections("tcp")}
        return found

    def start(self, name, *options):
        return self.spawn(name, [self.program, name, *options])

    def run(self, dag_id, **conf):
        """Start a run and return it."""
        wait_for(lambda: self.api.knows(dag_id), what=f"the reading of {dag_id}")
        run = Run(self, dag_id, self.api.trigger(dag_id, conf))
        self.runs.append(run)
        return run

    def one_trains_one_waits(self, waiting="local_job", **conf):
        """Return a run whose job has all GPUs, and a run of the DAG `waiting` that waits for them."""
        trains = self.run("local_job")
        trains.wait_until_training()
        waits = self.run(waiting, **conf)
        waits.wait_until_waiting()
        return trains, waits

    @staticmethod
    def both_end_well(trains, waits, timeout_s=200.0):
        """End the first run's job; assert that both runs succeed, each with a single process."""
        trains.finish()
        for run in (trains, waits):
            run.wait_until("success", timeout_s)
            assert len(run.processes()) == 1

    def history(self, change):
        """Return all changes of a kind."""
        return [entry for entry in self.manager.history(limit=1_000_000) if entry["change"] == change]

    def grants(self):
        """Return every granted request, in order."""
        return [change["lease"]["request"] for change in self.history("granted")]

    def beats(self):
        """Return every line of the ledger."""
        if not self.ledger.exists():
            return []
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]

    def check_ledger(self):
        """Assert by the ledger that no GPU and no task had two processes at the same time."""
        spans: dict[str, Any] = {}
        for beat in self.beats():
            span = spans.setdefault(beat["process"], [beat["at"], beat["at"], beat])
            span[1] = beat["at"]
        owners: dict[Any, list[Any]] = defaultdict(list)
        for start, end, beat in spans.values():
            # What is left of a gang on a server that was cut off runs on beside the next one.
            gang = f"{beat['process'].split('-')[0]}.{beat['member']}" if beat["member"] else ""
            owners["task", beat["task"], gang].append((start, end, beat["process"]))
            for gpu in beat["gpus"].split(","):
                owners[beat["server"], gpu].append((start, end, beat["process"]))
        for owner, held in owners.items():
            held.sort()
            for (_, end, first), (start, _, second) in pairwise(held):
                assert end < start, f"{owner}: {first} until {end} and {second} from {start}"

    free_within_s = TTL_S + 30.0

    def check_free(self, timeout_s=None):
        """Assert that all GPUs are free within `free_within_s`, and that no process of a job is left."""
        manager = self.manager

        def free():
            manager.expire_and_schedule()
            return not manager.leases() and not manager.queue()

        wait_for(free, timeout_s or self.free_within_s, "all GPUs free")
        seen = len(self.beats())
        time.sleep(4 * BEAT_S)
        assert len(self.beats()) == seen, "a job still runs"


def children_of(process):
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class Run:
    """DAG run, usually with one task called `job`."""

    def __init__(self, bench, dag_id, run_id):
        self.bench, self.dag_id, self.run_id = bench, dag_id, run_id
        self.lease_id = f"{bench.instance}:{dag_id}/{run_id}/job"
        self.path = f"/dags/{dag_id}/dagRuns/{run_id}"
        self.map_indexes = range(0)

    def processes(self):
        """Return the job's processes so far, by the ledger, in the order of their start."""
        return list(dict.fromkeys(beat["process"] for beat in self.beats()))

    def beats(self):
        """Return the lines of its job in the ledger, of all its jobs if the task is mapped."""
        own = f"{self.lease_id}/"
        return [beat for beat in self.bench.beats() if f"{beat['task']}/".startswith(own)]

    def task(self):
        return next(iter(self.bench.api.task_instances(self.dag_id, self.run_id)))

    def states(self):
        """Return the states of the run's tasks by task id."""
        tasks = self.bench.api.task_instances(self.dag_id, self.run_id)
        return {task["task_id"]: task["state"] for task in tasks}

    def count(self, *states):
        """Return the number of the run's tasks in one of these states."""
        wanted = "&".join(f"state={state}" for state in states)
        return self.bench.api.call("GET", f"{self.path}/taskInstances?limit=1&{wanted}")["total_entries"]

    def ended_at(self):
        return datetime.fromisoformat(self.task()["end_date"]).timestamp()

    def state(self):
        return self.bench.api.run_state(self.dag_id, self.run_id)

    def finish(self):
        """Make the job end with success, all of them if the task is mapped."""
        for lease_id in [f"{self.lease_id}/{index}" for index in self.map_indexes] or [self.lease_id]:
            Path(f"{self.bench.ledger}-end-{lease_id.replace('/', '-')}").touch()

    def wait_until_training(self):
        wait_for(self.beats, what=f"the start of {self.lease_id}")
        self.wait_until_deferred()

    def wait_until_waiting(self):
        self.wait_until_deferred()
        assert not self.beats()

    def wait_until_deferred(self, try_number=1):
        def deferred():
            task = self.task()
            return task["state"] == "deferred" and task["try_number"] >= try_number

        wait_for(deferred, what=f"deferral of try {try_number}")

    def wait_until(self, state, timeout_s=200.0):
        try:
            wait_for(lambda: self.state() == state, timeout_s, f"{self.lease_id} {state}")
        except AssertionError:
            for task in self.bench.api.task_instances(self.dag_id, self.run_id):
                if task["state"] not in ("success", "skipped"):
                    print(task["task_id"], task["map_index"], task["state"], f"try {task['try_number']}")
                    with suppress(StackError):
                        print(self.log(task["try_number"], task["task_id"])[-4000:])
            raise

    def log(self, try_number=None, task_id="job"):
        try_number = try_number or max(self.task()["try_number"], 1)
        return self.bench.api.log(self.dag_id, self.run_id, task_id, try_number)

    def xcom(self, key):
        """Return an XCom of the task, or None."""
        try:
            return self.bench.api.xcom(self.dag_id, self.run_id, "job", key)
        except StackError:
            return None

    def mark(self, state):
        self.bench.api.call("PATCH", f"{self.path}/taskInstances/job", {"new_state": state})

    def mark_run(self, state):
        self.bench.api.call("PATCH", self.path, {"state": state})

    def clear(self):
        self.bench.api.call(
            "POST",
            f"/dags/{self.dag_id}/clearTaskInstances",
            {
                "dry_run": False,
                "dag_run_id": self.run_id,
                "task_ids": ["job"],
                "only_failed": False,
                "reset_dag_runs": True,
            },
        )

    def delete(self):
        self.bench.api.call("DELETE", self.path)
