"""The entries of `[[notices]]` in a cluster file: which events are sent to which address."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from resource_manager.core.cluster_settings import Notice
from resource_manager.manager.demand_fields import Name

Event = Literal["preempted", "idle", "quarantined", "gpu closed", "server silent", "deadline at risk"]


class NoticeTable(BaseModel, extra="forbid", strict=True):
    """One entry of `[[notices]]`."""

    on: list[Event] = Field(min_length=1, max_length=10, description="Events that are sent.")
    to: Annotated[str, Field(min_length=1, max_length=2000)] = Field(description="Address of the webhook.")
    team: Name | Literal[""] = Field(default="", description="Only of leases of this team.")
    private: bool = Field(default=False, description="The address may redirect to one of a private network.")

    @field_validator("to")
    @classmethod
    def _address(cls, to: str) -> str:
        parts = urlsplit(to)
        is_host = parts.hostname and parts.username is None and parts.port != 0  # which checks the port
        if parts.scheme not in ("http", "https") or not is_host:
            raise ValueError("must be an address such as https://hooks.example.org/gpu")
        return to

    def notice(self) -> Notice:
        return Notice(tuple(dict.fromkeys(self.on)), self.to, self.team, self.private)


def form_of(notice: Notice) -> dict[str, Any]:
    """Return the entry as a file states it, without defaults and with its address masked."""
    more = {"team": notice.team, "private": notice.private}
    stated = {"on": list(notice.on), "to": notice.masked.to}
    return stated | {name: value for name, value in more.items() if value}


def in_words(notice: Notice) -> str:
    """Return what is sent where; of the address only its host, since who knows its path may write to it."""
    of = f" of team {notice.team}" if notice.team else ""
    return f"notice of {', '.join(notice.on)}{of} to {urlsplit(notice.to).hostname}"
