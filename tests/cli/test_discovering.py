"""`gpu-manager discover` on this machine and on four servers by ssh, each with GPUs of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.cli import discovering
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.reading import ClusterFiles, load_inventory
from tests.e2e.servers import SSHD, SSHServer
from tests.nvml.standin import State, gpu, library, mig, state, uuid_of
from tests.redis_server import RedisServer

__all__ = ["library", "state"]

GPU_KEYS = {
    *("index", "uuid", "type", "memory_mib", "memory_used_mib", "utilization_percent", "temperature_c"),
    *("power_w", "pci", "numa_node", "nvlink_group", "mig", "processes", "health"),
}
PAGE = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
PROCESS_KEYS = {"pid", "user", "command", "memory_mib", "lease_id"}


def discover(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resource_manager.cli", "discover", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_json_is_a_list_with_one_report_for_this_machine(state: State) -> None:
    state.write(gpu(0, "utilization 71 40", f"process {os.getpid()} 1048576"), gpu(1, "rows 0 1 1 0"))
    done = discover("--json")
    assert (done.returncode, done.stderr) == (0, "")
    [report] = json.loads(done.stdout)
    assert {"server", "driver", "gpus", "cpus", "memory_mib"} <= set(report)
    assert (report["server"], report["driver"]) == (os.uname().nodename, "550.54.15")
    first, second = report["gpus"]
    assert set(first) >= GPU_KEYS
    assert (first["uuid"], first["utilization_percent"], first["health"]) == (uuid_of(0), 71, [])
    [process] = first["processes"]
    assert set(process) >= PROCESS_KEYS
    assert (process["pid"], process["memory_mib"]) == (os.getpid(), 1)
    [finding] = second["health"]
    assert set(finding) == {"condition", "action", "text", "todo"}
    assert finding["condition"] == "row remap pending"
    assert finding["action"] == "close after lease"
    assert finding["text"]


def test_the_printed_inventory_can_be_loaded_and_pins_every_gpu(state: State, tmp_path: Path) -> None:
    state.write(
        gpu(0, "mig_mode 1"),
        mig(0, "1g.10gb", 10),
        gpu(1),
        gpu(2, "numa 1"),
        gpu(3, "lost"),
        gpu(4, "mig_mode 1"),
    )
    done = discover()
    assert done.returncode == 0, done.stderr
    (tmp_path / "inventory.toml").write_text(done.stdout)
    [node] = load_inventory(tmp_path / "inventory.toml")
    assert [(found.gpu_id, found.uuid, found.gpu_type, found.memory_mib) for found in node.gpus] == [
        (0, uuid_of(0, "MIG"), "A100-SXM4-80GB:1g.10gb", 10240),
        (1, uuid_of(1), "A100-SXM4-80GB", 81920),
        (2, uuid_of(2), "A100-SXM4-80GB", 81920),
    ]
    assert node.resources["cpus"] == os.cpu_count()
    assert "# GPU 3 is left out: it does not answer" in done.stdout
    assert "# GPU 4 is left out: it is in MIG mode and has no MIG device" in done.stdout
    assert "numa_node = 1" in done.stdout


def test_output_writes_the_file_and_says_what_it_found(state: State, tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    done = discover("--output", path)
    assert (done.returncode, done.stdout) == (0, f"{path}: 1 server with 2 GPUs\n")
    assert len(load_inventory(path)[0].gpus) == 2
    both = discover("--output", path, "--json")
    assert len(json.loads(both.stdout)) == 1
    assert [found.name for found in tmp_path.iterdir() if found.name.startswith(".")] == []


def test_a_machine_without_a_report_is_one_line_and_exit_3(state: State, tmp_path: Path) -> None:
    state.write(gpu(0), machine=["fail nvmlInit_v2 18"])
    done = discover("--json", "--output", tmp_path / "servers.toml")
    assert (done.returncode, done.stdout) == (3, "[]\n")
    assert len(done.stderr.splitlines()) == 1
    assert "Driver/library version mismatch" in done.stderr
    assert not (tmp_path / "servers.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--user", "ada"], "--user and --key go with a HOST"),
        (["gpu-a:port"], "HOST 'gpu-a:port' is not [user@]host[:port]"),
        (["gpu a"], "HOST 'gpu a' is not [user@]host[:port]"),
        (["ada@"], "HOST 'ada@' is not [user@]host[:port]"),
        (["gpu-a", "gpu-a"], "HOST 'gpu-a' is given twice"),
        (["gpu-a", "--key", "/none"], "'--key': File '/none' does not exist"),
        (["--health", "/none"], "/none: No such file or directory"),
        (["--output", "/none/servers.toml"], "--output /none/servers.toml: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(state: State, arguments: list[str], line: str) -> None:
    done = discover(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr


def test_servers_are_named_by_host_and_by_port_where_needed() -> None:
    assert discovering.server_names(["ada@gpu-a", "gpu-b:2222"]) == ["gpu-a", "gpu-b"]
    assert discovering.server_names(["box:2201", "box:2202", "box"]) == ["box-2201", "box-2202", "box-22"]
    assert discovering.server_names(["[::1]:22"]) == ["--1"]


class Servers:
    """Four servers by ssh on 127.0.0.2 to 127.0.0.5, each with its own GPUs."""

    def __init__(self, folder: Path, library: Path) -> None:
        (folder / "home" / ".ssh").mkdir(parents=True)
        self.states = []
        self.servers = []
        known = []
        for number in range(4):
            home = folder / str(number)
            home.mkdir()
            state = State(home / "state", library)
            server = SSHServer(home, f"127.0.0.{number + 2}", state.variables)
            key = " ".join((home / "host_key.pub").read_text().split()[:2])
            known.append(f"[{server.address}]:{server.port} {key}\n")
            (home / "authorized_keys").write_text((folder / "0" / "key.pub").read_text())
            self.states.append(state)
            self.servers.append(server)
        self.environment = {**os.environ, "HOME": str(folder / "home")}
        (folder / "home" / ".ssh" / "known_hosts").write_text("".join(known))
        self.login = ("--user", "root", "--key", str(folder / "0" / "key"))

    @property
    def hosts(self) -> list[str]:
        return [f"{server.address}:{server.port}" for server in self.servers]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[Servers]:
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("needs sshd (Debian: openssh-server) and root")
    made = Servers(tmp_path_factory.mktemp("servers"), library)
    for server in made.servers:
        server.start()
    yield made
    for server in made.servers:
        if server.process.poll() is None:
            server.stop()


@pytest.mark.e2e
def test_four_servers_by_ssh(servers: Servers, tmp_path: Path) -> None:
    for number, of_server in enumerate(servers.states):
        of_server.write(*(gpu(10 * number + each) for each in range(number + 1)))
    path = tmp_path / "servers.toml"
    done = discover(
        *servers.hosts, *servers.login, "--output", path, "--json", environment=servers.environment
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [report["server"] for report in reports] == [f"127.0.0.{number}" for number in range(2, 6)]
    assert [[found["uuid"] for found in report["gpus"]] for report in reports] == [
        [uuid_of(10 * number + each) for each in range(number + 1)] for number in range(4)
    ]
    nodes = load_inventory(path)
    assert [(node.name, node.address) for node in nodes] == [
        (f"127.0.0.{number + 2}", host) for number, host in enumerate(servers.hosts)
    ]
    assert [found.uuid for found in nodes[3].gpus] == [uuid_of(30 + each) for each in range(4)]
    assert not (Path(servers.environment["HOME"]) / "airflow").exists()


@pytest.mark.e2e
def test_servers_without_a_report_are_a_line_each_and_the_others_are_printed(
    servers: Servers, tmp_path: Path
) -> None:
    crashing, mismatched, fine, _ = servers.states
    crashing.write(gpu(0), machine=["crash nvmlDeviceGetName"])
    mismatched.write(gpu(0), machine=["fail nvmlInit_v2 18"])
    fine.write(gpu(5))
    stranger = f"127.0.0.6:{servers.servers[0].port}"  # nothing listens there
    hosts = [*servers.hosts[:3], stranger]
    done = discover(*hosts, *servers.login, "--json", environment=servers.environment)
    assert done.returncode == 3
    assert [report["server"] for report in json.loads(done.stdout)] == ["127.0.0.4"]
    first, second, third = done.stderr.splitlines()
    assert "gave no report: the GPU library crashed the probe: Segmentation fault" in first
    assert "gave no report: nvmlInit_v2 of NVML: Driver/library version mismatch" in second
    assert f"server {stranger} does not answer by ssh: [Errno 111] Connection refused" in third


@pytest.mark.e2e
def test_an_unknown_host_key_is_refused(servers: Servers, tmp_path: Path) -> None:
    environment = {**servers.environment, "HOME": str(tmp_path)}
    done = discover(servers.hosts[3], *servers.login, "--json", environment=environment)
    assert (done.returncode, done.stdout) == (3, "[]\n")
    assert "not found in known_hosts: log in once by hand and check its key: ssh HOST\n" in done.stderr


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def of_the_page(text: str, hosts: dict[str, str]) -> str:
    """Return a text of the page with other hosts in place of its own, and without what a machine decides."""
    for name, host in hosts.items():
        text = text.replace(f'name = "{name}"', f'name = "{host.partition(":")[0]}"').replace(name, host)
    return re.sub(r"(cpus|memory_mib) = (64|515000)\n", r"\1 = …\n", text)


@pytest.mark.e2e
def test_the_page_writes_the_inventory_that_it_shows(servers: Servers, tmp_path: Path) -> None:
    link = ("nvlink 0 gpu 00000000:0F:00.0", "nvlink 0 gpu 00000000:07:00.0")
    servers.states[0].write(gpu(0, link[0]), gpu(1, link[1]))
    servers.states[1].write(gpu(2, "mig_mode 1"), mig(0, "3g.40gb", 40), gpu(3))
    hosts = dict(zip(("gpu-a", "gpu-b"), servers.hosts, strict=False))
    [inventory, *_], [ask, use, *_] = blocks("toml"), blocks("sh")
    folder = Path(sys.executable).parent
    script = of_the_page(ask, hosts).replace("--user gpu --key ~/.ssh/gpu_key", " ".join(servers.login))
    done = subprocess.run(
        ["bash", "-ec", f"{script}\n{use}\ngpu-manager status --json"],
        env={
            **servers.environment,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "GPU_MANAGER_STORE": f"sqlite:///{tmp_path / 'state.db'}",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told, *lines, status = done.stdout.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        *(f"+ server {host.partition(':')[0]}" for host in hosts.values()),
        f"applied to sqlite:///{tmp_path / 'state.db'}",
    ]
    assert told == "servers.toml: 2 servers with 4 GPUs"
    assert [server["total_gpus"] for server in json.loads(status)["servers"]] == [2, 2]
    written = (tmp_path / "servers.toml").read_text()
    own = re.sub(r"^(cpus|memory_mib) = \d+$(?=\n(memory_mib|\n))", r"\1 = …", written, flags=re.MULTILINE)
    assert own == of_the_page(inventory, hosts)


@pytest.mark.e2e
def test_the_page_verifies_and_adopts_a_server(
    servers: Servers, embedded_redis: RedisServer, tmp_path: Path
) -> None:
    servers.states[0].write(gpu(0), gpu(1))
    path = tmp_path / "servers.toml"
    done = discover(servers.hosts[0], *servers.login, "--output", path, environment=servers.environment)
    assert done.returncode == 0, done.stderr
    path.write_text(path.read_text().replace('name = "127.0.0.2"', 'name = "gpu-a"'))
    verify, adopt = (
        text.replace("--user gpu --key ~/.ssh/gpu_key", " ".join(servers.login))
        for text in blocks("sh")
        if "gpu-manager verify" in text or "gpu-manager adopt" in text
    )
    environment = {
        **servers.environment,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPU_MANAGER_STORE": embedded_redis.fresh_url(),
    }
    GPUResourceManager.from_url(environment["GPU_MANAGER_STORE"], inventory=path).close()

    def run(script: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-c", script]
        return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=120)

    servers.states[0].write(gpu(1), gpu(2))
    told = run(verify + adopt)
    assert told.stderr == ""
    assert [line.split(":")[1] for line in told.stdout.splitlines()] == [
        " different",
        " drained, 0 still running",
        " 2 GPUs adopted",
        " takes leases again",
    ]
    assert run(verify).stdout == "gpu-a: same: as in the inventory\n"
    with GPUResourceManager.from_url(environment["GPU_MANAGER_STORE"]) as manager:
        assert [gpu["uuid"] for gpu in manager.server("gpu-a")["gpus"]] == [uuid_of(1), uuid_of(2)]
        with pytest.raises(InvalidRequestError, match=r"were adopted at 2\d{3}-.*--force"):
            manager.apply(ClusterFiles([path]).form)  # the old file, with the GPU that was replaced


def test_the_pages_commands_for_one_machine_run(state: State, tmp_path: Path) -> None:
    commands = [text.strip() for text in blocks("sh") if "--key" not in text][1:]
    by_memory, by_hand, looked = commands.pop(1), commands.pop(2), commands.pop(-1)
    assert looked == "gpu-manager top"
    inventory = tmp_path / "servers.toml"
    inventory.write_text('[[servers]]\nname = "gpu-a"\ngpus = 1\ngpu_memory_mib = 40960\ncpus = 1\n')
    url = f"sqlite:///{tmp_path / 'state.db'}"
    GPUResourceManager.from_url(url, inventory=inventory).close()
    store = f"gpu-manager --store {url}"
    script = "\n".join(text.replace("gpu-manager", store) for text in (by_hand, looked, by_memory))
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = subprocess.run(["bash", "-ec", script], env=path, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(
        "gpu-a: GPU 0 drained\ngpu-a: GPU 0 takes leases again\ngpu-a  IDLE  1 × GPU  no report\n"
    )
    assert re.search(r": GPU 0 and 1 CPU of gpu-a, fencing token \d+\n$", shown.stdout)
    assert commands == [
        "gpu-manager discover",
        "gpu-manager discover --json",
        "gpu-manager agent --server gpu-a --once --json",
    ]
    for text in commands:
        _, *arguments = text.split()
        done = subprocess.run(
            [sys.executable, "-m", "resource_manager.cli", *arguments], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert uuid_of(1) in done.stdout


@pytest.mark.e2e
def test_a_probe_after_login_takes_little_time(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 0.3 s at best of ten, or as much more as the machine is slower at starting Python by ssh."""
    from resource_manager.agent.running import program, read_answer
    from resource_manager.jobs.launchers.ssh_python import SSHPython

    monkeypatch.setenv("HOME", servers.environment["HOME"])
    servers.states[3].write(*(gpu(each, "nvlink 0 switch 00000000:C1:00.0") for each in range(8)))
    _, user, _, key = servers.login
    server = SSHPython(servers.hosts[3], user=user, key_file=key)
    server.run("pass", 30.0)  # the login
    nothing: list[float] = []
    whole: list[float] = []
    for text, taken in [("pass", nothing), (program(), whole)] * 10:
        begun = time.monotonic()
        answer = server.run(text, 30.0)
        taken.append(time.monotonic() - begun)
        if taken is whole:
            assert len(read_answer(*answer).gpus) == 8
    server.close()
    print(f"by ssh: {min(nothing):.3f} s for a program that does nothing, {min(whole):.3f} s for the probe")
    assert min(whole) <= 0.3 * max(1.0, min(nothing) / 0.1)
