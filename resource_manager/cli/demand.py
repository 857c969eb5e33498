"""Options of a command that describe a request, and the manager's arguments made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from resource_manager.cli.base import BAD_INPUT, Failure

F = TypeVar("F", bound=Callable[..., Any])


class WholeGpus(click.ParamType[int]):
    """Whole number; for a fraction, the error explains how to request a GPU fraction."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(value)
        except ValueError:
            from resource_manager.manager.demand import fraction_advice  # with pydantic: only for a complaint

            advice = fraction_advice(value)
            for word, option in (("gpus=", "--gpus "), ("gpu_milli=", "--gpu-milli "), (",", "")):
                advice = advice.replace(word, option)
            self.fail(f"{value!r} is not a whole number{advice}", param, ctx)


def demand_options(command: F) -> F:
    """Add the options for GPUs, CPUs and the queue."""
    for option in (
        click.option("--team"),
        click.option("--priority", type=int),
        click.option(
            "--sensitivity", "sensitivity_per_s", type=float, help="Steepness of the utility, per second."
        ),
        click.option(
            "--target", "target_s", type=float, metavar="SECONDS", help="Age that halves the utility."
        ),
        click.option("--utility", type=float, help="Value of finishing well before the target."),
        click.option("--expected-runtime", "expected_runtime_s", type=float, metavar="SECONDS"),
        click.option("--server", help="Required server: name or id."),
        click.option("--prefer-server", "prefer_server_id", help="Server to try first: name or id."),
        click.option(
            "--resource", "resources", multiple=True, metavar="NAME=AMOUNT", help="Such as memory_mib."
        ),
        click.option("--vendor", help="Vendor of the GPUs."),
        click.option("--gpu-type", "gpu_types", multiple=True, help="Accepted GPU type; may be repeated."),
        click.option("--gpu-milli", type=int, help="GPU fraction: thousandths of one GPU, with --gpus 1."),
        click.option("--cpus", "required_cpus", type=int, default=1, show_default=True),
        click.option(
            "--gpus",
            "required_gpus",
            type=WholeGpus(),
            required=True,
            help="Whole GPUs of one server, at most those of the largest; 1 with --gpu-milli.",
        ),
    ):
        command = option(command)
    return command


def lease_options(command: F) -> F:
    """Add the options for the lease."""
    for option in (
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="May be repeated."),
        click.option("--quarantine", is_flag=True, help="Keep the GPUs allocated after expiry."),
        click.option("--ttl", "ttl_s", type=float, metavar="SECONDS", help="Lifetime without renewal."),
        click.option("--owner"),
    ):
        command = option(command)
    return command


def arguments_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the manager's arguments: the options that were given, with pairs split."""
    # Zero is kept: it may be server 0, or a value that the manager must refuse.
    arguments = {key: value for key, value in options.items() if value is not None and value != ()}
    arguments["required_gpus"], arguments["required_cpus"] = (
        options["required_gpus"],
        options["required_cpus"],
    )
    if "gpu_types" in arguments:
        arguments["gpu_types"] = list(arguments["gpu_types"])
    if "labels" in arguments:
        arguments["labels"] = dict(_pair(text, "--label") for text in arguments["labels"])
    if "resources" in arguments:
        arguments["resources"] = {
            name: _amount(value, name)
            for name, value in (_pair(text, "--resource") for text in arguments["resources"])
        }
    return arguments


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise Failure(f"{option} must be NAME=VALUE, got {text!r}", BAD_INPUT)
    return key, value


def _amount(text: str, name: str) -> float:
    if name == "cpus":
        raise Failure("--resource does not take cpus: use --cpus", BAD_INPUT)
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise Failure(f"--resource {name} must be a number, got {text!r}", BAD_INPUT) from None
