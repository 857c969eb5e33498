-- One commit: all changes or none, on the version they were decided on; the lock it was made under goes to the
-- next waiter with it. See store.py for the keys.
-- ARGV: 1 format, 2 incarnation, 3 version, 4 now in s, 5 tolerance of now in s, 6 lock token, 7 commit id,
--       8 maximum changes and 9 maximum bytes of the history, 10 recovery window in s, 11 last fencing
--       token, 12 last node, 13 greatest sequence of a request or 0, 14 new inventory or '', 15 time to
--       live of an unclaimed hand-off of the lock in ms, 16 '1' if it waits for the end of a recovery
--       window, 17 id of the commit that led to 3 ('': unknown), 18 on: idempotency keys as in once.lua, then for each change: operation, key, JSON ('port', 'use', 'job', 'failed', 'learn', 'attain' and
--       those that begin with 'forget' are no changes).
-- Returns: status ('full': Redis is out of memory and the commit needs some), seconds, microseconds, stored
--       version, detail, and for 'stale' the missed changes, if few, with the id of the last commit, for 'repeated'
--       what was kept.
local meta, inventory, leases, renewals, quarantined, pending, drained, changes, kinds, lock, rules, gpus,
  preempting, waiters = unpack(KEYS, 1, 14)
local begin = 20 + tonumber(ARGV[19])

local status, version, detail, closed, sequence, held = preflight(meta, ARGV[1], ARGV[2], tonumber(ARGV[10]), changes,
  ARGV[3], ARGV[17])
if status ~= 'ok' then
  return {status, time[1], time[2], version, detail}
end

local expected = tonumber(ARGV[3])
if version ~= expected then
  -- The answer to an earlier try may have been lost: then this commit is stored already.
  local first = redis.call('XRANGE', changes, (expected + 1) .. '-0', (expected + 1) .. '-0')[1]
  if first and first[2][4] == ARGV[7] then
    return {'ok', time[1], time[2], version, ''}
  end
  if version > expected and version - expected <= 64 then
    return {'stale', time[1], time[2], version, '', missing_changes(changes, expected, version)}
  end
  return {'stale', time[1], time[2], version, ''}
end
if closed then
  return {'closed', time[1], time[2], version, closed}
end
local holder = redis.call('GET', lock)
if holder and holder ~= ARGV[6] then
  return {'locked', time[1], time[2], version, ''}
end
if math.abs(now - tonumber(ARGV[4])) > tonumber(ARGV[5]) then
  return {'clock', time[1], time[2], version, ''}
end
local number, kept = find_once(18)
if number then
  return {'repeated', time[1], time[2], version, number, kept}
end
if ARGV[16] == '1' and detail ~= '' then
  return {'suspended', time[1], time[2], version, detail}
end

-- Return true if the changes have a new request, a lease of one that was not pending, an inventory or rules. What
-- waits again, or is granted again, after its lease ended in these changes, takes the place of that lease.
local function grows()
  local ended = {}
  for i = begin, #ARGV, 3 do
    local operation, key = ARGV[i], ARGV[i + 1]
    if operation == 'inventory' or operation == 'rule' or not ended[key] and (operation == 'queue'
      or operation == 'grant' and redis.call('HEXISTS', pending, key) == 0) then
      return true
    end
    ended[key] = ended[key] or operation == 'end'
  end
  return false
end

local function is_change(operation)
  return operation ~= 'port' and operation ~= 'use' and operation ~= 'job' and operation ~= 'failed' and operation ~= 'learn'
    and operation ~= 'attain' and string.sub(operation, 1, 6) ~= 'forget'
end

local added, bytes = 0, 0
for i = begin, #ARGV, 3 do
  if is_change(ARGV[i]) then
    added = added + 1
    bytes = bytes + stream_bytes(ARGV[i + 2])
  end
end
held = tonumber(held or 0) + bytes
local fields = {'version', version + added, 'history_bytes', held, 'last_commit', version + added .. ' ' .. ARGV[7]}
if ARGV[11] ~= '' then
  fields[7], fields[8], fields[9], fields[10] = 'last_fencing_token', ARGV[11], 'last_node', ARGV[12]
end
-- A request that waits again, or is granted after its wait, has its old number.
if ARGV[13] ~= '0' and tonumber(ARGV[13]) > tonumber(sequence) then
  fields[#fields + 1], fields[#fields + 2] = 'sequence', ARGV[13]
end

-- With its memory full, Redis refuses commands that may use more, but only as the first write of a script.
-- This script then refuses new leases and requests; all else continues after a write that adds nothing:
-- leases are renewed and end, requests are cancelled, and pending requests get what becomes free.
local full = false
local written = redis.pcall('HSET', meta, unpack(fields))
if type(written) == 'table' then
  if not string.find(written.err, 'OOM', 1, true) then
    return written
  end
  if grows() then
    return {'full', time[1], time[2], version, ''}
  end
  full = true
  redis.call('HDEL', meta, '')
  redis.call('HSET', meta, unpack(fields))
end

-- Keep what an ended lease, or the members of these ranks, held on watched nodes: it is free only once it is
-- clean. The JSON of the lease and of its ends are kept as they are, since Lua would round their numbers. After
-- a restore the lease is only what was left of it then, and follows what another one says of the same GPU.
local function begin_cleaning(text, ending, ranks)
  if redis.call('HLEN', gpus) == 0 then
    return
  end
  text = text and string.match(text, '^[^\n]*')  -- without the places of its jobs
  local lease = text and cjson.decode(text).lease
  local members = lease and lease.members or {}
  if ranks then
    local of_rank = {}
    for i, member in ipairs(members) do
      of_rank[lease.ranks and lease.ranks[i] or i - 1] = member
    end
    members = {}
    for i, rank in ipairs(ranks) do
      members[i] = of_rank[rank]
    end
  end
  for _, member in ipairs(members) do
    if redis.call('HEXISTS', gpus, 'watched ' .. member.node) == 1 then
      for _, gpu_id in ipairs(member.gpu_ids or {}) do
        local field = string.format('cleaning %d %.0f %s', gpu_id, lease.fencing_token, member.node)
        local kept = redis.call('HGET', gpus, field)
        if not kept then
          kept = text
        elseif not string.find(kept, text, 1, true) then
          kept = kept .. '\n' .. text
        end
        if string.sub(kept, -#ending) ~= ending then
          redis.call('HSET', gpus, field, kept .. '\n' .. ending)
        end
      end
    end
  end
end

-- Tell the process that waits for this request what was decided, if one does.
local function wake(lease, json)
  if redis.call('DEL', pending .. ':waits:' .. lease) == 1 then
    local woken = pending .. ':woken:' .. lease
    redis.call('RPUSH', woken, json)
    redis.call('PEXPIRE', woken, 5000)
  end
end

local function job_id_of(lease_id)
  return (string.gsub(lease_id, '#%d+$', ''))
end

-- Nothing is announced any more of a task that asks, nor of the mapped task whose first one it is.
local function end_announced(lease)
  local name = job_id_of(lease)
  redis.call('HDEL', rules, 'announced:' .. name, 'announced:' .. (string.match(name, '^(.*)/') or ''))
end

-- Keep a job or a result for so long, and its size for its caller; without a text only for how long is changed.
local function keep_job(key, text)
  local name, caller, life_ms = string.match(key, '^(%S+) (%S+) (%d+)$')
  local row, sizes = string.gsub(leases, 'leases$', 'jobs:row:' .. name), string.gsub(leases, 'leases$', 'jobs:of:' .. caller)
  if text == '' then
    redis.call('PEXPIRE', row, life_ms)
  else
    redis.call('SET', row, text, 'PX', life_ms)
    if caller ~= '-' then  -- else nobody's: the sizes of what nobody counts would stay for ever
      redis.call('HSET', sizes, name, #text)
      redis.call('PEXPIRE', sizes, 7776000000)  -- 90 days, as long as any row is kept
    end
  end
end

-- Keep what was learnt of a class of tasks or of a job: when (the version of the change), then numbers. Of so
-- many fields with that beginning, the one that changed longest ago goes for a new one.
local function keep_learnt(beginning, name, numbers, most)
  local field = beginning .. name
  if redis.call('HEXISTS', rules, field) == 0 then
    local count, oldest, oldest_at = 0, nil, nil
    for _, known in ipairs(redis.call('HKEYS', rules)) do
      if string.sub(known, 1, #beginning) == beginning then
        count = count + 1
      end
    end
    if count >= most then
      local all = redis.call('HGETALL', rules)
      for n = 1, #all, 2 do
        local learnt_at = string.sub(all[n], 1, #beginning) == beginning and cjson.decode(all[n + 1])[1]
        if learnt_at and (not oldest or learnt_at < oldest_at) then
          oldest, oldest_at = all[n], learnt_at
        end
      end
      redis.call('HDEL', rules, oldest)
    end
  end
  numbers[1] = version + 1
  redis.call('HSET', rules, field, cjson.encode(numbers))
end

-- Return how long a lease ran that ends at that time, as core/runtimes.py does.
local function run_s(lease, at)
  return math.max(math.floor((at - lease.granted_at) * 1000 + 0.5) / 1000, 1)
end

-- Learn how long the task of a lease ran that ends at that time, as core/runtimes.py does: of so many classes
-- of tasks, so many runs each. The field of a class has the version of the change, then the runs in seconds.
-- A job that was preempted tells only what was left of it, and an id that is random names no task.
local function learn(text, classes, most, at)
  local lease = cjson.decode(string.match(text, '^[^\n]*')).lease
  local labels, id, class = lease.request.labels or {}, job_id_of(lease.request.lease_id), nil
  if (labels.restart_count or '0') ~= '0' then
    return
  end
  if (labels.dag_id or '') ~= '' then
    class = (labels.instance or '') .. '/' .. labels.dag_id .. '/' .. (labels.task_id or '')
  elseif string.find(id, '^hand:.*/' .. string.rep('[0-9a-f]', 8) .. '$') then
    return
  else
    class = string.gsub(id, '%d+', '#')
  end
  local known = redis.call('HGET', rules, 'runs:' .. class)
  local runs = known and cjson.decode(known) or {0}
  runs[#runs + 1] = run_s(lease, at)
  if #runs > most + 1 then
    table.remove(runs, 2)
  end
  keep_learnt('runs:', class, runs, classes)
end

-- Count the service of a lease that ends at that time for its job, as core/attained_service.py does; what is
-- left of a gang adds nothing.
local function attain(text, token, jobs, at)
  local lease = text and cjson.decode(string.match(text, '^[^\n]*')).lease
  if not lease or lease.fencing_token ~= token then
    return
  end
  local request, job = lease.request, job_id_of(lease.request.lease_id)
  local gpus = (request.gpus or 0) * #lease.members * (request.gpu_milli or 1000) / 1000
  local known = redis.call('HGET', rules, 'attained:' .. job)
  local before = known and cjson.decode(known)[2] or 0
  keep_learnt('attained:', job, {0, before + math.floor(gpus * run_s(lease, at) * 1000 + 0.5)}, jobs)
end

-- The hashes in which an operation only sets its field, and those from which one only deletes it.
local set_in = {port = meta, preempt = preempting, quarantine = quarantined, use = rules, drain = drained,
  ['set gpu'] = gpus}
local deleted_from = {['forget port'] = meta, unrule = rules, ['forget attained'] = rules, forget = drained,
  ['unset gpu'] = gpus, ['forget gpu'] = gpus}

for i = begin, #ARGV, 3 do
  local operation, key, json = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if set_in[operation] then
    redis.call('HSET', set_in[operation], key, json)
  elseif deleted_from[operation] then
    redis.call('HDEL', deleted_from[operation], key)
  elseif operation == 'grant' then
    redis.call('HSET', leases, key, json)
    if redis.call('HDEL', pending, key) == 1 then
      wake(key, json)
    end
    end_announced(key)
  elseif operation == 'end' then
    begin_cleaning(redis.call('HGET', leases, key), json)
    redis.call('HDEL', leases, key)
    redis.call('HDEL', renewals, key)
    redis.call('HDEL', quarantined, key)
    redis.call('HDEL', preempting, key)
  elseif operation == 'members' then
    -- The key is that of the remainder: lease id, separator, fencing token.
    local lease, released = string.match(key, '^(.*)\31'), redis.call('HGET', quarantined, key)
    if redis.call('HEXISTS', leases, key) == 0 then
      redis.call('HSET', leases, key, redis.call('HGET', leases, lease))
      redis.call('HDEL', leases, lease)
      redis.call('HDEL', renewals, lease)
      redis.call('HDEL', quarantined, lease)
      redis.call('HDEL', preempting, lease)
    end
    begin_cleaning(redis.call('HGET', leases, key), json, cjson.decode(json).ranks)
    released = released and released .. '\n' .. json or json
    local left = #cjson.decode(string.match(redis.call('HGET', leases, key), '^[^\n]*')).lease.members
    for line in string.gmatch(released, '[^\n]+') do
      left = left - #cjson.decode(line).ranks
    end
    if left > 0 then
      redis.call('HSET', quarantined, key, released)
    else
      redis.call('HDEL', leases, key)
      redis.call('HDEL', quarantined, key)
    end
  elseif operation == 'place' then
    redis.call('HSET', leases, key, string.match(redis.call('HGET', leases, key), '^[^\n]*') .. '\n' .. json)
  elseif operation == 'renew' then
    redis.call('HSET', renewals, key, json)
    redis.call('HDEL', quarantined, key)
  elseif operation == 'queue' then
    redis.call('HSET', pending, key, json)
    end_announced(key)
  elseif operation == 'cancel' then
    redis.call('HDEL', pending, key)
    wake(key, json)
  elseif operation == 'rule' then
    -- What teams used so far comes with their rules.
    for _, name in ipairs(key == 'teams' and redis.call('HKEYS', rules) or {}) do
      if string.sub(name, 1, 4) == 'use:' then
        redis.call('HDEL', rules, name)
      end
    end
    redis.call('HSET', rules, key, json)
  elseif operation == 'learn' then
    local classes, most, at = string.match(json, '^(%d+) (%d+) (.*)$')
    learn(redis.call('HGET', leases, key), tonumber(classes), tonumber(most), tonumber(at))
  elseif operation == 'attain' then
    local token, jobs, at = string.match(json, '^(%d+) (%d+) (.*)$')
    attain(redis.call('HGET', leases, key), tonumber(token), tonumber(jobs), tonumber(at))
  elseif operation == 'job' then
    keep_job(key, json)
  elseif operation == 'failed' then
    -- The key has the most of these releases that are kept; who reads them leaves out what is over.
    local kept = {}
    for line in string.gmatch(redis.call('HGET', rules, 'failed_starts') or '', '[^\n]+') do
      kept[#kept + 1] = line
    end
    kept[#kept + 1] = json
    redis.call('HSET', rules, 'failed_starts', table.concat(kept, '\n', math.max(1, #kept - tonumber(key) + 1)))
  elseif operation == 'resume' then
    redis.call('HDEL', drained, key)
    local agent = redis.call('HGET', gpus, 'watched ' .. key)
    if agent and string.find(agent, '{"change":"agentlost"', 1, true) == 1 then
      redis.call('HDEL', gpus, 'watched ' .. key)
    end
  end
  if is_change(operation) then
    version = version + 1
    redis.call('XADD', changes, version .. '-0', 'c', json, 'i', ARGV[7])
    redis.call('SADD', kinds, string.match(json, '"change":"(%w+)"'))
  end
end
keep_once(18, time)
if ARGV[14] ~= '' then
  redis.call('SET', inventory, ARGV[14])
  redis.call('HSET', meta, 'inventory_version', version)
end

-- The oldest changes are trimmed a hundred at a time; with memory full and above ten thousand, as many as
-- were added. The last hundred stay, whatever their size: they identify a commit that is sent again.
-- A lowered limit is reached by a thousand changes a commit, since all clients of Redis wait meanwhile.
local length = redis.call('XLEN', changes)
local least, left = added + 100, added + 1000
local most, step = tonumber(ARGV[8]) + 100, 100
if full then
  step = math.max(added, 1)
  most = math.min(most, math.max(length - added, 10000) + 1)
end
while length > least and left > 0 and (length >= most or held > tonumber(ARGV[9])) do
  local oldest = redis.call('XRANGE', changes, '-', '+', 'COUNT', math.min(step, length - least, left))
  for _, entry in ipairs(oldest) do
    held = held - stream_bytes(entry[2][2])
  end
  length, left = length - #oldest, left - #oldest
  redis.call('XTRIM', changes, 'MAXLEN', length)
  redis.call('HSET', meta, 'history_bytes', held)
end
if holder then
  redis.call('DEL', lock)
  hand_over(lock, waiters, ARGV[15])
end
return {'ok', time[1], time[2], version, ''}
