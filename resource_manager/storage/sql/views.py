"""Two read-only views for people and BI: servers with what is free, and allocations, past ones included.

They have the columns of the original design's tables (its Appendix A) and read the JSON of the snapshot and
of the changes, so a commit pays nothing for them. Past allocations reach back as far as the history is kept.

Here a lease is known by its fencing token (`token`), a member by the place it has among the members of its
lease (`place`, its rank). Of a lease both its grant and its copy in the snapshot may be there.
"""

from __future__ import annotations

from typing import NamedTuple

ALLOCATIONS = "task_allocations"
SERVERS = "gpu_servers"

_LIVES = ("quarantined", "renewed", "preempting", "membersreleased")
"""Changes of a lease between its grant and its end."""


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
    place: str
    """Number of such an element in its array, from 0, for the {name} of the join."""
    item: str
    """Integer in the array at {path} whose number is {place}."""
    element: str
    """An element that is an integer, `scalar` one that is a text."""
    scalar: str
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
    each="CROSS JOIN LATERAL jsonb_array_elements(COALESCE({x} #> '{path}', '[]'::jsonb)) WITH ORDINALITY",
    columns=" (value, place)",
    place="{name}.place - 1",
    item="({x} #> '{path}' ->> ({place})::int)::bigint",
    element="({x}::text)::bigint",
    scalar="({x} #>> '{{}}')",
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
    "COLUMNS (place FOR ORDINALITY, value JSON PATH '$'))",
    columns="",
    place="{name}.place - 1",
    item="CAST(JSON_EXTRACT({x}, CONCAT('${path}[', {place}, ']')) AS SIGNED)",
    element="({x} + 0)",
    scalar="JSON_VALUE({x}, '$')",
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
    place="{name}.key",
    item="json_extract({x}, '${path}[' || ({place}) || ']')",
    element="{x}",
    scalar="{x}",
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
            f"{create} {self._allocations} AS {self._with(self._members())} {self._all_allocations()}",
            f"{create} {self._servers} AS {self._with(self._members() | self._gpus())} {self._all_servers()}",
        ]

    def _with(self, parts: dict[str, str]) -> str:
        return "WITH " + ", ".join(f"{name} AS ({query})" for name, query in parts.items())

    def _members(self) -> dict[str, str]:
        """Return the queries of `node`, and of `member`: a row for each member of a lease that ever was.

        Its `lease` and `part` are JSON; `ended_version` is null while it lives.
        """
        json = self._json
        body = json.document.format(x="c.body")
        snapshot = json.document.format(x="s.body")
        place = json.place.format(name="m")
        token, of_lease = (json.at(json.integer, x, "fencing_token") for x in (body, "l.value"))
        rank = json.item.format(x="h.lease", path=json.path.format("ranks"), place=place)
        quarantined = f"CAST({json.at(json.text, 'l.value', 'quarantined')} AS {json.long}) IN ('true', '1')"
        until = json.at(json.number, "l.value", "preempt_until")
        preemptor = json.at(json.text, body, "preemptor")
        by = json.at(json.text, "l.value", "preempted_by")
        in_snapshot = " UNION ALL ".join(
            f"SELECT s.namespace, l.value AS lease, NULL AS version FROM {self._snapshot} s "
            f"{json.elements('l', snapshot, kind)}"
            for kind in ("leases", "remainders")
        )
        inventory = (
            f"SELECT s.namespace, COALESCE((SELECT c.body FROM {self._change} c "
            f"WHERE c.namespace = s.namespace AND c.version > s.version AND {_is('inventorychanged')} "
            f"ORDER BY c.version DESC LIMIT 1), s.inventory) AS body FROM {self._snapshot} s"
        )
        outcome = f"NULLIF({json.at(json.text, body, 'outcome')}, '')"
        return {
            "node": (
                f"SELECT i.namespace, {json.at(json.text, 'n.value', 'name')} AS server_name, "
                f"{json.at(json.integer, 'n.value', 'server_id')} AS server_id, "
                f"{json.at(json.length, 'n.value', 'gpus')} AS total_gpus, "
                f"COALESCE({json.at(json.number, 'n.value', 'resources', 'cpus')}, 0) AS total_cpus "
                f"FROM ({inventory}) i {json.elements('n', json.document.format(x='i.body'), 'nodes')}"
            ),
            "held": (
                f"SELECT c.namespace, {json.at(json.part, body, 'lease')} AS lease, c.version "
                f"FROM {self._change} c WHERE {_is('granted')} UNION ALL {in_snapshot}"
            ),
            # Some databases do not group by JSON; a text will do.
            "granted": (
                f"SELECT h.namespace, {json.at(json.integer, 'h.lease', 'fencing_token')} AS token, "
                f"COALESCE({rank}, {place}) AS place, MAX(CAST(h.lease AS {json.long})) AS lease, "
                f"MAX(CAST(m.value AS {json.long})) AS part, MAX(h.version) AS version, "
                "MAX(CASE WHEN h.version IS NULL THEN 1 ELSE 0 END) AS is_in_snapshot "
                f"FROM held h {json.elements('m', 'h.lease', 'members')} "
                "GROUP BY 1, 2, 3"
            ),
            "ended": (
                f"SELECT c.namespace, {token} AS token, NULL AS place, c.version, c.at, "
                f"COALESCE({outcome}, CASE WHEN {_is('expired')} THEN 'EXPIRED' ELSE 'RELEASED' END) "
                f"AS outcome FROM {self._change} c WHERE {_is('released', 'expired')} "
                f"UNION ALL SELECT c.namespace, {token}, {json.element.format(x='r.value')}, c.version, "
                f"c.at, COALESCE({outcome}, 'RELEASED') FROM {self._change} c "
                f"{json.elements('r', body, 'ranks')} WHERE {_is('membersreleased')}"
            ),
            "event": (
                f"SELECT c.namespace, {token} AS token, "
                f"CASE WHEN {_is('quarantined', 'membersreleased')} THEN c.version END AS quarantined, "
                f"CASE WHEN {_is('renewed')} THEN c.version END AS renewed, "
                f"CASE WHEN {_is('renewed')} THEN c.at END AS renewed_at, "
                f"CASE WHEN {_is('preempting')} AND {preemptor} <> '' THEN c.version END AS preempted, "
                f"CASE WHEN {_is('preempting')} AND {preemptor} = '' THEN c.version END AS taken_back, "
                f"{json.at(json.number, body, 'until')} AS preempt_until "
                f"FROM {self._change} c JOIN {self._snapshot} s "
                f"ON s.namespace = c.namespace AND c.version > s.version WHERE {_is(*_LIVES)} "
                f"UNION ALL SELECT s.namespace, {of_lease}, CASE WHEN {quarantined} THEN s.version END, "
                f"NULL, NULL, CASE WHEN {by} <> '' THEN s.version END, NULL, {until} "
                f"FROM {self._snapshot} s {json.elements('l', snapshot, 'leases')} "
                f"UNION ALL SELECT s.namespace, {of_lease}, s.version, NULL, NULL, NULL, NULL, NULL "
                f"FROM {self._snapshot} s {json.elements('l', snapshot, 'remainders')}"
            ),
            "life": (
                "SELECT e.namespace, e.token, MAX(e.quarantined) AS quarantined, MAX(e.renewed) AS renewed, "
                "MAX(e.renewed_at) AS renewed_at, MAX(e.preempted) AS preempted, "
                "MAX(e.taken_back) AS taken_back FROM event e GROUP BY e.namespace, e.token"
            ),
            "member": (
                f"SELECT g.namespace, g.token, g.place, {json.document.format(x='g.lease')} AS lease, "
                f"{json.document.format(x='g.part')} AS part, e.version AS ended_version, e.at AS ended_at, "
                "CASE WHEN e.version IS NOT NULL THEN e.outcome "
                "WHEN g.is_in_snapshot = 0 AND g.version <= s.version THEN 'RESET' "
                "WHEN l.quarantined > COALESCE(l.renewed, -1) "
                "OR (l.renewed > l.preempted AND l.renewed_at > p.preempt_until "
                "AND l.preempted > COALESCE(l.taken_back, -1)) THEN 'ERROR' "
                "WHEN l.preempted > COALESCE(l.taken_back, -1) THEN 'PREEMPTING' ELSE 'RUNNING' END "
                "AS status "
                f"FROM granted g JOIN {self._snapshot} s ON s.namespace = g.namespace "
                "LEFT JOIN ended e ON e.namespace = g.namespace AND e.token = g.token "
                "AND (e.place IS NULL OR e.place = g.place) "
                "LEFT JOIN life l ON l.namespace = g.namespace AND l.token = g.token "
                "LEFT JOIN event p ON p.namespace = l.namespace AND p.token = l.token "
                "AND p.preempted = l.preempted"
            ),
        }

    def _all_allocations(self) -> str:
        json = self._json
        lease = "m.lease"
        server = json.at(json.text, "m.part", "node")
        return (
            f"SELECT m.namespace, {json.at(json.text, lease, 'request', 'lease_id')} AS task_id, "
            f"n.server_id, {server} AS server_name, "
            f"COALESCE({json.at(json.part, 'm.part', 'gpu_ids')}, {json.none}) AS allocated_gpus, "
            f"{self._cpus()} AS allocated_cpus, m.status, "
            f"{json.time.format(x=json.at(json.number, lease, 'granted_at'))} AS start_time, "
            f"{json.time.format(x='m.ended_at')} AS end_time, "
            f"{json.at(json.text, lease, 'request', 'team')} AS team, "
            f"{json.at(json.text, lease, 'request', 'owner')} AS owner, m.token AS fencing_token, "
            "m.place AS member_rank "
            f"FROM member m LEFT JOIN node n ON n.namespace = m.namespace AND n.server_name = {server}"
        )

    def _cpus(self) -> str:
        return f"COALESCE({self._json.at(self._json.number, 'm.lease', 'request', 'resources', 'cpus')}, 0)"

    def _gpus(self) -> dict[str, str]:
        """Return the queries of `taken`, the GPUs that are not free, and `used`, the CPUs of leases."""
        json = self._json
        body, snapshot = json.document.format(x="c.body"), json.document.format(x="s.body")
        listed = json.scalar.format(x="l.value")
        server = json.at(json.text, "m.part", "node")
        gpu = json.element.format(x="k.value")
        gpus = json.elements("k", "m.part", "gpu_ids")
        lives = "m.status IN ('RUNNING', 'PREEMPTING', 'ERROR')"
        node = json.at(json.text, body, "node")
        cleaned, of_lease = (json.at(json.integer, "l.value", name) for name in ("gpu_id", "fencing_token"))
        return {
            "closed": self._on_now(self._switched("gpuclosed", ("gpuopened",), "closed_gpus", "gpu_id")),
            # Seen or lost since the snapshot, and what it was in it.
            "agent": (
                f"{self._switched('agentlost', ('agentseen',), 'silent')} UNION ALL "
                f"SELECT s.namespace, {listed}, 0, s.version, 0 FROM {self._snapshot} s "
                f"{json.elements('l', snapshot, 'watched')}"
            ),
            # A silent server is watched until an operator restores it.
            "watched": (
                "SELECT a.namespace, a.server_name, a.version, 1 AS is_on FROM agent a "
                f"UNION ALL SELECT c.namespace, {node}, c.version, 0 FROM {self._change} c "
                f"WHERE {_is('resumed')} AND (SELECT a.is_on FROM agent a "
                f"WHERE a.namespace = c.namespace AND a.server_name = {node} AND a.version < c.version "
                "ORDER BY a.version DESC, a.is_on DESC LIMIT 1) = 1"
            ),
            "silent": self._on_now(self._switched("agentlost", ("agentseen", "resumed"), "silent")),
            # Of a lease that ended while its server was watched, until it is said to be clean.
            "cleaning": (
                f"SELECT s.namespace, {json.at(json.text, 'l.value', 'node')} AS server_name, "
                f"{cleaned} AS gpu_id, {of_lease} AS token FROM {self._snapshot} s "
                f"{json.elements('l', snapshot, 'cleaning')} "
                f"UNION ALL SELECT m.namespace, {server}, {gpu}, m.token FROM member m "
                f"JOIN {self._snapshot} s ON s.namespace = m.namespace AND m.ended_version > s.version "
                f"{gpus} WHERE (SELECT w.is_on FROM watched w WHERE w.namespace = m.namespace "
                f"AND w.server_name = {server} AND w.version < m.ended_version "
                "ORDER BY w.version DESC LIMIT 1) = 1"
            ),
            "clean": (
                f"SELECT c.namespace, {node} AS server_name, "
                f"{json.at(json.integer, body, 'gpu_id')} AS gpu_id, "
                f"{json.at(json.integer, body, 'fencing_token')} AS token "
                f"FROM {self._change} c WHERE {_is('gpucleaned')}"
            ),
            "taken": (
                f"SELECT m.namespace, {server} AS server_name, {gpu} AS gpu_id FROM member m {gpus} "
                f"WHERE {lives} UNION SELECT c.namespace, c.server_name, c.gpu_id FROM closed c "
                "UNION SELECT c.namespace, c.server_name, c.gpu_id FROM cleaning c "
                "WHERE NOT EXISTS (SELECT 1 FROM clean d WHERE d.namespace = c.namespace "
                "AND d.server_name = c.server_name AND d.gpu_id = c.gpu_id AND d.token = c.token)"
            ),
            "used": (
                f"SELECT m.namespace, {server} AS server_name, SUM({self._cpus()}) AS cpus FROM member m "
                f"WHERE {lives} GROUP BY 1, 2"
            ),
            "drained": self._on_now(self._switched("drained", ("resumed",), "drained")),
            "retired": (
                f"SELECT s.namespace, {listed} AS server_name "
                f"FROM {self._snapshot} s {json.elements('l', snapshot, 'retired')}"
            ),
        }

    def _all_servers(self) -> str:
        """Return a row for each server, with what is in use or closed subtracted."""
        shut = "d.server_name IS NOT NULL OR q.server_name IS NOT NULL OR r.server_name IS NOT NULL"
        joined = "{0}.namespace = n.namespace AND {0}.server_name = n.server_name"
        return (
            "SELECT n.namespace, n.server_id, n.server_name, n.total_gpus, n.total_cpus, "
            f"CASE WHEN {shut} THEN 0 ELSE n.total_gpus - COALESCE(b.gpus, 0) END AS available_gpus, "
            f"CASE WHEN {shut} THEN 0 ELSE n.total_cpus - COALESCE(u.cpus, 0) END AS available_cpus, "
            "COALESCE(u.cpus, 0) AS allocated_cpus, CASE WHEN r.server_name IS NOT NULL THEN 'RETIRED' "
            "WHEN d.server_name IS NOT NULL THEN 'DRAINED' "
            "WHEN q.server_name IS NOT NULL THEN 'SILENT' ELSE 'ACTIVE' END AS status FROM node n "
            "LEFT JOIN (SELECT x.namespace, x.server_name, COUNT(*) AS gpus FROM taken x GROUP BY 1, 2) b "
            f"ON {joined.format('b')} LEFT JOIN used u ON {joined.format('u')} "
            f"LEFT JOIN drained d ON {joined.format('d')} LEFT JOIN silent q ON {joined.format('q')} "
            f"LEFT JOIN retired r ON {joined.format('r')} "
            "WHERE r.server_name IS NULL OR u.server_name IS NOT NULL"
        )

    def _switched(self, on: str, off: tuple[str, ...], part: str, number: str = "") -> str:
        """Return what switched a node (or GPU) on or off since the snapshot, and what was on in it."""
        json = self._json
        body = json.document.format(x="c.body")
        of_change = json.at(json.integer, body, number) if number else "0"
        of_entry = json.at(json.integer, "l.value", number) if number else "0"
        node = json.at(json.text, "l.value", "node")
        return (
            f"SELECT c.namespace, {json.at(json.text, body, 'node')} AS server_name, {of_change} AS gpu_id, "
            f"c.version, CASE WHEN {_is(on)} THEN 1 ELSE 0 END AS is_on FROM {self._change} c "
            f"JOIN {self._snapshot} s ON s.namespace = c.namespace AND c.version > s.version "
            f"WHERE {_is(on, *off)} UNION ALL SELECT s.namespace, {node}, {of_entry}, s.version, 1 "
            f"FROM {self._snapshot} s {json.elements('l', json.document.format(x='s.body'), part)}"
        )

    def _on_now(self, switched: str) -> str:
        return (
            f"SELECT v.namespace, v.server_name, v.gpu_id FROM ({switched}) v GROUP BY 1, 2, 3 "
            "HAVING MAX(CASE WHEN v.is_on = 1 THEN v.version ELSE -1 END) "
            "> MAX(CASE WHEN v.is_on = 0 THEN v.version ELSE -1 END)"
        )


def _is(*kinds: str) -> str:
    """Return the condition that a change `c` is of one of these kinds."""
    return "(" + " OR ".join(f'c.body LIKE \'{{"change":"{kind}"%\'' for kind in kinds) + ")"
