"""A real Slurm of Debian on one machine: munged, slurmctld and a slurmd for each of its nodes."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest

from demo.stack import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 4

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
OverTimeLimit=0
MinJobAge={kept_s}
MaxJobCount=10000
Epilog=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}] Sockets=1 CoresPerSocket=32 \
ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=24:00:00 State=UP PriorityTier=1
PartitionName=short Nodes=ALL MaxTime=10 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=24:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmCluster:
    """Four nodes of four GPUs each, which are links to /dev/null, in a state folder of its own."""

    def __init__(self, home, kept_s=300):
        self.home = home
        self._children = {}
        self.environment = {"SLURM_CONF": f"{home}/slurm.conf"}
        ports = _consecutive_ports(len(NODES))
        (home / "state").mkdir()
        key = home / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for number in range(GPUS_PER_NODE):
            (home / f"gpu{number}").symlink_to("/dev/null")
        (home / "gres.conf").write_text(f"NodeName=n[1-4] Name=gpu File={home}/gpu[0-{GPUS_PER_NODE - 1}]\n")
        text = CONFIGURATION.format(
            home=home,
            host=socket.gethostname(),
            controller_port=free_ports(1)[0],
            node_ports=f"{ports[0]}-{ports[-1]}",
            gpus=GPUS_PER_NODE,
            kept_s=kept_s,
        )
        (home / "slurm.conf").write_text(text)

    def start(self):
        """Start all; return once its nodes take jobs."""
        munged = ["munged", "--force", "--foreground", f"--socket={self.home}/munge.sock"]
        files = {"key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munge.seed"
        self._spawn("munged", [*munged, *(f"--{name}={self.home}/{file}" for name, file in files.items())])
        _wait(lambda: (self.home / "munge.sock").exists(), 20, "munged")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def start_controller(self):
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", f"{self.home}/slurm.conf"])

    def start_node(self, node):
        self._spawn(node, ["slurmd", "-D", "-N", node, "-f", f"{self.home}/slurm.conf"])

    def wait_for_nodes(self):
        """Return once all nodes take jobs."""
        asked = "sinfo -h -N -p gpu -t idle,mix,alloc -o %N"
        _wait(lambda: len(self.ask(asked, check=False).split()) == len(NODES), 60, "the nodes of Slurm")

    def kill(self, name):
        """Kill the controller, or the daemon of a node."""
        self._children[name].kill()
        self._children.pop(name).wait()

    def ask(self, command, check=True):
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(
            command, shell=True, env={**os.environ, **self.environment}, capture_output=True, text=True
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: {done.stderr}")
        return done.stdout

    def cancel_all(self):
        """End all jobs; return once none is left."""
        self.ask("scancel --full --signal=KILL --user=root; scancel --user=root", check=False)
        _wait(lambda: self.ask("squeue -h -o %i") == "", 60, "the end of all jobs")

    def stop(self):
        for name in [*NODES, "slurmctld", "munged"]:
            if (child := self._children.pop(name, None)) is None:
                continue
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _spawn(self, name, command):
        with (self.home / f"{name}.out").open("ab") as out:
            self._children[name] = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


def _consecutive_ports(count):
    """Return that many free ports in a row, as a range of nodes needs."""
    for first in range(21_000, 31_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, each in enumerate(sockets):
                each.bind(("127.0.0.1", first + number))
            return range(first, first + count)
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise AssertionError("no free ports")


def _wait(is_so, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come up"
        time.sleep(0.1)


@contextmanager
def slurm_at(home):
    """Run a cluster in a folder."""
    cluster = SlurmCluster(home)
    try:
        cluster.start()
        yield cluster
    finally:
        with suppress(AssertionError):
            cluster.cancel_all()
        cluster.stop()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Run one Slurm for all tests; import this fixture by name where it is used."""
    if os.geteuid() != 0 or not all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in PROGRAMS):
        pytest.skip("needs Slurm (Debian: slurm-wlm) and root")
    with slurm_at(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
