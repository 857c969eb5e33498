"""`gpu-manager` itself: its options, those that many commands have, and completion."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from resource_manager import STORED_FORMAT, __version__
from resource_manager.cli import completing
from resource_manager.cli.base import OneLineErrors
from resource_manager.cli.target import F, Target, exit_codes

PROGRAM = "gpu-manager"

_SILENCE = logging.NullHandler()


def _unless_a_store_is_named(context: click.Context, _: click.Parameter, url: str | None) -> str | None:
    """Return the service: one of the environment takes no command that names its store."""
    is_from_environment = context.get_parameter_source("url") is ParameterSource.ENVIRONMENT
    return None if is_from_environment and context.params.get("store") is not None else url


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--url",
    envvar="GPU_MANAGER_URL",
    callback=_unless_a_store_is_named,
    help="URL of the service; without it, the store is used.",
)
@click.option("--token", envvar="GPU_MANAGER_TOKEN", help="Bearer token for the service.")
@click.option(
    "--store", help="Store (redis://…, sqlite:///…, and so on); overrides GPU_MANAGER_STORE and _URL."
)
@click.version_option(message=f"{PROGRAM} {__version__}, stored format {STORED_FORMAT}", version=__version__)
@click.pass_context
def main(context: click.Context, /, **given: Any) -> None:
    """Show, request and release leases on named GPUs and CPUs.

    Exit codes: 0 done, 1 refused or not found, 2 bad input, 3 service or store unreachable.
    """
    if given["url"] and given["store"] is not None:
        raise click.UsageError("--url and --store exclude each other: leave out --url or --store", context)
    # A command's own line says what its caller must know, also where a job's launcher loads Airflow, which
    # prints all logs; `serve` sets up a log of its own.
    package = logging.getLogger("resource_manager")
    package.addHandler(_SILENCE)
    package.propagate = False
    context.call_on_close(lambda: setattr(package, "propagate", True))
    # The client of a service says there why a call takes longer.
    logging.getLogger("resource_manager.rest.connection").addHandler(logging.lastResort or _SILENCE)
    context.obj = (context.obj or Target.of)(given)  # who embeds the command may have a target of its own
    context.call_on_close(context.obj.close)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON only.")(command)


def on_target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command its target, `--json`, and one line with an exit code for an error."""
    return json_option(click.pass_obj(exit_codes(command)))


def wide_option(command: F) -> F:
    return click.option("--wide", is_flag=True, help="Print every column, however wide the terminal is.")(
        command
    )


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell, used as: eval "$(gpu-manager completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None
    script = found(main, {}, PROGRAM, "_GPU_MANAGER_COMPLETE").source()
    click.echo(completing.COLONS + script if shell == "bash" else script)
