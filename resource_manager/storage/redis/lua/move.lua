-- Mark the state as moved to another store, or take that back.
-- ARGV: 1 format, 2 incarnation, 3 recovery window in s, 4 version, 5 the other store, or ''.
-- Returns: status, seconds, microseconds, stored version, detail.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local status, version, detail = preflight(KEYS[1], ARGV[1], ARGV[2], now, tonumber(ARGV[3]))
if status == 'ok' and version ~= tonumber(ARGV[4]) then
  status = 'stale'
end
if status ~= 'ok' then
  return {status, time[1], time[2], version, detail}
end
if ARGV[5] == '' then
  redis.call('HDEL', KEYS[1], 'moved_to')
else
  redis.call('HSET', KEYS[1], 'moved_to', ARGV[5])
end
return {'ok', time[1], time[2], version, ''}
