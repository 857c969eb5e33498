"""The section `[sign_on]` of a cluster file: who knows the people, and what their groups may do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from resource_manager.core.cluster_settings import SignOn, SignOnGroup
from resource_manager.manager.cluster_file.durations import Duration
from resource_manager.manager.demand_fields import Name
from resource_manager.manager.wording import changed_in_words, entries_changed, value_in_words

LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
MAX_TOKEN_LIFE_S = 366 * 86_400.0

Text = Annotated[str, Field(min_length=1, max_length=250)]
DEFAULTS: dict[str, Any] = {
    field.name.removesuffix("_s"): list(field.default) if field.name == "scopes" else field.default
    for field in fields(SignOn)
    if field.default is not MISSING
}


class SignOnGroupTable(BaseModel, extra="forbid", strict=True):
    """One `[sign_on.groups.NAME]` table."""

    role: Literal["reader", "user", "operator"]
    teams: list[Name] = Field(
        default=[], max_length=50, description="Teams its members may name; the first is the default."
    )


class SignOnSection(BaseModel, extra="forbid", strict=True):
    """The section `[sign_on]`; without it people have tokens only."""

    issuer: Text = Field(description="Address of the provider, as its ID tokens state it.")
    client_id: Text = Field(description="Name of this service at the provider.")
    groups: dict[Text, SignOnGroupTable] = Field(
        min_length=1, max_length=1000, description="The provider's groups whose members may log in."
    )
    scopes: list[Text] = Field(default=DEFAULTS["scopes"], max_length=20)
    name_claim: Text = Field(
        default=DEFAULTS["name_claim"], description="Claim with the name under which a person owns leases."
    )
    groups_claim: Text = Field(default=DEFAULTS["groups_claim"], description="Claim with their groups.")
    token_life: Annotated[Duration, Field(ge=60, le=MAX_TOKEN_LIFE_S)] = Field(
        default=DEFAULTS["token_life"], description="Time until a log-in on the command line is over."
    )

    @field_validator("issuer")
    @classmethod
    def _address(cls, issuer: str) -> str:
        parts = urlsplit(issuer)
        is_host = parts.hostname and parts.username is None and parts.port != 0  # which checks the port
        if parts.query or parts.fragment or not is_host:
            raise ValueError(f"must be an address such as https://login.example.org/lab, got {issuer!r}")
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK_NAMES):
            raise ValueError(f"must begin with https://, got {issuer!r}")
        return issuer

    @field_validator("scopes")
    @classmethod
    def _asks_for_an_id_token(cls, scopes: list[str]) -> list[str]:
        if "openid" not in scopes:
            raise ValueError("must contain openid")
        return scopes

    def settings(self) -> SignOn:
        groups = tuple(
            SignOnGroup(name, table.role, tuple(table.teams)) for name, table in sorted(self.groups.items())
        )
        plain = self.model_dump(exclude={"groups", "scopes", "token_life"})
        return SignOn(**plain, groups=groups, scopes=tuple(self.scopes), token_life_s=self.token_life)


def form_of(sign_on: SignOn | None) -> dict[str, Any]:
    """Return the section as a file states it, without defaults; empty if there is none."""
    if sign_on is None:
        return {}
    plain = {name.removesuffix("_s"): value for name, value in asdict(sign_on).items() if name != "groups"}
    plain["scopes"] = list(sign_on.scopes)
    stated = {name: value for name, value in plain.items() if value != DEFAULTS.get(name)}
    groups = {
        each.group: {"role": each.role, **({"teams": list(each.teams)} if each.teams else {})}
        for each in sign_on.groups
    }
    return {**stated, "groups": groups}


def difference(before: SignOn | None, after: SignOn | None) -> Iterator[str]:
    """Yield what changes between two sections, a line for each key and each group."""
    old, new = form_of(before), form_of(after)
    groups = old.pop("groups", {}), new.pop("groups", {})
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            values = (form.get(key, DEFAULTS.get(key) if form else None) for form in (old, new))
            yield changed_in_words(f"sign_on {key}", *values)
    for sign, name, tables in entries_changed(*groups):
        yield f"{sign} sign_on group {name}: {' → '.join(map(value_in_words, tables))}"
