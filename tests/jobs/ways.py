"""Ways to GPUs, what breaks meanwhile, and what is seen from the outside: processes, leases, words.

A `Site` is a store, a server (`machine`) with two GPUs and a second machine (`desk`) from which others ask. A
request for both GPUs, the rival, waits from the beginning: it is granted once the GPUs count as free, and
then no process of the first lease may be there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from resource_manager import GPUResourceManager
from resource_manager.core.changes import GpuClosed
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import ResourceManagerError
from tests.builders import redefine
from tests.eventually import wait_for
from tests.faults.machines import Machine, Machines, Program, python
from tests.faults.quick import TTL_S
from tests.faults.redis_servers import Server, free_port

BEAT = Path(__file__).parents[1] / "e2e" / "dags" / "beat.py"
PYTHON = "/usr/bin/python3"
"""Python of the servers, which have none of ours."""

SETTLED_S = TTL_S + 4.0
"""Time after which a lease without a sign of its owner has ended, if it ends by itself."""

PATIENCE_S = 45.0


SERVER = """
[[servers]]
name = "{name}"
gpus = 2
cpus = 8
address = "{address}"
"""


class NotSeenError(AssertionError):
    """What should have been seen was not."""


class Site:
    """One store, one server, one desk, and what is seen of them; without `machines` all is this machine."""

    def __init__(self, machines: Machines | None, number: int, folder: Path, way: str) -> None:
        folder.mkdir(parents=True)
        self.way = way
        self.machines, self.folder = machines, folder
        self.machine: Machine | None = None
        self.desk: Machine | None = None
        self.name, address, self.here, self.settled_s = "here", "", "127.0.0.1", TTL_S / 2
        if machines is not None:
            server, self.desk = machines.servers[2 * number : 2 * number + 2]
            self.machine = server
            self.name, address = server.name, server.address
            self.here, self.settled_s = machines.here, SETTLED_S
        self.store = Server(
            folder / "redis", "appendonly yes", "appendfsync always", "bind 0.0.0.0", "protected-mode no"
        )
        self.inventory = folder / "servers.toml"
        self.inventory.write_text(SERVER.format(name=self.name, address=address))
        self.ledger = folder / "beats"
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.known_hosts = folder / "known_hosts"
        self.job = [PYTHON, str(BEAT), str(self.ledger), "900", "0"]
        self.programs: list[Program] = []
        self.gate = folder / "gate"
        self.url = f"unix://{self.store.socket}?namespace=n"
        self.manager = GPUResourceManager.from_url(
            self.url, inventory=self.inventory, confirmation_window_s=1.0
        )
        self.rival = "rival"
        self.lease_id = ""

    @property
    def server(self) -> Machine:
        """The server, where it is a machine of its own."""
        assert self.machine is not None
        return self.machine

    # ---- programs ----

    def environment(self, machine: Machine | None) -> dict[str, str]:
        """Return the environment of a program that runs on that machine."""
        home = machine.home if machine is not None else self.folder / "home"
        home.mkdir(exist_ok=True)
        own = {
            "HOME": str(home),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "GPU_MANAGER_STORE": f"redis://{self.here}:{self.store.port}/0?namespace=n",
            "GPU_MANAGER_JOBS_DIR": str(home / "jobs"),
            "GPU_MANAGER_INSTANCE": "test",
            "AIRFLOW_HOME": str(self.folder / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "TASK_NOTES": str(self.notes),
            "JOB": json.dumps(self.job),
        }
        if self.machines is not None:
            own["AIRFLOW_CONN_JOBS"] = self.connection(self.machines.key)
        own["AIRFLOW_CONN_GPU_MANAGER_DEFAULT"] = json.dumps(
            {"conn_type": "gpu_manager", "host": own["GPU_MANAGER_STORE"]}
        )
        if machine is self.machine:
            own["GPU_MANAGER_SERVER"] = self.name
        return own

    def connection(self, login: Path) -> str:
        """Return Airflow's connection to the server."""
        extra: dict[str, Any] = {"key_file": str(login), "conn_timeout": 2}
        if self.known_hosts.exists():
            kind, key = self.known_hosts.read_text().split()[1:3]
            extra |= {"no_host_key_check": False, "host_key": f"{kind} {key}"}
        else:
            extra |= {"no_host_key_check": True}
        return json.dumps({"conn_type": "ssh", "host": self.server.address, "login": "root", "extra": extra})

    def spawn(self, *command: str, machine: Machine | None = None, **more: str) -> Program:
        """Start a program on a machine, or here without one."""
        if self.machines is not None:
            known = self.known_hosts if self.known_hosts.exists() else None
            self.machines.ssh_program(self.folder / "bin", known_hosts=known)
        output = self.folder / f"said-{len(self.programs)}"
        program = Program(command, {**self.environment(machine), **more}, output, machine)
        self.programs.append(program)
        return program

    def gpu_manager(self, *arguments: str, machine: Machine | None = None, **more: str) -> Program:
        return self.spawn(*python("-m", "tests.faults.quick", *arguments), machine=machine, **more)

    def asked(self, *arguments: str, machine: Machine | None = None, **more: str) -> tuple[int, str]:
        """Return exit code and words of a command that ends."""
        program = self.gpu_manager(*arguments, machine=machine, **more)
        return program.wait(PATIENCE_S), program.said()

    def close(self) -> None:
        for program in self.programs:
            program.close()
        for process in self.processes():
            process.kill()
        self.manager.close()
        self.store.kill()
        for machine in (self.machine, self.desk):
            if machine is None:
                continue
            machine.join()
            if not machine.alive:
                machine.start()
            for jobs in ("jobs", ".gpu-manager"):  # the next store counts from one again
                if (place := machine.home / jobs).is_dir():
                    shutil.rmtree(place)
                else:
                    place.unlink(missing_ok=True)

    # ---- what is seen ----

    def processes(self) -> list[psutil.Process]:
        """Return the live processes that compute for a job of this site, wherever they came from."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if words[:3] == self.job[:3] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def beats(self) -> list[dict[str, Any]]:
        if not self.ledger.exists():
            return []
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]

    def leases(self) -> list[Any]:
        return [lease for lease in self.manager.leases() if lease["task_id"] != self.rival]

    def has_rival(self) -> bool:
        """Return whether the GPUs count as free; fail if a process of the first lease is still there then."""
        self.manager.expire_and_schedule()
        if self.state_of(self.rival) != "RUNNING":
            return False
        if any(process.is_running() for process in self.processes()):
            raise NotSeenError("the GPUs were granted while a process of the lease before was on them")
        return True

    def has_ended(self) -> bool:
        """Return whether the lease is over."""
        self.manager.expire_and_schedule()
        return self.lease_id not in {lease["task_id"] for lease in self.leases()}

    def is_quarantined(self) -> bool:
        self.manager.expire_and_schedule()
        return self.state_of(self.lease_id) == "ERROR"

    def state_of(self, task_id: str) -> str:
        found = self.manager.status_of(task_id)
        return "ABSENT" if found is None else str(found["state"])

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(ResourceManagerError):  # the store is away
                if condition():
                    return
            if time.monotonic() > deadline:
                raise NotSeenError(f"{what}: not within {timeout_s:g} s; {self.words()}")
            time.sleep(0.1)

    def holds(self, condition: Callable[[], object], what: str, for_s: float) -> None:
        """Demand that a condition is true for all of that time."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            with suppress(ResourceManagerError):
                if not condition():
                    raise NotSeenError(f"{what}; {self.words()}")
            time.sleep(0.1)

    def words(self) -> str:
        """Return what all programs have said, and the leases."""
        said = "\n".join(f"[{program.exit_code}] {program.said()}" for program in self.programs)
        with suppress(ResourceManagerError):
            rows = [
                (lease["task_id"], lease["state"], lease.get("reason"), lease["job_places"])
                for lease in self.manager.leases()
            ]
            said = f"{said}\nleases: {rows}"
        return said

    # ---- what others do ----

    def begun(self, *, has_job: bool = True) -> None:
        """Wait until the job computes, or there is the lease of who has none."""
        if has_job:
            self.until(self.beats, "the job's first beat")
        self.until(self.leases, "the lease")
        [lease] = self.leases()
        self.lease_id = lease["task_id"]

    def trust_host_key(self) -> None:
        """From now on only the host key that the server has at this moment is known."""
        key = (self.server.home / "host_key.pub").read_text().split()[:2]
        self.known_hosts.write_text(f"{self.server.address} {' '.join(key)}\n")

    def compete(self) -> None:
        """Let the rival wait for both GPUs."""
        self.manager.submit(self.rival, 2, server=self.name, ttl=3600.0)

    def preempt(self) -> None:
        """Let the rival take both GPUs by right."""
        redefine(self.manager, teams=Teams((Team("first", 2),), True, 0.0, 0.0))
        self.manager.submit(self.rival, 2, server=self.name, ttl=3600.0, team="first", priority=9)

    def close_gpu(self) -> None:
        """Let the first GPU fall off the bus."""
        node = self.name
        self.manager.commit(
            lambda cluster, now: [
                GpuClosed(node, 0, "", "xid 79; GPU has fallen off the bus", now, stop=True)
            ]
        )

    def finish(self) -> None:
        """Let the job come to its end by itself."""
        for lease in self.leases():
            Path(f"{self.ledger}-end-{lease['task_id'].replace('/', '-')}").touch()

    def reconcile(self, *, wanted: bool = False) -> str:
        """Compare the leases with an Airflow in which the task has ended, or is still `wanted`."""
        program = self.spawn(*python("-m", "tests.jobs.reconcile_program", "wanted" if wanted else "ended"))
        assert program.wait(PATIENCE_S) == 0, program.said()
        return program.said()

    def press(self, button: str) -> str:
        """Press a button of the console's page of the lease; return what the next page says."""
        url = self.serve()
        [lease] = self.leases()
        form = {"task_id": lease["task_id"], "fencing_token": lease["fencing_token"]}
        answer = httpx.post(f"{url}/act/{button}", data=form, timeout=PATIENCE_S, follow_redirects=True)
        return answer.text

    def serve(self) -> str:
        """Start the service; return its URL."""
        url = f"http://127.0.0.1:{(port := free_port())}"
        service = self.gpu_manager("serve", "--port", str(port))
        wait_for(lambda: service.exit_code is not None or _answers(url), PATIENCE_S)
        return url


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/healthz", timeout=5).is_success
    return False
