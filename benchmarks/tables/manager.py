"""Benchmarks of the manager, its service and its agents, and of other schedulers beside it."""

from __future__ import annotations

from benchmarks.tables.row import MS, PAIRS, PART, Benchmark, Row, S

OF_DATABASES = (
    ("bare compare-and-set pair", "bare_pairs_per_s", PAIRS),
    ("part of it", "of_bare_pair", PART, "≥ 0.5"),
    ("median of one call", "call_p50_ms", MS, "≤ 5 ms"),
    ("32 clients in 4 processes, part of it", "clients_32/of_bare_pair", PART, "≥ 0.25"),
    ("32 clients in 4 processes, errors", "clients_32/errors", "{}", "0"),
    ("32 clients in 32 processes, part of it", "clients_32_processes/of_bare_pair", PART, "≥ 0.25"),
    ("32 clients in 32 processes", "clients_32_processes/pairs_per_s", PAIRS),
    ("32 clients in 32 processes, errors", "clients_32_processes/errors", "{}", "0"),
    ("times slower after a million changes", "slower_with_a_million_changes", PART, "≤ 1.2"),
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

OF_MANAGER = (
    Benchmark(
        "core",
        "Manager and stores",
        "A pair is an allocation and its release. The yardstick is a bare redis-py lock, acquired and "
        "released, in the same run.",
        "gpu-manager bench --json",
        Row("redis-py lock", "redis/lock_pairs_per_s", PAIRS),
        Row("through Redis, one client, 4 servers", "redis/pairs_per_s_4_servers", PAIRS),
        Row("the same, part of the lock's rate", "redis/of_lock_4_servers", PART, "≥ 0.6"),
        Row("10,000 servers, part of the rate at 4", "redis/of_4_servers_at_10000", PART, "≥ 0.95"),
        Row("100 clients (10 processes of 10 threads)", "clients/pairs_per_s", PAIRS, "≥ 500 pairs/s"),
        Row("the same, median of one call", "clients/p50_s", S),
        Row("the same, 99th percentile of one call", "clients/p99_s", S, "≤ 1 s"),
        Row("the same, errors", "clients/errors", "{}", "0"),
        Row("in memory, first_fit, 4 servers", "memory/first_fit_4_servers_per_s", PAIRS, "≥ 100,000"),
        Row("in memory, best_fit, 1,000 servers", "memory/best_fit_1000_servers_per_s", PAIRS, "≥ 50,000"),
        Row(
            "memory of the state of 10,000 servers × 8 GPUs",
            "memory/state_10000_servers_mb",
            "{:.0f} MB",
            "≤ 150 MB",
        ),
    ),
    Benchmark(
        "contention",
        "Contention",
        "Many clients on one Redis, as parts of the pairs that one client makes of a bare redis-py lock in "
        "the same run. A client that is refused asks again at once; only granted and released pairs count.",
        "python -m benchmarks.contention",
        Row("100 clients in 10 processes, all fit", "fit/of_lock", PART, "≥ 0.4"),
        Row("the same, 99th percentile of one call", "fit/p99_s", S, "≤ 0.2 s"),
        Row("the same, slowest client of the mean", "fit/slowest_client_of_mean", "{:.2f} ×", "≤ 2 ×"),
        Row("the same, six times more asked than there is", "scarce/of_lock", PART, "≥ 0.3"),
        Row("the same, 99th percentile of one call", "scarce/p99_s", S, "≤ 0.2 s"),
        Row("1,000 clients on asyncio in 10 processes", "many/of_lock", PART, "≥ 0.4"),
        Row("the same, 99th percentile of one call", "many/p99_s", S, "≤ 3 s"),
        Row("the same, errors", "many/errors", "{}", "0"),
        Row("one client beside 10,000 pending, part of none", "pending/ratio", PART, "≥ 0.5"),
        Row("32 clients on 16 places: freed to known, median", "handover/p50_ms_from_commit", MS, "≤ 5 ms"),
    ),
    Benchmark(
        "backfill",
        "Backfill",
        "One process, in memory: 30,000 jobs on 100 servers of 8 GPUs that ask for 1.2 times what there is, "
        "and a pass after one release with 10,000 pending requests and 1,000 servers.",
        "python -m benchmarks.backfill",
        Row("the replay by `fifo`, processor time", "replay/fifo_s", S),
        Row("the replay by `priority+backfill`, processor time", "replay/backfill_s", S),
        Row("times that by `fifo`", "replay/times_fifo", "{:.1f}", "≤ 5"),
        Row("a pass after a release, median", "pass_after_release_ms/p50", MS, "≤ 20 ms"),
    ),
    Benchmark(
        "gangs",
        "Gangs",
        "One process, in memory: gangs of 64 of 10,000 servers, and passes over 1,000 pending gangs.",
        "python -m benchmarks.gangs",
        *(
            Row(f"a gang of 64 by `{name}`, median", f"grant_{name}/p50", MS, "≤ 10 ms")
            for name in ("first_fit", "best_fit", "fgd")
        ),
        Row("a pass by priority, median", "pass_priority/p50", MS, "≤ 50 ms"),
        Row("a pass with backfill, median", "pass_priority_backfill/p50", MS, "≤ 50 ms"),
    ),
    Benchmark(
        "preemption",
        "Victims",
        "One process, in memory: choosing victims among 11,600 leases, and passes over the queue where 1,600 "
        "leases run and no request can have any.",
        "python -m benchmarks.preemption",
        *(
            Row(f"victims for a request of {gpus} GPU(s), median", f"victims_{gpus}_gpus/p50", MS, "≤ 20 ms")
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
    Benchmark(
        "stores",
        "Stores and locks without the manager",
        "Allocator and store alone; the lock is this project's fair one on Redis, the yardstick as above.",
        "python benchmarks/stores.py",
        Row("redis-py lock", "redis_py_lock_pairs_per_s", PAIRS),
        Row("our lock, part of that rate", "our_lock_ratio", PART),
        Row("Redis store, 4 servers, part of that rate", "redis_4_servers_ratio", PART),
        Row("Redis store, 10,000 servers, part of that rate", "redis_10000_servers_ratio", PART),
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
    Benchmark(
        "service",
        "REST service and console",
        "`gpu-manager serve` on Redis, called over HTTP from the same machine.",
        "gpu-manager bench --http --json",
        Row("`POST /api/allocate`, 4 servers, one client, median", "one_client/p50_ms", MS, "≤ 5 ms"),
        Row("the same, 99th percentile", "one_client/p99_ms", MS, "≤ 30 ms"),
        Row("50 clients", "clients/requests_per_s", "{:,.0f} requests/s", "≥ 300 requests/s"),
        Row("the same, 99th percentile", "clients/p99_ms", MS),
        Row("the same, errors", "clients/errors", "{}", "0"),
        Row("`GET /api/status`, 1,000 servers", "many_servers/status_ms", MS, "≤ 50 ms"),
        Row("`GET /api/queue`, 1,000 servers", "many_servers/queue_ms", MS),
        Row("`GET /api/task` of each of 200 pending in turn, 1,000 servers", "many_servers/pending_ms", MS),
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
        Row("the same, layout shift", "many_servers/console_layout_shift", PART, "0"),
    ),
    Benchmark(
        "agents",
        "Agents of servers",
        "1,000 servers with 8 GPUs report every 10 s to one service on Redis, a quarter of them with a "
        "lease. The one agent whose cost is measured is the real one, with its probe on a stand-in for "
        "NVIDIA's library; a request waits for the GPUs whose job and lease end.",
        "python benchmarks/agents.py",
        Row("part of a core that the service takes", "service_core_percent", "{:.0f} %", "≤ 25 %"),
        Row("allocation over HTTP, median", "allocate_p50_ms", MS),
        Row("the same, of that without agents", "allocate_ratio", PART, "≤ 1.2"),
        Row("reports refused or lost", "errors", "{}", "0"),
        Row("one agent, part of a core", "agent_core_percent", "{:.2f} %", "≤ 1 %"),
        Row("one agent and its probe, memory", "agent_rss_mib", "{:.0f} MiB", "≤ 60 MiB"),
        Row("freed GPUs to the next grant, median", "granted_p50_s", S),
        Row("the same, longest", "granted_max_s", S, "≤ 2 s"),
        Row("probe of 8 GPUs, median", "probe_p50_s", S, "≤ 0.3 s"),
    ),
    *(
        Benchmark(
            f"asking_{jobs}",
            f"Agents that ask for jobs, {jobs} on each server",
            "1,000 agents report every 10 s and ask which jobs should be on their servers, a question that "
            "waits for 45 s where nothing changes, at one service on Redis; all begin within 10 s.",
            f"python benchmarks/agents.py --jobs {jobs} --seconds 60",
            Row("part of a core that the service takes", "service_core_percent", "{:.0f} %", target),
            Row("a report, median", "report_p50_ms", MS),
            Row("reports refused or lost", "errors", "{}", "0"),
            Row("questions refused", "refused_questions", "{}", "0"),
        )
        for jobs, target in ((0, "≤ 35 %"), (8, "≤ 60 %"))
    ),
    Benchmark(
        "agent_jobs",
        "Jobs that agents run",
        "A real agent with a service on Redis: 20 jobs that ask for all 8 GPUs wait for each other, by what "
        "they print and when they were granted; 200 jobs without GPUs run on one server.",
        "python benchmarks/agents.py --run-jobs",
        Row("grant to the first line, median", "granted_to_line_p50_s", S, "≤ 0.5 s"),
        Row("the same, longest", "granted_to_line_max_s", S),
        Row("last line to the first of the next job, median", "line_to_line_p50_s", S, "≤ 0.8 s"),
        Row("the same, longest", "line_to_line_max_s", S),
        Row("200 jobs, submitted one by one, until all have begun", "all_begun_s", "{:.0f} s"),
        Row("part of a core that they cost their agent", "agent_of_jobs_core_percent", "{:.0f} %"),
    ),
    Benchmark(
        "imports",
        "Imports",
        "Processor time of a fresh process, best of five, less that of a bare interpreter or of one that has "
        "imported Airflow's own part. Airflow reads DAG files again and again, and loads the plugin in "
        "each of its processes.",
        "python benchmarks/imports.py",
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
    Benchmark(
        "peers",
        "Side by side with other schedulers",
        "Grant 2 GPUs and 16 CPUs of 4 servers × 8 GPUs × 64 CPUs, 16 places, and release them, in a closed "
        "loop; no process is started, one scheduler after the other, medians of five. Slurm 22.05 is called "
        "through its C API (`slurm_allocate_resources_blocking`, `slurm_complete_job`); with an epilog it "
        "runs `/bin/true` on the server after each job, and looks for freed resources then. Ray's placement "
        "groups as they come, when Ray looks for freed resources ten times a second, and tuned, 1,000 times. "
        "Both do more with each grant, across machines, than this manager does; neither is made for many "
        "small grants a second. redis-py's lock is one place without a queue: who holds it takes it again.",
        "make --silent bench-peers",
        *(Row(f"one client: {label}", f"{name}/one/pairs_per_s", PAIRS) for name, label in PEERS),
        *(
            row
            for name, label in PEERS
            if name != "redis_lock"
            for row in (
                Row(f"32 clients: {label}", f"{name}/full/pairs_per_s", PAIRS),
                Row("the same, 99th percentile of a pair", f"{name}/full/p99_s", S),
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
                Row("the same, 99th percentile", f"{name}/held_{clients}/p99_s", S),
                Row("the same, clients that never got it", f"{name}/held_{clients}/never_got_it", "{:.0f}"),
            )
        ),
    ),
)
