"""Person that a provider vouches for: their name and, by their groups, role and teams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resource_manager.core.cluster_settings import SignOn
from resource_manager.rest.sign_on.provider import RefusedLogInError
from resource_manager.rest.tokens import Role

MAX_SHOWN = 10
"""Groups in a refusal: some people are in hundreds."""


@dataclass(frozen=True, slots=True)
class Person:
    """Person with their rights; without `teams` they may name any. `subject` is their id at the provider."""

    name: str
    subject: str
    role: Role
    teams: tuple[str, ...]


def person_of(sign_on: SignOn, claims: Mapping[str, Any]) -> Person:
    """Return the person of an ID token, with the rights of all their groups; raises `RefusedLogInError`.

    The role is the highest. Teams are those of every group that may allocate; any, if one names none.
    """
    name = claims.get(sign_on.name_claim)
    if not isinstance(name, str) or not name:
        raise RefusedLogInError(f"the ID token has no name of a person in {sign_on.name_claim}")
    if sign_on.name_claim == "email" and claims.get("email_verified") is not True:
        raise RefusedLogInError(f"the provider has not verified that {name} is the address of who logged in")
    found = claims.get(sign_on.groups_claim, [])
    found = [found] if isinstance(found, str) else found  # so some providers say the only one
    theirs = [group for group in found if isinstance(group, str)] if isinstance(found, list) else []
    groups = [group for group in sign_on.groups if group.group in theirs]
    if not groups:
        listed = ", ".join(theirs[:MAX_SHOWN]) or f"no group in {sign_on.groups_claim}"
        raise RefusedLogInError(f"[sign_on.groups] names no group of {name}, who is in {listed}")
    allocating = [group.teams for group in groups if Role.named(group.role) >= Role.USER]
    is_bound = bool(allocating) and all(allocating)
    teams = dict.fromkeys(team for named in allocating for team in named) if is_bound else ()
    role = max(Role.named(group.role) for group in groups)
    return Person(name, str(claims["sub"]), role, tuple(teams))
