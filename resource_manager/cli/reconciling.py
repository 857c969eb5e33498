"""The command that ends what Airflow's tasks left behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from resource_manager.cli.commands import check_interval, json_option, main
from resource_manager.cli.target import Target, exit_codes
from resource_manager.command_line import UNREACHABLE, Failure, print_json
from resource_manager.errors import InvalidRequestError, ResourceManagerError

if TYPE_CHECKING:
    from resource_manager.reconcile import Action


@main.command()
@click.option(
    "--airflow-url", envvar="GPU_MANAGER_AIRFLOW_URL", required=True, help="Such as http://airflow:8080."
)
@click.option("--airflow-token", envvar="GPU_MANAGER_AIRFLOW_TOKEN", help="Bearer token, or:")
@click.option("--airflow-user", envvar="GPU_MANAGER_AIRFLOW_USER", help="Who may read task instances.")
@click.option("--airflow-password", envvar="GPU_MANAGER_AIRFLOW_PASSWORD")
@click.option("--every", "interval_s", type=float, metavar="SECONDS", help="Again and again, until Ctrl-C.")
@json_option
@click.pass_obj
@exit_codes
def reconcile(
    target: Target,
    airflow_url: str,
    airflow_token: str | None,
    airflow_user: str | None,
    airflow_password: str | None,
    interval_s: float | None,
    as_json: bool,
) -> None:
    """Stop the jobs and end the leases of Airflow tasks that are over.

    A lease whose job cannot be reached is kept. The jobs' own connections (ssh, docker) are Airflow's, so
    run this where Airflow is installed.
    """
    from resource_manager.airflow_api import AirflowTaskStates, AirflowUnavailableError
    from resource_manager.reconcile import reconcile as reconcile_once

    check_interval("--every", interval_s)
    states = None
    while True:
        try:
            if states is None:
                states = AirflowTaskStates(
                    airflow_url, token=airflow_token, user=airflow_user, password=airflow_password
                )
            _show(reconcile_once(target.manager, states), as_json, once=interval_s is None)
        except InvalidRequestError:
            raise
        except ResourceManagerError as error:
            if interval_s is None and isinstance(error, AirflowUnavailableError):
                raise Failure(str(error), UNREACHABLE) from error
            if interval_s is None:
                raise
            click.echo(f"Error: {error}; trying again", err=True)
        if interval_s is None:
            return
        try:
            time.sleep(interval_s)
        except KeyboardInterrupt:
            return


def _show(actions: Sequence[Action], as_json: bool, *, once: bool) -> None:
    if as_json:
        print_json([asdict(action) for action in actions])
        return
    for action in actions:
        click.echo(f"{action.action:12}{action.task_id}: {action.detail}")
    if once and not actions:
        click.echo("nothing to do: every lease belongs to a task that goes on")
