-- Put a reply in the place of the claim on it; where that is no longer there, keep nothing.
-- KEYS: the reply, the names of the caller's claims and refusals by age, the names among which it goes.
-- ARGV: the claim, the new reply, its life in s, most names: beyond them the oldest go.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- A first write that adds nothing opens a full memory to those that follow.
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[3] * 1000000)
redis.call('ZADD', KEYS[3], now, KEYS[1])
if redis.call('TTL', KEYS[3]) < tonumber(ARGV[3]) then
  redis.call('EXPIRE', KEYS[3], ARGV[3])
end
for _ = 1, redis.call('ZCARD', KEYS[3]) - tonumber(ARGV[4]) do
  redis.call('DEL', redis.call('ZPOPMIN', KEYS[3])[1])
end
