-- The time of the script.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

-- Return the id of the commit that made the change of that entry, nil if there was none or it was trimmed.
local function commit_id_at(changes, at)
  local entry = redis.call('XRANGE', changes, at, at)[1]
  return entry and entry[2][4]
end

-- Check the state before a script uses it. Returns status, version, for how many seconds grants are still
-- suspended ('' if they are not; after a jump of the clock its seconds follow), why the state is closed, if it is, the
-- last sequence and the bytes of the history.
-- The recovery window is that of the cluster's settings, if they state one, else `recovery_window_s`. `known_id` is
-- that of the commit that led to the version `known`, as the client knows it; '' if it does not.
local function preflight(meta, format, incarnation, recovery_window_s, changes, known, known_id)
  local found = redis.call('HMGET', meta, 'format', 'incarnation', 'version', 'server', 'grants_suspended_until', 'operator_reset', 'closed', 'sequence',
    'confirmation_window_s', 'clock_jump', 'history_bytes', 'last_commit')
  if not found[1] then
    return 'empty', 0, ''
  end
  local version = tonumber(found[3])
  if tonumber(found[1]) > tonumber(format) then
    return 'format', version, found[1]
  end
  if incarnation ~= '' and found[2] ~= incarnation and not found[6] then
    return 'lost', version, found[2]
  end
  -- The last commit is in the meta, too, since a look at the stream takes a tenth of the script.
  if known_id and known_id ~= '' and found[2] == incarnation and found[12] ~= known .. ' ' .. known_id
    and (commit_id_at(changes, known .. '-0') or known_id) ~= known_id then
    return 'another history', version, ''
  end
  local info = redis.call('INFO', 'server')
  local _, before = string.find(info, 'run_id:', 1, true)
  local server = string.sub(info, before + 1, string.find(info, '\r', before, true) - 1)
  local grants_suspended_until = tonumber(found[5] or 0)
  if found[4] ~= server then
    -- Another server process holds the data: Redis was restarted or failed over, and the last commits may
    -- be lost. Version, fencing token and sequence jump beyond all of them, so that no earlier replica passes
    -- as current, and no token or short id is issued twice.
    grants_suspended_until = now + tonumber(found[9] or recovery_window_s)
    version = version + 1048576
    -- With memory full, Redis refuses only the first write of a script: this one adds nothing.
    redis.call('HDEL', meta, 'clock_jump')
    found[10] = nil
    redis.call('HINCRBY', meta, 'last_fencing_token', 1048576)
    found[8] = redis.call('HINCRBY', meta, 'sequence', 8192)
    redis.call('HSET', meta, 'server', server, 'version', version, 'grants_suspended_until', grants_suspended_until)
  end
  local left = ''
  if now < grants_suspended_until then
    left = tostring(math.ceil(grants_suspended_until - now))
    if found[10] then
      left = left .. ' ' .. string.match(found[10], '^%S+')
    end
  end
  return 'ok', version, left, found[7], found[8], found[11]
end

-- Return the JSON of every change after `known` up to `version`, and the id of the commit that made the last; nil if
-- the stream lacks any of them.
local function missing_changes(changes, known, version)
  local entries = redis.call('XRANGE', changes, (known + 1) .. '-0', '+')
  if #entries ~= version - known or entries[1][1] ~= (known + 1) .. '-0' then
    return nil
  end
  local missing = {}
  for i, entry in ipairs(entries) do
    missing[i] = entry[2][2]
  end
  return missing, entries[#entries][2][4]
end
