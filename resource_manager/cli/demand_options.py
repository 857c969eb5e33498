"""Options of the commands that request a lease, generated from the fields of `Demand`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

import click

from resource_manager.cli import completing
from resource_manager.cli.base import Command

if TYPE_CHECKING:  # pydantic takes longer to load than most commands to run
    from pydantic.fields import FieldInfo

    from resource_manager.cli.target import Target
    from resource_manager.manager.demand import Demand

SINGULAR = {
    "gpu_types": "--gpu-type",
    "resources": "--resource",
    "labels": "--label",
    "labels_required": "--require-label",
}
"""Options that are repeated, by field; every other option is named after its field."""

RUNTIMES = ("--expected-runtime", "--time", "--for")
"""Options of one idea, of which each command has the one that says what it does with the runtime."""

SERVERS = ("server", "prefer_server")
"""Fields that name a server."""

METAVARS: dict[object, str] = {
    int: "INTEGER",
    float: "NUMBER",
    dict: "NAME=VALUE",
    "resources": "NAME=AMOUNT",
    "deadline": "TIME",
}
"""Values of options in the help, by their type, or by the field where that says more."""


class DemandCommand(Command):
    """Command with one option per field of `Demand`, generated only when the command is called."""

    omitted: ClassVar[frozenset[str]] = frozenset({"lease_id"})
    """Fields without an option, since the command itself says them."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of fields whose option is left out, where they differ from those of `Demand`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        common = [param for param in own if param.name in ("as_json", "help")]  # come last
        return [*(param for param in own if param not in common), *self._options(), *common]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in RUNTIMES:
                raise
            near = " or ".join(self.alike(ctx, error.option_name))
            text = f"No such option {error.option_name}: did you mean {near}?"
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from error

    def alike(self, ctx: click.Context, option: str) -> list[str]:
        """Return the options that may be meant by one that the command has not, the likeliest first."""
        own = [name for param in self.get_params(ctx) for name in param.opts]
        if option in RUNTIMES:
            return [name for name in RUNTIMES if name in own]
        from difflib import get_close_matches

        return get_close_matches(option, own)

    def _options(self) -> list[click.Parameter]:
        fields = _demand().model_fields
        return [
            click.Option(
                [_names(name, field.default), name],
                multiple=(get_origin(field.annotation) or field.annotation) in (list, dict),
                metavar=METAVARS.get(name) or _metavar(field),
                help=field.description,
                is_flag=True if field.annotation is bool else None,
                default=self.defaults.get(name),
                show_default=name in self.defaults,
                shell_complete=completing.servers if name in SERVERS else None,
            )
            for name, field in fields.items()
            if name not in self.omitted
        ]


def _metavar(field: FieldInfo) -> str | None:
    """Return the word for an option's value in the help; None for a text."""
    from resource_manager.manager.cluster_file.durations import as_seconds

    kind, limits = field.annotation, field.metadata
    if get_args(kind)[1:] == (type(None),):  # a field that may be left out
        kind, *limits = get_args(get_args(kind)[0])
    if any(getattr(limit, "func", None) is as_seconds for limit in limits):
        return "DURATION"
    return METAVARS.get(get_origin(kind) or kind)


def _names(field: str, default: object) -> str:
    """Return an option's name; with the way to say no, if the answer is yes without it."""
    name = SINGULAR.get(field, f"--{field.replace('_', '-')}")
    return f"{name}/--not-{name.removeprefix('--')}" if default is True else name


def demand_of(lease_id: str | None, options: dict[str, Any]) -> Demand:
    """Return the demand of the options that were given; raises `InvalidRequestError`.

    Without a `lease_id` it is only asked about.
    """
    from resource_manager.manager import demand

    fields = {"lease_id": lease_id, **options}
    given = {name: value for name, value in fields.items() if value not in (None, ())}
    return (demand.WhatIf if lease_id is None else demand.Demand).of(**demand.from_texts(given))


def owned(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with this user as owner, unless they name one or the service knows its callers."""
    from resource_manager.manager.commit.asking import user_name

    return {**options, "owner": options.get("owner") or target.manager.stated_owner(user_name())}


def _demand() -> type[Demand]:
    gc.disable()  # garbage collection would take a tenth of the import's time and free nothing
    try:
        from resource_manager.manager.demand import Demand
    finally:
        gc.enable()
    return Demand
