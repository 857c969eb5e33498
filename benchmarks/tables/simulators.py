"""Benchmarks of the simulators and of the estimates."""

from __future__ import annotations

from benchmarks.tables.row import DATA, MS, PART, PER_S, PERCENT, Benchmark, Row, S

OF_SIMULATORS = (
    Benchmark(
        "replay",
        "Simulator: replay of openb",
        "Pods placed a second of processor time, commits included, the best of five runs on one core. The "
        "published simulator takes about ten minutes for the same run, some 18 pods a second.",
        f"python benchmarks/replay.py --data {DATA}/openb --json",
        Row("fgd", "fgd", PER_S, "≥ 8,000/s"),
        *(
            Row(name, name, PER_S, "≥ 50,000/s")
            for name in ("best_fit", "dot_product", "gpu_packing", "gpu_clustering", "random")
        ),
    ),
    Benchmark(
        "estimates",
        "Estimated runtimes",
        "Runs of the last half of each trace, each estimated when it begins from what ended before. Losses "
        "and widths are parts of those of the plain quantiles of the last 20 runs of the same class, team "
        "and shape, whose intervals are too narrow, and of the same quantiles calibrated to hold four of "
        "five; the error of the median is a part of that of the median of the last 20 runs. In the Pollux "
        "trace equal jobs run equally long: plain quantiles are exact, and no part of their loss is told. "
        "See [estimates](estimates.md).",
        f"python benchmarks/estimates.py --data {DATA} --json",
        *(
            row
            for trace in ("openb", "pollux", "shockwave", "sample")
            for row in (
                Row(f"{trace}: estimates", f"{trace}/estimates", "{:,}"),
                Row(f"{trace}: unknown", f"{trace}/unknown_percent", PERCENT, "≤ 10 %"),
                Row(f"{trace}: inside the interval", f"{trace}/coverage_percent", PERCENT, "77 to 83 %"),
                Row(f"{trace}: the same, plain quantiles", f"{trace}/plain_coverage_percent", PERCENT),
                Row(f"{trace}: the same, calibrated", f"{trace}/calibrated_coverage_percent", PERCENT),
                *(
                    Row(
                        f"{trace}: the same, {way} team or size",
                        f"{trace}/group_{way}_percent",
                        PERCENT,
                        "73 to 87 %",
                    )
                    for way in (("lowest", "highest") if trace == "openb" else ())
                ),
                Row(f"{trace}: pinball loss, part of the plain one", f"{trace}/of_plain_loss", PART, "≤ 0.9"),
                Row(f"{trace}: the same, of the calibrated one", f"{trace}/of_calibrated_loss", PART),
                Row(f"{trace}: the same of logarithms", f"{trace}/of_plain_log_loss", PART),
                Row(f"{trace}: median width, part of the plain one", f"{trace}/of_plain_width", PART, "≤ 1"),
                Row(f"{trace}: the same, of the calibrated one", f"{trace}/of_calibrated_width", PART),
                Row(f"{trace}: error of the median, part", f"{trace}/of_median_error", PART),
            )
        ),
    ),
    Benchmark(
        "starts",
        "Estimated starts",
        "How often a queue is played forward with drawn runtimes in two seconds of processor time; 40 times "
        "are enough. See [estimates](estimates.md).",
        "python benchmarks/starts.py --json",
        *(
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
    Benchmark(
        "start_coverage",
        "Estimated starts that came true",
        "Jobs of a trace are submitted as they arrive, nothing known at the begin; each that has to wait is "
        "given an estimate, and starts. 40 servers: of four GPUs for Pollux, of one for Shockwave. Widths "
        "are parts of the estimated wait, in the second half; the order is `priority`. See "
        "[estimates](estimates.md#starts).",
        f"python benchmarks/start_coverage.py --data {DATA} --json",
        *(
            row
            for trace in ("pollux", "shockwave")
            for row in (
                Row(f"{trace}: starts", f"{trace}/starts", "{:,}"),
                Row(f"{trace}: unknown", f"{trace}/unknown_percent", PERCENT, "≤ 10 %"),
                *(
                    Row(
                        f"{trace}: inside, {half} half", f"{trace}/{half}_half_percent", PERCENT, "77 to 83 %"
                    )
                    for half in ("first", "second")
                ),
                Row(f"{trace}: median width", f"{trace}/of_wait_width", PART),
            )
        ),
    ),
    Benchmark(
        "serverless",
        "Simulator: serverless workflows",
        "Functions, or steps of the environment, a second of processor time, best of ten runs.",
        f"python benchmarks/serverless.py --workflows {DATA}/serverless/MONTAGE.n.200.0.dax "
        f"--workflows {DATA}/serverless/CYBERSHAKE.n.200.0.dax",
        Row("1,000 functions on 71 nodes, no observations", "spread", PER_S, "≥ 50,000/s"),
        Row("4,000 functions on 8 nodes, congested", "congested", PER_S, "≥ 15,000/s"),
        Row("the same with memory × 1,000, nothing waits", "large_memory", PER_S, "≥ 10,000/s"),
        Row("4,000 functions of CyberShake on 8 nodes", "cybershake", PER_S, "≥ 10,000/s"),
        Row("environment with observations, 71 nodes", "environment", PER_S, "≥ 10,000/s"),
        *(
            Row(f"1,000 functions on 71 nodes, placed by `{name}`", f"policy_{name}", PER_S, "≥ 30,000/s")
            for name in ("round_robin", "least_loaded", "first_fit", "best_fit", "data_local", "random")
        ),
        Row("cost of a function after ten times as many", "cost_after_ten_times_as_many", "{:.2f} ×", "1"),
    ),
    Benchmark(
        "vgpu",
        "Simulator: vGPU pool",
        "Processor time of one run of 32,000 ticks with 190 tasks, interpreted and compiled.",
        "python benchmarks/vgpu.py speed",
        *(
            Row(f"{name}, `{admission}`, {engine}", f"{name}_{admission}/{engine}_s", S, target)
            for name in ("A1", "A3")
            for admission in ("quota", "usage")
            for engine, target in (("plain", "≤ 1.5 s"), ("compiled", "≤ 0.15 s"))
        ),
        Row("A1 to A5 (six scenarios) × 20 seeds, two processes, elapsed", "sweep/wall_s", "{:.0f} s"),
    ),
    Benchmark(
        "oasis",
        "Simulator: OASiS",
        "Processor time of one decision: 100 slots, 50 + 50 servers, 100 jobs, means over 20 seeds.",
        "python benchmarks/oasis.py speed",
        *(
            row
            for load in ("0.5", "1", "2")
            for row in (
                Row(f"load {load}, mean", f"load_{load}/mean_ms", MS, "≤ 10 ms"),
                Row(f"load {load}, mean of the slowest seed", f"load_{load}/slowest_seed_ms", MS),
            )
        ),
    ),
    Benchmark(
        "shares",
        "Simulator: shares of mixed GPUs",
        "Processor time from reading the file to the answer, best of five, on one core: 2,048 jobs on 512 "
        "GPUs of each of three types by `max_min`, whole and in parts. The published times are those of the "
        "solver alone, of the slowest part.",
        f"python benchmarks/shares.py --data {DATA}/gavel",
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
    Benchmark(
        "edge",
        "Simulator: cloud, edge and devices",
        "Processor time of planning with `timetable` on all tiers, and of scoring, on three generated "
        "datasets of 60 jobs; simulated seconds a second.",
        "python benchmarks/edge.py --policy timetable --tiers host+bs+ue --json",
        Row("slowest plan", "slowest_planning_s", "{:.1f} s", "≤ 60 s"),
        Row("slowest scoring", "slowest_scoring", PER_S, "≥ 3,000/s"),
    ),
)
