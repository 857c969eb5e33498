"""The servers of the day: an sshd each on a loopback address of its own, and their agents' reports."""

from __future__ import annotations

import heapq
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from demo.stack import free_ports
from resource_manager.agent.sending import ReportRefusedError, ReportSender
from tests.agent.reporting import gpu, report, uuid
from tests.e2e.servers import SSHServer
from tests.faults.day.plan import GPUS, SERVERS

REPORT_S = 3.0

SERVER = """
[[servers]]
name = "{name}"
cpus = 64
address = "{address}:{port}"
[[servers.gpus]]
ids = {ids}
type = "A100"
uuids = {uuids}
"""


def name_of(number: int) -> str:
    return f"gpu-{number:02}"


def uuids_of(number: int) -> list[str]:
    return [uuid(100 * number + each) for each in range(GPUS)]


class Fleet:
    """Servers that are reached by ssh with one key, and that can lose a GPU or vanish."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        [self.port] = free_ports(1)
        self.servers: list[Any] = []
        for number in range(SERVERS):
            folder = home / name_of(number)
            folder.mkdir()
            variables = {"HOME": str(folder)}
            server = SSHServer(folder, f"127.0.77.{number + 1}", variables, port=self.port)  # type: ignore[no-untyped-call]
            self.servers.append(server)
            if number:
                server.share_key(self.servers[0])
            server.start()
        self.gpus = {number: set(range(GPUS)) for number in range(SERVERS)}
        self.vanished: set[int] = set()
        self.out_of_reach: set[int] = set()

    @property
    def key(self) -> Path:
        return Path(self.servers[0].key)

    @property
    def connection(self) -> str:
        return str(self.servers[0].connection)

    def inventory(self) -> str:
        """Return the fleet as a template, in which `str.format` finds nothing to fill in."""
        return "".join(
            SERVER.format(
                name=name_of(number),
                address=server.address,
                port=self.port,
                ids=list(range(GPUS)),
                uuids=str(uuids_of(number)).replace("'", '"'),
            )
            for number, server in enumerate(self.servers)
        )

    def lose_gpu(self, server: int, number: int) -> None:
        """Let a GPU fall off the bus: reports show it no more."""
        self.gpus[server].discard(number)

    def vanish(self, server: int) -> None:
        """Kill a server's sshd and everything that runs there; it reports no more."""
        self.vanished.add(server)
        self.servers[server].stop()
        home = str(self.servers[server].home)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ()
                if own.get("GPU_SERVER") == name_of(server) or own.get("HOME") == home:
                    process.kill()

    def cut(self, server: int) -> None:
        """Let nobody reach a server any more, over old connections or new; what runs there goes on."""
        self.out_of_reach.add(server)
        for process in self._sshd(server):
            process.suspend()

    def join(self, server: int) -> None:
        """Undo `cut`."""
        for process in self._sshd(server):
            process.resume()
        self.out_of_reach.discard(server)

    def _sshd(self, server: int) -> list[psutil.Process]:
        """Return a server's sshd with its sessions, not what they run."""
        listener = psutil.Process(self.servers[server].process.pid)
        found = [listener]
        for process in listener.children(recursive=True):
            with suppress(psutil.Error):
                if "sshd" in process.name():
                    found.append(process)
        return found

    def report(self, server: int) -> dict[str, Any]:
        uuids = uuids_of(server)
        gpus = [gpu(number, uuid=uuids[number]) for number in sorted(self.gpus[server])]
        now = time.time()
        return {**report(now, *gpus, name=name_of(server)), "interval_s": REPORT_S}

    def stop(self) -> None:
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.stop()


class Agents(threading.Thread):
    """The agents of all servers; each reports every `REPORT_S`, sooner if the service asks it to."""

    def __init__(self, fleet: Fleet, url: str, tokens: list[str]) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._senders = [ReportSender(url, token) for token in tokens]
        self._stop_asked = threading.Event()
        self.sent = self.refused = 0

    def run(self) -> None:
        due = [(time.monotonic() + REPORT_S * number / SERVERS, number) for number in range(SERVERS)]
        while not self._stop_asked.wait(max(due[0][0] - time.monotonic(), 0)):
            _, server = heapq.heappop(due)
            if server in self._fleet.out_of_reach:
                heapq.heappush(due, (time.monotonic() + REPORT_S, server))
            elif server not in self._fleet.vanished:
                heapq.heappush(due, (time.monotonic() + self._send(server), server))

    def _send(self, server: int) -> float:
        try:
            answer = self._senders[server].send(self._fleet.report(server))
        except ReportRefusedError:
            self.refused += 1
            return REPORT_S
        self.sent += 1
        return min(REPORT_S, max(float(answer.get("next_s", REPORT_S)), 0.5))

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()
