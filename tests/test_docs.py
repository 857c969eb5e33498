"""Tests of the documentation: every example runs or names options that exist, every link has a target.

Commands of pages in `ELSEWHERE` are run by the tests named there.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from click.testing import CliRunner
from werkzeug.serving import make_server

import resource_manager.airflow as for_authors
from benchmarks import figures
from demo.stack import free_ports
from resource_manager import GPUResourceManager, Settings, __version__
from resource_manager.cli import main as gpu_manager
from resource_manager.cli.install_files import write_files
from resource_manager.cli.serving import serve
from resource_manager.core.changes import Change
from resource_manager.jobs.launchers.registry import LAUNCHERS
from resource_manager.manager.cluster_file.reading import load_inventory
from resource_manager.manager.cluster_file.sections import KEYS
from resource_manager.rest import tokens
from resource_manager.rest.app import create_app
from resource_manager.rest.assemble import persistence_of, standalone
from resource_manager.rest.tokens import Role
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import ORDERS
from simulator.cli import main as simulate
from simulator.edge.dataset_files import write_dataset
from simulator.edge.random_dataset import generate
from tests.faults import run
from tests.faults.day import __main__ as day
from tests.redis_server import RedisServer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVICE, TOKEN, REDIS = "http://localhost:5000", "gpm_…", "redis://localhost:6379/0"
TOKEN_ID = "5b0c41d09e3f"
WHEEL = f"gpu_resource_manager-{__version__}-py3-none-any.whl"
"""Placeholders of the pages for the reader's own values."""

LANGUAGES = {"python", "sh", "toml", "yaml", "json", "text"}

ELSEWHERE = {
    "README.md": "tests/test_getting_started.py",
    "docs/first-server.md": "tests/e2e/test_first_server.py",
    "docs/getting-started.md": "tests/test_getting_started.py",
    "docs/testing.md": "tests/test_testing.py",
    "docs/from-a-pool.md": "tests/cli/test_converting.py",
    "docs/your-code.md": "tests/cli/test_syncing.py",
    "docs/gpus.md": "tests/cli/test_discovering.py",
    "docs/deploy.md": "tests/test_deploy.py",
    "docs/proxy.md": "tests/test_proxy.py",
    "docs/restore.md": "tests/cli/test_restore_drill.py",
    "docs/slurm.md": "tests/e2e/test_slurm.py",
    "docs/compose.md": "tests/test_docs.py::test_the_stack_has_what_its_page_uses",
    "docs/contributing/fault-tests.md": "tests/test_docs.py::test_the_fault_tests_know_their_options",
}

SMALLER = {
    "--seeds 1-20": "--seeds 1-1",
    "--seeds 1-5": "--seeds 1-1",
    "--calibrate 20": "--calibrate 2",
    "--tasks 160": "--tasks 20",
    "--output-dir reports/": "--duration 40 --output-dir reports/",
    "tasks:120,160,190": "tasks:20,30",
    "limit_threshold:1,1.05,1.2": "limit_threshold:1,1.2",
    "decay:0.01,0.02,0.04": "decay:0.01,0.04 --duration 40",
    "edge --seed 3": "edge --seed 3 --jobs 2",
    "--pods default --seed 42 --policy fgd": "--pods default --seed 42 --policy best_fit",
    "--load 1 --algorithms": "--jobs 4 --load 1 --algorithms",
    "--load 1 --calibrate": "--jobs 4 --load 1 --calibrate",
    "--load 1 --save": "--jobs 4 --load 1 --save",
    "--jobs trace1": "--jobs trace3",
    "jobs:5,10,20": "jobs:5,10",
}
"""Sizes for a test: fewer seeds and smaller inputs of the same kind."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def examples(language: str) -> list[tuple[str, str]]:
    """Return the name and text of every block in that language."""
    return [
        (f"{name_of(page)}:{number}", code)
        for page in PAGES
        for number, code in enumerate(blocks(page, language), 1)
    ]


def parametrize(found: list[tuple[str, str]]) -> pytest.MarkDecorator:
    assert found
    return pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in found])


def is_dag(code: str) -> bool:
    return "import DAG" in code


PYTHON = examples("python")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_is_in_a_language_that_is_tested(page: Path) -> None:
    opening = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opening) <= LANGUAGES


# ---- Python ----


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the address of a service, and a token for it."""
    manager = GPUResourceManager.from_url("memory://")
    kept = persistence_of(Settings(store="memory://"), tmp_path_factory.mktemp("tokens") / "tokens.json")
    token = tokens.create(kept.tokens, "reader-of-the-pages", Role.USER)
    app = create_app(standalone(manager, kept))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.port}", token
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@parametrize([(name, code) for name, code in PYTHON if not is_dag(code)])
def test_an_example_runs(
    code: str, service: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace(SERVICE, service[0]).replace(TOKEN, service[1]), "example", "exec"), {})


@pytest.mark.filterwarnings("ignore")
@parametrize([(name, code) for name, code in PYTHON if is_dag(code)])
def test_an_example_is_a_dag(code: str, tmp_path: Path) -> None:
    """Airflow loads it as a file of its DAGs folder; tests/test_distribution.py runs the README's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of Airflow's import
        from airflow.dag_processing.dagbag import DagBag

    (tmp_path / "example.py").write_text(code)
    bag = DagBag(str(tmp_path))
    assert bag.import_errors == {}
    assert bag.dags
    assert all(dag.description and dag.tasks for dag in bag.dags.values())


# ---- files ----


@parametrize([(name, code) for name, code in examples("toml") if "[[servers]]" in code])
def test_an_inventory_can_be_loaded(code: str, tmp_path: Path) -> None:
    (tmp_path / "servers.toml").write_text(code)
    assert load_inventory(tmp_path / "servers.toml")


@parametrize(examples("toml"))
def test_toml_can_be_read(code: str) -> None:
    assert tomllib.loads(code)


@parametrize(examples("json"))
def test_json_can_be_read(code: str) -> None:
    assert json.loads(code)


# ---- commands ----

COMMANDS = [page for page in PAGES if blocks(page, "sh") and name_of(page) not in ELSEWHERE]


def script_of(page: Path, store: str, port: int) -> str:
    """Return the page's commands as one script, with the test's store, service and sizes."""
    lines = ["trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        command, _, _ = line.partition("  #")
        if command.startswith("pip install"):  # tests/test_distribution.py installs each extra
            extras = re.findall(rf"'{WHEEL}\[(.*)\]'", command)[0].split(",")
            assert set(extras) <= set(project()["optional-dependencies"])
            continue
        for given, smaller in SMALLER.items():
            command = command.replace(given, smaller)
        command = command.replace(REDIS, store).replace(SERVICE, f"http://localhost:{port}")
        if "token create" in command:
            command = f"token=$({command} | grep -o 'gpm_[^ ]*'); token_id=$(cut -d_ -f2 <<< $token)"
        if command.endswith(" serve"):
            command += f" --port {port} & curl -sf --retry 60 --retry-connrefused --retry-delay 1"
            command += f" http://localhost:{port}/healthz"
        lines.append(command.replace(TOKEN, "$token").replace(TOKEN_ID, "$token_id"))
    return "\n".join(lines)


def test_the_extra_of_airflow_brings_what_the_commands_of_its_pages_need() -> None:
    """As docs/first-server.md has it, which names the extras airflow, redis and ssh."""
    assert "gpu-resource-manager[api]" in project()["optional-dependencies"]["airflow"]


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


LONG = [ROOT / "docs" / "simulators" / f"{name}.md" for name in ("oasis", "published", "replay", "vgpu")]
"""Pages whose studies take over twenty seconds."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=pytest.mark.e2e
            if page in LONG
            else [pytest.mark.slow]
            if page.parent.name == "simulators"
            else [],
        )
        for page in COMMANDS
    ],
    ids=name_of,
)
def test_the_commands_of_a_page_run(
    page: Path, embedded_redis: RedisServer, shared_data: Path, tmp_path: Path
) -> None:
    store = f"{embedded_redis.url}?namespace={uuid.uuid4().hex}"
    servers = (ROOT / "resource_manager" / "deploy" / "servers.toml").read_text()
    with_agents = tmp_path / "with-agents.toml"
    with_agents.write_text(servers.replace("[[servers]]", '[[servers]]\njob_user = "ada"'))
    with GPUResourceManager.from_url(store, inventory=with_agents) as manager:
        manager.submit("earlier", gpus=2)  # so that there is a history
        manager.release_resources("earlier", outcome="SUCCESS")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for folder in ("gavel", "muri", "openb", "pollux", "serverless", "shockwave"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / folder).symlink_to(shared_data / folder)
    write_dataset(generate(3, jobs=3), tmp_path / "data" / "edge" / "test0")
    for code in blocks(page, "toml") + blocks(page, "yaml"):
        if (named := re.match(r"# (\S+\.\w+)\n", code)) is not None:
            (tmp_path / named[1]).write_text(code)
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPU_MANAGER")}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail"],
        input=script_of(page, store, free_ports(1)[0]),
        cwd=tmp_path,
        env={
            **own,
            "HOME": str(tmp_path),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GPU_MANAGER_STORE": store,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", LONG, ids=name_of)
def test_the_commands_of_a_long_page_have_their_options(page: Path) -> None:
    """With `--help` at the end a command checks the names of the options before it, and stops."""
    script = "".join(blocks(page, "sh")).replace("\\\n", " ")
    studies = [command for command in re.split(r"\n| && ", script) if command.startswith("gpu-simulate ")]
    assert studies
    for study in studies:
        done = CliRunner().invoke(simulate, [*shlex.split(study)[1:], "--help"])
        assert done.exit_code == 0, done.output


IN_TEXTS = re.findall(
    r"^(?:\$ |docker run .* |/opt/gpu-manager/bin/)?gpu-manager (.+)$",
    "\n".join(code for _, code in [*examples("text"), ("", "".join(blocks(ROOT / "docs/deploy.md", "sh")))]),
    re.MULTILINE,
)
"""Commands that no test runs from their page: they need a terminal, or a machine to install on."""


@pytest.mark.parametrize("line", IN_TEXTS)
def test_a_command_in_a_text_has_its_options(line: str) -> None:
    words = shlex.split(line.partition(" -- ")[0], comments=True)
    done = CliRunner().invoke(gpu_manager, [*words, "--help"])
    assert done.exit_code == 0, done.output


def test_pages_whose_commands_run_elsewhere_name_their_test() -> None:
    for page, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        assert blocks(ROOT / page, "sh")
        assert function in (ROOT / file).read_text()


def test_the_stack_has_what_its_page_uses(tmp_path: Path) -> None:
    """The stack itself needs public images; `python -m demo.compose` runs it."""
    install, *before = "".join(blocks(ROOT / "docs" / "compose.md", "sh")).splitlines()
    in_stack = [before.pop(before.index(line)) for line in list(before) if line.startswith("docker ")]
    (tmp_path / WHEEL).touch()
    assert (install, before.pop(0)) == ("python3 -m venv tools", f"tools/bin/pip install {WHEEL}")
    script = "\n".join(before).replace("tools/bin/", f"{Path(sys.executable).parent}/")
    subprocess.run(["bash", "-e"], input=script, cwd=tmp_path, check=True, text=True)
    folder = tmp_path / "gpu-manager"
    stack = yaml.safe_load((folder / "docker-compose.yml").read_text())
    secrets = dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())
    assert (folder / ".env").stat().st_mode & 0o077 == 0
    needed = set(re.findall(r"\$\{(\w+):\?", (folder / "docker-compose.yml").read_text()))
    assert needed <= secrets.keys()
    own = [secret for name, secret in secrets.items() if not name.startswith("GPU_")]
    assert {len(base64.urlsafe_b64decode(secret)) for secret in own} == {32}
    example = (folder / "env.example").read_text()
    written = (folder / ".env").read_text().replace(secrets["REDIS_PASSWORD"], "<REDIS_PASSWORD>")
    written = written.replace(secrets["GPU_DATABASE_PASSWORD"], "<GPU_DATABASE_PASSWORD>")
    stores = re.findall(r"^GPU_MANAGER_STORE=.*", written, re.MULTILINE)
    assert sorted(re.findall(r"GPU_MANAGER_STORE=\S+", example)) == sorted(stores)
    mounted = [
        str(each).split(":")[0] for one in stack["services"].values() for each in one.get("volumes", ())
    ]
    assert [path for path in mounted if path.startswith("./") and not (folder / path).exists()] == []
    profiles = {name for service in stack["services"].values() for name in service.get("profiles", ())}
    for line in in_stack:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["docker", "compose"]
        if "--profile" in words:
            assert words[words.index("--profile") + 1] in profiles
        if "exec" in words:
            assert words[words.index("exec") + 1] in stack["services"]


def test_a_store_that_has_none_of_the_stacks_tokens_gets_new_ones(tmp_path: Path) -> None:
    stack = yaml.safe_load((ROOT / "resource_manager/deploy/compose/docker-compose.yml").read_text())
    [script] = stack["services"]["gpu-manager"]["command"]
    script = script.replace("$$", "$").replace("/opt/airflow/tokens", str(tmp_path))
    begin = script.replace("exec gpu-manager serve", "exec echo")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    written = []
    for store in ("first", "first", "second"):
        settings = {"GPU_MANAGER_STORE": f"sqlite:///{tmp_path}/{store}.db", "PATH": programs}
        subprocess.run(["bash", "-c", begin], env={**os.environ, **settings}, check=True)
        written.append({file.name: file.read_text() for file in tmp_path.glob("*.token")})
    once, again, elsewhere = written
    assert once == again
    assert once.keys() == elsewhere.keys() == {"operator.token", "user.token", "reader.token"}
    assert not set(once.values()) & set(elsewhere.values())
    user = elsewhere["user.token"].split("_")[1]
    environment = {**os.environ, "GPU_MANAGER_STORE": f"sqlite:///{tmp_path}/second.db", "PATH": programs}
    subprocess.run(["gpu-manager", "token", "rotate", user, "--overlap", "1d"], env=environment, check=True)
    subprocess.run(["bash", "-c", begin], env=environment, check=True)
    rotated = {file.name: file.read_text() for file in tmp_path.glob("*.token")}
    assert [name for name in rotated if rotated[name] != elsewhere[name]] == ["user.token"], "its end is set"
    for_others = [file.name for file in tmp_path.glob("*.token") if file.stat().st_mode & 0o077]
    assert (for_others, stack["services"]["prometheus"].get("user")) == (["reader.token"], None)


def test_the_mark_of_the_state_is_in_a_volume_of_the_stack() -> None:
    stack = yaml.safe_load((ROOT / "resource_manager/deploy/compose/docker-compose.yml").read_text())
    service = stack["services"]["gpu-manager"]
    mounts = {folder: volume for volume, folder in (each.split(":") for each in service["volumes"])}
    assert mounts[service["environment"]["STATE_DIRECTORY"]] in stack["volumes"]
    assert "GPU_MANAGER_STORE" in service["environment"]


def test_the_fault_tests_know_their_options() -> None:
    """With `--help` at the end, a program checks the options before it and stops; tests/faults runs it."""
    programs: dict[str, Callable[[list[str]], object]] = {
        "tests.faults.run": run.command,
        "tests.faults.day": day.main,
    }
    for line in "".join(blocks(ROOT / "docs" / "contributing" / "fault-tests.md", "sh")).splitlines():
        python, option, name, *options = shlex.split(line, comments=True)
        assert (python, option) == ("python", "-m")
        with pytest.raises(SystemExit) as ended:
            programs[name]([*options, "--help"])
        assert ended.value.code == 0


# ---- texts ----


def test_no_page_names_an_unpublished_package() -> None:
    sources = [
        ROOT / "Makefile",
        *(ROOT / "resource_manager").rglob("*.py"),
        *(ROOT / "simulator").rglob("*.py"),
    ]
    for path in [*PAGES, *sources]:
        assert not re.search(r"pip install [^\n]*gpu-resource-manager", path.read_text()), path


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text()):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / file if file else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            missing.append(target)
    assert not missing


def test_every_setting_and_every_change_stands_on_its_page() -> None:
    settings = (ROOT / "docs" / "operating.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in settings] == []
    assert [name for name in Settings.model_fields if f"`GPU_MANAGER_{name.upper()}`" not in settings] == []
    changes = (ROOT / "docs" / "contributing" / "state-and-changes.md").read_text()
    assert [kind for kind in get_args(Change) if f"`{kind.__name__}`" not in changes] == []


def test_every_option_of_the_service_and_every_alert_stands_on_its_page() -> None:
    service = (ROOT / "docs" / "service.md").read_text()
    options = [option for param in serve.params for option in param.opts]
    assert [option for option in options if f"`{option}`" not in service] == []
    variables = [param.envvar for param in serve.params if isinstance(param.envvar, str)]
    login = {name for name in variables if name.startswith("GPU_MANAGER_AIRFLOW_")}
    assert [name for name in {*variables} - login if f"`{name}`" not in service] == []
    alerts = (ROOT / "resource_manager" / "deploy" / "monitoring" / "alerts.yml").read_text()
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert [name for name in re.findall(r"alert: (\w+)", alerts) if f"`{name}`" not in page] == []


def test_the_dag_of_the_readme_is_the_one_that_a_command_writes(tmp_path: Path) -> None:
    [written] = write_files("dag", tmp_path)
    [shown] = [code for code in blocks(ROOT / "README.md", "python") if is_dag(code)]
    assert written.read_text().partition('"""\n\n')[2] == shown


def test_the_readme_asks_some_of_what_the_index_asks() -> None:
    index, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    rows = re.findall(r"^\| .*\? \| .*", readme, re.MULTILINE)
    assert rows
    assert [row for row in rows if row.replace("](docs/", "](") not in index.splitlines()] == []


def test_every_page_that_answers_a_question_is_in_the_index() -> None:
    """Pages of contributors are linked from theirs, and a study from its simulator."""
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (ROOT / "docs" / "index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} - {"index.md"}
    assert {page for page in pages - linked if "contributing/" not in page and "-study" not in page} == set()


def test_no_page_needs_a_checkout() -> None:
    for page in PAGES:
        assert "in a checkout" not in page.read_text(), page
        assert "pip install '.[" not in page.read_text(), page


def test_every_page_is_in_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert set(re.findall(r"- (\S+\.md)$", settings, re.MULTILINE)) == pages


def test_the_site_asks_no_other_host_for_fonts() -> None:
    """A built site was looked through, too: `make docs` brings all else of it."""
    assert "\n  font: false" in (ROOT / "mkdocs.yml").read_text()


READS_THE_TERMINAL = re.compile(r"^docker (?:compose )?exec |^gpu-manager apply (?!.*--yes)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_takes_the_lines_pasted_behind_it(page: Path) -> None:
    for block in blocks(page, "sh"):
        assert not READS_THE_TERMINAL.search(block[: block.rstrip().rfind("\n") + 1])


def test_make_docs_says_where_the_site_is() -> None:
    commands = subprocess.run(["make", "-n", "docs"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert f'echo "the site: file://{ROOT}/site/index.html"\n' in commands.stdout


SPEED = re.compile(
    r"\bp(?:50|9\d) (?:of )?\d|\b(?:renew|release|allocate) p(?:50|9\d)\b|"
    r"\d (?:pairs|pods|requests|steps|functions|calls)/s|\bµs\b"
)
PRIVATE = re.compile(r"\b(whoever|room|rests|rested|resting|anew|settle|he|his|him|wish|held)\b")
"""Words of an older dialect, for which docs/glossary.md has a term."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_of_speed_stand_on_one_page(page: Path) -> None:
    if page not in (figures.PAGE, ROOT / "docs" / "security.md"):
        assert not SPEED.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_are_those_of_the_glossary(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    assert not PRIVATE.findall(text)


def test_the_page_of_benchmarks_is_made_of_the_results() -> None:
    assert figures.PAGE.read_text() == figures.page(json.loads(figures.RESULTS.read_text()))


# ---- reference ----

REFERENCE = re.findall(
    r"^::: (\S+)$", "\n".join(page.read_text() for page in PAGES if page.parent.name == "reference"), re.M
)


def test_operators_launchers_stores_policies_and_orders_have_a_reference() -> None:
    described = {name.rpartition(".")[2] for name in REFERENCE}
    launchers = {f"{name}launcher" for name in LAUNCHERS}
    assert set(for_authors.__all__) <= described
    assert launchers <= {name.lower() for name in described}
    assert {"MemoryStore", "RedisStore", "VariableStore"} <= described
    assert set(POLICIES) <= described
    assert {order.arrange.__name__ for order in ORDERS.values()} <= described


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFERENCE)
def test_a_reference_names_something_described(name: str) -> None:
    """Constants carry their docstring in the source, below them."""
    module, _, attribute = name.rpartition(".")
    try:
        described = getattr(importlib.import_module(module), attribute)
    except (AttributeError, ModuleNotFoundError):
        described = importlib.import_module(name)
    in_source = re.compile(rf'^{attribute} = .*\n"""', re.MULTILINE)
    if not in_source.search(Path(sys.modules[module].__file__ or "").read_text()):
        assert described.__doc__
        assert re.match(r"[A-Z`]", described.__doc__)
