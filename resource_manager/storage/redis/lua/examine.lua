-- Check the state before a script uses it. Returns status, version, and for how many seconds grants are
-- still suspended ('' if they are not).
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
    -- Another server process holds the data: Redis was restarted or failed over, and the last commits may
    -- be lost. Version and fencing token jump beyond all of them, so that no earlier replica passes as
    -- current and no token is issued twice.
    resting_until = now + rest_s
    version = version + 1048576
    -- With memory full, Redis refuses only the first write of a script: this one adds nothing.
    redis.call('HDEL', meta, '')
    redis.call('HINCRBY', meta, 'fencing', 1048576)
    redis.call('HSET', meta, 'server', server, 'version', version, 'resting_until', resting_until)
  end
  if now < resting_until then
    return 'ok', version, tostring(math.ceil(resting_until - now))
  end
  return 'ok', version, ''
end

-- Return the JSON of every change after `known` up to `version`, or nil if the stream lacks any of them.
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
