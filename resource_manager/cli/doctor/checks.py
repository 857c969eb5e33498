"""Checks of what `doctor` observed; each line that is not ok ends with the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resource_manager import __version__
from resource_manager.core.changes import Drained
from resource_manager.core.gpu_state import DRAINED
from resource_manager.core.search import is_unsearched
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.answer_words import duration
from resource_manager.manager.plurals import counted
from resource_manager.storage.finding import Finding

if TYPE_CHECKING:
    from resource_manager.agent.report_format import Report
    from resource_manager.jobs.task_identity import TaskIdentity
    from resource_manager.rest.tokens import Token

LEAST_FREE_BYTES = 1 << 30
"""Free space below which logs of jobs and checkpoints soon fail to be written."""

NEXT_STEPS = (
    ("host key", "if it was set up anew, ssh-keygen -R HOST and log in once by hand; else ask who answers"),
    ("not found in known_hosts", "log in once by hand and check its key: ssh HOST"),
    ("authentication", "let this user log in there with a key: ssh-copy-id HOST"),
    ("no python3", "install python3 there"),
    ("timed out", "check its address, its sshd and the firewall"),
    ("banner", "check its address, its sshd and the firewall"),
    ("no route", "check its address, and the network"),
    ("unreachable", "check its address, and the network"),
    ("refused", "start its sshd, or correct the port of its address"),
    ("no address", 'add address = "HOST" to it in the cluster file, and gpu-manager apply'),
)
"""Parts of the reason why a server did not answer, and what to do about it."""

LAST_REPORT_S = 60.0
"""Time after a server's last report for which a use of its token may have been that report."""

LOOK_AGAIN = "see docs/gpus.md, then ask again"


Login = tuple[str | None, str | None]
"""User and key file with which servers are asked by ssh."""


def of_store_out_of_reach(
    error: str, shown: str, setting: str = "GPU_MANAGER_STORE", *, is_service: bool = False
) -> Finding:
    """Return the finding for a store or service that cannot be read: a wrong password, or nobody listens.

    `setting` is the option or variable that named it.
    """
    text = error.rstrip(".")
    text = text if shown in text else f"{shown}: {text}"
    if any(word in text.lower() for word in ("password", "authenticat", "access denied", "noauth")):
        todo = f"correct user and password in {'its GPU_MANAGER_STORE' if is_service else setting}"
    elif any(word in text for word in ("token", "GPU_MANAGER_JOB_KEYS", "pip install")):  # it says what to do
        return Finding(False, text)
    else:
        todo = f"start it, or correct {setting}"
    return Finding(False, f"{text}: {todo}")


def all_open(servers: int, agents: int) -> Finding:
    """Return the finding where no server has a fault."""
    return Finding(True, f"{counted(servers, 'server')} open, {agents} with an agent")


def of_cluster(summary: Mapping[str, Any], notices: Iterable[str]) -> list[Finding]:
    """Return whether there is a cluster that this process can decide on, and what differs from its file."""
    if faults := [Finding(False, notice) for notice in notices]:
        return faults
    gpus = sum(server["total_gpus"] for server in summary["servers"])
    has = f"{counted(summary['total_servers'], 'server')}, {counted(gpus, 'GPU')}"
    return [Finding(True, f"{has}, {counted(summary['leases'], 'lease')}")]


def of_server(server: Mapping[str, Any], use: Mapping[str, Any], now: float) -> list[Finding]:
    """Return a server's faults and what of it somebody closed, from its row and its last report."""
    name = server["server_name"]
    found = []
    if server["silent_since"] is not None:
        age = duration(max(now - server["silent_since"], 0.0))
        found.append(
            f"its agent has been silent for {age}: on it, systemctl status gpu-manager-agent, or start "
            f"gpu-manager agent --server {name}"
        )
    if use["error"]:
        found.append(f"it reports no GPUs: {use['error']}: {LOOK_AGAIN}")
    if use["agent_version"] not in (None, __version__):
        found.append(
            f"its agent is {use['agent_version']}, this is {__version__}: install the same version there and "
            "restart the agent"
        )
    meant = []
    if server["drained"] and server["silent_since"] is None:
        reason = f" ({server['drain_reason']})" if server["drain_reason"] else ""
        if server["state"] == "DRAINED" and not is_unsearched(Drained(name, 0.0, server["drain_reason"])):
            who = server["drained_by"] or "somebody"
            meant.append(f"drained by {who}{reason}: gpu-manager resume {name}")
        else:
            found.append(f"it takes no new leases{reason}: gpu-manager resume {name}")
    for gpu in server["gpus_closed"]:
        is_meant = gpu["reason"].partition("; ")[0] == DRAINED
        who = f" by {gpu['closed_by'] or 'somebody'}" if is_meant else ""
        (meant if is_meant else found).append(
            f"GPU {gpu['gpu_id']} is closed{who} ({gpu['reason']}): gpu-manager resume {name} "
            f"--gpu {gpu['gpu_id']} once it is in order"
        )
    return [Finding(ok, f"{name}: {text}") for ok, texts in ((False, found), (True, meant)) for text in texts]


def of_agent_tokens(
    tokens: Iterable[Token],
    last_uses: Mapping[str, float],
    reported_at: Mapping[str, float],
    servers: Collection[str],
    now: float,
) -> list[Finding]:
    """Return the tokens of servers that are in use although no report of their server is taken.

    `last_uses` are the noted times by token id, `reported_at` those of the last reports by server; those
    and `now` are by the clock of the store, which that of the service need not follow.
    """
    from resource_manager.rest.tokens import USE_EVERY_S

    found = []
    for token in filter(lambda token: token.server, tokens):
        used_at, last_at = last_uses.get(token.token_id, 0.0), reported_at.get(token.server, 0.0)
        if now - used_at >= USE_EVERY_S + LAST_REPORT_S or min(used_at, now) - last_at <= LAST_REPORT_S:
            continue
        todo = (
            "no report of it is taken: on it, journalctl -u gpu-manager-agent says why. If it says nothing, "
            f"another server sends with it: gpu-manager agent install {token.server} --service URL gives it "
            f"a new one, gpu-manager token revoke {token.token_id} ends this one"
            if token.server in servers
            else "the cluster has no such server: stop its agent, then gpu-manager token revoke "
            + token.token_id
        )
        found.append(f"{token.server}: its agent's token is in use, but {todo}")
    return [Finding(False, text) for text in found]


def of_instance(instance: str, unknown: Sequence[TaskIdentity]) -> list[Finding]:
    """Return whether leases with this Airflow's id are of tasks that it does not know."""
    if not unknown:
        return []
    first = unknown[0]
    return [
        Finding(
            False,
            f"{counted(len(unknown), 'lease')} with its instance id {instance} of no task of it, such as "
            f"{first.dag_id}.{first.task_id}: another Airflow has a copy of the id, or the run was "
            "deleted: give the copy its own, airflow variables set gpu_manager_instance NEW",
        )
    ]


def of_answer(server: str, answer: Report | ResourceManagerError) -> Finding:
    """Return the finding for a server that was asked by ssh, which gave a report or the reason for none."""
    if not isinstance(answer, ResourceManagerError):
        if answer.error is None:
            return Finding(True, f"{server} answers by ssh with {counted(len(answer.gpus), 'GPU')}")
        return Finding(False, f"{server}: it reports no GPUs: {answer.error}: {LOOK_AGAIN}")
    text = " ".join(str(answer).split()).rstrip(".")
    named = text if server in text else f"{server}: {text}"
    return Finding(False, f"{named}: {next_step(text) or LOOK_AGAIN}")


def next_step(reason: str) -> str:
    """Return what to do about a server that did not answer for that reason; empty if that is not known."""
    return next((step for part, step in NEXT_STEPS if part in reason.lower()), "")


def of_walls(server: str, missing: str) -> Finding:
    """Return the finding for a server whose jobs must have walls, from what is missing for them there."""
    if not missing:
        return Finding(True, f"{server}: jobs have their walls")
    return Finding(False, f'{server}: no job starts, since confine = "must" and {missing}: see docs/walls.md')


def of_disk(folder: str, free_bytes: int) -> Finding:
    """Return whether the disk of a folder has room for the logs of jobs."""
    free = f"{folder}: {free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes >= LEAST_FREE_BYTES:
        return Finding(True, free)
    return Finding(False, f"{free}: make room, or set GPU_MANAGER_JOBS_DIR to a folder of another disk")


def of_airflow_out_of_reach(error: str) -> Finding:
    """Return the finding for an Airflow that does not answer, or not to this login."""
    if "refused the login" in error or "answered 401" in error:
        todo = (
            "give --airflow-user and --airflow-password (those of `airflow standalone` are in "
            "$AIRFLOW_HOME/simple_auth_manager_passwords.json.generated), or --airflow-token "
            "(GPU_MANAGER_AIRFLOW_USER, …_PASSWORD, …_TOKEN)"
        )
    elif "answered 403" in error:
        todo = "let this user read its health, DAGs and plugins"
    else:
        todo = "start it, or correct --airflow-url"
    return Finding(False, f"{error}: {todo}")


def of_airflow(health: Mapping[str, Any]) -> Iterable[Finding]:
    """Return the faults of an Airflow, from what its API says of its parts.

    `health` has `triggerer` and `scheduler` (their states), `plugins` (names), `reconcile` (None: no such
    DAG; else whether it is paused) and `instance` (its id).
    """
    for part in ("scheduler", "triggerer"):
        is_well = health[part] == "healthy"
        todo = "" if is_well else f": start one, airflow {part}"
        yield Finding(is_well, f"its {part} is {health[part] or 'missing'}{todo}")
    has_plugin = health["plugins"] is None or "gpu_resource_manager" in health["plugins"]
    install = "install this package in the environment of its API server, and restart that"
    yield Finding(
        has_plugin, "the plugin is loaded" if has_plugin else f"the plugin is not loaded: {install}"
    )
    match health["reconcile"]:
        case None:
            yield Finding(
                False,
                "no DAG gpu_reconcile: put reconcile_dag() into a file of the DAGs folder (docs/airflow.md), "
                "or run gpu-manager reconcile --every 1min",
            )
        case paused:
            todo = ": airflow dags unpause gpu_reconcile" if paused else ""
            yield Finding(not paused, f"the DAG gpu_reconcile is {'paused' if paused else 'on'}{todo}")
    instance = health["instance"]
    yield Finding(
        instance is not None,
        f"its instance id is {instance}" if instance else "it has no instance id: restart its API server",
    )
