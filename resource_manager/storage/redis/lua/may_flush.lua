-- Return 1 if the current user may empty or swap databases, else 0; changes nothing.
if redis.acl_check_cmd then
  for _, command in ipairs({'FLUSHALL', 'FLUSHDB', 'SWAPDB'}) do
    local known, allowed = pcall(redis.acl_check_cmd, command)
    if known and allowed then
      return 1
    end
  end
  return 0
end
-- Before Redis 7 a script cannot check rights. With these arguments none of the commands does anything, and
-- only a user who may run the command is told what is wrong with them.
for command, complaint in pairs({FLUSHALL = 'syntax error', FLUSHDB = 'syntax error', SWAPDB = 'DB index'}) do
  if string.find(redis.pcall(command, 'none', 'none').err, complaint, 1, true) then
    return 1
  end
end
return 0
