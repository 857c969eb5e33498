-- Write a whole state: the first one, or a replacement of the stored one.
-- ARGV: 1 format, 2 incarnation, 3 'initialise', 'replace' or
--       'restore', 4 version, 5 fencing, 6 sequence, 7 last node, 8 inventory, of a restore: 9 stored version
--       that it replaces ('' if there is no state), 10 time until which nothing is granted, 11 last version
--       whose change stays in the history, 12 on: idempotency keys as in once.lua, then: part, key, JSON.
-- Returns: status, seconds, microseconds, stored version, detail, incarnation.
local meta, inventory, changes = KEYS[1], KEYS[2], KEYS[8]
local parts = {lease = KEYS[3], pending = KEYS[6], drained = KEYS[7], rule = KEYS[11], gpu = KEYS[12],
  port = KEYS[1]}
local time = redis.call('TIME')
local found = redis.call('HMGET', meta, 'format', 'version', 'last_fencing_token', 'sequence', 'incarnation', 'history_bytes', 'closed')
local version, fencing, sequence = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local incarnation, history_bytes = ARGV[2], found[1] and found[6] or 0

if found[1] and tonumber(found[1]) > tonumber(ARGV[1]) then
  return {'format', time[1], time[2], tonumber(found[2]), found[1], ''}
end
if ARGV[3] == 'initialise' then
  if found[1] then
    return {'exists', time[1], time[2], tonumber(found[2]), '', found[5]}
  end
elseif ARGV[3] == 'restore' then
  if found[5] == incarnation then  -- written by an earlier try whose answer was lost
    return {'ok', time[1], time[2], version, '', incarnation}
  end
  if (found[2] or '') ~= ARGV[9] then
    return {'stale', time[1], time[2], tonumber(found[2] or 0), '', ''}
  end
  for _, entry in ipairs(redis.call('XRANGE', changes, (tonumber(ARGV[11]) + 1) .. '-0', '+')) do
    redis.call('XDEL', changes, entry[1])
    history_bytes = history_bytes - stream_bytes(entry[2][2])
  end
else
  local number, kept = find_once(12)
  if number then
    return {'repeated', time[1], time[2], tonumber(found[2] or 0), number, kept}
  end
  if found[7] then
    return {'closed', time[1], time[2], tonumber(found[2]), found[7], ''}
  end
  -- The earlier state may be lost, and with it the numbers it had reached: the time in ms is above them.
  version = math.max(version, tonumber(found[2] or 0) + 1, tonumber(time[1]) * 1000)
  fencing = math.max(fencing, tonumber(found[3] or 0), tonumber(time[1]) * 1000)
  sequence = math.max(sequence, tonumber(found[4] or 0))
end
redis.call('DEL', meta, inventory, KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[9], KEYS[11],
  KEYS[12], KEYS[13])
if not found[1] then
  redis.call('DEL', changes)
end
redis.call('HSET', meta, 'format', ARGV[1], 'incarnation', incarnation, 'version', version, 'last_fencing_token', fencing,
  'sequence', sequence, 'last_node', ARGV[7], 'inventory_version', version,
  'history_bytes', history_bytes,
  'server', string.match(redis.call('INFO', 'server'), 'run_id:(%x+)'))
if ARGV[3] ~= 'initialise' then
  redis.call('HSET', meta, 'operator_reset', '1')  -- clients that saw another state before accept this one
end
if ARGV[3] == 'restore' then
  redis.call('HSET', meta, 'grants_suspended_until', ARGV[10])
end
redis.call('SET', inventory, ARGV[8])
keep_once(12, time)
for i = 14 + tonumber(ARGV[13]), #ARGV, 3 do
  redis.call('HSET', parts[ARGV[i]], ARGV[i + 1], ARGV[i + 2])
end
return {'ok', time[1], time[2], version, '', incarnation}
