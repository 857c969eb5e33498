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
-- Before Redis 7 a script cannot check rights. Swapping databases that do not exist always fails; the error
-- names the index only if the user may swap databases.
return string.find(redis.pcall('SWAPDB', 'none', 'none').err, 'DB index', 1, true) and 1 or 0
