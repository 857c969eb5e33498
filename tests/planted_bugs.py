"""Plant bugs one by one where mutmut cannot (Lua, decorated functions); the tests must detect each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LUA = "resource_manager/storage/redis/lua"
BUSY = ["system_redis", "paused_past", "dead_holders", "long_held", "postgresql", "mariadb", "mysql"]
BUSY += ["running_jobs", "read_only"]
BUSY += [f"{kind}-{seed}" for kind in ("memory", "redis", "variable") for seed in range(2, 6)]
"""Parts of the names of tests to skip: they take long, or another test covers the same."""

OF_STORES = ("tests/storage/test_contract.py", "tests/storage/redis/test_faults.py")
OF_WAITING = tuple(
    f"tests/storage/redis/test_client.py::test_a_client_{name}"
    for name in ("waits_awake_for_an_answer_only_after_a_quick_one", "that_waits_awake_falls_asleep")
)
OF_LOCKS = ("tests/storage/redis/test_lock.py", "tests/storage/test_locks.py")
OF_JUMPS = ("tests/manager/commit/test_clock_jumps.py",)
OF_SNAPSHOTS = tuple(
    f"tests/storage/sql/test_faults.py::test_{name}"
    for name in (
        "no_snapshot_has_changes_that_the_server_lost",
        "the_history_is_bounded_and_snapshots_take_its_place",
    )
)
OF_VARIABLES = ("tests/storage/airflow_variable/test_store.py", "tests/storage/test_contract.py")
OF_AIRFLOW = ("tests/storage/airflow_variable/test_access.py",)
OF_CLUSTER = tuple(
    f"tests/core/test_{name}.py" for name in ("node_index", "leased_nodes", "cluster", "expiry_heap")
)
OF_GPUS = ("tests/core/test_gpu_state.py", "tests/faults/test_gpus.py")
OF_GANGS = tuple(
    f"tests/scheduling/placement/test_{name}.py" for name in ("gangs", "gang_slots", "node_masks")
)
OF_PREEMPTION = (
    "tests/scheduling/preemption/test_preempting.py",
    "tests/scheduling/preemption/test_requeueing.py",
)
OF_VICTIMS = (
    *OF_PREEMPTION,
    "tests/scheduling/preemption/test_victims.py",
    "tests/scheduling/preemption/test_victim_right.py",
)
OF_QUOTAS = ("tests/scheduling/queue/test_quotas.py",)
OF_ENDING = ("tests/jobs/test_preempting.py",)
OF_WINDOWS = ("tests/scheduling/queue/test_windows.py", "tests/core/test_maintenance.py")
OF_REPORTS = ("tests/fleet/test_receiving.py", "tests/faults/test_gpus.py")


class Bug(NamedTuple):
    """Replacement of the first `right` in `file` by `wrong`, which `tests` must detect."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def of_script(name: str, tests: tuple[str, ...], *bugs: tuple[str, str]) -> list[Bug]:
    return [Bug(f"{LUA}/{name}.lua", right, wrong, tests) for right, wrong in bugs]


BUGS = [
    *of_script(
        "commit",
        OF_STORES,
        ("if version ~= expected then", "if false then"),
        ("expected + 1) .. '-0', (expected", "expected + 2) .. '-0', (expected"),
        ("if first and first[2][4] == ARGV[7] then", "if first then"),
        ("'stale', time[1], time[2], version, '', missing_changes(changes, expected", "'stale', 0, 0, 0, ''"),
        ("if holder and holder ~= ARGV[6] then", "if false then"),
        ("if holder and holder ~= ARGV[6] then", "if holder then"),
        ("math.abs(now - tonumber(ARGV[4]))", "now - tonumber(ARGV[4])"),
        ("math.abs(now - tonumber(ARGV[4]))", "tonumber(ARGV[4]) - now"),
        ("if ARGV[16] == '1' and detail ~= '' then", "if false then"),
        ("if ARGV[16] == '1' and detail ~= '' then", "if detail ~= '' then"),
        ("redis.call('HDEL', pending, key)", ""),
        ("redis.call('HDEL', leases, key)", ""),
        ("redis.call('HDEL', renewals, key)", ""),
        ("redis.call('HDEL', quarantined, key)\n    redis.call('HDEL', preempting, key)",
         "redis.call('HDEL', preempting, key)"),
        ("redis.call('HSET', renewals, key, json)", ""),
        ("redis.call('HDEL', quarantined, key)\n  elseif operation == 'quarantine'",
         "elseif operation == 'quarantine'"),
        ("redis.call('HSET', quarantined, key, json)", ""),
        ("redis.call('HDEL', preempting, lease)", ""),
        ("= 'sequence', ARGV[13]\n", "= 'sequence', 0\n"),
        ("redis.call('SADD', kinds, string.match(json, '\"change\":\"(%w+)\"'))", ""),
        ("keep_once(17, time)", ""),
        ("if number then", "if false then"),
        ("if ARGV[13] ~= '0' and tonumber(ARGV[13]) > tonumber(sequence) then", "if true then"),
        ("elseif operation == 'cancel' then\n    redis.call('HDEL', pending, key)", ""),
        ("redis.call('HSET', drained, key, json)", ""),
        ("operation == 'resume' or operation == 'forget'", "operation == 'forget'"),
        ("operation == 'resume' or operation == 'forget'", "operation == 'resume'"),
        ("string.sub(operation, 1, 6) ~= 'forget'", "true"),
        ("watching = redis.call('HLEN', gpus) > 0", "watching = false"),
        ("'watched ' .. member.node) == 1", "'watched ' .. member.node) == 0"),
        ("operation == 'resume' and redis.call", "operation == 'none' and redis.call"),
        ("""'{"change":"agentlost"', 1, true) == 1""", """'{"change":', 1, true) == 1"""),
        ("kept[#kept + 1] = json", "kept = {json}"),
        ("redis.call('HSET', gpus, key, json)", ""),
        ("operation == 'unset gpu' or operation == 'forget gpu'", "operation == 'forget gpu'"),
        ("redis.call('XTRIM', changes, 'MAXLEN', length)", ""),
        ("'i', ARGV[7])", "'i', '')"),
        ("'history_bytes', held, 'last_fencing_token', ARGV[11],", "'history_bytes', held,"),
        ("'last_fencing_token', ARGV[11], ", ""),
        (", 'last_node', ARGV[12]}", "}"),
        ("local fields = {'version', version + added,", "local fields = {'format', ARGV[1],"),
        ("redis.call('SET', inventory, ARGV[14])", ""),
        ("redis.call('HSET', meta, 'inventory_version', version)", ""),
    ),
    *of_script(
        "preflight",
        OF_STORES,
        ("tonumber(found[1]) > tonumber(format)", "false"),
        ("incarnation ~= '' and found[2] ~= incarnation and not found[6]", "false"),
        ("and not found[6]", ""),
        ("if found[4] ~= server then", "if false then"),
        ("grants_suspended_until = now + tonumber(found[9] or recovery_window_s)", ""),
        ("version = version + 1048576", ""),
        ("redis.call('HINCRBY', meta, 'last_fencing_token', 1048576)", ""),
        ("'server', server, 'version', version,", "'version', version,"),
        ("'version', version, 'grants_suspended_until', grants_suspended_until)",
         "'grants_suspended_until', grants_suspended_until)"),
        (", 'grants_suspended_until', grants_suspended_until)", ")"),
        ("if now < grants_suspended_until then", "if now > grants_suspended_until then"),
        ("(known + 1) .. '-0', '+')", "known .. '-0', '+')"),
        ("missing[i] = entry[2][2]", "missing[i] = entry[2][4]"),
    ),
    *of_script(
        "refresh",
        OF_STORES,
        ("if known >= 0 and missed == 0 then", "if known >= 0 then"),
        ("if known > version then", "if false then"),
        ("if missing then", "if true then"),
        ("if found[5] ~= ARGV[5] then", "if ARGV[5] == '' then"),
        ("nodes = redis.call('GET', inventory)", ""),
        ("redis.call('HGETALL', renewals), redis.call('HGETALL', quarantined),",
         "redis.call('HGETALL', quarantined), redis.call('HGETALL', quarantined),"),
        ("redis.call('HGETALL', renewals), redis.call('HGETALL', quarantined),",
         "redis.call('HGETALL', renewals), redis.call('HGETALL', renewals),"),
    ),
    *of_script(
        "replace_state",
        OF_STORES,
        ("if found[1] and tonumber(found[1]) > tonumber(ARGV[1]) then", "if false then"),
        ("if found[1] then\n    return {'exists'", "if false then\n    return {'exists'"),
        ("operator_reset = '1'", ""),
        ("version = math.max(version, tonumber(found[2] or 0) + 1, tonumber(time[1]) * 1000)", ""),
        ("tonumber(found[2] or 0) + 1, tonumber(time[1]) * 1000", "tonumber(found[2] or 0) + 1"),
        ("fencing = math.max(fencing, tonumber(found[3] or 0), tonumber(time[1]) * 1000)", ""),
        ("sequence = math.max(sequence, tonumber(found[4] or 0))", ""),
        ("inventory, KEYS[3], KEYS[4]", "inventory, KEYS[4]"),
        ("KEYS[3], KEYS[4], KEYS[5]", "KEYS[3], KEYS[5]"),
        ("KEYS[4], KEYS[5], KEYS[6]", "KEYS[4], KEYS[6]"),
        ("KEYS[5], KEYS[6], KEYS[7], KEYS[9]", "KEYS[5], KEYS[7], KEYS[9]"),
        ("KEYS[6], KEYS[7], KEYS[9]", "KEYS[6], KEYS[9]"),
        ("KEYS[7], KEYS[9], KEYS[11]", "KEYS[7], KEYS[11]"),
        ("keep_once(12, time)", ""),
        ("if number then", "if false then"),
        ("if not found[1] then\n  redis.call('DEL', changes)\nend", ""),
        ("'inventory_version', version,", ""),
        (",\n  'server', string.match(redis.call('INFO', 'server'), 'run_id:(%x+)'))", ")"),
    ),
    *of_script(
        "once",
        (*OF_STORES, "tests/security/test_full_memory.py"),
        ("    if kept then\n      return tostring(i), kept\n    end\n", ""),
        ("KEYS[13 + 2 * i])\n    if kept", "KEYS[13 + i])\n    if kept"),
        ("redis.call('SET', key, ARGV[at + 1 + i], 'EX', ARGV[at])", ""),
        ("ARGV[at + 1 + i], 'EX'", "ARGV[at + 2], 'EX'"),
        ("redis.call('ZADD', names, now, key)", ""),
    ),
    *of_script(
        "lock",
        OF_LOCKS,
        ("if redis.call('GET', lock .. ':server') ~= server then", "if false then"),
        ("redis.call('SET', lock .. ':server', server)", ""),
        ("if redis.call('EXISTS', waiters) == 0 then", "if true then"),
        ("redis.call('SET', lock, token, 'PX', life_ms)", "redis.call('SET', lock, token)"),
        ("elseif holder == token then\n    redis.call('PEXPIRE', lock, life_ms)",
         "elseif holder == token then"),
        ("elseif holder == token then", "elseif false then"),
        ("redis.call('SET', alive, 1, 'PX', alive_ms)", "redis.call('SET', alive, 1)"),
        ("if not holder then\n    hand_over(lock", "if false then\n    hand_over(lock"),
        ("if redis.call('GET', lock) == token then\n      redis.call('PEXPIRE', lock, life_ms)",
         "if redis.call('GET', lock) == token then"),
        ("if step == 'renew' then\n  if holder ~= token then",
         "if step == 'renew' then\n  if not holder then"),
        ("return redis.call('PEXPIRE', lock, life_ms)", "return 1"),
        ("local held = holder == token", "local held = true"),
        ("redis.call('LREM', waiters, 0, token)\n  redis.call('DEL', alive)", ""),
        ("if held then\n  redis.call('DEL', lock)",
         "if held and step ~= 'leave' then\n  redis.call('DEL', lock)"),
        ("redis.call('DEL', lock)\n  hand_over", "hand_over"),
    ),
    *of_script(
        "lock",
        OF_JUMPS,
        ("redis.call('PTTL', lock) > tonumber(life_ms)", "false"),
    ),
    *of_script(
        "handover",
        OF_LOCKS,
        ("if redis.call('DEL', lock .. ':alive:' .. waiter) == 1 then", "if true then"),
        (", 'PX', claim_ms)", ")"),
        ("redis.call('RPUSH', lock .. ':handoff:' .. waiter, 1)", ""),
        ("redis.call('PEXPIRE', lock .. ':handoff:' .. waiter, claim_ms)", ""),
        ("      return\n", ""),
    ),
]  # fmt: skip


def of_python(file: str, tests: tuple[str, ...], *bugs: tuple[str, str]) -> list[Bug]:
    return [Bug(f"resource_manager/{file}.py", right, wrong, tests) for right, wrong in bugs]


OPEN = "return self.drained is None and self.silent is None"

BUGS += [
    *of_python(
        "core/node_state",
        ("tests/core/test_node_state.py", "tests/core/test_node_index.py"),
        (f"{OPEN} and not self.retired", OPEN),
        (f"{OPEN} and not self.retired", "return self.silent is None and not self.retired"),
        (f"{OPEN} and not self.retired", "return self.drained is None and not self.retired"),
        ("or self.silent is not None or self.retired", "or self.retired"),
    ),
    *of_python(
        "core/leased_nodes",
        OF_CLUSTER,
        ("before = (self.version, self.last_fencing_token, self.sequence",
         "before = (0, self.last_fencing_token, self.sequence"),
        ("before = (self.version, self.last_fencing_token, self.sequence",
         "before = (self.version, 0, self.sequence"),
        ("before = (self.version, self.last_fencing_token, self.sequence",
         "before = (self.version, self.last_fencing_token, 0"),
        ("self.sequence, self.last_node)\n", "self.sequence, None)\n"),
        ("self._expiry_heap = self._expiry_heap, ExpiryHeap(self.leases)", "_ = self._deadlines, None"),
        ("            self._expiry_heap = expiry_heap\n", ""),
        ("            self._undo = outer\n", "            self._undo = None\n"),
        ("for step in reversed(undo):", "for step in undo:"),
    ),
    *of_python(
        "core/node_index",
        OF_GANGS,
        ("            self._deallocate_members(request, done, lease.key)\n", ""),
        ("member.port == port for other", "False for other"),
    ),
    *of_python("core/leased_nodes", OF_GANGS, ("rest = lease.without(ranks)", "rest = None")),
    *of_python(
        "core/cluster",
        OF_GANGS,
        ("(*snapshot.leases, *snapshot.remainders)", "snapshot.leases"),
    ),
    *of_python(
        "scheduling/preemption/preempting",
        OF_PREEMPTION,
        ("with cluster.reserved(_free_parts(cluster, planned.values())):", "with cluster.reserved([]):"),
        ("not _starts_after(cluster, pending, victims, plan, current)", "False"),
        ("ledger.rules.preemption_delay_s if delay_s is None else delay_s", "0.0"),
        ("if not lease.request.preemptible:", "if False:"),
        ("if preemptor and preemptor not in cluster.pending:", "if False:"),
        ("if before.keys() - {by} <= after.keys():", "if True:"),
        ("plan.add(_place(cluster, pending, current))\n            found", "found"),
        ("            self.planned.add(lease)\n", ""),
        ("if is_over and own_kind not in turn:", "if is_over:"),
    ),
    *of_python(
        "scheduling/preemption/requeueing",
        OF_PREEMPTION,
        ("return [Queued(request, lease.arrived_at, lease.sequence, now)]", "return []"),
        ("lease.arrived_at, lease.sequence, now)", "now, lease.sequence, now)"),
        ("restarts_of(request.labels) + 1)}", "restarts_of(request.labels))}"),
        ("preferred_node=lease.placement.node", "preferred_node=None"),
        ("not (is_idle or outcome == Outcome.PREEMPTED) or lease.preempt_until == math.inf",
         "lease.preempt_until == math.inf"),
        (".preempt_until\n        and not", ".granted_at\n        and not"),
        ("        and lease.preempted_by not in cluster.pending\n", ""),
    ),
    *of_python(
        "scheduling/preemption/victims",
        OF_VICTIMS,
        ("        if not fits() or not right.holds([*taken[:place], *kept]):\n", "        if True:\n"),
        ("if not fits() or not right.holds([*taken[:place], *kept]):", "if not fits():"),
    ),
    *of_python(
        "scheduling/preemption/victim_right",
        OF_VICTIMS,
        ("other.priority >= priority", "other.priority > priority"),
        ("if lease.quarantined or lease.preempted_by:", "if lease.preempted_by:"),
        (" or not other.preemptible:", ":"),
        ("return level.account.allocated > self._milli(level)",
         "return level.account.allocated >= self._milli(level)"),
        (" and stays_inside(decides, self._request, -own_milli)", ""),
        ("min(account.guaranteed for account in upwards)", "upwards[0].guaranteed"),
        ("self._above[max(place - 1, 0)]", "self._above[0]"),
        ("return (lease.request.priority, -saved_at", "return (-lease.request.priority, -saved_at"),
        ("return (lease.request.priority, -saved_at", "return (lease.request.priority, saved_at"),
        ("-lease.arrived_at, lease.lease_id)", "lease.arrived_at, lease.lease_id)"),
        ("-account.allocated / account.guaranteed if", "account.allocated / account.guaranteed if"),
        ("self._ledger.rules.min_runtime_s if own_s is None else own_s", "0.0"),
    ),
    *of_python(
        "scheduling/queue/quotas",
        OF_QUOTAS,
        ("allocated + asked > account.limit", "allocated > account.limit"),
        ("if ledger.rules.preemption and not request.preemptible:", "if not request.preemptible:"),
        ("account.fixed + requested_milli <= account.guaranteed", "account.fixed <= account.guaranteed"),
        ("own.by_owner.get(request.owner, 0) + asked >", "own.by_owner.get(request.owner, 0) >"),
    ),
    *of_python(
        "scheduling/queue/runtime_limits",
        ("tests/scheduling/queue/test_runtime_limits.py", "tests/scheduling/queue/test_giving_back.py"),
        ("return min(now + life_s, _told_at(ledger, request, granted_at))", "return now + life_s"),
        ("runtime_used_s(request), 1.0)", "0, 1.0)"),
        ("now + _grace_s(ledger, lease.request)", "now"),
    ),
    *of_python(
        "jobs/job_preemption",
        OF_ENDING,
        ("grace_s / 2), grace_s)", "grace_s / 2), 1e9)"),
        ("max(until - time.time(), grace_s / 2)", "(until - time.time())"),
        ("outcome: Outcome = Outcome.PREEMPTED", "outcome: Outcome = Outcome.FAILED"),
    ),
    *of_python(
        "jobs/launchers/directory_job",
        OF_ENDING,
        (' and not exists(told):', ":"),
        ("if kill_at is not None and time.time() >= kill_at:", "if kill_at is not None:"),
        ('f"{grace_s:g}\\n"', '"0\\n"'),
    ),
    *of_python(
        "scheduling/allocator",
        OF_PREEMPTION,
        ("if not grants or granted == new:", "if True:"),
        ("    yield from starting_early(cluster, current)\n", ""),
    ),
    *of_python(
        "scheduling/queue/windows",
        OF_WINDOWS,
        ("change = Preempting(lease.lease_id, lease.fencing_token, window.preemptor,",
         "change = Preempting(lease.lease_id, lease.fencing_token, window.preemptor.strip(),"),
        ("window.preempt and cluster.teams.preemption", "window.preempt"),
        ("window.crossed(current.now, length_s):", "window.crossed(current.now, 0.0):"),
        ("return 0.0 if request.preemptible and preempts(cluster, window) else guard_s", "return guard_s"),
        ("else guard_s\n", "else 0.0\n"),
        ("if lease.request.preemptible and not (", "if not ("),
        ("not (lease.preempted_by or lease.quarantined)", "not lease.quarantined"),
        ("window.is_open(now) and preempts(cluster, window)", "preempts(cluster, window)"),
        ("        if node in window.servers\n", ""),
    ),
    *of_python(
        "core/maintenance",
        OF_WINDOWS,
        ("if at < self.end:", "if at <= self.end:"),
        ("(math.floor((at - self.end) / self.every_s) + 1)", "math.floor((at - self.end) / self.every_s)"),
        ("found[0] >= start + horizon_s and", "found[0] > start + horizon_s and"),
        (" and found[0] > start)", ")"),
        ("found is not None and found[0] <= at", "found is not None"),
    ),
    *of_python(
        "core/models",
        OF_GANGS,
        ("ranks=tuple(rank for rank, _ in left)", "ranks=tuple(range(len(left)))"),
    ),
    *of_python("core/models", OF_STORES, ('            preempted_by="",\n', "")),
    *of_python(
        "core/node_state",
        OF_GANGS,
        ("if port not in used), 0)", "), 0)"),
    ),
    *of_python(
        "scheduling/lease_steps",
        OF_GANGS,
        ("not held.issuperset(ranks)", "False"),
    ),
    *of_python(
        "core/node_index",
        OF_CLUSTER,
        ("return self.journal_start + len(self.journal)", "return len(self.journal)"),
    ),
    *of_python(
        "core/gpu_state",
        OF_GPUS,
        ("after = 0 if gpu_id in state.closed_gpus else", "after ="),
        ("state.cleaning.pop((change.gpu_id, change.fencing_token), None)", "state.cleaning.clear()"),
        ("    state.cleaning = cleaning\n", ""),
        ("new.cleaning = dict(old.cleaning)", ""),
        ("lease.request.gpu_milli + (other.milli if other else 0)", "1000"),
    ),
    *of_python(
        "fleet/transitions",
        OF_REPORTS,
        ("if left is not None and not left:", "if True:"),
        ("if gpu is None or gpu.lost or gpu.processes is None:", "if gpu is None:"),
        ("return stop\n", "return False\n"),
        ("xid.at + offset_s > opened.at", "True"),
        ("self._clean[key] >= CLEAN_REPORTS", "True"),
        ('process.lease_source != "unreadable"', "True"),
        ("self._now - entry.since > self._rules.clean_timeout_s", "True"),
        ("if self._reported.keys() - pinned:", "if False:"),
    ),
    *of_python(
        "storage/locks",
        OF_LOCKS,
        ('return f"thread-{self._acquisition}"', 'return "thread"'),
        ("self._alive_since + self._life_s - time.monotonic()", "self._life_s"),
        ("if self._token is None:\n            return 0.0", "if False:\n            return 0.0"),
    ),
    *of_python(
        "storage/airflow_variable/store",
        OF_VARIABLES,
        ("raise LockedError(version)\n        return lock", "pass\n        return lock"),
        ("2 * LOCK_TTL_S if patient else 0.0", "2 * LOCK_TTL_S"),
        ("2 * LOCK_TTL_S if patient else 0.0", "0.0"),
        ("            if patient:\n", "            if not patient:\n"),
        ("            if lock is None:\n", "            if False:\n"),
        ("            if lock is None:\n", "            if True:\n"),
        ("with suppress(LockError, StoreUnavailableError):", "if True:"),
        ("raise StaleStateError(version, None, str(error)) from error", "raise"),
    ),
    *of_python(
        "storage/airflow_variable/access",
        OF_AIRFLOW,
        ("answer.error == ErrorType", "answer.error != ErrorType"),
        ("        if isinstance(answer, ErrorResponse):", "        if False:"),
        ("TaskAccess() if supervised else", "DatabaseAccess() if supervised else"),
        ("raise outage(f\"Airflow Variable {key!r} c", "raise KeyError(f\"Airflow Variable {key!r} c"),
        (") != before:", ") == before:"),
        (") != before:", ") is False:"),
    ),
    *of_python(
        "manager/commit/protocol",
        ("tests/manager/commit/test_protocol.py",),
        ("        if self._recovery.suspends_grants:\n            suspended",
         "        if False:\n            suspended"),
        ("suspended = self._in_recovery(cluster, now) or suspended", "pass"),
    ),
    *of_python(
        "manager/commit/group_commits",
        ("tests/manager/commit/test_protocol.py",),
        ("group += self.groups.newcomers()", "self.groups.newcomers()"),
        ("group += self.groups.newcomers()", "pass"),
        ("self._contended = lock.waited", "pass"),
        ("looks_again = self._contended and not", "looks_again = not"),
        ("and operation.is_refused(cluster)", "and not operation.changes"),
    ),
    *of_python(
        "manager/commit/group",
        ("tests/manager/commit/test_protocol.py",),
        ("if self._is_open else []", ""),
        ("while not operation.done:", "if not operation.done:"),
        ("if operation.done and operation is not mine and operation.turn is not None:", "if False:"),
        ("self._leader = self._arrived[0] if self._arrived else None", "self._leader = None"),
        ("self._leader.turn.release()", "pass"),
        ("self._arrived.extendleft(reversed(left))", "pass"),
    ),
    *of_python(
        "manager/commit/replica",
        ("tests/manager/commit",),
        ("if kind is not None and not issubclass(kind, Exception):", "if False:"),
    ),
    *of_python(
        "storage/redis/client",
        OF_WAITING,
        ("if self._answered_in_s < QUICK_S:", "if True:"),
        ("and time.monotonic() - asked_at < AWAKE_S", ""),
    ),
    *of_python(
        "storage/sql/snapshots",
        OF_SNAPSHOTS,
        ("AND s.version >= :version AND s.server", "AND s.server"),
        ("limit = self._last_dropped()", "limit = -1"),
    ),
]  # fmt: skip


OF_PLACED_JOBS = ("tests/manager/test_placed_jobs.py",)
OF_ENDED_JOBS = ("tests/jobs/launchers/test_ended.py", "tests/jobs/launchers/test_terminal.py")
OF_TERMINALS = ("tests/cli/test_attended.py",)
OF_REPLAY = ("tests/simulator/replay/test_every_decision.py",)

# What frees GPUs on which a job still runs, wherever somebody asks.
BUGS += [
    *of_python(
        "scheduling/lease_steps",
        OF_PLACED_JOBS,
        ("if lease.request.quarantine or lease.places:", "if False:"),
        ("if lease.places and job_end in (JobEnd.UNKNOWN, JobEnd.FORCED):", "if False:"),
        ("if lease.places and not _tells_walls(", "if not _tells_walls("),
    ),
    *of_python(
        "jobs/launchers/directory_job",
        ("tests/jobs/launchers/test_places.py",),
        ('if place["machine"] != here:', "if False:"),
        ('if text_of(mark) != place["mark"]:', "if False:"),
        ("elif os.stat(mark).st_uid == os.geteuid():", "else:"),
    ),
    *of_python(
        "jobs/launchers/directory_job",
        OF_ENDED_JOBS,
        ("if not exists(tombstone_of(root, key)):", "if True:"),
        ("if ttl_s and time.monotonic() - silent_since >= ttl_s:", "if False:"),
        ("if _is_told_to_end(woken, ttl_s / 20 if ttl_s else None):", "if False:"),
    ),
    *of_python(
        "cli/attended",
        OF_TERMINALS,
        ('if lease["preempted_by"] and not self._preemption:', "if False:"),
        ('if lease["gpu_failed"]:', "if False:"),
        ("self._place(place)", "pass"),
        ("self._release(Outcome.EVICTED if self._preemption else Outcome.CANCELLED, self._preemption)", ""),
        ("return None, LauncherUnreachableError(", "return None, None and LauncherUnreachableError("),
    ),
    *of_python(
        "cli/signals",
        ("tests/cli/test_signals.py",),
        (
            "if self.first is not None:\n            raise Interrupted",
            "if False:\n            raise Interrupted",
        ),
        ("ends_at = min(ends_at, max(begun_at, self.first_at) + after_signal_s)", "pass"),
    ),
    *of_python(
        "fleet/silence",
        ("tests/fleet/test_silence.py",),
        ("if len(together) > reporting:", "if False:"),
        ("if name in self._held or now - began[name] < limit_s:", "if True:"),
    ),
    *of_python(
        "core/node_state",
        ("tests/fleet/test_receiving.py",),
        (OPEN, "return self.drained is None"),
    ),
    *of_python(
        "scheduling/placement/avoidance",
        ("tests/scheduling/placement/test_avoidance.py",),
        (" or could_ever_take(cluster, request, without=found):", ":"),
        ("if not found or has_stored_job", "if True or has_stored_job"),
    ),
    *of_python(
        "scheduling/allocator",
        ("tests/scheduling/test_lease_steps.py", *OF_PREEMPTION),
        ("cluster.sequence + 1 if pending is None else pending.sequence", "0"),
    ),
    *of_python(
        "scheduling/preemption/requeueing",
        OF_PREEMPTION,
        ("lease.arrived_at, lease.sequence, now", "lease.arrived_at, cluster.sequence + 1, now"),
    ),
    Bug("simulator/replay/operations.py", "life.is_over and life.fencing_token in again", "False", OF_REPLAY),
    *of_python(
        "scheduling/accounting/lives",
        ("tests/scheduling/accounting/test_lives.py",),
        ("quarantined = change.at > life.lease.preempt_until", "quarantined = False"),
        ("held_milli(life.lease) - (0 if rest is None else held_milli(rest))", "held_milli(life.lease)"),
        ("since = lease.queued_at if wait is None else wait.start", "since = lease.queued_at"),
    ),
]


OF_SEARCHES = (
    "tests/jobs/test_searching.py",
    "tests/fleet/test_search_answers.py",
    "tests/core/test_search.py",
)
OF_BACKUPS = ("tests/storage/test_backup.py",)
OF_CLOCKS = ("tests/storage/test_clock.py", "tests/manager/commit/test_clock_jumps.py")
OF_REPEATED = ("tests/manager/test_repeated_commands.py",)
OF_BUILDS = ("tests/faults/test_two_builds.py",)

# What forgets the stored cluster, or takes an older state, time or format for the present one.
BUGS += [
    *of_python(
        "manager/manager",
        ("tests/rest/test_old_inventory.py",),
        (
            "        open_cluster(self._commits, self._stated)\n",
            "        from resource_manager.manager.cluster_file.sections import ClusterDefinition\n\n"
            "        open_cluster(self._commits, self._stated)\n"
            "        if self.settings.inventory:\n"
            "            self.apply(ClusterDefinition(nodes=load_inventory(self.settings.inventory)))\n",
        ),
    ),
    *of_python(
        "storage/backup",
        OF_BACKUPS,
        ("store.close_state(cluster.version, closing)", "pass"),
        ("_require_replaceable(store, stored, backup)", "pass"),
        ("if backup_id_of(store.incarnation) == backup.backup_id:", "if False:"),
        (", preempt_until=lease.preempt_until + pause_s", ""),
        ("before.last_fencing_token + NUMBERS_LEFT_FREE, token, beyond", "before.last_fencing_token, token"),
        ("if is_whole or lease.places\n", "if True\n"),
        ("if _may_be_granted_again(lease, before, went_on, now)", "if False"),
        ("    if not is_whole:\n        names", "    if False:\n        names"),
        ("        drained[others.node] = others\n", ""),
    ),
    *of_python(
        "core/search",
        OF_SEARCHES,
        ("looked_at - drained.at >= settings.confirmation_window_s", "True"),
        ("    elif is_complete:", "    else:"),
        ("return {key for key in keys if token_of_key(key) not in tokens}", "return set()"),
        ("now - restore.at > NEWCOMERS_S", "False"),
    ),
    *of_python(
        "manager/administration",
        OF_SEARCHES,
        ("or state.watched or not is_searchable(", "or not is_searchable("),
        ("now - age_s):", "now):"),
    ),
    *of_python(
        "jobs/searching",
        OF_SEARCHES,
        ("    if not ways:", "    if False:"),
        ('way.launcher == "local" or not server["address"]', "False"),
    ),
    *of_python(
        "jobs/launchers/directory_job",
        OF_SEARCHES,
        ("if key in marked or not _is_free(", "if not _is_free("),
        ('if user not in ("", _user()):', "if False:"),
        ('if not exists(os.path.join(folder, "mark")):', "if False:"),
    ),
    *of_python(
        "manager/state_marks",
        ("tests/manager/test_state_marks.py",),
        ("if known is not None and is_behind(store, version, known):", "if False:"),
    ),
    *of_python(
        "storage/clock",
        OF_CLOCKS,
        ("if abs(moved_s) > JUMP_S +", "if False and abs(moved_s) > JUMP_S +"),
        ("self._learnt_at - 2 * self._error_s + offset_s - error_s", "self._learnt_at + offset_s"),
    ),
    *of_python(
        "manager/commit/recovery",
        OF_CLOCKS,
        ("if is_seen or not any(", "if True or not any("),
        ("self._extends = jump if jump.seconds > 0 else None", "pass"),
    ),
    *of_python(
        "storage/redis/check",
        ("tests/storage/test_checks.py",),
        ('policy == "noeviction",', "True,"),
        ('if found.get("aof_enabled") == "0":', "if False:"),
    ),
    *of_python("rest/api/about", ("tests/rest/test_health.py",), ("    service.watch.check()\n", "")),
    *of_python(
        "manager/administration",
        OF_REPEATED,
        (
            "exclusive=True, once=repeats.of_answer(once, answer))",
            "exclusive=True)",
        ),
    ),
    *of_python(
        "manager/cluster_file/sections",
        OF_REPEATED,
        ("teams=self.rules() if has_teams else None", "teams=self.rules()"),
    ),
    *of_python(
        "manager/commit/protocol",
        OF_BUILDS,
        ("            if lease_id is None:\n                raise\n", "            raise\n"),
    ),
    *of_python(
        "storage/codec",
        OF_BUILDS,
        ("if tag not in _CHANGES and not _skips.get():", "if tag not in _CHANGES:"),
    ),
]


def verdict(folder: Path, tests: tuple[str, ...]) -> str:
    """Return the first test that fails, or an empty string; exit if the tests are skipped here."""
    timeout_s = 300 if tests == OF_AIRFLOW else 60  # generous, because a timeout counts as a detection
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-pno:cacheprovider", "-mnot e2e"]
    command += [f"--timeout={timeout_s}"]
    command += ["-k", f"not {' and not '.join(BUSY)}"]
    done = subprocess.run([*command, *tests], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        if " passed" not in done.stdout:
            raise SystemExit(f"{' '.join(tests)} skips its tests here: pytest -rs says why")
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}: {done.stdout[-500:]}"


def main(pattern: str = "") -> int:
    """Plant the bugs whose file and text match `pattern` in a copy of the tree; return 1 if any survives."""
    bugs = [bug for bug in BUGS if re.search(pattern, f"{bug.file} {bug.right} {bug.wrong}")]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        for part in ("resource_manager", "simulator", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", folder)
        os.environ["TMPDIR"] = name
        for tests in sorted({bug.tests for bug in bugs}):
            if failed := verdict(folder, tests):
                print(f"{failed} fails without any planted bug: fix it first", file=sys.stderr)
                return 2
        for bug in bugs:
            target = folder / bug.file
            text = target.read_text(encoding="utf-8")
            if bug.right not in text:
                print(f"{bug.file} does not contain {bug.right!r}: update the list of bugs", file=sys.stderr)
                return 2
            target.write_text(text.replace(bug.right, bug.wrong, 1), encoding="utf-8")
            found = verdict(folder, bug.tests)
            target.write_text(text, encoding="utf-8")
            survived += not found
            print(f"{found or 'SURVIVED'}: {bug.file}: {bug.right!r} -> {bug.wrong!r}", flush=True)
    print(f"{len(bugs)} planted, {survived} survived")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
