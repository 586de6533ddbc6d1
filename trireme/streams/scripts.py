"""What Redis does in one piece, as Lua: nobody sees half of it, and a script that is refused has written nothing.

In each, what needs memory (XADD) comes first: Redis refuses a script at its first such command when memory is full.
Field names in entries: `d` data, and in dead letters `reason`, `source`, `n` (deliveries).
"""

# KEYS stream, dead; ARGV group, consumer, lease in ms, count, most deliveries, most dead letters, source.
# {id, data, deliveries} of each entry claimed. A dead letter that Redis has no memory for stays pending, so that
# taking, which frees memory, goes on. Entries deleted under a lease show up as nil in 6.2 and not at all in 7.
CLAIM = """
local stream, dead, group = KEYS[1], KEYS[2], ARGV[1]
local taken = {}

local function drop(id)
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
end

local function bury(id, deliveries)
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if not entry then return drop(id) end
  local put = redis.pcall('XADD', dead, 'MAXLEN', ARGV[6], '*', 'd', entry[2][2], 'source', ARGV[7],
    'reason', 'delivered ' .. deliveries .. ' times and never finished', 'n', deliveries)
  if not (type(put) == 'table' and put.err) then drop(id) end
end

local function claim(id, deliveries)
  local entry = redis.call('XCLAIM', stream, group, ARGV[2], ARGV[3], id)[1]
  if entry then
    table.insert(taken, {id, entry[2][2], deliveries + 1})
  else
    drop(id)
  end
end

for _, row in ipairs(redis.call('XPENDING', stream, group, 'IDLE', ARGV[3], '-', '+', ARGV[4])) do
  local id, deliveries = row[1], row[4]
  if deliveries >= tonumber(ARGV[5]) then bury(id, deliveries) else claim(id, deliveries) end
end
return taken
"""

# KEYS stream; ARGV group, consumer, idle time to set in ms, ids. The ids that this consumer holds, now that idle.
# Asks first who holds an entry: XCLAIM alone would take it away from a consumer that claimed it meanwhile.
SET_IDLE = """
local held = {}
for i = 4, #ARGV do
  if redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])[1] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
    table.insert(held, ARGV[i])
  end
end
return held
"""

# KEYS stream; ARGV group, ids. A script and not MULTI: with its memory full Redis refuses even these inside MULTI.
DONE = """
for i = 2, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
return 1
"""

# KEYS stream; ARGV group. The number of entries removed.
CLEAR = """
local removed = redis.call('XLEN', KEYS[1])
redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
local held = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000)
while #held > 0 do
  for _, row in ipairs(held) do redis.call('XACK', KEYS[1], ARGV[1], row[1]) end
  held = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000)
end
return removed
"""

# KEYS from, to; ARGV group, id, outputs. 1, or 0 when the entry is gone.
FORWARD = """
if not redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)[1] then return 0 end
for i = 3, #ARGV do redis.call('XADD', KEYS[2], '*', 'd', ARGV[i]) end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
"""

# KEYS from, dead; ARGV group, id, data, reason, source, deliveries, most dead letters. 1, or 0 when the entry is gone.
DEAD_LETTER = """
if not redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)[1] then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[7], '*', 'd', ARGV[3], 'reason', ARGV[4], 'source', ARGV[5], 'n', ARGV[6])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
"""

# KEYS stream; ARGV group, own consumer, idle in ms. Removes consumers that hold nothing: the caller, and those silent
# for so long that they are dead. With a lease left a consumer must stay, or its entries would be lost.
FORGET = """
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local of = {}
  for i = 1, #info, 2 do of[info[i]] = info[i + 1] end
  if of.pending == 0 and (of.name == ARGV[2] or of.idle > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], of.name)
  end
end
return 1
"""
