-- Begin a recovery window because the clock jumped, unless that jump began one before.
-- ARGV: 1 format, 2 incarnation, 3 recovery window in s, 4 the jump in s, 5 a time before it by the clock of now,
--       6 the most that two sightings of one jump differ by, in s.
-- Returns: status, seconds, microseconds, stored version, detail, 1 if it was begun now, or by this jump, else 0.
local meta, lock = KEYS[1], KEYS[10]
local status, version, detail = preflight(meta, ARGV[1], ARGV[2], tonumber(ARGV[3]))
if status ~= 'ok' then
  return {status, time[1], time[2], version, detail}
end
local seconds, at = string.match(redis.call('HGET', meta, 'clock_jump') or '', '^(%S+) (%S+)$')
if seconds and math.abs(seconds - ARGV[4]) <= tonumber(ARGV[6]) and tonumber(at) >= tonumber(ARGV[5]) then
  return {'ok', time[1], time[2], version, detail, seconds == ARGV[4] and 1 or 0}
end
local window = tonumber(redis.call('HGET', meta, 'confirmation_window_s') or ARGV[3])
-- With memory full, Redis refuses only the first write of a script: this one adds nothing.
redis.call('HDEL', meta, '')
redis.call('HSET', meta, 'grants_suspended_until', string.format('%.6f', now + window),
  'clock_jump', ARGV[4] .. ' ' .. string.format('%.6f', now))
-- After a jump back the lock of a holder that died would live longer by the jump.
redis.call('DEL', lock)
return {'ok', time[1], time[2], version, math.ceil(window) .. ' ' .. ARGV[4], 1}
