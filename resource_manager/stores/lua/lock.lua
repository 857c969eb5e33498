-- KEYS: lock (its holder's token), line of waiting tokens, fencing counter.
-- ARGV: step, token, life of the lock, of a heartbeat, and of an unclaimed turn, in ms.
local lock, waiters, fencing = KEYS[1], KEYS[2], KEYS[3]
local step, token = ARGV[1], ARGV[2]
local life_ms, alive_ms, claim_ms = ARGV[3], ARGV[4], ARGV[5]
local alive, turn = lock .. ':alive:' .. token, lock .. ':turn:' .. token
-- A first write that adds nothing opens a full memory to those that follow. A turn that still stands here is
-- claimed now, or was not in time.
redis.call('DEL', turn)
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
if redis.call('GET', lock .. ':server') ~= server then
  -- Redis was restarted or failed over: the holder's commits are void by then, so nobody waits for it.
  redis.call('DEL', lock)
  redis.call('SET', lock .. ':server', server)
end
local holder = redis.call('GET', lock)

if step == 'acquire' then
  -- Also how a waiter beats its heart, claims its turn and notices that a holder died.
  if not holder then
    if redis.call('EXISTS', waiters) == 0 then
      redis.call('SET', lock, token, 'PX', life_ms)
      return {redis.call('INCR', fencing), 0}
    end
  elseif holder == token then
    redis.call('PEXPIRE', lock, life_ms)
    return {tonumber(redis.call('GET', fencing)), 0}
  end
  if redis.call('EXISTS', alive) == 0 then
    redis.call('RPUSH', waiters, token)
  end
  redis.call('SET', alive, 1, 'PX', alive_ms)
  if not holder then
    hand_over(lock, waiters, fencing, claim_ms)
    if redis.call('GET', lock) == token then
      redis.call('PEXPIRE', lock, life_ms)
      redis.call('DEL', turn)
      return {tonumber(redis.call('GET', fencing)), 0}
    end
  end
  return {0, redis.call('PTTL', lock)}
end

if step == 'renew' then
  if holder ~= token then
    return 0
  end
  return redis.call('PEXPIRE', lock, life_ms)
end

-- release, or leave the line
local held = holder == token
if step == 'leave' then
  redis.call('LREM', waiters, 0, token)
  redis.call('DEL', alive)
end
if held then
  redis.call('DEL', lock)
  hand_over(lock, waiters, fencing, claim_ms)
end
return held and 1 or 0
