"""Two read-only views for people and BI: servers with what is free, and allocations, past ones included.

They have the columns of the original design's tables (its Appendix A) and read the JSON of the snapshot and
of the changes, so a commit pays nothing for them. Past allocations reach back as far as the history is kept.
"""

from __future__ import annotations

from typing import NamedTuple

ALLOCATIONS = "task_allocations"
SERVERS = "gpu_servers"

_OF_LEASES = ("granted", "released", "expired", "quarantined", "renewed")


class Json(NamedTuple):
    """How a kind of database reads JSON: {x} stands for the document, {path} for a path in it."""

    create: str
    document: str
    text: str
    part: str
    integer: str
    number: str
    each: str
    """Join with the elements of an array, whose name is the last word and whose column is `value`."""
    columns: str
    element: str
    length: str
    time: str
    long: str
    none: str
    """An empty array."""
    path: str
    step: str

    def at(self, template: str, x: str, *names: str) -> str:
        """Return what is at a path of the document `x`, as that template reads it."""
        return template.format(x=x, path=self.path.format(self.step.join(names)))

    def elements(self, name: str, x: str, *names: str) -> str:
        """Return the join with the elements of the array at a path, under that name."""
        return f"{self.at(self.each, x, *names)} AS {name}{self.columns}"


POSTGRESQL = Json(
    create="CREATE OR REPLACE VIEW",
    document="{x}::jsonb",
    text="({x} #>> '{path}')",
    part="({x} #> '{path}')",
    integer="({x} #>> '{path}')::bigint",
    number="({x} #>> '{path}')::numeric",
    each="CROSS JOIN LATERAL jsonb_array_elements(COALESCE({x} #> '{path}', '[]'::jsonb))",
    columns=" (value)",
    element="({x}::text)::bigint",
    length="jsonb_array_length(COALESCE({x} #> '{path}', '[]'::jsonb))",
    time="to_timestamp({x})",
    long="text",
    none="'[]'::jsonb",
    path="{{{}}}",
    step=",",
)
MYSQL = Json(
    create="CREATE OR REPLACE VIEW",
    document="{x}",
    text="JSON_VALUE({x}, '${path}')",
    part="JSON_EXTRACT({x}, '${path}')",
    integer="CAST(JSON_VALUE({x}, '${path}') AS SIGNED)",
    number="(JSON_VALUE({x}, '${path}') + 0)",
    each="CROSS JOIN JSON_TABLE(COALESCE(JSON_EXTRACT({x}, '${path}'), '[]'), '$[*]' "
    "COLUMNS (value JSON PATH '$'))",
    columns="",
    element="({x} + 0)",
    length="COALESCE(JSON_LENGTH({x}, '${path}'), 0)",
    time="FROM_UNIXTIME({x})",
    long="char",
    none="'[]'",
    path=".{}",
    step=".",
)
SQLITE = Json(
    create="CREATE VIEW IF NOT EXISTS",
    document="{x}",
    text="json_extract({x}, '${path}')",
    part="json_extract({x}, '${path}')",
    integer="json_extract({x}, '${path}')",
    number="json_extract({x}, '${path}')",
    each="CROSS JOIN json_each(COALESCE(json_extract({x}, '${path}'), '[]'))",
    columns="",
    element="{x}",
    length="COALESCE(json_array_length({x}, '${path}'), 0)",
    time="datetime({x}, 'unixepoch')",
    long="text",
    none="'[]'",
    path=".{}",
    step=".",
)


class Views:
    """The statements that create both views, over tables of these names."""

    def __init__(self, json: Json, snapshot: str, change: str, allocations: str, servers: str) -> None:
        self._json = json
        self._snapshot = snapshot
        self._change = change
        self._allocations = allocations
        self._servers = servers

    def statements(self) -> list[str]:
        create = self._json.create
        return [
            f"{create} {self._allocations} AS {self._all_allocations()}",
            f"{create} {self._servers} AS {self._all_servers()}",
        ]

    def _all_allocations(self) -> str:
        """Return a row for each lease and member: its grant, its end, and what a snapshot has of it."""
        json = self._json
        lease = json.document.format(x="g.lease")
        server = json.at(json.text, "m.value", "node")
        return (
            "SELECT g.namespace, "
            f"{json.at(json.text, lease, 'request', 'lease_id')} AS task_id, n.server_id, "
            f"{server} AS server_name, "
            f"COALESCE({json.at(json.part, 'm.value', 'gpu_ids')}, {json.none}) AS allocated_gpus, "
            f"COALESCE({json.at(json.number, lease, 'request', 'resources', 'cpus')}, 0) AS allocated_cpus, "
            "CASE WHEN g.ended_at IS NOT NULL THEN g.outcome "
            "WHEN g.in_snapshot = 0 AND g.granted_version <= s.version THEN 'RESET' "
            "WHEN g.quarantined > g.renewed THEN 'ERROR' ELSE 'RUNNING' END AS status, "
            f"{json.time.format(x=json.at(json.number, lease, 'granted_at'))} AS start_time, "
            f"{json.time.format(x='g.ended_at')} AS end_time, "
            f"{json.at(json.text, lease, 'request', 'team')} AS team, "
            f"{json.at(json.text, lease, 'request', 'owner')} AS owner, g.token AS fencing_token "
            "FROM (SELECT e.namespace, e.token, MAX(e.lease) AS lease, MAX(e.in_snapshot) AS in_snapshot, "
            "MAX(e.granted_version) AS granted_version, MAX(e.ended_at) AS ended_at, "
            "MAX(e.outcome) AS outcome, MAX(e.quarantined) AS quarantined, MAX(e.renewed) AS renewed "
            f"FROM ({self._events()}) e GROUP BY e.namespace, e.token HAVING MAX(e.lease) IS NOT NULL) g "
            f"JOIN {self._snapshot} s ON s.namespace = g.namespace "
            f"{json.elements('m', lease, 'members')} "
            f"LEFT JOIN ({self._nodes()}) n ON n.namespace = g.namespace AND n.server_name = {server}"
        )

    def _all_servers(self) -> str:
        """Return a row for each server, with what is in use or closed subtracted."""
        json = self._json
        gpus = json.each.format(x="a.allocated_gpus", path=json.path.format("") if json.columns else "")
        busy = (
            f"SELECT a.namespace, a.server_name, {json.element.format(x='k.value')} AS gpu_id "
            f"FROM {self._allocations} a {gpus} AS k{json.columns} WHERE a.status IN ('RUNNING', 'ERROR') "
            f"UNION SELECT c.namespace, c.node, c.gpu_id FROM "
            f"({self._switched('gpuclosed', 'gpuopened', 'closed_gpus', 'gpu_id')}) c WHERE c.is_on = 1"
        )
        used = (
            f"SELECT a.namespace, a.server_name, SUM(a.allocated_cpus) AS cpus FROM {self._allocations} a "
            "WHERE a.status IN ('RUNNING', 'ERROR') GROUP BY a.namespace, a.server_name"
        )
        return (
            "SELECT n.namespace, n.server_id, n.server_name, n.total_gpus, n.total_cpus, "
            "CASE WHEN d.is_on = 1 THEN 0 ELSE n.total_gpus - COALESCE(b.gpus, 0) END AS available_gpus, "
            "CASE WHEN d.is_on = 1 THEN 0 ELSE n.total_cpus - COALESCE(u.cpus, 0) END AS available_cpus, "
            "CASE WHEN d.is_on = 1 THEN 'DRAINED' ELSE 'ACTIVE' END AS status "
            f"FROM ({self._nodes()}) n "
            f"LEFT JOIN (SELECT x.namespace, x.server_name, COUNT(*) AS gpus FROM ({busy}) x "
            "GROUP BY x.namespace, x.server_name) b "
            "ON b.namespace = n.namespace AND b.server_name = n.server_name "
            f"LEFT JOIN ({used}) u ON u.namespace = n.namespace AND u.server_name = n.server_name "
            f"LEFT JOIN ({self._switched('drained', 'restored', 'drained')}) d "
            "ON d.namespace = n.namespace AND d.node = n.server_name AND d.is_on = 1"
        )

    def _nodes(self) -> str:
        """Return the servers of the newest inventory."""
        json = self._json
        inventory = (
            f"SELECT s.namespace, COALESCE((SELECT c.body FROM {self._change} c "
            f"WHERE c.namespace = s.namespace AND c.version > s.version AND {_is('inventorychanged')} "
            f"ORDER BY c.version DESC LIMIT 1), s.inventory) AS body FROM {self._snapshot} s"
        )
        return (
            f"SELECT i.namespace, {json.at(json.text, 'n.value', 'name')} AS server_name, "
            f"{json.at(json.integer, 'n.value', 'server_id')} AS server_id, "
            f"{json.at(json.length, 'n.value', 'gpus')} AS total_gpus, "
            f"COALESCE({json.at(json.number, 'n.value', 'resources', 'cpus')}, 0) AS total_cpus "
            f"FROM ({inventory}) i {json.elements('n', json.document.format(x='i.body'), 'nodes')}"
        )

    def _events(self) -> str:
        """Return what happened to each lease, by its fencing token, and the leases of the snapshot."""
        json = self._json
        body = json.document.format(x="c.body")
        token = (
            f"COALESCE({json.at(json.integer, body, 'lease', 'fencing_token')}, "
            f"{json.at(json.integer, body, 'fencing_token')})"
        )
        outcome = json.at(json.text, body, "outcome")
        quarantined = json.at(json.text, "l.value", "quarantined")
        return (
            f"SELECT c.namespace, {token} AS token, "
            f"CAST({json.at(json.part, body, 'lease')} AS {json.long}) AS lease, 0 AS in_snapshot, "
            f"CASE WHEN {_is('granted')} THEN c.version END AS granted_version, "
            f"CASE WHEN {_is('released', 'expired')} THEN c.at END AS ended_at, "
            f"CASE WHEN {_is('released')} THEN COALESCE(NULLIF({outcome}, ''), 'RELEASED') "
            f"WHEN {_is('expired')} THEN 'EXPIRED' END AS outcome, "
            f"CASE WHEN {_is('quarantined')} THEN c.version ELSE 0 END AS quarantined, "
            f"CASE WHEN {_is('renewed')} THEN c.version ELSE 0 END AS renewed "
            f"FROM {self._change} c WHERE {_is(*_OF_LEASES)} "
            f"UNION ALL SELECT s.namespace, {json.at(json.integer, 'l.value', 'fencing_token')}, "
            f"CAST(l.value AS {json.long}), 1, NULL, NULL, NULL, "
            f"CASE WHEN {quarantined} IN ('true', '1') THEN s.version ELSE 0 END, 0 "
            f"FROM {self._snapshot} s {json.elements('l', json.document.format(x='s.body'), 'leases')}"
        )

    def _switched(self, on: str, off: str, part: str, number: str = "") -> str:
        """Return each node (and GPU) that a change switched on or off, and whether it is on now."""
        json = self._json
        body = json.document.format(x="c.body")
        of_change = json.at(json.integer, body, number) if number else "0"
        of_entry = json.at(json.integer, "l.value", number) if number else "0"
        events = (
            f"SELECT c.namespace, {json.at(json.text, body, 'node')} AS node, {of_change} AS gpu_id, "
            f"c.version, CASE WHEN {_is(on)} THEN 1 ELSE 0 END AS is_on FROM {self._change} c "
            f"JOIN {self._snapshot} s ON s.namespace = c.namespace AND c.version > s.version "
            f"WHERE {_is(on, off)} "
            f"UNION ALL SELECT s.namespace, {json.at(json.text, 'l.value', 'node')}, {of_entry}, "
            f"s.version, 1 FROM {self._snapshot} s "
            f"{json.elements('l', json.document.format(x='s.body'), part)}"
        )
        return (
            "SELECT v.namespace, v.node, v.gpu_id, "
            "CASE WHEN MAX(CASE WHEN v.is_on = 1 THEN v.version ELSE -1 END) "
            "> MAX(CASE WHEN v.is_on = 0 THEN v.version ELSE -1 END) THEN 1 ELSE 0 END AS is_on "
            f"FROM ({events}) v GROUP BY v.namespace, v.node, v.gpu_id"
        )


def _is(*kinds: str) -> str:
    """Return the condition that a change `c` is of one of these kinds."""
    return "(" + " OR ".join(f'c.body LIKE \'{{"change":"{kind}"%\'' for kind in kinds) + ")"
