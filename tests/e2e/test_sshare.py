"""Fair use with memory against a real Slurm: `sshare` prints the same factors for the same trees and use.

Needs Debian's slurm-wlm and slurmdbd, munge and MariaDB. Each tree is a cluster of its own in slurmdbd; its
use is put where slurmctld keeps it between two starts, since real jobs would need days.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, filterfalse, islice
from pathlib import Path

import pytest

from resource_manager.scheduling.accounting.decayed_use import (
    Share,
    fair_tree_ranks,
    fair_usage_factors,
    level_fair_shares,
)
from tests.eventually import wait_for
from tests.faults.redis_servers import free_port
from tests.sql_servers import MariaDB

pytestmark = pytest.mark.e2e

TREES = int(os.environ.get("GPU_MANAGER_SSHARE_TREES", "200"))
PROGRAMS = ("slurmctld", "slurmdbd", "sacctmgr", "sshare", "munged")
PROTOCOL = 38 << 8
"""First word of the state files of Slurm 22.05, which the next two releases read too."""


@dataclass
class Slurm:
    """A munged and a slurmdbd, and a slurmctld for each question; all run as this user, on this host only."""

    folder: Path
    mariadb: MariaDB
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    loading: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        names = {
            name: self.folder / f"munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")
        }
        options = [f"--{name}={path}" for name, path in names.items()]
        self._run("munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}", *options)
        wait_for(names["socket"].exists)
        self.port = free_port()
        settings = f"""
            AuthType=auth/munge
            AuthInfo=socket={names["socket"]}
            DbdHost=localhost
            DbdPort={self.port}
            SlurmUser=root
            LogFile={self.folder / "dbd.log"}
            PidFile={self.folder / "dbd.pid"}
            StorageType=accounting_storage/mysql
            StorageHost=127.0.0.1
            StoragePort={self.mariadb.port}
            StorageUser=root
            StorageLoc=slurm_acct
        """
        (self.folder / "slurmdbd.conf").write_text(settings)
        (self.folder / "slurmdbd.conf").chmod(0o600)
        self._configure(self.folder, "ClusterName=none")
        self._run("slurmdbd", "-D", SLURM_CONF=str(self.folder / "slurmdbd.conf"))
        wait_for(lambda: self._ask("sacctmgr", "-n", "show", "cluster").returncode == 0)

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(timeout=30)

    def load(self, cluster: str, tops: Sequence[Share]) -> dict[str, int]:
        """Make a cluster with these accounts and return its users' numbers; a user has nobody below it."""
        lines = [f"Cluster - '{cluster}':Fairshare=1:QOS='normal'", "Parent - 'root'"]
        lines += ["User - 'root':DefaultAccount='root':AdminLevel='Administrator':Fairshare=1"]
        levels = [("root", tops)]
        for above, accounts in levels:
            lines.append(f"Parent - '{above}'")
            for account in accounts:
                kind, default = ("Account", "") if account.below else ("User", f":DefaultAccount='{above}'")
                lines.append(f"{kind} - '{account.name}'{default}:Fairshare={account.shares:g}")
                if account.below:
                    levels.append((account.name, account.below))
        path = self.folder / f"{cluster}.cfg"
        path.write_text("\n".join(lines) + "\n")
        with self.loading:  # several at once deadlock in the database, and have ended slurmdbd by a segfault
            done = self._ask("sacctmgr", "-i", "load", str(path))
            ids = self.ids(cluster)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ids.keys() >= {user.name for user in _users(tops)}
        return ids

    def ids(self, cluster: str) -> dict[str, int]:
        """Return the numbers of the cluster's users."""
        found = self._ask("sacctmgr", "-nP", "show", "assoc", f"cluster={cluster}", "format=id,user")
        return {user: int(number) for number, user in (line.split("|") for line in found.stdout.split())}

    def factors(
        self, cluster: str, ids: dict[str, int], tops: Sequence[Share], *, fair_tree: bool
    ) -> dict[str, str]:
        """Return what `sshare` prints as FairShare of each user; `ids` are their numbers."""
        state = self.folder / f"state-{cluster}-{fair_tree}"
        state.mkdir()
        (state / "assoc_usage").write_bytes(_usage_file({ids[user.name]: user.use for user in _users(tops)}))
        (state / "clustername").write_text(cluster)
        flags = "" if fair_tree else "PriorityFlags=NO_FAIR_TREE"
        settings = self._configure(state, f"ClusterName={cluster}", f"SlurmctldPort={free_port()}", flags)
        controller = self._run("slurmctld", "-D", "-i", SLURM_CONF=settings)
        try:
            wait_for(lambda: self._ask("sshare", "-h", SLURM_CONF=settings).returncode == 0)
            printed = self._ask("sshare", "-haP", "-o", "Account,User,FairShare", SLURM_CONF=settings)
        finally:
            controller.terminate()
            controller.wait(timeout=30)
            self.processes.remove(controller)
        assert printed.returncode == 0, printed.stderr
        rows = [line.strip().split("|") for line in printed.stdout.splitlines()]
        return {user: factor for _, user, factor in rows if user}

    def _configure(self, folder: Path, *own: str) -> str:
        settings = f"""
            SlurmctldHost={socket.gethostname()}(127.0.0.1)
            AuthType=auth/munge
            AuthInfo=socket={self.folder / "munge.socket"}
            CredType=cred/munge
            SlurmUser=root
            StateSaveLocation={folder}
            SlurmctldPidFile={folder / "pid"}
            SlurmctldLogFile={folder / "log"}
            AccountingStorageType=accounting_storage/slurmdbd
            AccountingStorageHost=localhost
            AccountingStoragePort={self.port}
            AccountingStoragePass={self.folder / "munge.socket"}
            PriorityType=priority/multifactor
            PriorityDecayHalfLife=0
            PriorityUsageResetPeriod=NONE
            PriorityWeightFairshare=1000
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            MpiDefault=none
            NodeName=n1 NodeAddr=127.0.0.1 State=DOWN
            PartitionName=p Nodes=ALL Default=YES
        """
        (folder / "slurm.conf").write_text("\n".join([settings, *own]))
        return str(folder / "slurm.conf")

    def _run(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        self.processes.append(process)
        return process

    def _ask(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **environment}
        return subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)


def _usage_file(uses: dict[int, float]) -> bytes:
    """Return slurmctld's file of raw use by association: big-endian, texts with their length and a 0."""

    def text(value: str) -> bytes:
        return struct.pack(">I", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack(">HQ", PROTOCOL, int(time.time()))]
    for number, use in uses.items():
        parts.append(struct.pack(">I", number) + text(f"{use:.6f}") + text("1=0") + struct.pack(">I", 0))
    return b"".join(parts)


def _users(accounts: Sequence[Share]) -> Iterator[Share]:
    for account in accounts:
        if account.below:
            yield from _users(account.below)
        else:
            yield account


def random_tree(rng: random.Random) -> list[Share]:
    """Return accounts up to four levels deep, with users as leaves; some used nothing, some the same."""
    numbers = count()

    def level(depth: int) -> list[Share]:
        found = []
        for _ in range(rng.randint(1, 4)):
            shares = float(rng.choice([1, 1, rng.randint(1, 100)]))
            if depth and rng.random() < 0.6:
                found.append(Share(f"a{next(numbers)}", shares, below=level(depth - 1)))
            else:
                use = float(rng.choice([0, 1000, rng.randint(1, 10**7)]))
                found.append(Share(f"u{next(numbers)}", shares, use))
        return found

    tops = range(rng.randint(1, 5))
    return [Share(f"a{next(numbers)}", float(rng.randint(1, 9)), below=level(3)) for _ in tops]


def has_equal_accounts(accounts: Sequence[Share]) -> bool:
    """Return True if siblings with others below them have the same finite level fair share.

    Slurm's page says that what is below them is compared together; 22.05 goes through one after the other.
    """
    levels = [level for level, account in level_fair_shares(accounts) if account.below and level < math.inf]
    return len(set(levels)) < len(levels) or any(has_equal_accounts(account.below) for account in accounts)


@pytest.fixture(scope="module")
def slurm(mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs {', '.join(missing)} (Debian: slurm-wlm, slurmdbd, munge)")
    if os.geteuid() != 0:
        pytest.skip("needs root, as slurmctld reads only the state of its own user")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"), mariadb)
    slurm.start()
    yield slurm
    slurm.stop()


@pytest.mark.timeout(3600)
def test_sshare_prints_our_factors(slurm: Slurm) -> None:
    def compare(number: int, tops: list[Share]) -> None:
        cluster, accounts = f"c{number}", [*tops, Share("root", 1.0)]  # each cluster has the user root
        ids = slurm.load(cluster, tops)
        factors = fair_usage_factors(accounts)
        expected = {user.name: f"{factors[user.name]:.6f}" for user in _users(accounts)}
        assert slurm.factors(cluster, ids, tops, fair_tree=False) == expected, number
        ranks = fair_tree_ranks(accounts)
        taken = sorted(ranks[name] for name in expected)
        turns = {name: f"{1 - taken.index(ranks[name]) / len(taken):.6f}" for name in expected}
        assert slurm.factors(cluster, ids, tops, fair_tree=True) == turns, number

    rng = random.Random(22)
    trees = (random_tree(rng) for _ in count())
    chosen = list(islice(filterfalse(has_equal_accounts, trees), TREES))
    with ThreadPoolExecutor(4) as pool:  # they wait more than they compute
        for number, _ in enumerate(pool.map(compare, count(), chosen)):
            print(f"{number + 1} of {TREES} trees agree", flush=True)
