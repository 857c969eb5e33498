"""Benchmarks of whole systems: an Airflow with the manager, and a service kept busy."""

from __future__ import annotations

from benchmarks.tables.row import MS, Benchmark, Row, S

BETWEEN_JOBS = (
    ("a grant → the job's first line", "grant_to_first_line", "≤ 0.7 s"),
    ("a job's last line → the next grant", "last_line_to_next_grant", "≤ 0.5 s"),
    ("a job's last line → the next one's first", "last_line_to_next_first_line", "≤ 1.2 s"),
)

OF_SYSTEMS = (
    Benchmark(
        "airflow",
        "Waiting in Airflow",
        "A standalone Airflow on SQLite with four worker slots; times are those of the jobs' own clocks and "
        "the store's. The server of ssh and the engine of Docker are on the same machine.",
        "python benchmarks/waiting.py",
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
    Benchmark(
        "mapped",
        "Tasks that ask at once",
        "1,000 mapped tasks of a standalone Airflow on PostgreSQL with four worker slots; all GPUs are in "
        "use. Airflow itself bounds how soon they start: each has a worker process.",
        "python benchmarks/waiting.py --mapped",
        Row("a task's start → its request in the queue, median", "start_to_queued_s/p50", S),
        Row("the slowest of them", "start_to_queued_s/max", S, "≤ 10 s"),
        Row("the first one's start → the last request", "first_start_to_last_queued_s", S),
        Row("connections of the triggerer to Redis", "redis_connections_of_the_triggerer", "{}", "≤ 3"),
    ),
    Benchmark(
        "triggerer",
        "A triggerer full of tasks",
        "The triggers of 500 tasks whose jobs run here, with a line of output each 10 s, and of 500 that "
        "wait, in one process, against a service on Redis; without what Airflow itself does for them.",
        "python benchmarks/waiting.py --load",
        Row("the triggerer's part of a core", "triggerer_core_percent", "{:.0f} %", "≤ 25 %"),
        Row("its requests to the service", "requests_per_s", "{:.1f} a second", "≤ 5"),
        Row("the service's part of a core", "service_core_percent", "{:.0f} %"),
    ),
    Benchmark(
        "gaps",
        "GPUs between short jobs",
        "500 jobs of a second on 8 GPUs; the process that runs the triggers is killed three times, and its "
        "successor goes on. A gap is a GPU's time between two jobs, by their own clocks; a kill explains "
        "those that begin until each GPU has begun another job. Without what Airflow itself does: it starts "
        "the triggers of a dead triggerer again after 30 s.\n\n"
        "![When each GPU had a job, and the three kills](images/idle-gaps.png)",
        "python benchmarks/gaps.py --picture docs/images/idle-gaps.png",
        Row("jobs that ran", "jobs", "{:,}"),
        Row("most runs of one job", "most_runs_of_a_job", "{}", "1"),
        Row("gap, median", "gap_p50_s", S),
        Row("longest gap that no kill explains", "gap_max_s", S, "≤ 3 s"),
        Row("longest gap of a kill", "gap_after_a_kill_max_s", S),
    ),
    Benchmark(
        "airflow_gaps",
        "GPUs between short jobs in Airflow",
        "500 jobs of 15 seconds on 8 GPUs, tasks of a standalone Airflow on PostgreSQL with four worker "
        "slots. Triggerer, scheduler with its workers, and triggerer again are killed and started. Gaps and "
        "kills are told apart as above; Airflow starts the triggers of a dead triggerer again after 30 s.\n\n"
        "![When each GPU had a job, and the three kills](images/idle-gaps-in-airflow.png)",
        "python benchmarks/gaps.py --airflow --picture docs/images/idle-gaps-in-airflow.png",
        Row("jobs that ran", "jobs", "{:,}"),
        Row("gap, median", "gaps_s/p50", S),
        Row("longest gap that no kill explains", "gaps_s/max", S, "≤ 3 s"),
        Row("longest gap of a kill", "gaps_of_a_kill_s/max", S),
    ),
    Benchmark(
        "variable",
        "The store in an Airflow Variable",
        "In a task, through the execution API, on SQLite.",
        "python benchmarks/variable_store.py",
        Row("allocate, median", "allocate_p50_ms", MS, "≤ 60 ms"),
        Row("allocate, 90th percentile", "allocate_p90_ms", MS),
        Row("release, median", "release_p50_ms", MS, "≤ 60 ms"),
        Row("release, 90th percentile", "release_p90_ms", MS),
    ),
    Benchmark(
        "soak",
        "A service kept busy",
        "200 requests a second on 1,000 servers with an archive of the history. The benchmark fails if "
        "memory, sockets, files, threads or latency grow from the second quarter to the last, or if the "
        "archive lacks a change. `--minutes 60` is the length to judge a release by.",
        "python benchmarks/soak.py --minutes 5 --rate 200 --servers 1000",
        Row("requests", "requests", "{:,}"),
        Row("errors", "errors", "{}", "0"),
        Row("median, best minute of the last quarter", "p50_ms", MS),
        Row("99th percentile, the same minute's", "p99_ms", MS),
        Row("the service's processor time a request", "service_ms", MS),
        Row("the service's memory at the end", "service_mb", "{:.0f} MB"),
        Row("complaints", "problems", "{}", "0"),
    ),
)
