"""Take the pictures of the console: `python docs/images/make_pictures.py [--airflow]`, from the repository.

`python -m demo --picture docs/images/demo-timeline.png` draws the timeline; the pictures of the simulators
come from `gpu-simulate … --output-dir`, as their pages describe it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from demo.stack import Stack  # noqa: E402
from tests.e2e import browser as b  # noqa: E402
from tests.e2e import test_airflow_console as inside  # noqa: E402

TASKS = [
    # task, GPUs, CPUs, minutes it should run
    ("train_small", 2, 8, 20),
    ("train_medium", 4, 16, 45),
    ("train_wide", 6, 32, 60),
    ("finetune_llm", 8, 48, 180),
    ("evaluate", 2, 8, 10),
    ("embed_corpus", 4, 24, 30),
    ("train_widest", 8, 32, 90),
    ("nightly_sweep", 4, 16, 40),
]


def fill(client: Any) -> None:
    """Fill the cluster as on a working day: running and pending jobs, a drained server, GPU fractions."""
    client.post("/api/servers/2/drain", json={"reason": "new fan, back at 16:00"}).raise_for_status()
    for name in ("notebook_ada", "notebook_bob"):
        request = {"task_id": name, "required_gpus": 1, "required_cpus": 4, "gpu_milli": 400}
        client.post("/api/submit", json=request).raise_for_status()
    for name, gpus, cpus, minutes in TASKS:
        labels = {
            "instance": "production",
            "dag_id": "train_digits",
            "run_id": "manual__2026-01-05",
            "task_id": name,
            "map_index": "-1",
        }
        request = {
            "task_id": f"production:train_digits/manual__2026-01-05/{name}",
            "required_gpus": gpus,
            "required_cpus": cpus,
            "expected_runtime": 60 * minutes,
            "labels": labels,
        }
        client.post("/api/submit", json=request).raise_for_status()


def console(chromium: Any, folder: Path) -> None:
    with b.serving(folder, 4, "--airflow-url", "http://localhost:8080") as service:
        with service.client("olga") as olga:
            fill(olga)
        for name, path, scheme, width, height in (
            ("servers", "/", "light", 1440, 760),
            ("queue", "/queue", "dark", 1440, 450),
            ("phone", "/", "light", 390, 844),
        ):
            page = chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            ).new_page()
            b.log_in(page, service, "olga")
            page.goto(service.url + path)
            page.get_by_text("Live", exact=True).wait_for()
            page.screenshot(path=HERE / f"console-{name}.png")
            page.context.close()


def airflow(chromium: Any, folder: Path) -> None:
    servers = folder / "servers.toml"
    servers.write_text(b.INVENTORY.format(count=4))
    settings = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": inside.USERS,
        "GPU_MANAGER_INVENTORY": str(servers),
    }
    with Stack(folder / "airflow", settings=settings, answer_timeout_s=120.0) as stack:
        with inside.client(stack, "olga") as olga:
            fill(olga)
        page, frame = inside.console(chromium, stack, "olga")
        frame.get_by_text("Live", exact=True).wait_for(timeout=20_000)
        page.set_viewport_size({"width": 1440, "height": 580})
        page.wait_for_timeout(1500)
        page.screenshot(path=HERE / "console-airflow.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, b.chromium() as chromium:
        console(chromium, Path(folder))
        if "--airflow" in sys.argv[1:]:
            airflow(chromium, Path(folder))


if __name__ == "__main__":
    main()
