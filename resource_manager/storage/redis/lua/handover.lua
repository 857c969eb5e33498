-- Hand the free lock to the first waiter that is still alive, and wake it.
local function hand_over(lock, waiters, claim_ms)
  local waiter = redis.call('LPOP', waiters)
  while waiter do
    -- The heartbeat is deleted: a token that is queued twice gets the lock once.
    if redis.call('DEL', lock .. ':alive:' .. waiter) == 1 then
      redis.call('SET', lock, waiter, 'PX', claim_ms)
      redis.call('RPUSH', lock .. ':handoff:' .. waiter, 1)
      redis.call('PEXPIRE', lock .. ':handoff:' .. waiter, claim_ms)
      return
    end
    waiter = redis.call('LPOP', waiters)
  end
end
