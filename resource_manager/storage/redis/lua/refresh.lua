-- Return what a replica lacks: the changes since its version, or the whole state where that is less.
-- ARGV: 1 format, 2 incarnation, 3 recovery window in s, 4 version of the replica (-1: there is none),
--       5 version of the inventory that the reader has, 6 nodes in it, 7 id of the commit that led to 4 ('': unknown).
-- Returns: status, seconds, microseconds, stored version, detail, then 'changes' and a list of JSON, or
-- 'state' and incarnation, fencing, sequence, last node, inventory version, inventory ('' if the reader has it),
-- leases, renewals, quarantined, pending, drained, the kinds of changes that led to the state, rules,
-- gpus, meta, and preempting; last of all the id of the commit that led to the stored version, or '' (also if that
-- is the replica's), and why the state is closed, or ''.
local meta, inventory, leases, renewals, quarantined, pending, drained, changes, kinds, _, rules, gpus,
  preempting = unpack(KEYS)
local status, version, detail, closed = preflight(meta, ARGV[1], ARGV[2], tonumber(ARGV[3]), changes, ARGV[4], ARGV[7])
if status ~= 'ok' then
  return {status, time[1], time[2], version, detail}
end

closed = closed or ''
local known = tonumber(ARGV[4])
local missed = version - known
if known >= 0 and missed == 0 then
  return {'ok', time[1], time[2], version, detail, 'changes', {}, '', closed}
end
if known > version then
  return {'behind', time[1], time[2], version, detail}
end
local size = redis.call('HLEN', leases) + redis.call('HLEN', pending) + tonumber(ARGV[6])
if known >= 0 and missed <= math.max(2 * size, 128) then
  local missing, commit_id = missing_changes(changes, known, version)
  if missing then
    return {'ok', time[1], time[2], version, detail, 'changes', missing, commit_id, closed}
  end
end
local found = redis.call('HMGET', meta, 'incarnation', 'last_fencing_token', 'sequence', 'last_node', 'inventory_version')
local nodes = ''
if found[5] ~= ARGV[5] then
  nodes = redis.call('GET', inventory)
end
return {
  'ok', time[1], time[2], version, detail, 'state',
  found[1], found[2], found[3], found[4], found[5], nodes,
  redis.call('HGETALL', leases), redis.call('HGETALL', renewals), redis.call('HGETALL', quarantined),
  redis.call('HGETALL', pending), redis.call('HGETALL', drained), redis.call('SMEMBERS', kinds),
  redis.call('HGETALL', rules), redis.call('HGETALL', gpus),
  redis.call('HGETALL', meta),
  redis.call('HGETALL', preempting), commit_id_at(changes, string.format('%.0f-0', version)) or '', closed,
}
