-- Write a short text, also with memory full: Redis refuses only the first write of a script, and PERSIST adds
-- nothing.
redis.call('PERSIST', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
