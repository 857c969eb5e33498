"""`gpu-manager reconcile`: end the jobs and leases that Airflow's tasks left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from resource_manager.cli.base import DONE, INTERVAL, UNREACHABLE, Failure, one_line, print_json
from resource_manager.cli.program import main, on_target
from resource_manager.cli.signals import interruptible
from resource_manager.cli.target import F, Target
from resource_manager.errors import InvalidRequestError, ResourceManagerError

if TYPE_CHECKING:
    from resource_manager.jobs.airflow_api import AirflowTaskStates
    from resource_manager.jobs.reconcile import Reconciliation


@dataclass(frozen=True, slots=True)
class AirflowLogin:
    """Address of an Airflow, None if none is named, and the token, or user and password, of who asks it."""

    url: str | None
    token: str | None = field(repr=False)
    user: str | None
    password: str | None = field(repr=False)

    @property
    def is_complete(self) -> bool:
        return bool(self.url and (self.token or self.user))

    def states(self) -> AirflowTaskStates:
        """Log in; raises `AirflowUnavailableError`."""
        from resource_manager.jobs.airflow_api import AirflowTaskStates

        return AirflowTaskStates(self.url or "", token=self.token, user=self.user, password=self.password)


def airflow_options(*, required: bool) -> Callable[[F], F]:
    """Return the decorator that adds the options with which a command asks Airflow, given as `airflow`."""
    options = [
        click.option(
            "--airflow-url",
            envvar="GPU_MANAGER_AIRFLOW_URL",
            required=required,
            help="Airflow's address, such as http://airflow:8080.",
        ),
        click.option(
            "--airflow-token", envvar="GPU_MANAGER_AIRFLOW_TOKEN", help="Bearer token, or user and password."
        ),
        click.option(
            "--airflow-user",
            envvar="GPU_MANAGER_AIRFLOW_USER",
            help="User that may read task instances, and edit those that it ends.",
        ),
        click.option("--airflow-password", envvar="GPU_MANAGER_AIRFLOW_PASSWORD"),
    ]

    def add(command: F) -> F:
        @wraps(command)
        def run(*args: Any, **given: Any) -> Any:
            login = (given.pop(f"airflow_{name}") for name in ("url", "token", "user", "password"))
            return command(*args, airflow=AirflowLogin(*login), **given)

        for option in reversed(options):
            run = option(run)
        return run  # type: ignore[return-value]

    return add


@main.command()
@airflow_options(required=True)
@click.option(
    "--instance",
    metavar="ID",
    help="Instance id of the Airflow whose leases are meant. Default: GPU_MANAGER_INSTANCE, else the id that "
    "this Airflow publishes.",
)
@click.option("--every", "interval_s", type=INTERVAL, help="Repeat until Ctrl-C.")
@on_target
def reconcile(
    target: Target, airflow: AirflowLogin, instance: str | None, interval_s: float | None, as_json: bool
) -> None:
    """Stop the jobs and end the leases of an Airflow's tasks that have ended.

    Leases of other Airflow instances on the same store are only counted. A lease whose job is unreachable is
    kept. Servers of a restored state are searched for jobs without a lease. The jobs' connections (ssh,
    docker) are Airflow's, so run this where Airflow is installed.
    """
    if instance is not None:
        instance = _valid(instance)
    else:
        instance = (target.configured() if target.url else target.settings()).instance
    work = partial(_reconcile, target, airflow, instance, interval_s, as_json=as_json)
    interruptible(work, None if interval_s is None else DONE)


def _reconcile(
    target: Target, airflow: AirflowLogin, instance: str | None, interval_s: float | None, *, as_json: bool
) -> None:
    """Reconcile once, or again after each interval."""
    from resource_manager.jobs.airflow_api import AirflowUnavailableError
    from resource_manager.jobs.reconcile import reconcile as reconcile_once
    from resource_manager.jobs.slurm_records import end_left_behind

    states = None
    while True:
        try:
            manager = target.manager
            if states is None:
                states = airflow.states()
            of = _instance_of(states, airflow.url, instance)
            done = reconcile_once(manager, states, of)
            try:
                done.actions.extend(end_left_behind(manager, states, of))
            except ResourceManagerError:
                if done.actions:  # they were carried out
                    _show(done, as_json, once=False)
                raise
            _show(done, as_json, once=interval_s is None)
        except WrongInstanceError:
            raise
        except ResourceManagerError as error:
            if interval_s is None and isinstance(error, AirflowUnavailableError):
                raise Failure(str(error), UNREACHABLE) from error
            is_misuse = states is None and isinstance(error, InvalidRequestError)  # by an option
            if interval_s is None or is_misuse:
                raise
            click.echo(f"Error: {one_line(error)}; trying again", err=True)
        if interval_s is None:
            return
        time.sleep(interval_s)


class WrongInstanceError(ResourceManagerError, ValueError):
    """Airflow at the given address is not, or not known to be, the one whose leases are meant."""


def _valid(instance: str) -> str:
    from resource_manager.settings import valid_instance

    try:
        return valid_instance(instance)
    except ValueError as error:
        raise WrongInstanceError(f"--instance: {error}") from None


def _instance_of(states: AirflowTaskStates, airflow_url: str | None, wanted: str | None) -> str:
    """Return the id of the Airflow at this address; raises `WrongInstanceError` unless it is certain.

    An Airflow does not know another's tasks, so with the wrong id all of them would be taken for ended.
    """
    told = states.instance()
    if wanted is None and told is None:
        from resource_manager.jobs.airflow_instance import VARIABLE

        raise WrongInstanceError(
            f"the Airflow at {airflow_url} does not give its instance id: its API server runs without the "
            f"plugin, or this user may not read the Variable {VARIABLE!r}; set --instance"
        )
    if None not in (wanted, told) and wanted != told:
        raise WrongInstanceError(
            f"the Airflow at {airflow_url} has the instance id {told!r}, not {wanted!r}: correct --instance "
            "(or GPU_MANAGER_INSTANCE) or --airflow-url"
        )
    return str(wanted or told)


def _show(done: Reconciliation, as_json: bool, *, once: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    for action in done.actions:
        click.echo(f"{action.action:16}{action.name}: {one_line(action.detail)}")
    if once and not done.actions:
        click.echo("nothing to do: every lease of this Airflow belongs to an unfinished task")
    if once and done.other_instances:
        click.echo(f"leases and requests of other Airflow instances, left unchanged: {done.other_instances}")
