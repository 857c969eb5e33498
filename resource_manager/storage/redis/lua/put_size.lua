-- Keep the size of a text for its caller, also with memory full: Redis refuses only the first write of a script.
-- KEYS: the sizes of the caller. ARGV: name and size of the text, and for how many milliseconds sizes are kept.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
