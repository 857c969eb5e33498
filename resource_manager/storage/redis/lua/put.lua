-- Write texts, each for so many milliseconds, also with memory full: Redis refuses only the first write of a script,
-- and PERSIST adds nothing. One script is half as dear as a pipeline.
-- KEYS: those of the texts. ARGV: for each its text and its life, '' for one without an end.
redis.call('PERSIST', KEYS[1])
for i, key in ipairs(KEYS) do
  local text, life_ms = ARGV[2 * i - 1], ARGV[2 * i]
  if life_ms == '' then
    redis.call('SET', key, text)
  else
    redis.call('SET', key, text, 'PX', life_ms)
  end
end
