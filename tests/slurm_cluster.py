"""A real Slurm of Debian on one machine: munged, slurmctld and a slurmd for each of its nodes."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom

import pytest

from demo.stack import free_ports
from tests.eventually import wait_for
from tests.sql_servers import MariaDB, running_sql

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
{accounting}
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


DATABASE = """
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadb.port}
StorageUser=root
LogFile={home}/slurmdbd.log
PidFile={home}/slurmdbd.pid
"""


class SlurmCluster:
    """Four nodes of four GPUs each, which are links to /dev/null, in a state folder of its own."""

    def __init__(self, home, kept_s=300, mariadb=None):
        """With a server of MariaDB it has accounts and QOS, which every job needs then."""
        self.home = home
        self.mariadb = mariadb
        self._children = {}
        self.environment = {"SLURM_CONF": f"{home}/slurm.conf"}
        ports = _consecutive_ports(len(NODES))
        database_port = free_ports(1)[0]
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
            accounting="AccountingStorageType=accounting_storage/none"
            if mariadb is None
            else "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
            f"AccountingStoragePort={database_port}\nAccountingStoragePass={home}/munge.sock\n"
            "AccountingStorageEnforce=associations,limits,qos\nAccountingStorageTRES=gres/gpu",
        )
        if mariadb is not None:
            (home / "slurmdbd.conf").write_text(
                DATABASE.format(home=home, port=database_port, mariadb=mariadb)
            )
            (home / "slurmdbd.conf").chmod(0o600)
        (home / "slurm.conf").write_text(text)

    def start(self):
        """Start all; return once its nodes take jobs."""
        munged = ["munged", "--force", "--foreground", f"--socket={self.home}/munge.sock"]
        files = {"key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munge.seed"
        self._spawn("munged", [*munged, *(f"--{name}={self.home}/{file}" for name, file in files.items())])
        wait_for(lambda: (self.home / "munge.sock").exists(), 20, "munged")
        if self.mariadb is not None:
            self.start_database()
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def start_database(self):
        """Start slurmdbd; return once it answers."""
        self._spawn("slurmdbd", ["slurmdbd", "-D"])
        # It exits with 0 whether it gets an answer or not.
        wait_for(lambda: "root" in self.ask("sacctmgr -n -P show user", check=False), 60, "slurmdbd")

    def start_controller(self):
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", f"{self.home}/slurm.conf"])

    def start_node(self, node):
        self._spawn(node, ["slurmd", "-D", "-N", node, "-f", f"{self.home}/slurm.conf"])

    def clear(self):
        """End all jobs, start what a test left killed, and return once all nodes are idle.

        A controller that is killed just after the start of a job starts it again, and drains the node that
        has it as "Duplicate jobid", until an administrator resumes it.
        """
        if "slurmctld" not in self._children:
            self.start_controller()
        for node in NODES:
            if node not in self._children:
                self.start_node(node)
        self.cancel_all()
        self.wait_for_nodes()

    def wait_for_nodes(self):
        """Return once all nodes are idle; those that are drained are resumed."""

        def are_idle():
            for node in self._nodes("drain"):
                self.ask(f"scontrol update nodename={node} state=resume", check=False)
            return len(self._nodes("idle")) == len(NODES)

        wait_for(are_idle, 60, "the nodes of Slurm")

    def _nodes(self, state):
        return self.ask(f"sinfo -h -N -p gpu -t {state} -o %N", check=False).split()

    def kill(self, name):
        """Kill a daemon."""
        self._children[name].kill()
        self._children.pop(name).wait()

    def kill_controller(self):
        """Kill the controller once its state has the jobs of now: it would give a number again."""
        began = time.time()
        self.ask("squeue -h -o %i | xargs -rI % scontrol update job=% nice=0")
        wait_for(lambda: (self.home / "state" / "job_state").stat().st_mtime > began, 30, "Slurm's state")
        self.kill("slurmctld")

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
        wait_for(lambda: "UP" in self.ask("scontrol ping", check=False), 60, "slurmctld")
        for signal in ("--full --signal=KILL", ""):
            self.ask(f"squeue -h -o %i | xargs -r scancel {signal}", check=False)
        wait_for(lambda: self.ask("squeue -h -o %i") == "", 60, "the end of all jobs")

    def stop(self):
        for name in [*NODES, "slurmctld", "slurmdbd", "munged"]:
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
    """Return that many free ports in a row, as a range of nodes needs, by chance: others look, too."""
    firsts = range(21_000, 31_000, count)
    for first in SystemRandom().sample(firsts, len(firsts)):
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


@contextmanager
def slurm_at(home, **options):
    """Run a cluster in a folder."""
    cluster = SlurmCluster(home, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        with suppress(AssertionError):
            cluster.cancel_all()
        cluster.stop()


@pytest.fixture(scope="session")
def slurm_cluster():
    """Run one Slurm for all tests; import this fixture by name where `slurm` is used."""
    if os.geteuid() != 0 or not all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in PROGRAMS):
        pytest.skip("needs Slurm (Debian: slurm-wlm) and root")
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o711)  # Slurm is for all users of the machine; pytest's folders are its own user's
        with slurm_at(Path(home)) as cluster:
            yield cluster


@pytest.fixture
def slurm(slurm_cluster):
    """Return the Slurm of all tests, with no job on it and all nodes idle."""
    slurm_cluster.clear()
    return slurm_cluster


@pytest.fixture(scope="session")
def slurm_with_accounts(tmp_path_factory):
    """Run a Slurm with accounts and QOS; jobs that have ended are known to these alone after 2 s."""
    if os.geteuid() != 0 or not all(
        shutil.which(name, path="/usr/sbin:/usr/bin") for name in (*PROGRAMS, "slurmdbd")
    ):
        pytest.skip("needs Slurm with accounts (Debian: slurm-wlm slurmdbd) and root")
    with (
        running_sql(MariaDB) as mariadb,
        slurm_at(tmp_path_factory.mktemp("accounts"), mariadb=mariadb, kept_s=2) as cluster,
    ):
        yield cluster
