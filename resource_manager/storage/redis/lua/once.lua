-- Idempotency keys. KEYS from 15 on: for each, the key of what is kept, and of the names of all that is kept for
-- its caller, by age. ARGV from `at` on: seconds to keep it, number of keys, what to keep.

-- Return the number of the first key that is known and what is kept under it, or nil.
local function find_once(at)
  for i = 1, tonumber(ARGV[at + 1]) do
    local kept = redis.call('GET', KEYS[13 + 2 * i])
    if kept then
      return tostring(i), kept
    end
  end
end

-- Keep them all.
local function keep_once(at, time)
  for i = 1, tonumber(ARGV[at + 1]) do
    local now = time[1] * 1000000 + time[2]
    local key, names = KEYS[13 + 2 * i], KEYS[14 + 2 * i]
    redis.call('SET', key, ARGV[at + 1 + i], 'EX', ARGV[at])
    redis.call('ZREMRANGEBYSCORE', names, '-inf', now - ARGV[at] * 1000000)
    redis.call('ZADD', names, now, key)
    redis.call('EXPIRE', names, ARGV[at])
  end
end
