-- Looks at the state before a script touches it: status, version, and until when grants rest ('' if not).
local function examine(meta, format, epoch, now, rest_s)
  local found = redis.call('HMGET', meta, 'format', 'epoch', 'version', 'server', 'resting_until', 'by_hand')
  if not found[1] then
    return 'empty', 0, ''
  end
  local version = tonumber(found[3])
  if tonumber(found[1]) > tonumber(format) then
    return 'format', version, found[1]
  end
  if epoch ~= '' and found[2] ~= epoch and not found[6] then
    return 'lost', version, found[2]
  end
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local resting_until = tonumber(found[5] or 0)
  if found[4] ~= server then
    -- Another process holds the data than before: Redis was restarted or failed over, and the last commits
    -- may be gone. Version and fencing number leap over all of those, so that no replica from before passes
    -- as current and no number is given out twice.
    resting_until = now + rest_s
    version = version + 1048576
    -- A first write that adds nothing opens a full memory to those that follow.
    redis.call('HDEL', meta, '')
    redis.call('HINCRBY', meta, 'fencing', 1048576)
    redis.call('HSET', meta, 'server', server, 'version', version, 'resting_until', resting_until)
  end
  if now < resting_until then
    return 'ok', version, tostring(math.ceil(resting_until - now))
  end
  return 'ok', version, ''
end

-- The JSON of every change from version `known` to `version`, or nil if the stream no longer has them all.
local function missing_changes(changes, known, version)
  local entries = redis.call('XRANGE', changes, (known + 1) .. '-0', '+')
  if #entries ~= version - known or entries[1][1] ~= (known + 1) .. '-0' then
    return nil
  end
  local missing = {}
  for i, entry in ipairs(entries) do
    missing[i] = entry[2][2]
  end
  return missing
end
