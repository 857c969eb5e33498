"""Commands `login` and `logout`: a person's token at a service, by its sign-on."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import click

from resource_manager.cli import log_ins
from resource_manager.cli.base import BAD_INPUT, REFUSED, Failure, print_json
from resource_manager.cli.program import main, on_target
from resource_manager.cli.session import say
from resource_manager.cli.target import Target

if TYPE_CHECKING:
    from resource_manager.rest.client import ServiceClient

LONGEST_S = 900.0
"""Time after which nobody logs in any more."""


def _service(target: Target) -> tuple[str, ServiceClient]:
    if not target.url:
        raise Failure("name the service: --url https://gpus.example.org, or GPU_MANAGER_URL", BAD_INPUT)
    return target.url, cast("ServiceClient", target.manager)


@main.command()
@on_target
def login(target: Target, as_json: bool) -> None:
    """Log in at the service with a browser, here or on another machine, by the sign-on of its cluster."""
    url, service = _service(target)
    begun = service.begin_log_in()
    where = begun.get("verification_uri_complete") or begun["verification_uri"]
    say(f"open {where} in a browser and confirm the code {begun['user_code']}")
    ends_at = time.monotonic() + LONGEST_S
    while (made := service.end_log_in(begun["device_code"]))["token"] is None:
        if time.monotonic() > ends_at:
            raise Failure("nobody logged in: gpu-manager login begins again", REFUSED)
        time.sleep(begun["interval_s"])
    caller, expires_at = made["caller"], made["expires_at"]
    assert caller is not None
    log_ins.keep(url, {"token": made["token"], "name": caller["name"], "expires_at": expires_at})
    if as_json:
        print_json({**caller, "expires_at": expires_at})
        return
    until = (
        datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC") if expires_at else "revoked"
    )
    click.echo(f"logged in as {caller['name']} ({caller['role']}) until {until}")


@main.command()
@on_target
def logout(target: Target, as_json: bool) -> None:
    """End the log-in at the service: its token is revoked and forgotten."""
    from resource_manager.rest.client_errors import ServiceError

    url, service = _service(target)
    if log_ins.token_of(url) is None:
        raise Failure(f"there is no log-in at {service.url}", REFUSED)
    try:
        service.log_out()
    except ServiceError as error:
        if error.status != 401:  # it is over already
            raise
    log_ins.keep(url, None)
    print_json({"success": True}) if as_json else click.echo("logged out")
