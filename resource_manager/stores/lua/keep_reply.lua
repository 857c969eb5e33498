-- Puts a reply in the place of the one that is there; where none is any more, it is not kept.
-- KEYS: the reply. ARGV: the new reply, its life in s.
if redis.call('EXPIRE', KEYS[1], ARGV[2]) == 1 then
  redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
