-- The approximate bytes that a JSON of that length takes in a stream, measured on Redis 6.2 and 7.
local function stream_bytes(json)
  return math.ceil(#json * 1.25) + 100
end
