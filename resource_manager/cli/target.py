"""Target of a command (service or store), and the exit codes of its errors."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from resource_manager import errors
from resource_manager.cli.base import BAD_INPUT, REFUSED, UNREACHABLE, Failure, of_file

if TYPE_CHECKING:  # importing them takes half of the time allowed for the shortest command
    from resource_manager.manager.lease_service import LeaseService
    from resource_manager.manager.manager import GPUResourceManager
    from resource_manager.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

NO_STORE = "no store is set."
HOW_TO_NAME_A_STORE = (
    "Set a store (--store redis://localhost:6379/0, or GPU_MANAGER_STORE=redis://localhost:6379/0), "
    "or a service (--url http://localhost:5000)."
)


CONNECT_TIMEOUT_S = 10.0
"""Time that a service may take to listen: as typed in one go, `serve &` and what asks it start together."""

SERVICE_MODULES = {"flask", "prometheus_client", "waitress", "werkzeug"}
"""Modules that the extra `api` installs."""


@dataclass
class Target:
    """Service by URL, or store by settings; opened at first use."""

    url: str | None
    token: str | None = field(repr=False)
    store: str | None = field(default=None, repr=False)
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    _opened: LeaseService | None = field(default=None, repr=False)

    @classmethod
    def of(cls, given: Mapping[str, Any], **more: Any) -> Target:
        """Return the target that the options before the command name."""
        return cls(given.get("url"), given.get("token"), given.get("store"), **more)

    def settings(self) -> Settings:
        """Return the settings of environment and file, overridden by the command line.

        Raises `Failure` if no store is set and no Airflow is configured here whose Variable could be the
        store: opening it would create a new Airflow in the home folder.
        """
        settings = self.configured()
        if "store" not in settings.model_fields_set and not in_airflow():
            raise Failure(NO_STORE, BAD_INPUT, HOW_TO_NAME_A_STORE)
        return settings

    def configured(self) -> Settings:
        """The same, also where nothing names a store: a service has its own."""
        from resource_manager.settings import Settings

        return Settings.load().model_copy(update={} if self.store is None else {"store": self.store})

    @property
    def setting(self) -> str:
        """The option or environment variable that named the service or store."""
        if not self.url:
            return "GPU_MANAGER_STORE" if self.store is None else "--store"
        source = click.get_current_context().find_root().get_parameter_source("url")
        return "GPU_MANAGER_URL" if source is ParameterSource.ENVIRONMENT else "--url"

    def require_store(self, why: str) -> None:
        """Raise `Failure` where a service is named; `why` says what a service does not do."""
        if self.url:
            way = "leave out --url" if self.setting == "--url" else f"unset {self.setting}"
            raise Failure(f"{why}: {way}, or name a --store before the command in its place", BAD_INPUT)

    @property
    def place(self) -> str:
        """The service or store without its password; whether nothing named the store."""
        if self.url:
            return errors.redact(self.url)
        settings = self.configured()
        unset = "" if "store" in settings.model_fields_set else ", since GPU_MANAGER_STORE is not set"
        return errors.redact(settings.store) + unset

    def placed(self, text: str) -> str:
        """Return the text, which says where there are no servers if it says that there are none."""
        if errors.NO_SERVERS not in text:
            return text
        has_none, how = errors.NO_SERVERS.split(":")
        return text.replace(errors.NO_SERVERS, f"{has_none} in {self.place}:{how}")

    @property
    def manager(self) -> LeaseService:
        """The lease service, opened at first use."""
        if self._opened is None:
            if self.url:
                from resource_manager.rest.client import ServiceClient

                token = self.known_token()
                self._opened = ServiceClient(self.url, token, connect_timeout_s=self.connect_timeout_s)
            else:
                self._opened = _open(self.settings())
        return self._opened

    def known_token(self) -> str | None:
        """Return the token that was given, else that of the log-in at this service."""
        if self.token or not self.url:
            return self.token
        from resource_manager.cli.log_ins import token_of

        return token_of(self.url)

    def on_store(self) -> GPUResourceManager:
        """Return the manager on the store itself, for a command that requires one."""
        assert not self.url
        return cast("GPUResourceManager", self.manager)

    def require_lasting_store(self) -> None:
        """Raise `Failure` where the store ends with this process: its servers are no machines either."""
        if not self.url and self.settings().store.startswith("memory:"):
            raise Failure(
                "memory:// has four servers that are examples, and forgets leases with this command.",
                BAD_INPUT,
                HOW_TO_NAME_A_STORE,
            )

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def abandon(self) -> None:
        """Leave it open: a thread still waits for an answer, and closing would wait, too."""
        self._opened = None

    def environment(self) -> dict[str, str]:
        """Return the environment that gives another `gpu-manager` this target: options show secrets."""
        given = {"url": self.url, "token": self.known_token(), "store": self.store}
        own = {f"GPU_MANAGER_{name.upper()}": str(value) for name, value in given.items() if value}
        others = {name: value for name, value in os.environ.items() if name != "GPU_MANAGER_URL"}
        return {**others, **own}


def exit_codes(command: F) -> F:
    """Turn the project's errors into one line and the exit code of their kind."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except errors.ResourceManagerError as error:
            raise Failure(_in_options(error), code_of(error)) from error
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in SERVICE_MODULES:
                raise
            missing = f"{command.__name__} needs {error.name}: {errors.how_to_install('api')}"
            raise Failure(missing, BAD_INPUT) from error
        except OSError as error:
            if error.filename is None:  # of standard output or a connection: the program says so
                raise
            raise Failure(of_file(error), BAD_INPUT) from error
        except ValueError as error:
            raise Failure(str(error), BAD_INPUT) from error

    return run  # type: ignore[return-value]


def _in_options(error: errors.ResourceManagerError) -> str:
    """Return the error's text in the command's own options and arguments."""
    context = click.get_current_context()
    target = context.find_object(Target)
    text = str(error)
    if isinstance(error, errors.InvalidRequestError):
        names = {
            param.name: param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
            for param in context.command.get_params(context)
            if param.name is not None
        }
        text = error.words.named(names)
    return target.placed(text) if target else text


def _open(settings: Settings) -> GPUResourceManager:
    # Importing creates no garbage, but collecting while it runs takes a tenth of the time.
    gc.disable()
    try:
        from resource_manager.fleet.opening import open_manager
    finally:
        gc.enable()
    return open_manager(settings)


def in_airflow() -> bool:
    """Return whether Airflow is configured by the environment or has loaded this: `airflow://` then works."""
    return "airflow" in sys.modules or any(name.startswith("AIRFLOW_") for name in os.environ)


def code_of(error: errors.ResourceManagerError) -> int:
    """Return the exit code: 1 refused or not found, 2 bad input, 3 service or store unreachable."""
    status = getattr(error, "status", None)
    if isinstance(error, errors.BackupRefusedError):
        return REFUSED
    if isinstance(error, errors.StoreError | errors.OutageError) or (status is not None and status >= 500):
        return UNREACHABLE
    if isinstance(error, errors.DuplicateTaskError | errors.LeaseNotFoundError) or status is not None:
        return REFUSED
    return BAD_INPUT if isinstance(error, ValueError | errors.PolicyError) else REFUSED
