"""`gpu-manager files`: write the files that the installation pages use, which come with the package."""

from __future__ import annotations

from pathlib import Path

import click

from resource_manager.cli.base import BAD_INPUT, FOLDER, Failure, print_json
from resource_manager.cli.program import json_option, main
from resource_manager.cli.target import exit_codes

PACKAGE = Path(__file__).parents[1]
SERVERS = "deploy/servers.toml"
KINDS = {
    "servers": {"servers.toml": SERVERS},
    "dag": {"train_on_a_gpu.py": "deploy/train_on_a_gpu.py"},
    "systemd": {".": "deploy/systemd"},
    "nginx": {".": "deploy/nginx"},
    "container": {".": "deploy/container"},
    "compose": {".": "deploy/compose", "servers.toml": SERVERS, "monitoring": "deploy/monitoring"},
    "monitoring": {".": "deploy/monitoring"},
}
"""Files and folders of each kind: path that is written, path in the package."""


@main.command("files")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--output", "folder", type=FOLDER, default=".", help="Folder.")
@json_option
@exit_codes
def files(kind: str, folder: Path, as_json: bool) -> None:
    """Write the files of an installation page here, or into a folder: units, compose file, DAG.

    \b
    servers     an example of a cluster's file
    dag         a DAG with one job on one GPU
    systemd     unit and settings of the service
    nginx       configuration of a reverse proxy with TLS
    container   Dockerfile of the service alone
    compose     the whole stack with Airflow, for Docker Compose
    monitoring  scrape configuration, alerts and dashboard
    """
    written = [str(path) for path in write_files(kind, folder)]
    if as_json:
        print_json(written)
    else:
        click.echo("\n".join(written))


def write_files(kind: str, folder: Path) -> list[Path]:
    """Write the files of a kind and return their paths; raises `Failure` rather than change a file."""
    from resource_manager.storage.draft_file import replacing  # with which all stores are loaded

    texts = {}
    for written, source in KINDS[kind].items():
        root = PACKAGE / source
        for path in [root] if root.is_file() else sorted(filter(Path.is_file, root.rglob("*"))):
            if path.parent.name == "__pycache__":  # pip compiles the DAG of the stack, too
                continue
            texts[folder / written / path.relative_to(root)] = path.read_text(encoding="utf-8")
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise Failure(f"{path} is there and differs: remove it, or name another --output", BAD_INPUT)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
    return list(texts)
