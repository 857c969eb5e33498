-- Keep what a machine saw of the clock, also with memory full: Redis refuses only the first write of a script, and
-- this one adds nothing.
-- KEYS: the sightings. ARGV: boot id of the machine, sighting, then boot ids of others to forget.
redis.call('HDEL', KEYS[1], '', unpack(ARGV, 3))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
