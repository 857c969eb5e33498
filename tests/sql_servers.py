"""Real PostgreSQL, MariaDB and MySQL servers for tests, each in a folder and on a port of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.faults.redis_servers import free_port
from tests.shifted_clock import ShiftedClock


def postgresql_programs() -> Path | None:
    """Return the folder with initdb and postgres; None if there is no PostgreSQL."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    folders += [Path(found).resolve().parent] if found else []
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder of the databases of tests: on a disk they wait most of their time for each commit to be synced."""


class SqlServer:
    """A server process that a test may kill and start again; run as `user` where this is root."""

    user = ""
    scheme = ""

    def __init__(self, folder: Path | None = None, *, clock: ShiftedClock | None = None) -> None:
        self.clock = clock
        self.folder = Path(tempfile.mkdtemp(prefix="sql-", dir=IN_MEMORY)) if folder is None else folder
        self.folder.mkdir(exist_ok=True)
        self.run_as = self.user if os.geteuid() == 0 else None
        if self.run_as:
            shutil.chown(self.folder, self.run_as)
        self.port = free_port()
        self.prepare()
        self.start()

    @property
    def url(self) -> str:
        """The URL of the database's superuser."""
        raise NotImplementedError

    @property
    def socket(self) -> Path:
        """Its unix socket."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str:
        """Return what this machine lacks to run it; empty if nothing."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Create the data folder."""

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    def fresh_url(self) -> str:
        """Return the URL of an unused namespace."""
        return f"{self.url}?namespace={uuid.uuid4().hex}"

    def start(self) -> None:
        shifted = contextlib.nullcontext() if self.clock is None else self.clock.applied()
        with shifted, (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), user=self.run_as, stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + 60
        while not self.answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it without a word to anyone, as `kill -9` does."""
        pids = self.pids() if self.process.poll() is None else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def restart(self, away_s: float) -> None:
        """Crash it and start it again: connections are dropped and the log is replayed."""
        self.kill()
        time.sleep(away_s)
        self.start()

    def pids(self) -> list[int]:
        """Return the server and all its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str) -> None:
        subprocess.run(command, user=self.run_as, check=True, capture_output=True, cwd="/")


class Postgres(SqlServer):
    """One cluster; without `fsync`, as no test pulls the plug of the machine."""

    user = "postgres"

    def __init__(
        self, folder: Path | None = None, *, options: str = "", clock: ShiftedClock | None = None
    ) -> None:
        found = postgresql_programs()
        assert found is not None
        self.programs = found
        self.options = options
        super().__init__(folder, clock=clock)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def socket(self) -> Path:
        return self.folder / f".s.PGSQL.{self.port}"

    @classmethod
    def missing(cls) -> str:
        is_there = postgresql_programs() is not None
        return "" if is_there else "needs PostgreSQL's initdb and postgres (Debian: postgresql)"

    def prepare(self) -> None:
        initdb = str(self.programs / "initdb")
        self.run(initdb, "-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-sync")

    def command(self) -> Sequence[str]:
        options = f"-k {self.folder} -h 127.0.0.1 -p {self.port} -c fsync=off -c max_connections=300"
        return [
            str(self.programs / "postgres"),
            "-D",
            str(self.data),
            *options.split(),
            *self.options.split(),
        ]

    def answers(self) -> bool:
        ready = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False).returncode == 0

    def psql(self, statement: str, database: str = "postgres") -> str:
        """Return what a statement prints, run as the superuser."""
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", database]
        options = [*address, "-qAt", "-v", "ON_ERROR_STOP=1", "-c", statement]
        done = subprocess.run([str(self.programs / "psql"), *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


class MariaDB(SqlServer):
    """One MariaDB with the database `gpu_manager`."""

    user = "mysql"

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/gpu_manager"

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @classmethod
    def missing(cls) -> str:
        is_there = shutil.which("mariadbd") and shutil.which("mariadb-install-db")
        return "" if is_there else "needs mariadbd and mariadb-install-db (Debian: mariadb-server)"

    def prepare(self) -> None:
        self.run(
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            f"--tmpdir={self.folder}",
        )

    program = "mariadbd"

    def command(self) -> Sequence[str]:
        return [
            self.program,
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            f"--socket={self.socket}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--max-connections=300",
            "--innodb-buffer-pool-size=64M",
            f"--pid-file={self.folder / 'pid'}",
            f"--tmpdir={self.folder}",  # it begins with deleting the temporary tables there, also of others
        ]

    def answers(self) -> bool:
        return self._client("CREATE DATABASE IF NOT EXISTS gpu_manager").returncode == 0

    def sql(self, statement: str) -> str:
        """Return what a statement prints, run as the superuser."""
        done = self._client(statement)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _client(self, statement: str) -> subprocess.CompletedProcess[str]:
        address = ["--no-defaults", f"--socket={self.socket}", "-uroot", "-N", "-B"]
        return subprocess.run(["mariadb", *address, "-e", statement], capture_output=True, text=True)


class MySQL(MariaDB):
    """One MySQL, through MariaDB's client; Debian's mysqld is a MariaDB where that is installed."""

    program = "mysqld"

    @classmethod
    def missing(cls) -> str:
        needs = "needs MySQL's mysqld on the PATH, and the client mariadb"
        if not shutil.which(cls.program) or not shutil.which("mariadb"):
            return needs
        version = subprocess.run([cls.program, "--version"], capture_output=True, text=True).stdout
        return needs if "MariaDB" in version else ""

    def prepare(self) -> None:
        self.run(self.program, "--no-defaults", "--initialize-insecure", f"--datadir={self.folder / 'data'}")

    def command(self) -> Sequence[str]:
        # Its root is of localhost alone, so that name is looked up.
        options = [option for option in super().command() if option != "--skip-name-resolve"]
        return [*options, "--mysqlx=OFF", "--skip-log-bin", "--secure-file-priv="]


S = TypeVar("S", bound=SqlServer)


@contextmanager
def running_sql(kind: type[S], **options: Any) -> Iterator[S]:
    """Run a server of that kind; skip the test where there is none."""
    if missing := kind.missing():
        pytest.skip(missing)
    server = kind(**options)
    try:
        yield server
    finally:
        server.stop()


DATABASES = ("postgresql", "mariadb", *(() if MySQL.missing() else ("mysql",)))
"""Servers that tests of all databases ask for by their fixtures; MySQL only where it is."""


class SqliteFiles:
    """A SQLite file, which gives fresh URLs as servers do."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def fresh_url(self) -> str:
        return f"sqlite:///{self.folder}/state.db?namespace={uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def sqlite() -> Iterator[SqliteFiles]:
    with tempfile.TemporaryDirectory(prefix="sqlite-", dir=IN_MEMORY) as folder:
        yield SqliteFiles(folder)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgres]:
    """A PostgreSQL shared by all tests: each needs its own namespace."""
    with running_sql(Postgres) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """A MariaDB shared by all tests: each needs its own namespace."""
    with running_sql(MariaDB) as server:
        yield server


@pytest.fixture(scope="session")
def mysql() -> Iterator[MySQL]:
    """A MySQL shared by all tests: each needs its own namespace."""
    with running_sql(MySQL) as server:
        yield server
