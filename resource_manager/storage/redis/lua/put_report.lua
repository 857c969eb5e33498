-- Keep the report of a server and its record, each for so many milliseconds: half as dear as a pipeline.
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
