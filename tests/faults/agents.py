"""Jobs that agents run, while agents, servers, services and messages fail, and proof that each ran once.

A course is a seeded sequence of steps on two services of one store and the agents of three servers. Every
message between them is carried by hand: late, twice, to the other service, or not at all. Jobs are real
processes, which write into a ledger. One server puts walls around its jobs.
"""

from __future__ import annotations

import getpass
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import ReportError, read_report
from resource_manager.core.changes import AgentLost, Change, Granted, Preempting, Released
from resource_manager.core.changes import Outcome as LeaseOutcome
from resource_manager.core.models import RUNS_JOBS, Gpu, Node
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import ResourceManagerError
from resource_manager.fleet import job_board
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs import reconcile
from resource_manager.jobs.directories import starting
from resource_manager.jobs.launchers import agent, job_key
from resource_manager.jobs.launchers.walls import CHECK, program_of
from resource_manager.storage.backup import read_backup, restore, write_backup
from tests.builders import redefine
from tests.faults.agent_servers import AgentServer
from tests.faults.bugs import BUGS
from tests.faults.job_ledger import JOB, Beat, check_jobs
from tests.faults.outcomes import Outcome
from tests.faults.redis_servers import Server

SETTING = "agent jobs"
USER = getpass.getuser()
SERVERS = ("s0", "s1", "walled")
GPUS = 2
TTL_S = 2.0
SECONDS = 12.0
HEAL_S = 60.0
"""Time after the last fault within which every job is over."""

FINDING = {"no search": ("kill agent", "back up", "restore")}
"""The faults that bring a planted bug to light, where not all do."""


class Course:
    """One seed on a store; `run` returns its outcome."""

    def __init__(self, seed: int, folder: Path, url: str, bug: str = "") -> None:
        self.rng = random.Random(seed)
        self.outcome = Outcome(seed, SETTING)
        self._folder, self._url, self._bug = folder, url, bug
        self._ledger = folder / "ledger" / "beats"
        self._ledger.parent.mkdir()
        check = [*program_of((), (), "", ()), CHECK]
        has_walls = not starting.prepare(str(folder / "probe"), "probe", 0, check)["walls"]
        self._walls = {name: name == "walled" and has_walls for name in SERVERS}
        self._managers = [self._open() for _ in range(2)]
        self._servers = [
            AgentServer(node.name, folder / "servers", [gpu.uuid for gpu in node.gpus], bug)
            for node in self._managers[0].inventory
        ]
        redefine(
            self._managers[0],
            teams=Teams(
                (Team("t0", 4, user=USER), Team("t1", 0, user=USER)),
                preemption=True,
                min_runtime_s=0.2,
                preemption_delay_s=0.0,
            ),
        )
        self._receivers = [ReportReceiver(manager) for manager in self._managers]
        self._under_way: list[tuple[float, Callable[[], None]]] = []
        self._old_reports: list[bytes] = []
        self._old_answers: list[tuple[int, Mapping[str, Any]]] = []
        self._gpus_of: dict[str, dict[str, tuple[str, ...]]] = {}
        self._stops: list[threading.Thread] = []
        self._submitted: set[str] = set()
        self._given_up: set[str] = set()
        self._hurt: set[int] = set()
        self._backup: Path | None = None
        self._history: dict[int, Change] = {}

    def _open(self) -> GPUResourceManager:
        writable = (str(self._ledger.parent),)
        nodes = [
            Node(
                name,
                number,
                {"cpus": 64},
                tuple(Gpu(n, uuid=f"GPU-{number}{n:07x}-0000") for n in range(GPUS)),
                address=f"10.0.0.{number + 1}",
                labels=RUNS_JOBS,
                job_user=USER,
                confine="must" if self._walls[name] else "off",
                writable=writable,
            )
            for number, name in enumerate(SERVERS)
        ]
        return GPUResourceManager.from_url(
            self._url, inventory=nodes, confirmation_window_s=1.0, lease_ttl_s=TTL_S
        )

    # ---- the course ----

    def run(self) -> Outcome:
        steps: dict[Callable[[], None], int] = {
            self._report: 10,
            self._poll: 10,
            self._submit: 3,
            self._chores: 3,
            self._stop: 1,
            self._cancel: 1,
        }
        faults: dict[Callable[[], None], int] = {
            self._kill_agent: 3,
            self._pause_agent: 2,
            self._lose_answer: 3,
            self._repeat_answer: 3,
            self._repeat_report: 2,
            self._kill_job: 2,
            self._reboot: 2,
            self._restart_service: 2,
            self._silence: 2,
            self._back_up: 1,
            self._restore: 1,
        }
        names = {fault: fault.__name__.strip("_").replace("_", " ") for fault in faults}
        kinds = FINDING.get(self._bug, tuple(names.values()))
        faults = {fault: weight for fault, weight in faults.items() if names[fault] in kinds}
        ends_at = time.monotonic() + SECONDS
        fault_at = time.monotonic() + 1.0
        while (now := time.monotonic()) < ends_at:
            if now >= fault_at:
                fault_at = now + self.rng.uniform(0.1, 0.7)
                fault = self.rng.choices([*faults], [*faults.values()])[0]
                fault()
                self.outcome.faults[names[fault]] += 1
            step = self.rng.choices([*steps], [*steps.values()])[0]
            step()
            self.outcome.kinds[step.__name__.strip("_")] += 1
            self._carry(now)
            time.sleep(self.rng.uniform(0.0, 0.02))
        self._heal()
        self._check()
        return self.outcome

    def close(self) -> None:
        for server in self._servers:
            server.die()
        for manager in self._managers:
            manager.close()

    def _carry(self, now: float) -> None:
        """Deliver what is due."""
        for entry in [entry for entry in self._under_way if entry[0] <= now]:
            self._under_way.remove(entry)
            entry[1]()

    def _later(self, act: Callable[[], None]) -> None:
        """Do it at once, or now and then later than what comes after it."""
        delay_s = self.rng.uniform(0.0, 0.8) if self.rng.random() < 0.2 else 0.0
        self._under_way.append((time.monotonic() + delay_s, act))

    def _manager(self) -> GPUResourceManager:
        return self.rng.choice(self._managers)

    def _server(self) -> AgentServer:
        return self.rng.choice(self._servers)

    # ---- what people do ----

    def _submit(self) -> None:
        if len(self._managers[0].queue()) > 3:
            return
        name = f"j{len(self._submitted)}"
        beats, code = self.rng.randint(1, 30), self.rng.choice((0, 0, 0, 3))
        script = JOB.format(ledger=self._ledger, beats=beats, code=code)
        demand: dict[str, Any] = {"team": self.rng.choice(("t0", "t1")), "preempt_grace": 1.0, "ttl": TTL_S}
        if self.rng.random() < 0.3:
            demand |= {
                "nodes": 2,
                "labels": {"startup_order": self.rng.choice(("together", "workers_first"))},
            }
        job = {"command": ["/bin/sh", "-c", script]}
        self._submitted.add(name)
        self._manager().submit(name, self.rng.randint(1, GPUS), 1, job=job, **demand)

    def _stop(self) -> None:
        """Somebody stops a job, as `gpu-manager stop` does, which waits for its agent."""
        if sum(each.is_alive() for each in self._stops) > 1:
            return
        if leases := self._managers[0].leases():
            lease, manager = self.rng.choice(leases), self._manager()
            self._given_up.add(lease["task_id"])
            self._hurt.add(lease["fencing_token"])

            def end() -> None:
                with suppress(ResourceManagerError):
                    reconcile.end(manager, lease)

            self._stops.append(threading.Thread(target=end, daemon=True))
            self._stops[-1].start()

    def _cancel(self) -> None:
        if queue := self._managers[0].queue():
            entry = self.rng.choice(queue)
            self._given_up.add(entry["task_id"])
            self._manager().cancel(entry["task_id"])

    # ---- services and agents ----

    def _chores(self) -> None:
        number = self.rng.randrange(2)
        self._managers[number].expire_and_schedule()

    def _report(self, server: AgentServer | None = None) -> None:
        server = server or self._server()
        self._learn_gpus()
        text = server.report(self._gpus_of)
        if text is not None:
            self._later(lambda: self._receive(server, text))

    def _learn_gpus(self) -> None:
        for lease in self._managers[0].leases():
            for member in lease["members"]:
                key = job_key(lease["task_id"], lease["fencing_token"], member["rank"], lease["nodes"])
                self._gpus_of.setdefault(key, {})[member["server_name"]] = tuple(member["gpu_uuids"])

    def _receive(self, server: AgentServer, text: bytes) -> None:
        self._old_reports = [*self._old_reports[-9:], text]
        try:
            answer = self.rng.choice(self._receivers).receive(read_report(text))
            server.lists_jobs = answer.get("jobs") is True
        except ReportError:
            self.outcome.errors += 1

    def _poll(self, server: AgentServer | None = None) -> None:
        server = server or self._server()
        answer = self.rng.choice(self._receivers).board.jobs(server.name, server.known)
        pid = server.pid
        self._old_answers = [*self._old_answers[-9:], (pid, answer)]
        self._later(lambda: server.tell(answer, pid))

    # ---- what fails ----

    def _kill_agent(self) -> None:
        server = self._server()
        server.kill_agent()
        self._after(self.rng.uniform(0.0, 2.5), server.revive)

    def _pause_agent(self) -> None:
        server = self._server()
        if server.runs:
            server.pause()
            pid = server.pid
            self._after(self.rng.uniform(0.1, 1.5 * TTL_S), lambda: server.go_on(pid))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._under_way.append((time.monotonic() + delay_s, act))

    def _lose_answer(self) -> None:
        self.rng.choice(self._receivers).board.jobs((server := self._server()).name, server.known)

    def _repeat_answer(self) -> None:
        """An old answer comes again to the agent that asked, or to one that it is not for."""
        if self._old_answers:
            pid, answer = self.rng.choice(self._old_answers)
            for server in self._servers:
                server.tell(answer, pid if server.name == answer["server"] else server.pid)

    def _repeat_report(self) -> None:
        if self._old_reports:
            with suppress(ReportError):
                self.rng.choice(self._receivers).receive(read_report(self.rng.choice(self._old_reports)))
                self.outcome.complaints.append("an old report was taken")

    def _kill_job(self) -> None:
        found = self._server().processes()
        if found:
            victim = self.rng.choice(found)
            with suppress(psutil.Error):
                self._hurt.add(int(victim.environ().get("GPU_LEASE_FENCING_TOKEN", 0)))
                victim.kill()

    def _reboot(self) -> None:
        server = self._server()
        self._hurt |= server.tokens()
        server.die()
        self._after(self.rng.uniform(0.0, 2.5), server.boot)

    def _silence(self) -> None:
        name = self._server().name
        self._manager().commit(
            lambda cluster, now: [AgentLost(name, now, now - 60.0)] if cluster.node(name).watched else []
        )

    def _restart_service(self) -> None:
        number = self.rng.randrange(2)
        self._managers[number] = self._open()  # the other one may still be asked by who stops a job
        self._receivers[number] = ReportReceiver(self._managers[number])

    def _back_up(self) -> None:
        self._backup = self._folder / "backup.json"
        write_backup(self._managers[0].store, self._backup)

    def _restore(self) -> None:
        """The state goes back: what was submitted since is lost, and what was granted is searched for."""
        if self._backup is None:
            self._back_up()
        assert self._backup is not None
        self._note_history()  # some of it goes with the state
        restore(self._managers[0].store, read_backup(self._backup), force=True)
        self._given_up |= self._submitted

    # ---- the end ----

    def _heal(self) -> None:
        """Undo every fault; every job ends, and everything is free."""
        while self._under_way:
            self._carry(float("inf"))
        ends_at = time.monotonic() + HEAL_S
        while time.monotonic() < ends_at and (
            self._is_busy() or any(each.is_alive() for each in self._stops)
        ):
            for server in self._servers:
                self._report(server)
                self._poll(server)
            self._chores()
            time.sleep(0.05)
            self._carry(float("inf"))
        for lease in self._managers[0].leases():
            self.outcome.complaints.append(f"{lease['name']} is left: {lease['state']} {lease['reason']}")
        for entry in self._managers[0].queue():
            self.outcome.complaints.append(f"{entry['task_id']} waits for ever: {entry['reason']}")

    def _note_history(self) -> None:
        self._history.update(self._managers[0].store.history(0, 1_000_000))

    def _is_busy(self) -> bool:
        manager = self._managers[0]
        return bool(manager.leases() or manager.queue() or any(each.processes() for each in self._servers))

    def _check(self) -> None:
        manager, outcome = self._managers[0], self.outcome
        self._note_history()
        changes = [change for _, change in sorted(self._history.items(), key=lambda entry: entry[0])]
        leases = {c.lease.fencing_token: c.lease.lease_id for c in changes if isinstance(c, Granted)}
        results = {
            token: dict(found)
            for token, name in leases.items()
            if (found := manager.stored_jobs.result(name, token)) is not None
        }
        beats = Beat.read(self._ledger)
        outcome.complaints += check_jobs(beats, changes, results, self._hurt, self._walls)
        for name in sorted(self._submitted - self._given_up):
            if manager.result_of(name) is None:
                outcome.complaints.append(f"{name} was submitted, and has no result")
        for server in self._servers:
            if left := server.processes():
                outcome.complaints.append(f"{len(left)} processes of jobs are left on {server.name}")
        outcome.operations = outcome.kinds.total()
        outcome.granted = len(leases)
        outcome.gangs = sum(isinstance(c, Granted) and c.lease.request.nodes > 1 for c in changes)
        outcome.preemptions = sum(isinstance(c, Preempting) and c.preemptor != "" for c in changes)
        outcome.victims = sum(
            isinstance(c, Released) and c.outcome == LeaseOutcome.PREEMPTED for c in changes
        )
        outcome.kinds["jobs that ran"] = len({beat.process for beat in beats})
        outcome.kinds.update(c.outcome for c in changes if isinstance(c, Released))


def run_course(seed: int, folder: Path, *, bug: str = "") -> Outcome:
    """Return the outcome of a seed, on a Redis of its own or, every other one, on SQLite."""
    server = None if seed % 2 else Server(folder / "server", 'save ""')
    url = f"sqlite:///{folder}/state.db" if server is None else f"unix://{server.socket}?namespace=n"
    if bug:
        BUGS[bug]()
    usual = agent.ANSWER_TIMEOUT_S, job_board.STOPPED_S  # type: ignore[attr-defined]
    agent.ANSWER_TIMEOUT_S, job_board.STOPPED_S = 5.0, 3.0  # type: ignore[attr-defined]
    try:
        course = Course(seed, folder, url, bug)
        try:
            return course.run()
        finally:
            course.close()
    finally:
        agent.ANSWER_TIMEOUT_S, job_board.STOPPED_S = usual  # type: ignore[attr-defined]
        if server is not None:
            server.kill()
