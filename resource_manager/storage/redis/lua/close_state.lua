-- Close the state for the reason that every later commit is refused with.
-- ARGV: 1 format, 2 incarnation, 3 recovery window in s, 4 version, 5 reason.
-- Returns: status, seconds, microseconds, stored version, detail.
local status, version, detail = preflight(KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]))
if status == 'ok' and version ~= tonumber(ARGV[4]) then
  status = 'stale'
end
if status ~= 'ok' then
  return {status, time[1], time[2], version, detail}
end
-- With memory full, Redis refuses only the first write of a script: this one adds nothing.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], 'closed', ARGV[5])
return {'ok', time[1], time[2], version, ''}
