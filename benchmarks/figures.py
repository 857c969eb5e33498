"""Measure, and write docs/benchmarks.md: `make figures`, or `python benchmarks/figures.py [NAME …]`.

Figures go into benchmarks/results.json with date, machine and command; the page is written from that file.
Benchmarks that are not run keep the figures they have. `--data` is a folder with the public traces (`openb`,
`serverless`, as the pages of the simulators describe them); without it, benchmarks that need it are left
out. `--page` writes the page alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
NOT_MEASURED = "not measured"
DATA = "DATA"
"""Stands for the folder of the public traces in a command."""

INTRODUCTION = """\
# Benchmarks

<!-- Written by `make figures` from benchmarks/results.json: do not edit. -->

Every figure of speed that this project states is on this page, with the date, the machine and the command
that measured it. What [a flood](security.md#what-do-others-feel-of-a-flood) costs others stands apart.
`make figures` measures them again; `make figures FIGURES="core service"` measures some. Clients, Redis and
service share one machine. A target is the limit that the project set itself.

## Targets

| | met | not met | not measured | which are not met |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: its text, the path of its value in the figures, a format and the target."""

    label: str
    path: str
    shown: str
    target: str = ""

    def value(self, figures: Mapping[str, Any]) -> str:
        """Return the formatted value, "not measured" where the machine lacked what it needs."""
        found: Any = figures
        for key in self.path.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return NOT_MEASURED if found is None else self.shown.format(found)

    def is_met(self, value: str) -> bool | None:
        """Return whether the formatted value, in the unit of the target, meets it; None if not measured."""
        if value == NOT_MEASURED:
            return None
        measured = _numbers(value)[0]
        limits = _numbers(self.target)
        if self.target.startswith("≤"):
            return measured <= limits[0]
        if self.target.startswith("≥"):
            return measured >= limits[0]
        return limits[0] <= measured <= limits[-1]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command that prints JSON, and the table made of it."""

    title: str
    about: str
    command: str
    rows: tuple[Row, ...]


PAIRS, PER_S, MS, S = "{:,.0f} pairs/s", "{:,.0f}/s", "{:,.1f} ms", "{:,.2f} s"

BETWEEN_JOBS = (
    ("a grant → the job's first line", "grant_to_first_line", "≤ 0.7 s"),
    ("a job's last line → the next grant", "last_line_to_next_grant", "≤ 0.5 s"),
    ("a job's last line → the next one's first", "last_line_to_next_first_line", "≤ 1.2 s"),
)

OF_DATABASES = (
    ("bare compare-and-set pair", "bare_pairs_per_s", PAIRS),
    ("part of it", "of_bare_pair", "{:.2f}", "≥ 0.5"),
    ("median of one call", "call_p50_ms", MS, "≤ 5 ms"),
    ("32 clients in 4 processes, part of it", "clients_32/of_bare_pair", "{:.2f}", "≥ 0.25"),
    ("32 clients in 4 processes, errors", "clients_32/errors", "{}", "0"),
    ("32 clients in 32 processes, part of it", "clients_32_processes/of_bare_pair", "{:.2f}", "≥ 0.25"),
    ("32 clients in 32 processes", "clients_32_processes/pairs_per_s", PAIRS),
    ("32 clients in 32 processes, errors", "clients_32_processes/errors", "{}", "0"),
    ("times slower after a million changes", "slower_with_a_million_changes", "{:.2f}", "≤ 1.2"),
)

PEERS = (
    ("this", "this manager, through Redis"),
    ("redis_lock", "redis-py lock alone"),
    ("slurm", "Slurm, C API"),
    ("slurm_with_epilog", "Slurm, C API, with an epilog"),
    ("ray", "Ray placement groups"),
    ("ray_tuned", "Ray placement groups, tuned"),
)
"""Schedulers of benchmarks/peers.py, as the page calls them."""

BENCHMARKS: dict[str, Benchmark] = {
    "core": Benchmark(
        "Manager and stores",
        "A pair is an allocation and its release. The yardstick is a bare redis-py lock, acquired and "
        "released, in the same run.",
        "gpu-manager bench --json",
        (
            Row("redis-py lock", "redis/lock_pairs_per_s", PAIRS),
            Row("through Redis, one client, 4 servers", "redis/pairs_per_s_4_servers", PAIRS),
            Row("the same, part of the lock's rate", "redis/of_lock_4_servers", "{:.2f}", "≥ 0.6"),
            Row("10,000 servers, part of the rate at 4", "redis/of_4_servers_at_10000", "{:.2f}", "≥ 0.95"),
            Row("100 clients (10 processes of 10 threads)", "clients/pairs_per_s", PAIRS, "≥ 500 pairs/s"),
            Row("the same, median of one call", "clients/p50_s", S),
            Row("the same, 99th percentile of one call", "clients/p99_s", S, "≤ 1 s"),
            Row("the same, errors", "clients/errors", "{}", "0"),
            Row("in memory, first_fit, 4 servers", "memory/first_fit_4_servers_per_s", PAIRS, "≥ 100,000"),
            Row(
                "in memory, best_fit, 1,000 servers", "memory/best_fit_1000_servers_per_s", PAIRS, "≥ 50,000"
            ),
            Row(
                "memory of the state of 10,000 servers × 8 GPUs",
                "memory/state_10000_servers_mb",
                "{:.0f} MB",
                "≤ 150 MB",
            ),
        ),
    ),
    "contention": Benchmark(
        "Contention",
        "Many clients on one Redis, as parts of the pairs that one client makes of a bare redis-py lock in "
        "the same run. A client that is refused asks again at once; only granted and released pairs count.",
        "python -m benchmarks.contention",
        (
            Row("100 clients in 10 processes, all fit", "fit/of_lock", "{:.2f}", "≥ 0.4"),
            Row("the same, 99th percentile of one call", "fit/p99_s", S, "≤ 0.2 s"),
            Row("the same, slowest client of the mean", "fit/slowest_client_of_mean", "{:.2f} ×", "≤ 2 ×"),
            Row("the same, six times more asked than there is", "scarce/of_lock", "{:.2f}", "≥ 0.3"),
            Row("the same, 99th percentile of one call", "scarce/p99_s", S, "≤ 0.2 s"),
            Row("1,000 clients on asyncio in 10 processes", "many/of_lock", "{:.2f}", "≥ 0.4"),
            Row("the same, 99th percentile of one call", "many/p99_s", S, "≤ 3 s"),
            Row("the same, errors", "many/errors", "{}", "0"),
            Row("one client beside 10,000 pending, part of none", "pending/ratio", "{:.2f}", "≥ 0.5"),
            Row(
                "32 clients on 16 places: freed to known, median", "handover/p50_ms_from_commit", MS, "≤ 5 ms"
            ),
        ),
    ),
    "backfill": Benchmark(
        "Backfill",
        "One process, in memory: 30,000 jobs on 100 servers of 8 GPUs that ask for 1.2 times what there is, "
        "and a pass after one release with 10,000 pending requests and 1,000 servers.",
        "python -m benchmarks.backfill",
        (
            Row("the replay by `fifo`, processor time", "replay/fifo_s", S),
            Row("the replay by `priority+backfill`, processor time", "replay/backfill_s", S),
            Row("times that by `fifo`", "replay/times_fifo", "{:.1f}", "≤ 5"),
            Row("a pass after a release, median", "pass_after_release_ms/p50", MS, "≤ 20 ms"),
        ),
    ),
    "gangs": Benchmark(
        "Gangs",
        "One process, in memory: gangs of 64 of 10,000 servers, and passes over 1,000 pending gangs.",
        "python -m benchmarks.gangs",
        (
            *(
                Row(f"a gang of 64 by `{name}`, median", f"grant_{name}/p50", MS, "≤ 10 ms")
                for name in ("first_fit", "best_fit", "fgd")
            ),
            Row("a pass by priority, median", "pass_priority/p50", MS, "≤ 50 ms"),
            Row("a pass with backfill, median", "pass_priority_backfill/p50", MS, "≤ 50 ms"),
        ),
    ),
    "preemption": Benchmark(
        "Victims",
        "One process, in memory: choosing victims among 11,600 leases, and passes over the queue where 1,600 "
        "leases run and no request can have any.",
        "python -m benchmarks.preemption",
        (
            *(
                Row(
                    f"victims for a request of {gpus} GPU(s), median",
                    f"victims_{gpus}_gpus/p50",
                    MS,
                    "≤ 20 ms",
                )
                for gpus in (1, 8)
            ),
            Row("a pass without requests, median", "in_vain_0_and_0_gangs/p50", MS),
            *(
                Row(
                    f"a pass over {requests} requests and {gangs} gangs in vain, median",
                    f"in_vain_{requests}_and_{gangs}_gangs/p50",
                    MS,
                    "≤ 5 ms",
                )
                for requests, gangs in ((32, 0), (32, 4), (500, 8))
            ),
        ),
    ),
    "stores": Benchmark(
        "Stores and locks without the manager",
        "Allocator and store alone; the lock is this project's fair one on Redis, the yardstick as above.",
        "python benchmarks/stores.py",
        (
            Row("redis-py lock", "redis_py_lock_pairs_per_s", PAIRS),
            Row("our lock, part of that rate", "our_lock_ratio", "{:.2f}"),
            Row("Redis store, 4 servers, part of that rate", "redis_4_servers_ratio", "{:.2f}"),
            Row("Redis store, 10,000 servers, part of that rate", "redis_10000_servers_ratio", "{:.2f}"),
            Row("reading the whole state of 10,000 servers", "redis_10000_servers_full_read_s", S),
            Row("memory store, 4 servers", "memory_4_servers_pairs_per_s", PAIRS),
            Row("100 threads, each with its own connection, on Redis", "threads_100/pairs_per_s", PAIRS),
            Row("the same, 99th percentile of a pair", "threads_100/pair_p99_s", S),
            Row("the same, errors", "threads_100/errors", "{}", "0"),
            *(
                Row(f"{title}, {measured}", f"databases/{title.lower()}/{path}", *shown)
                for title in ("PostgreSQL", "MariaDB", "SQLite")
                for measured, path, *shown in OF_DATABASES
            ),
        ),
    ),
    "service": Benchmark(
        "REST service and console",
        "`gpu-manager serve` on Redis, called over HTTP from the same machine.",
        "gpu-manager bench --http --json",
        (
            Row("`POST /api/allocate`, 4 servers, one client, median", "one_client/p50_ms", MS, "≤ 5 ms"),
            Row("the same, 99th percentile", "one_client/p99_ms", MS, "≤ 30 ms"),
            Row("50 clients", "clients/requests_per_s", "{:,.0f} requests/s", "≥ 300 requests/s"),
            Row("the same, 99th percentile", "clients/p99_ms", MS),
            Row("the same, errors", "clients/errors", "{}", "0"),
            Row("`GET /api/status`, 1,000 servers", "many_servers/status_ms", MS, "≤ 50 ms"),
            Row("`GET /api/queue`, 1,000 servers", "many_servers/queue_ms", MS),
            Row(
                "`GET /api/task` of each of 200 pending in turn, 1,000 servers", "many_servers/pending_ms", MS
            ),
            Row("`GET /metrics`, 1,000 servers", "many_servers/metrics_ms", MS),
            Row("console, 1,000 servers, the page", "many_servers/console_ms", MS),
            Row(
                "console, 1,000 servers, first paint in Chromium",
                "many_servers/console_first_paint_ms",
                "{:,.0f} ms",
                "≤ 500 ms",
            ),
            Row(
                "the same, end of a lease until its row is painted",
                "many_servers/console_update_ms",
                MS,
                "≤ 50 ms",
            ),
            Row("the same, layout shift", "many_servers/console_layout_shift", "{:.2f}", "0"),
        ),
    ),
    "agents": Benchmark(
        "Agents of servers",
        "1,000 servers with 8 GPUs report every 10 s to one service on Redis, a quarter of them with a "
        "lease. The one agent whose cost is measured is the real one, with its probe on a stand-in for "
        "NVIDIA's library; a request waits for the GPUs whose job and lease end.",
        "python benchmarks/agents.py",
        (
            Row("part of a core that the service takes", "service_core_percent", "{:.0f} %", "≤ 25 %"),
            Row("allocation over HTTP, median", "allocate_p50_ms", MS),
            Row("the same, of that without agents", "allocate_ratio", "{:.2f}", "≤ 1.2"),
            Row("reports refused or lost", "errors", "{}", "0"),
            Row("one agent, part of a core", "agent_core_percent", "{:.2f} %", "≤ 1 %"),
            Row("one agent and its probe, memory", "agent_rss_mib", "{:.0f} MiB", "≤ 60 MiB"),
            Row("freed GPUs to the next grant, median", "granted_p50_s", S),
            Row("the same, longest", "granted_max_s", S, "≤ 2 s"),
            Row("probe of 8 GPUs, median", "probe_p50_s", S, "≤ 0.3 s"),
        ),
    ),
    **{
        f"asking_{jobs}": Benchmark(
            f"Agents that ask for jobs, {jobs} on each server",
            "1,000 agents report every 10 s and ask which jobs should be on their servers, a question that "
            "waits for 45 s where nothing changes, at one service on Redis; all begin within 10 s.",
            f"python benchmarks/agents.py --jobs {jobs} --seconds 60",
            (
                Row("part of a core that the service takes", "service_core_percent", "{:.0f} %", target),
                Row("a report, median", "report_p50_ms", MS),
                Row("reports refused or lost", "errors", "{}", "0"),
                Row("questions refused", "refused_questions", "{}", "0"),
            ),
        )
        for jobs, target in ((0, "≤ 35 %"), (8, "≤ 60 %"))
    },
    "agent_jobs": Benchmark(
        "Jobs that agents run",
        "A real agent with a service on Redis: 20 jobs that ask for all 8 GPUs wait for each other, by what "
        "they print and when they were granted; 200 jobs without GPUs run on one server.",
        "python benchmarks/agents.py --run-jobs",
        (
            Row("grant to the first line, median", "granted_to_line_p50_s", S, "≤ 0.5 s"),
            Row("the same, longest", "granted_to_line_max_s", S),
            Row("last line to the first of the next job, median", "line_to_line_p50_s", S, "≤ 0.8 s"),
            Row("the same, longest", "line_to_line_max_s", S),
            Row("200 jobs, submitted one by one, until all have begun", "all_begun_s", "{:.0f} s"),
            Row("part of a core that they cost their agent", "agent_of_jobs_core_percent", "{:.0f} %"),
        ),
    ),
    "imports": Benchmark(
        "Imports",
        "Processor time of a fresh process, best of five, less that of a bare interpreter or of one that has "
        "imported Airflow's own part. Airflow reads DAG files again and again, and loads the plugin in "
        "each of its processes.",
        "python benchmarks/imports.py",
        (
            Row("`resource_manager` with the manager", "core", "{:,.0f} ms"),
            Row("the same with the Redis store", "redis", "{:,.0f} ms"),
            Row("the service's app", "service", "{:,.0f} ms"),
            Row("`gpu-simulate replay`", "simulator", "{:,.0f} ms"),
            Row("`resource_manager.airflow` in a DAG file, no name used", "names_for_dags", "{:,.0f} ms"),
            Row("`GPUTrainingOperator`, beside Airflow's `BaseOperator`", "operator", "{:,.0f} ms"),
            Row("`@task.gpu`, beside the same", "decorator", "{:,.0f} ms"),
            Row("Airflow's `DAG` and `BaseOperator` themselves", "airflow_alone", "{:,.0f} ms"),
            Row("the plugin, beside Airflow's plugin manager", "plugin", "{:,.0f} ms"),
        ),
    ),
    "peers": Benchmark(
        "Side by side with other schedulers",
        "Grant 2 GPUs and 16 CPUs of 4 servers × 8 GPUs × 64 CPUs, 16 places, and release them, in a closed "
        "loop; no process is started, one scheduler after the other, medians of five. Slurm 22.05 is called "
        "through its C API (`slurm_allocate_resources_blocking`, `slurm_complete_job`); with an epilog it "
        "runs `/bin/true` on the server after each job, and looks for freed resources then. Ray's placement "
        "groups as they come, when Ray looks for freed resources ten times a second, and tuned, 1,000 times. "
        "Both do more with each grant, across machines, than this manager does; neither is made for many "
        "small grants a second. redis-py's lock is one place without a queue: who holds it takes it again.",
        "make --silent bench-peers",
        (
            *(Row(f"one client: {label}", f"{name}/one/pairs_per_s", PAIRS) for name, label in PEERS),
            *(
                row
                for name, label in PEERS
                if name != "redis_lock"
                for row in (
                    Row(f"32 clients: {label}", f"{name}/full/pairs_per_s", PAIRS),
                    Row("the same, 99th percentile of a pair", f"{name}/full/p99_s", "{:.2f} s"),
                )
            ),
            *(
                row
                for clients in (50, 100)
                for name, label in PEERS[:2]
                for row in (
                    Row(
                        f"{clients} clients hold the only place for 5 ms: {label}",
                        f"{name}/held_{clients}/pairs_per_s",
                        PAIRS,
                    ),
                    Row("the same, 99th percentile", f"{name}/held_{clients}/p99_s", "{:.2f} s"),
                    Row(
                        "the same, clients that never got it", f"{name}/held_{clients}/never_got_it", "{:.0f}"
                    ),
                )
            ),
        ),
    ),
    "airflow": Benchmark(
        "Waiting in Airflow",
        "A standalone Airflow on SQLite with four worker slots; times are those of the jobs' own clocks and "
        "the store's. The server of ssh and the engine of Docker are on the same machine.",
        "python benchmarks/waiting.py",
        (
            *(
                row
                for launcher in ("local", "ssh", "docker")
                for label, name, target in BETWEEN_JOBS
                for row in (
                    Row(f"{launcher}: {label}, median", f"{launcher}_{name}_s/p50", S, target),
                    Row("the same, slowest of ten", f"{launcher}_{name}_s/max", S),
                )
            ),
        ),
    ),
    "mapped": Benchmark(
        "Tasks that ask at once",
        "1,000 mapped tasks of a standalone Airflow on PostgreSQL with four worker slots; all GPUs are in "
        "use. Airflow itself bounds how soon they start: each has a worker process.",
        "python benchmarks/waiting.py --mapped",
        (
            Row("a task's start → its request in the queue, median", "start_to_queued_s/p50", S),
            Row("the slowest of them", "start_to_queued_s/max", S, "≤ 10 s"),
            Row("the first one's start → the last request", "first_start_to_last_queued_s", S),
            Row(
                "connections of the triggerer to Redis",
                "redis_connections_of_the_triggerer",
                "{}",
                "≤ 3",
            ),
        ),
    ),
    "triggerer": Benchmark(
        "A triggerer full of tasks",
        "The triggers of 500 tasks whose jobs run here, with a line of output each 10 s, and of 500 that "
        "wait, in one process, against a service on Redis; without what Airflow itself does for them.",
        "python benchmarks/waiting.py --load",
        (
            Row("the triggerer's part of a core", "triggerer_core_percent", "{:.0f} %", "≤ 25 %"),
            Row("its requests to the service", "requests_per_s", "{:.1f} a second", "≤ 5"),
            Row("the service's part of a core", "service_core_percent", "{:.0f} %"),
        ),
    ),
    "gaps": Benchmark(
        "GPUs between short jobs",
        "500 jobs of a second on 8 GPUs; the process that runs the triggers is killed three times, and its "
        "successor goes on. A gap is a GPU's time between two jobs, by their own clocks; a kill explains "
        "those that begin until each GPU has begun another job. Without what Airflow itself does: it starts "
        "the triggers of a dead triggerer again after 30 s.\n\n"
        "![When each GPU had a job, and the three kills](images/idle-gaps.png)",
        "python benchmarks/gaps.py --picture docs/images/idle-gaps.png",
        (
            Row("jobs that ran", "jobs", "{:,}"),
            Row("most runs of one job", "most_runs_of_a_job", "{}", "1"),
            Row("gap, median", "gap_p50_s", S),
            Row("longest gap that no kill explains", "gap_max_s", S, "≤ 3 s"),
            Row("longest gap of a kill", "gap_after_a_kill_max_s", S),
        ),
    ),
    "airflow_gaps": Benchmark(
        "GPUs between short jobs in Airflow",
        "500 jobs of 15 seconds on 8 GPUs, tasks of a standalone Airflow on PostgreSQL with four worker "
        "slots. Triggerer, scheduler with its workers, and triggerer again are killed and started. Gaps and "
        "kills are told apart as above; Airflow starts the triggers of a dead triggerer again after 30 s.\n\n"
        "![When each GPU had a job, and the three kills](images/idle-gaps-in-airflow.png)",
        "python benchmarks/gaps.py --airflow --picture docs/images/idle-gaps-in-airflow.png",
        (
            Row("jobs that ran", "jobs", "{:,}"),
            Row("gap, median", "gaps_s/p50", S),
            Row("longest gap that no kill explains", "gaps_s/max", S, "≤ 3 s"),
            Row("longest gap of a kill", "gaps_of_a_kill_s/max", S),
        ),
    ),
    "variable": Benchmark(
        "The store in an Airflow Variable",
        "In a task, through the execution API, on SQLite.",
        "python benchmarks/variable_store.py",
        (
            Row("allocate, median", "allocate_p50_ms", MS, "≤ 60 ms"),
            Row("allocate, 90th percentile", "allocate_p90_ms", MS),
            Row("release, median", "release_p50_ms", MS, "≤ 60 ms"),
            Row("release, 90th percentile", "release_p90_ms", MS),
        ),
    ),
    "soak": Benchmark(
        "A service kept busy",
        "200 requests a second on 1,000 servers with an archive of the history. The benchmark fails if "
        "memory, sockets, files, threads or latency grow from the second quarter to the last, or if the "
        "archive lacks a change. `--minutes 60` is the length to judge a release by.",
        "python benchmarks/soak.py --minutes 5 --rate 200 --servers 1000",
        (
            Row("requests", "requests", "{:,}"),
            Row("errors", "errors", "{}", "0"),
            Row("median, best minute of the last quarter", "p50_ms", MS),
            Row("99th percentile, the same minute's", "p99_ms", MS),
            Row("the service's processor time a request", "service_ms", MS),
            Row("the service's memory at the end", "service_mb", "{:.0f} MB"),
            Row("complaints", "problems", "{}", "0"),
        ),
    ),
    "replay": Benchmark(
        "Simulator: replay of openb",
        "Pods placed a second of processor time, commits included, the best of five runs on one core. The "
        "published simulator takes about ten minutes for the same run, some 18 pods a second.",
        f"python benchmarks/replay.py --data {DATA}/openb --json",
        (
            Row("fgd", "fgd", PER_S, "≥ 8,000/s"),
            *(
                Row(name, name, PER_S, "≥ 50,000/s")
                for name in ("best_fit", "dot_product", "gpu_packing", "gpu_clustering", "random")
            ),
        ),
    ),
    "estimates": Benchmark(
        "Estimated runtimes",
        "Runs of the last half of each trace, each estimated when it begins from what ended before. Losses "
        "and widths are parts of those of the plain quantiles of the last 20 runs of the same class, team "
        "and shape, whose intervals are too narrow, and of the same quantiles calibrated to hold four of "
        "five; the error of the median is a part of that of the median of the last 20 runs. In the Pollux "
        "trace equal jobs run equally long: plain quantiles are exact, and no part of their loss is told. "
        "See [estimates](estimates.md).",
        f"python benchmarks/estimates.py --data {DATA} --json",
        tuple(
            row
            for trace in ("openb", "pollux", "shockwave", "sample")
            for row in (
                Row(f"{trace}: estimates", f"{trace}/estimates", "{:,}"),
                Row(f"{trace}: unknown", f"{trace}/unknown_percent", "{:.1f} %", "≤ 10 %"),
                Row(f"{trace}: inside the interval", f"{trace}/coverage_percent", "{:.1f} %", "77 to 83 %"),
                Row(f"{trace}: the same, plain quantiles", f"{trace}/plain_coverage_percent", "{:.1f} %"),
                Row(f"{trace}: the same, calibrated", f"{trace}/calibrated_coverage_percent", "{:.1f} %"),
                *(
                    Row(
                        f"{trace}: the same, {way} team or size",
                        f"{trace}/group_{way}_percent",
                        "{:.1f} %",
                        "73 to 87 %",
                    )
                    for way in (("lowest", "highest") if trace == "openb" else ())
                ),
                Row(
                    f"{trace}: pinball loss, part of the plain one",
                    f"{trace}/of_plain_loss",
                    "{:.2f}",
                    "≤ 0.9",
                ),
                Row(f"{trace}: the same, of the calibrated one", f"{trace}/of_calibrated_loss", "{:.2f}"),
                Row(f"{trace}: the same of logarithms", f"{trace}/of_plain_log_loss", "{:.2f}"),
                Row(
                    f"{trace}: median width, part of the plain one",
                    f"{trace}/of_plain_width",
                    "{:.2f}",
                    "≤ 1",
                ),
                Row(f"{trace}: the same, of the calibrated one", f"{trace}/of_calibrated_width", "{:.2f}"),
                Row(f"{trace}: error of the median, part", f"{trace}/of_median_error", "{:.2f}"),
            )
        ),
    ),
    "starts": Benchmark(
        "Estimated starts",
        "How often a queue is played forward with drawn runtimes in two seconds of processor time; 40 times "
        "are enough. See [estimates](estimates.md).",
        "python benchmarks/starts.py --json",
        tuple(
            row
            for size, text in (
                ("long", "500 pending, 1,000 servers"),
                ("announced", "the same with 500 announced"),
                ("short", "50 pending, 30 servers"),
            )
            for order in ("priority", "backfill")
            for row in (
                Row(f"{text}, {order}: plays", f"{size}_{order}/plays", "{}", "40"),
                Row(f"{text}, {order}: processor time", f"{size}_{order}/seconds", "{:.1f} s", "≤ 2 s"),
                *(
                    (Row(f"{text}, {order}: when they arrive", f"{size}_{order}/arrivals_ms", MS),)
                    if size == "announced"
                    else ()
                ),
            )
        ),
    ),
    "start_coverage": Benchmark(
        "Estimated starts that came true",
        "Jobs of a trace are submitted as they arrive, nothing known at the begin; each that has to wait is "
        "given an estimate, and starts. 40 servers: of four GPUs for Pollux, of one for Shockwave. Widths "
        "are parts of the estimated wait, in the second half; the order is `priority`. See "
        "[estimates](estimates.md#starts).",
        f"python benchmarks/start_coverage.py --data {DATA} --json",
        tuple(
            row
            for trace in ("pollux", "shockwave")
            for row in (
                Row(f"{trace}: starts", f"{trace}/starts", "{:,}"),
                Row(f"{trace}: unknown", f"{trace}/unknown_percent", "{:.1f} %", "≤ 10 %"),
                *(
                    Row(
                        f"{trace}: inside, {half} half",
                        f"{trace}/{half}_half_percent",
                        "{:.1f} %",
                        "77 to 83 %",
                    )
                    for half in ("first", "second")
                ),
                Row(f"{trace}: median width", f"{trace}/of_wait_width", "{:.2f}"),
            )
        ),
    ),
    "serverless": Benchmark(
        "Simulator: serverless workflows",
        "Functions, or steps of the environment, a second of processor time, best of ten runs.",
        f"python benchmarks/serverless.py --workflows {DATA}/serverless/MONTAGE.n.200.0.dax "
        f"--workflows {DATA}/serverless/CYBERSHAKE.n.200.0.dax",
        (
            Row("1,000 functions on 71 nodes, no observations", "spread", PER_S, "≥ 50,000/s"),
            Row("4,000 functions on 8 nodes, congested", "congested", PER_S, "≥ 15,000/s"),
            Row("the same with memory × 1,000, nothing waits", "large_memory", PER_S, "≥ 10,000/s"),
            Row("4,000 functions of CyberShake on 8 nodes", "cybershake", PER_S, "≥ 10,000/s"),
            Row("environment with observations, 71 nodes", "environment", PER_S, "≥ 10,000/s"),
            *(
                Row(f"1,000 functions on 71 nodes, placed by `{name}`", f"policy_{name}", PER_S, "≥ 30,000/s")
                for name in ("round_robin", "least_loaded", "first_fit", "best_fit", "data_local", "random")
            ),
            Row(
                "cost of a function after ten times as many", "cost_after_ten_times_as_many", "{:.2f} ×", "1"
            ),
        ),
    ),
    "vgpu": Benchmark(
        "Simulator: vGPU pool",
        "Processor time of one run of 32,000 ticks with 190 tasks, interpreted and compiled.",
        "python benchmarks/vgpu.py speed",
        (
            *(
                Row(f"{name}, `{admission}`, {engine}", f"{name}_{admission}/{engine}_s", S, target)
                for name in ("A1", "A3")
                for admission in ("quota", "usage")
                for engine, target in (("plain", "≤ 1.5 s"), ("compiled", "≤ 0.15 s"))
            ),
            Row("A1 to A5 (six scenarios) × 20 seeds, two processes, elapsed", "sweep/wall_s", "{:.0f} s"),
        ),
    ),
    "oasis": Benchmark(
        "Simulator: OASiS",
        "Processor time of one decision: 100 slots, 50 + 50 servers, 100 jobs, means over 20 seeds.",
        "python benchmarks/oasis.py speed",
        tuple(
            row
            for load in ("0.5", "1", "2")
            for row in (
                Row(f"load {load}, mean", f"load_{load}/mean_ms", MS, "≤ 10 ms"),
                Row(f"load {load}, mean of the slowest seed", f"load_{load}/slowest_seed_ms", MS),
            )
        ),
    ),
    "shares": Benchmark(
        "Simulator: shares of mixed GPUs",
        "Processor time from reading the file to the answer, best of five, on one core: 2,048 jobs on 512 "
        "GPUs of each of three types by `max_min`, whole and in parts. The published times are those of the "
        "solver alone, of the slowest part.",
        f"python benchmarks/shares.py --data {DATA}/gavel",
        (
            *(
                Row(f"packed, {parts} (published: {published} s)", f"packed/{number}", S, f"≤ {target} s")
                for number, parts, published, target in (
                    (1, "whole", 285.6, 0.5),
                    (2, "2 parts", 62.2, 0.5),
                    (4, "4 parts", 17.5, 0.5),
                    (8, "8 parts", 12.6, 1),
                )
            ),
            *(
                Row(f"{name}, {parts} part(s)", f"{name}/{parts}", S, f"≤ {1 if parts == 8 else 0.5} s")
                for name in ("unpacked", "agnostic")
                for parts in (1, 8)
            ),
            Row("three teams of up to 18 jobs by `two_level`, 18 fleets", "rows", S),
            Row("five teams of 1,024 jobs that all differ", "different_jobs", S, "≤ 5 s"),
        ),
    ),
    "edge": Benchmark(
        "Simulator: cloud, edge and devices",
        "Processor time of planning with `timetable` on all tiers, and of scoring, on three generated "
        "datasets of 60 jobs; simulated seconds a second.",
        "python benchmarks/edge.py --policy timetable --tiers host+bs+ue --json",
        (
            Row("slowest plan", "slowest_planning_s", "{:.1f} s", "≤ 60 s"),
            Row("slowest scoring", "slowest_scoring", PER_S, "≥ 3,000/s"),
        ),
    ),
}


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[\d,]*\.?\d+", text)]


def machine() -> str:
    """Return the kind of this machine: cores, processor and memory."""
    processor = "unknown processor"
    if (described := Path("/proc/cpuinfo")).exists():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores, {processor}, {memory_gib:.0f} GiB"


def measure(name: str, data: Path | None) -> dict[str, Any]:
    """Run the benchmark and return its record; raises `RuntimeError` if it fails."""
    command = BENCHMARKS[name].command
    words = [
        word.replace(DATA, str(data), 1) if word.startswith(DATA) else word for word in shlex.split(command)
    ]
    found = Path(sys.executable).parent / words[0]
    words[0] = str(found) if found.exists() else words[0]
    load = os.getloadavg()[0]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    ran = subprocess.run(
        words, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        figures = json.loads(ran.stdout[ran.stdout.index("{") :])
    except ValueError:
        raise RuntimeError(f"{command} gave no figures (exit code {ran.returncode})") from None
    if name == "soak":
        figures = soaked(figures)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load": round(load, 1),
        "command": command,
        "figures": figures,
    }


def soaked(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a soak: totals, and those of the best minute of the last quarter."""
    records = result["records"]
    best = min(records[-max(len(records) // 4, 1) :], key=lambda record: record["p50_ms"])
    return {
        "requests": sum(record["requests"] for record in records),
        "errors": records[-1]["errors"],
        **{key: best[key] for key in ("p50_ms", "p99_ms", "service_ms")},
        "service_mb": records[-1]["service_mb"],
        "problems": len(result["problems"]),
    }


def page(results: Mapping[str, Any]) -> str:
    """Return the text of docs/benchmarks.md."""
    targets, parts = INTRODUCTION, []
    for name, benchmark in BENCHMARKS.items():
        if name not in results:
            continue
        record = results[name]
        parts.append(f"## {benchmark.title}\n\n{benchmark.about}\n")
        lines = ["| | measured | target |", "|---|---|---|"]
        verdicts: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for row in benchmark.rows:
            value = row.value(record["figures"])
            lines.append(f"| {row.label} | {value} | {row.target} |")
            if row.target:
                verdicts[row.is_met(value)].append(f"{row.label}: {value} ({row.target})")
        if any(verdicts.values()):
            counts = f"{len(verdicts[True])} | {len(verdicts[False])} | {len(verdicts[None])}"
            anchor = re.sub(r"[^a-z0-9 -]", "", benchmark.title.lower()).replace(" ", "-")
            targets += f"| [{benchmark.title}](#{anchor}) | {counts} | {'; '.join(verdicts[False])} |\n"
        parts.append("\n".join(lines) + "\n")
        where = f"{record['date']}, {record['machine']}, load {record['load']:g} at the start"
        parts.append(f"{where}: `{record['command']}`\n")
    return "\n".join([targets, *parts])


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Public traces.")
@click.option("--page", "only_page", is_flag=True, help="Measure nothing.")
def main(names: tuple[str, ...], data: Path | None, only_page: bool) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for name in () if only_page else names or tuple(BENCHMARKS):
        if data is None and DATA in BENCHMARKS[name].command:
            click.echo(f"{name}: left out, it needs --data", err=True)
            continue
        click.echo(f"{name}: {BENCHMARKS[name].command}", err=True)
        try:
            results[name] = measure(name, None if data is None else data.resolve())
        except RuntimeError as error:
            click.echo(f"{name}: {error}", err=True)
            failed = True
            continue
        # After each one, so that nothing is lost if a later one is interrupted.
        ordered = {key: results[key] for key in BENCHMARKS if key in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(results))
    sys.exit(failed)


if __name__ == "__main__":
    main()
