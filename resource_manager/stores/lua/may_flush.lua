-- 1 if the user who runs this may empty or swap databases, else 0; changes nothing.
if redis.acl_check_cmd then
  for _, command in ipairs({'FLUSHALL', 'FLUSHDB', 'SWAPDB'}) do
    local known, allowed = pcall(redis.acl_check_cmd, command)
    if known and allowed then
      return 1
    end
  end
  return 0
end
-- Before Redis 7 a script cannot ask. Databases that are none cannot be swapped, but only who may swap
-- databases is told so.
return string.find(redis.pcall('SWAPDB', 'none', 'none').err, 'DB index', 1, true) and 1 or 0
