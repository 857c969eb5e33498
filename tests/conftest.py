"""Fixtures for all tests, and a temporary home for Airflow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

from tests.builders import Clock
from tests.eventually import TIMEOUT_FACTOR
from tests.redis_server import (
    embedded_redis,
    own_redis,
    own_redis_of_each_release,
    redis_url,
    system_redis,
)
from tests.small_disk import small_disk_at
from tests.sql_servers import mariadb, mysql, postgresql, sqlite

if TYPE_CHECKING:
    from resource_manager.core.models import Request
    from resource_manager.manager.demand import Demand

__all__ = [
    "embedded_redis",
    "mariadb",
    "mysql",
    "own_redis",
    "own_redis_of_each_release",
    "postgresql",
    "redis_url",
    "sqlite",
    "system_redis",
]

ROOT = Path(__file__).parent.parent

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Airflow creates its home on import, so the variables are set before any test is collected.
_airflow_home = tempfile.TemporaryDirectory(prefix="airflow-home-")
os.environ["AIRFLOW_HOME"] = _airflow_home.name
# A mark of a state that was served in another run means nothing in this one.
os.environ["XDG_STATE_HOME"] = _airflow_home.name
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"

# Where Python may not keep what it compiles, each of the many processes that tests start compiles the product
# again, which takes longer than most of them do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As `gpu-simulate` sets it: for small matrices threads of BLAS only wait for each other, which cost a minute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The gate runs the same examples each time, also on a slow machine; `explore` draws new ones.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", PATIENT, derandomize=True)
settings.register_profile("explore", PATIENT)
settings.load_profile("gate")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        # It draws constants of the modules that are loaded, which depend on the tests that ran before.
        HypothesisProvider._local_constants = Constants()  # type: ignore[assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with most slow tests, then those with the longest limit, then those with most tests, first.

    A long file that begins last is what the other processes wait for, if several share the files.
    """
    default_s = config.getoption("timeout")
    default_s = float(config.getini("timeout")) if default_s is None else default_s
    limits_s: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        limit_s = (mark.args[0] if mark else default_s) * TIMEOUT_FACTOR
        item.add_marker(pytest.mark.timeout(limit_s), append=False)
        limits_s[item.path] = max(limit_s, limits_s.get(item.path, 0.0))
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        all_of = Counter(item.path for item in items)
        items.sort(key=lambda item: (-slow[item.path], -limits_s[item.path], -all_of[item.path], item.path))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public traces, beside the repository or named by SHARED_DATA."""
    folder = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"public data not found at {folder}; set SHARED_DATA to its folder")
    return folder


@pytest.fixture
def set_wall_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[float], float]], None]:
    """Return a function that has this machine's wall clock show that of the true time."""
    true_time = time.time
    return lambda shown: monkeypatch.setattr(time, "time", lambda: shown(true_time()))


@pytest.fixture
def as_another_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which this process counts as one of another user."""
    own = os.geteuid()
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: own + 1)


@pytest.fixture
def built_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Demand, Request]]:
    """Demands that reached a manager, each with the request that was made of it."""
    from resource_manager.manager import requests

    made: list[tuple[Demand, Request]] = []
    build_request = requests.build_request

    def note(demand: Demand, *more: Any, **options: Any) -> Request:
        made.append((demand, build_request(demand, *more, **options)))
        return made[-1][1]

    monkeypatch.setattr(requests, "build_request", note)
    return made


@pytest.fixture
def connect_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Return connect_by(opened): from then on `opened(hook)` opens every connection to a GPU manager."""
    from resource_manager.airflow.hook import GPUManagerHook

    return lambda opened: monkeypatch.setattr(GPUManagerHook, "get_conn", opened)


@pytest.fixture
def connect(connect_by: Callable[[Callable[[Any], Any]], None]) -> Callable[[Any], None]:
    """Return connect(manager): from then on every connection to a GPU manager leads to that one."""
    return lambda manager: connect_by(lambda hook: manager)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the pauses of a command that repeats; none lasts, and the third is interrupted."""
    from resource_manager.cli.signals import Interrupted, Signals

    made: list[float] = []

    def nap(signals: Signals, seconds: float) -> None:
        made.append(seconds)
        if len(made) == 3:
            raise Interrupted(130)

    monkeypatch.setattr(Signals, "pause", nap)
    return made


@pytest.fixture
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of this process's temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    with small_disk_at(tmp_path / "small", "size=3m") as folder:
        yield folder


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a group of its own, of which no launcher knows."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def without_a_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user of this process is a number without a name, as in containers."""
    from resource_manager.manager.commit import asking

    def unknown(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for cached in (asking.user_name, asking.this_user):
        cached.cache_clear()
    yield
    for cached in (asking.user_name, asking.this_user):
        cached.cache_clear()
