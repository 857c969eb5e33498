-- Forget a claim on a reply, unless a later request has taken it.
-- KEYS: the reply, the names of the caller's claims and refusals by age. ARGV: the claim.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], KEYS[1])
end
