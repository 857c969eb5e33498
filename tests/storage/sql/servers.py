"""A standby beside a PostgreSQL, and a pooler in front of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.eventually import wait_for
from tests.faults.redis_servers import free_port
from tests.sql_servers import Postgres


class Standby(Postgres):
    """A PostgreSQL that follows another one until it is promoted."""

    def __init__(self, primary: Postgres) -> None:
        self.primary = primary
        super().__init__()

    def prepare(self) -> None:
        self.run(
            str(self.programs / "pg_basebackup"),
            *("-h", "127.0.0.1", "-p", str(self.primary.port), "-U", "postgres"),
            *("-D", str(self.data), "-R", "-X", "stream", "-c", "fast"),
        )

    def promote(self) -> None:
        self.run(str(self.programs / "pg_ctl"), "promote", "-w", "-D", str(self.data))


class PgBouncer:
    """A pgbouncer in transaction mode, which gives each transaction any of two connections."""

    def __init__(self, server: Postgres) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        shutil.chown(self.folder, "postgres")
        self.port = free_port()
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(
            "[databases]\n"
            f"postgres = host=127.0.0.1 port={server.port} dbname=postgres user=postgres\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 200\nunix_socket_dir =\n"
        )
        settings.chmod(0o644)
        self.process = subprocess.Popen(
            ["pgbouncer", "-q", str(settings)],
            user="postgres",
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ready = [str(server.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        wait_for(lambda: subprocess.run(ready, check=False).returncode == 0, what="the start of pgbouncer")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)
