"""`agent install`: which machine a HOST is, and which tokens go on however an installation ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from resource_manager import GPUResourceManager, Settings, __version__
from resource_manager.agent.report_format import read_report
from resource_manager.cli import agents, main
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs.launchers import LauncherError, LauncherUnreachableError, NoAnswerError
from resource_manager.jobs.launchers.ssh_python import SSHPython
from resource_manager.rest import tokens
from resource_manager.rest.assemble import persistence_of
from resource_manager.rest.tokens import Role
from tests.agent.reporting import as_text, gpu, report

ADDRESSES = {"s1": "gw:2201", "s2": "gw:2202", "gpu-a": "gpu@gpu-a", "GPU-B": "10.0.0.7", "c": "", "x": "c"}


class Servers:
    """Stand-in for the servers of a cluster: where somebody logged in, and what an installation leads to."""

    def __init__(self, folder: Path) -> None:
        self.store = f"sqlite:///{folder}/state.db"
        file = folder / "servers.toml"
        file.write_text(
            "".join(
                f'[[servers]]\nname = "{name}"\naddress = "{address}"\ngpus = 1\ncpus = 8\n'
                for name, address in ADDRESSES.items()
            )
        )
        GPUResourceManager.from_url(self.store, inventory=file).close()
        self.tokens = persistence_of(Settings(store=self.store)).tokens
        self.installed: dict[str, str] = {}
        self.fault: LauncherError | None = None
        self.exit_code = 0
        self.uses_token = self.reports = True

    def run(self, address: str, program: str) -> tuple[int, str, str]:
        if self.fault is not None:
            raise self.fault
        found = re.search(r"GPU_MANAGER_SERVER=(\S+?)\\+nGPU_MANAGER_AGENT_TOKEN=gpm_([0-9a-f]+)_", program)
        assert found is not None
        self.installed[found[1]] = address
        if self.uses_token and not self.exit_code:
            self.tokens.note_use(found[2], time.time())
        if self.reports and not self.exit_code:
            with GPUResourceManager.from_url(self.store) as manager:
                text = as_text(report(manager.store.now(), gpu(0), name=found[1], version=__version__))
                ReportReceiver(manager).receive(read_report(text))
        return self.exit_code, "", "no bus\n"

    def install(self, *hosts: str) -> Result:
        where = ["--store", self.store, "agent", "install", "--service", "http://service:5000"]
        return CliRunner().invoke(main, [*where, *hosts])

    def of_server(self, server: str) -> set[str]:
        """Return the ids of a server's tokens."""
        return {token.token_id for token in self.tokens.read().values() if token.server == server}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers(tmp_path)
    monkeypatch.setattr(
        SSHPython, "run", lambda self, program, timeout_s, library="": servers.run(self.host, program)
    )
    monkeypatch.setenv("GPU_MANAGER_SERVER", "elsewhere")  # so that no name is looked up
    monkeypatch.setattr(agents, "FIRST_REPORT_S", 0.0)
    monkeypatch.setattr(agents, "LOOK_EVERY_S", 0.0)
    return servers


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        (["gpu-a"], {"gpu-a": "gpu@gpu-a"}),
        (["gw:2201", "gw:2202"], {"s1": "gw:2201", "s2": "gw:2202"}),
        (["root@s2"], {"s2": "root@gw:2202"}),
        (["root@GPU-B"], {"GPU-B": "root@10.0.0.7"}),
        (["10.0.0.7:22", "gpu-a:2222"], {"GPU-B": "10.0.0.7:22", "gpu-a": "gpu@gpu-a:2222"}),
        (["c", "0"], {"c": "c", "s1": "gw:2201"}),
        (["c:22"], {"x": "c:22"}),
        (["--all"], {name: address for name, address in ADDRESSES.items() if address}),
    ],
)
def test_a_server_is_reached_at_its_address_with_the_user_and_port_that_are_given(
    servers: Servers, hosts: list[str], places: dict[str, str]
) -> None:
    done = servers.install(*hosts)
    assert (done.exit_code, servers.installed) == (0, places), done.output


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["gw"], "HOST 'gw' is the address of s1, s2: name the server"),
        (["gw:2203"], "server 'gw:2203' is not in the inventory"),
        (["GPU-B", "10.0.0.7"], "HOST '10.0.0.7' is given twice: it is server GPU-B"),
    ],
)
def test_a_host_that_is_not_one_server_is_refused(servers: Servers, hosts: list[str], words: str) -> None:
    done = servers.install(*hosts)
    assert (done.exit_code, words in done.stderr, servers.installed) == (2, True, {}), done.output


def test_an_agent_that_reports_has_the_only_token_of_an_installation(servers: Servers) -> None:
    by_hand = tokens.create(servers.tokens, "of its jobs", Role.AGENT, server="gpu-a")
    assert servers.install("gpu-a", "s1").exit_code == 0
    before = servers.of_server("gpu-a")
    assert servers.install("gpu-a").exit_code == 0
    after = servers.of_server("gpu-a")
    assert (len(before), len(after), before & after) == (2, 2, {by_hand.split("_")[1]})
    assert len(servers.of_server("s1")) == 1


@pytest.mark.parametrize(
    ("fault", "exit_code", "uses_token", "goes_on"),
    [
        (NoAnswerError("nobody there"), 0, False, False),
        (LauncherError("no python3"), 0, False, False),
        (LauncherUnreachableError("the connection was lost"), 0, False, True),
        (None, 1, False, True),
        (None, 0, False, True),
        (None, 0, True, True),
    ],
    ids=["no log-in", "no python", "lost", "failed", "silent", "refused"],
)
def test_no_token_that_an_agent_may_have_ends_before_a_report(
    servers: Servers, fault: LauncherError | None, exit_code: int, uses_token: bool, goes_on: bool
) -> None:
    assert servers.install("gpu-a").exit_code == 0
    before = servers.of_server("gpu-a")
    servers.fault, servers.exit_code = fault, exit_code
    servers.uses_token, servers.reports = uses_token, False
    assert servers.install("gpu-a").exit_code == 3
    after = servers.of_server("gpu-a")
    assert (before <= after, len(after)) == (True, 1 + goes_on)
    servers.fault, servers.exit_code = None, 0
    servers.uses_token = servers.reports = True
    assert servers.install("gpu-a").exit_code == 0
    assert len(servers.of_server("gpu-a") - after) == len(servers.of_server("gpu-a")) == 1
