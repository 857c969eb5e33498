"""`gpu-simulate`: one command per simulator, imported only when it is called."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from resource_manager import __version__
from resource_manager.cli.base import BAD_INPUT, FOLDER, Failure, OneLineErrors, of_file
from resource_manager.cli.base import FiniteRange as FiniteRange
from resource_manager.cli.base import print_json as print_json
from resource_manager.errors import ResourceManagerError, how_to_install

COMMANDS = {
    "serverless": ("simulator.serverless.command", "Serverless workflows on servers with NUMA nodes."),
    "vgpu": ("simulator.vgpu.command", "A vGPU pool with API-sandbox gates, scenarios A1 to A5."),
    "oasis": ("simulator.oasis.command", "Online scheduling of training jobs by resource prices."),
    "edge": ("simulator.edge.command", "Job graphs on cloud hosts, base stations and devices."),
    "replay": ("simulator.replay.command", "A recorded workload under a placement policy and queue order."),
    "compare": (
        "simulator.replay.compare_command",
        "Policies and queue orders side by side on one workload.",
    ),
    "shares": ("simulator.shares.command", "A fleet of several GPU types divided among jobs and teams."),
    "sample": ("simulator.replay.sample", "A simulated month as a history file, to try compare with."),
}
"""Command name -> (module with a click command called `command`, short help)."""


class BadInput(Failure):
    """Error shown as one line on standard error, with exit status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, BAD_INPUT)


class InputErrors(click.Command):
    """Command that turns every error of its input into a `BadInput`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ResourceManagerError as error:
            raise BadInput(str(error)) from error
        except OSError as error:
            if error.filename is None:  # of standard output
                raise
            raise BadInput(of_file(error)) from error
        except ModuleNotFoundError as error:  # some are loaded when they are needed
            raise _missing(ctx.info_name, error) from error


def _missing(command: str | None, error: ModuleNotFoundError) -> BadInput:
    """Return the error for a package of the extra that is not installed; raise it if it is a part of ours."""
    if error.name is None or error.name.startswith(("simulator", "resource_manager")):
        raise error
    package = error.name.partition(".")[0]
    return BadInput(f"{command} needs {package}: {how_to_install('simulator')}")


class LazyGroup(InputErrors, OneLineErrors):
    """Group that imports a simulator only when its command is called: a missing extra affects no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        # For small matrices threads of BLAS only wait for each other; it reads this when imported.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        try:
            command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        except ModuleNotFoundError as error:
            raise _missing(cmd_name, error) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


MAX_SEEDS = 100_000


class Seeds(click.ParamType):  # type: ignore[type-arg]
    """Seeds given as numbers and ranges such as 1-20 or 3,5,8-9, in order and without repeats."""

    name = "SEEDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        return value if isinstance(value, list) else read_seeds(value)


def read_seeds(text: str) -> list[int]:
    """Return the seeds that the text lists; raise `BadInput` for a text that is no list of seeds."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        if match is None:
            raise BadInput(f"--seeds: {part!r} is neither a number nor a range such as 1-20")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise BadInput(f"--seeds: {part!r} ends before it begins")
        if len(seeds) + last - first >= MAX_SEEDS:
            raise BadInput(f"--seeds: {part!r} makes more than {MAX_SEEDS:,} seeds")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


seeds_option = click.option(
    "--seeds", type=Seeds(), help="Many runs: 1-20 or 3,5,8-9. Without it, one run with --seed."
)


def seeds_of(seeds: list[int] | None, seed: int) -> list[int]:
    """Return the seeds of --seeds, or the one of --seed; raise `BadInput` where both are given."""
    if seeds is None:
        return [seed]
    reject_given(("seed",), "is for one run; use either --seed or --seeds")
    return seeds


def options_as(name: str, into: type, *options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds the options, one for each field of the dataclass `into`, to a command.

    The command receives them as one value of that class, under that name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**values: Any) -> Any:
            made = into(**{field.name: values.pop(field.name) for field in fields(into)})
            return function(**{name: made}, **values)

        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def sweep_option(axes: Mapping[str, click.ParamType[Any]], example: str) -> Callable[..., Any]:
    """Return the option --sweep: values by axis, each read by the type of its axis, as in the example."""

    def parse(
        context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
    ) -> dict[str, list[float]]:
        sweeps: dict[str, list[float]] = {}
        for text in texts:
            axis, _, values = text.partition(":")
            if axis not in axes:
                raise click.BadParameter(f"{text!r} is not AXIS:VALUES with an axis of {', '.join(axes)}")
            if axis in sweeps:
                raise click.BadParameter(f"{axis} is varied twice; give all its values together")
            found = [axes[axis].convert(value.strip(), parameter, context) for value in values.split(",")]
            sweeps[axis] = list(dict.fromkeys(found))
        return sweeps

    what = f"Also vary one of {', '.join(axes)}, as {example}; may be repeated."
    return click.option("--sweep", callback=parse, multiple=True, metavar="AXIS:VALUES", help=what)


def reject_given(names: Sequence[str], reason: str) -> None:
    """Raise `BadInput` for the first of these options that was given instead of left at its default."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not ParameterSource.DEFAULT:
            raise BadInput(f"{parameter.opts[0]} {reason}")


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every simulator command takes: --seed, --output-dir, --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else."),
        click.option("--output-dir", type=FOLDER, help="Write reports and plots into this folder."),
        click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of every random draw."),
    ):
        function = option(function)
    return function


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="gpu-simulate", message="%(prog)s %(version)s")
def main() -> None:
    """Replay and simulate GPU scheduling with the resource manager's own allocator."""
