-- Acquire, renew, release or leave the lock.
-- KEYS: lock (its holder's token), queue of the waiters' tokens.
-- ARGV: step, token, time to live of the lock, of a heartbeat, and of an unclaimed hand-off, in ms.
local lock, waiters = KEYS[1], KEYS[2]
local step, token = ARGV[1], ARGV[2]
local life_ms, alive_ms, claim_ms = ARGV[3], ARGV[4], ARGV[5]
local alive, turn = lock .. ':alive:' .. token, lock .. ':handoff:' .. token
-- With memory full, Redis refuses only the first write of a script: this one adds nothing. A hand-off that is
-- still stored is claimed now, or came too late.
redis.call('DEL', turn)
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
if redis.call('GET', lock .. ':server') ~= server then
  -- Redis was restarted or failed over: the holder's commits would be refused, so its lock is dropped.
  redis.call('DEL', lock)
  redis.call('SET', lock .. ':server', server)
end
local holder = redis.call('GET', lock)

if step == 'acquire' then
  -- A waiter repeats this step to send its heartbeat, claim a hand-off and detect that a holder died.
  if not holder then
    if redis.call('EXISTS', waiters) == 0 then
      redis.call('SET', lock, token, 'PX', life_ms)
      return {1, 0}
    end
  elseif holder == token then
    redis.call('PEXPIRE', lock, life_ms)
    return {1, 0}
  elseif redis.call('PTTL', lock) > tonumber(life_ms) then
    redis.call('PEXPIRE', lock, life_ms)  -- the clock was set back, and a dead holder would keep it as long
  end
  if redis.call('EXISTS', alive) == 0 then
    redis.call('RPUSH', waiters, token)
  end
  redis.call('SET', alive, 1, 'PX', alive_ms)
  if not holder then
    hand_over(lock, waiters, claim_ms)
    if redis.call('GET', lock) == token then
      redis.call('PEXPIRE', lock, life_ms)
      redis.call('DEL', turn)
      return {1, 0}
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

-- step 'release', or 'leave': stop waiting
local held = holder == token
if step == 'leave' then
  redis.call('LREM', waiters, 0, token)
  redis.call('DEL', alive)
end
if held then
  redis.call('DEL', lock)
  hand_over(lock, waiters, claim_ms)
end
return held and 1 or 0
