"""`gpu-manager top` in a real terminal (pexpect): what it draws, resizes to, and leaves behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pexpect
import psutil
import pytest

from resource_manager import GPUResourceManager
from resource_manager.agent.report_format import read_report
from resource_manager.fleet.receiving import ReportReceiver
from tests.agent.reporting import as_text, gpu, report, server
from tests.cli.programs import GPU_MANAGER
from tests.eventually import wait_for
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def manager(embedded_redis: RedisServer) -> Iterator[GPUResourceManager]:
    with GPUResourceManager.from_url(embedded_redis.fresh_url(), inventory=[server(gpus=2)]) as manager:
        yield manager


@pytest.fixture
def top(manager: GPUResourceManager) -> Iterator[pexpect.spawn]:
    terminal = terminal_of(manager)
    yield terminal
    terminal.close(force=True)


def terminal_of(manager: GPUResourceManager, kind: str = "xterm", way: tuple[str, ...] = ()) -> pexpect.spawn:
    command, *arguments = [*way, *GPU_MANAGER, "--store", manager.settings.store, "top", "--every", "0.5"]
    return pexpect.spawn(
        command,
        arguments,
        env={**os.environ, "TERM": kind, "COLUMNS": "", "LINES": ""},
        timeout=15,
        encoding="utf-8",
        dimensions=(24, 80),
        # As from a shell's prompt; tests that run in the background of a script have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def report_use(manager: GPUResourceManager, percent: int) -> None:
    gpus = (gpu(number, utilization_percent=percent) for number in (0, 1))
    text = as_text(report(manager.store.now(), *gpus))
    ReportReceiver(manager).receive(read_report(text))


def widths(drawn: str) -> set[int]:
    return {len(line) for line in SEQUENCE.sub("", drawn).splitlines() if line.strip()}


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_draws_anew_fits_the_terminal_and_leaves_it_as_it_was(
    top: pexpect.spawn, manager: GPUResourceManager, key: str
) -> None:
    top.expect_exact(ALTERNATE)
    top.expect_exact("gpu-a")
    assert manager.allocate_resources("train", 1, 1)
    report_use(manager, 37)
    top.expect("37 ?%")
    top.expect_exact("train")
    report_use(manager, 84)
    top.expect("84 ?%")
    top.expect_exact("\x1b[H")
    assert max(widths(top.before)) <= 80
    top.setwinsize(24, 60)
    wait_for(lambda: top.expect_exact("\x1b[H") == 0 and max(widths(top.before), default=80) <= 60)
    top.setwinsize(24, 120)
    wait_for(lambda: top.expect_exact("\x1b[H") == 0 and max(widths(top.before), default=0) > 80)
    top.send("x")
    top.send(key)
    top.expect_exact(BACK)
    top.expect(pexpect.EOF)
    top.close()
    assert (top.exitstatus, top.signalstatus) == (0, None)
    assert "Traceback" not in top.before


def test_q_ends_it_while_the_store_is_silent(
    top: pexpect.spawn, manager: GPUResourceManager, embedded_redis: RedisServer
) -> None:
    top.expect_exact("gpu-a")
    with embedded_redis.client() as admin:
        server = psutil.Process(admin.info("server")["process_id"])
    server.suspend()
    try:
        top.expect_exact("did not answer within 5 s", timeout=60)
        begun = time.monotonic()
        top.send("q")
        top.expect(pexpect.EOF)
        assert time.monotonic() - begun < 4
    finally:
        server.resume()
    top.close()
    assert top.exitstatus == 0


def test_a_terminal_that_cannot_be_drawn_on_gets_the_table_once(manager: GPUResourceManager) -> None:
    terminal = terminal_of(manager, "dumb")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert (terminal.exitstatus, "gpu-a" in terminal.before, "\x1b" in terminal.before) == (0, True, False)


def test_it_draws_until_ctrl_c_where_standard_input_is_closed(manager: GPUResourceManager) -> None:
    terminal = terminal_of(manager, way=("sh", "-c", 'exec "$@" <&-', "sh"))
    terminal.expect_exact("gpu-a")
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert (terminal.exitstatus, "Traceback" in terminal.before) == (0, False)
