-- Writes a short text, with memory full too: a first write that adds nothing opens it.
redis.call('PERSIST', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
