-- Returns the reply that is kept under a key of a caller, or else keeps this one and returns nothing.
-- KEYS: the reply, the names of the caller's replies by age. ARGV: the reply, its life in s, the life of
-- the names in s, most replies of one caller: beyond them its oldest go.
local found = redis.call('GET', KEYS[1])
if found then
  return found
end
-- A first write that adds nothing opens a full memory to those that follow.
redis.call('ZREM', KEYS[2], KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000000 + time[2], KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[3])
for _ = 1, redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[4]) do
  redis.call('DEL', redis.call('ZPOPMIN', KEYS[2])[1])
end
return false
