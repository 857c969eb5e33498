-- One commit: all changes or none, on the version they were decided on. See redis.py for the keys.
-- ARGV: 1 format, 2 epoch, 3 version, 4 now in s, 5 tolerance of now in s, 6 lock token, 7 commit id,
--       8 length of the history, 9 rest after a restart in s, 10 last fencing number, 11 last node,
--       12 new inventory or '', then for each change: operation, key, JSON ('forget' is no change).
-- Answers: status, seconds, microseconds, stored version, detail, and for 'stale' the changes missed, if few.
local meta, inventory, leases, renewals, quarantined, waiting, drained, changes, lock =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local status, version, detail = examine(meta, ARGV[1], ARGV[2], now, tonumber(ARGV[9]))
if status ~= 'ok' then
  return {status, time[1], time[2], version, detail}
end

local expected = tonumber(ARGV[3])
if version ~= expected then
  -- The answer to an earlier try may have been lost on its way: then this commit is there already.
  local first = redis.call('XRANGE', changes, (expected + 1) .. '-0', (expected + 1) .. '-0')[1]
  if first and first[2][4] == ARGV[7] then
    return {'ok', time[1], time[2], version, ''}
  end
  if version > expected and version - expected <= 64 then
    return {'stale', time[1], time[2], version, '', missing_changes(changes, expected, version)}
  end
  return {'stale', time[1], time[2], version, ''}
end
local holder = redis.call('GET', lock)
if holder and holder ~= ARGV[6] then
  return {'locked', time[1], time[2], version, ''}
end
if math.abs(now - tonumber(ARGV[4])) > tonumber(ARGV[5]) then
  return {'clock', time[1], time[2], version, ''}
end
if ARGV[10] ~= '' and detail ~= '' then
  return {'resting', time[1], time[2], version, detail}
end

-- What frees capacity comes first: with its memory full, Redis refuses only what would add, and only as
-- the first write of a script, so that releases still go through.
for i = 13, #ARGV, 3 do
  local operation, key, json = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if operation == 'grant' then
    redis.call('HSET', leases, key, json)
    redis.call('HDEL', waiting, key)
  elseif operation == 'end' then
    redis.call('HDEL', leases, key)
    redis.call('HDEL', renewals, key)
    redis.call('HDEL', quarantined, key)
  elseif operation == 'renew' then
    redis.call('HSET', renewals, key, json)
    redis.call('HDEL', quarantined, key)
  elseif operation == 'quarantine' then
    redis.call('HSET', quarantined, key, json)
  elseif operation == 'wait' then
    redis.call('HSET', waiting, key, redis.call('HINCRBY', meta, 'sequence', 1) .. ' ' .. json)
  elseif operation == 'cancel' then
    redis.call('HDEL', waiting, key)
  elseif operation == 'drain' then
    redis.call('HSET', drained, key, json)
  elseif operation == 'restore' then
    redis.call('HDEL', drained, key)
  end
  if operation == 'forget' then
    redis.call('HDEL', drained, key)
  else
    version = version + 1
    redis.call('XADD', changes, 'MAXLEN', '~', ARGV[8], version .. '-0', 'c', json, 'i', ARGV[7])
  end
end
if ARGV[10] ~= '' then
  redis.call('HSET', meta, 'version', version, 'fencing', ARGV[10], 'last_node', ARGV[11])
else
  redis.call('HSET', meta, 'version', version)
end
if ARGV[12] ~= '' then
  redis.call('SET', inventory, ARGV[12])
  redis.call('HSET', meta, 'inventory_version', version)
end
return {'ok', time[1], time[2], version, ''}
