-- Takes batches of frames: checks who may write, keeps the frames, and publishes them, for many sessions in one call.
--
-- KEYS, for each batch: the state of its session (a hash), the frames kept of it (a stream).
-- ARGV: frames kept, bytes kept, TTL of a live execution, TTL of an ended one (both ms), then for each batch
--   channel, execution, epoch, '1' if it says ended, head of LiveFrames,
--   '1' if history's head follows, its execution, its epoch, '1' if that has ended,
--   how many frames, then for each: index, 8 bytes that stand for its content, entry of LiveFrames.
-- Returns, for each batch: verdict, next index, execution and epoch that have the session, index at fault.
--
-- State: x execution, e epoch, n next index, r contents of the newest frames (8 bytes each, the last is n-1; zeros where
-- an index was skipped), b bytes and c frames kept, d '1' once ended.

local ACCEPTED, FENCED, CONFLICT, NEEDS_HEAD, FAILED = 1, 2, 3, 4, 5
local REMEMBERED = 64
local SKIPPED = string.rep('\0', 8)
local ENTRY_FRAMES, ENTRY_BYTES = 256, 131072

local max_frames, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local live_ttl, ended_ttl = ARGV[3], ARGV[4]
local at = 5

local function number(value)
  return string.format('%.0f', value)
end

-- Seeds a session that is not known here with what history says, so that a writer that history knows as superseded or
-- ended cannot come first.
local function load(state, batch)
  local found = redis.call('HMGET', state, 'x', 'e', 'n', 'r', 'b', 'c', 'd')
  if found[1] then
    return {
      execution = found[1], epoch = tonumber(found[2]), next = tonumber(found[3]), ring = found[4],
      bytes = tonumber(found[5]), count = tonumber(found[6]), ended = found[7] == '1',
    }
  end
  if not batch.has_head then
    return nil
  end
  return {
    execution = batch.head_execution, epoch = batch.head_epoch, next = 0, ring = '', bytes = 0, count = 0,
    ended = batch.head_ended, fresh = true,
  }
end

local function save(state, s, ends)
  redis.call('HSET', state, 'x', s.execution, 'e', number(s.epoch), 'n', number(s.next), 'r', s.ring,
    'b', number(s.bytes), 'c', number(s.count), 'd', s.ended and '1' or '0')
  if s.fresh or ends then
    redis.call('PEXPIRE', state, s.ended and ended_ttl or live_ttl)
  end
end

-- What is remembered of the content at an index below the next one; nil when it is too old or was skipped.
local function remembered(s, index)
  local back = (s.next - 1 - index) * 8
  if back + 8 > #s.ring then
    return nil
  end
  local content = string.sub(s.ring, #s.ring - back - 7, #s.ring - back)
  if content == SKIPPED then
    return nil
  end
  return content
end

local function remember(s, index, content)
  local skipped = math.min(index - s.next, REMEMBERED)
  s.ring = string.sub(s.ring .. string.rep(SKIPPED, skipped) .. content, -8 * REMEMBERED)
  s.next = index + 1
end

local function keep(frames, s, entries, sizes)
  local slice, bytes = {}, 0
  for i = 1, #entries do
    slice[#slice + 1] = entries[i]
    bytes = bytes + sizes[i]
    if #slice == ENTRY_FRAMES or bytes >= ENTRY_BYTES or i == #entries then
      redis.call('XADD', frames, '*', 'f', table.concat(slice), 'c', #slice, 'b', bytes)
      s.bytes, s.count = s.bytes + bytes, s.count + #slice
      slice, bytes = {}, 0
    end
  end
  while s.bytes > max_bytes or s.count > max_frames do
    local oldest = redis.call('XRANGE', frames, '-', '+', 'COUNT', 1)[1]
    if not oldest then
      s.bytes, s.count = 0, 0
      return
    end
    redis.call('XDEL', frames, oldest[1])
    s.count, s.bytes = s.count - tonumber(oldest[2][4]), s.bytes - tonumber(oldest[2][6])
  end
end

local function take(batch, state, frames)
  local s = load(state, batch)
  if not s then
    return {NEEDS_HEAD, 0, '', '0', 0}
  end
  if batch.epoch < s.epoch or (batch.epoch == s.epoch and batch.execution ~= s.execution) then
    if s.fresh then
      save(state, s)
    end
    return {FENCED, 0, s.execution, number(s.epoch), 0}
  end
  if batch.epoch > s.epoch then
    redis.call('UNLINK', frames)
    s = {execution = batch.execution, epoch = batch.epoch, next = 0, ring = '', bytes = 0, count = 0, ended = false,
      fresh = true}
  end
  local entries, sizes = {}, {}
  local first_kept = s.count == 0
  for i = 1, #batch.index do
    local index = batch.index[i]
    if index < s.next then
      local known = remembered(s, index)
      if known and known ~= batch.content[i] then
        return {CONFLICT, s.next, s.execution, number(s.epoch), index}
      end
    elseif s.ended then
      return {FENCED, s.next, s.execution, number(s.epoch), 0}
    else
      remember(s, index, batch.content[i])
      entries[#entries + 1], sizes[#sizes + 1] = batch.entry[i], #batch.entry[i]
    end
  end
  if #entries > 0 then
    keep(frames, s, entries, sizes)
    redis.call('PUBLISH', batch.channel, 'F' .. batch.head .. table.concat(entries))
  end
  local ends = batch.ended and not s.ended
  s.ended = s.ended or batch.ended
  if #entries > 0 or ends or s.fresh then
    save(state, s, ends)
  end
  if ends or (first_kept and #entries > 0) then
    redis.call('PEXPIRE', frames, redis.call('PTTL', state))
  end
  return {ACCEPTED, s.next, s.execution, number(s.epoch), 0}
end

local function read()
  local batch = {
    channel = ARGV[at], execution = ARGV[at + 1], epoch = tonumber(ARGV[at + 2]), ended = ARGV[at + 3] == '1',
    head = ARGV[at + 4], has_head = ARGV[at + 5] == '1', head_execution = ARGV[at + 6],
    head_epoch = tonumber(ARGV[at + 7]), head_ended = ARGV[at + 8] == '1', index = {}, content = {}, entry = {},
  }
  local count = tonumber(ARGV[at + 9])
  at = at + 10
  for i = 1, count do
    batch.index[i], batch.content[i], batch.entry[i] = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2]
    at = at + 3
  end
  return batch
end

local answers = {}
for i = 1, #KEYS, 2 do
  local batch = read()
  local fine, answer = pcall(take, batch, KEYS[i], KEYS[i + 1])
  if not fine then
    answer = {FAILED, 0, '', '0', 0, type(answer) == 'table' and answer.err or tostring(answer)}
  end
  answers[#answers + 1] = answer
end
return answers
