-- Add a session of a token, also with memory full: a first write that adds nothing opens it to those that follow.
-- KEYS: the token's sessions by their end. ARGV: the session, now in s, its life in s, most sessions.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])
redis.call('ZADD', KEYS[1], ARGV[2] + ARGV[3], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[3])
