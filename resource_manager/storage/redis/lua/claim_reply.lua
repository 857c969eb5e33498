-- Return the reply that is kept under a key of a caller, or else keep this one and return nothing.
-- KEYS: the reply, the names of the caller's claims and refusals by age.
-- ARGV: the reply, its life in s, most names: beyond them the oldest go.
local found = redis.call('GET', KEYS[1])
if found then
  return found
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- A first write that adds nothing opens a full memory to those that follow. Names that ran out do not count.
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[2] * 1000000)
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('ZADD', KEYS[2], now, KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[2])
for _ = 1, redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[3]) do
  redis.call('DEL', redis.call('ZPOPMIN', KEYS[2])[1])
end
return false
