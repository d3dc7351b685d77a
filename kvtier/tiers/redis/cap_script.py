"""The script that keeps the books of one tenant's blocks in a Redis: who is there, how large, since when.

The books of a tenant are sorted sets, apart by the hash slots of its blocks, so that none of them is large; in a
Cluster each mostly lies where its blocks do, and need not. Each has an equal part of the cap. In it are

- each block: the 48 bytes of its key behind the tenant, and as score when it was written or last known to be read, in
  eighths of a second since 2023, above 20 bits for its size in units of 4 KiB;
- `used`: the units of all these blocks, negative;
- `d` and 48 bytes, for a block that is to be removed: its score, between 0 and 1, says since when. It counts no more.

A block that was entered in the last `YOUNG_S` may still be on its way, so it makes room for nobody: who is faster than
that through all of the cap is refused. One whose time is more than `GRACE_S` to come has it from a clock that was
wrong, and is the first to go. A block that is to be removed is named twice: to the call that condemned it, and to the
first one `GRACE_S` later, in case the former did not live to remove it, or came before the block.
"""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

from redis.crc import key_slot

from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.redis.commands import Command

UNIT_BYTES = 4096
_TAGS = "265b 48576 4129 1296 8209 bfa 356 b509".split()
"""Texts between braces whose hash slots are 0, 2048, ... With more books, sets are smaller, and a write needs more."""
NUM_BOOKS = len(_TAGS)
_SLOTS_PER_BOOK = 16_384 // NUM_BOOKS
YOUNG_S = 2
"""Longer than a write takes, as a rule."""
GRACE_S = 30
"""Longer than a call may take, and than the clocks of a server and of its replica are apart."""
_SCRIPT = """
local index, limit, young, grace = KEYS[1], tonumber(ARGV[1]), 8 * tonumber(ARGV[2]), 8 * tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = (tonumber(clock[1]) - 1700000000) * 8 + math.floor(tonumber(clock[2]) / 125000)
local used = -tonumber(redis.call('ZSCORE', index, 'used') or '0')
local large = tonumber(ARGV[4])
local small_victims, victims, refused, fresh = {}, {}, {}, {}

-- They change nothing. A user without these rights fails here, and not between two changes that belong together; and a
-- server that is full lets a script go on that has written before.
redis.call('ZREM', index, '')
redis.call('ZADD', index, 'XX', 0, '')

local function marked(time)
  return string.format('%.17g', time / 17179869184)
end

local function score(time, units)
  return string.format('%.0f', time * 1048576 + units)
end

local function put(member, units)
  redis.call('ZADD', index, score(now, units), member)
end

local function units_of(member)
  local score = redis.call('ZSCORE', index, member)
  return score and tonumber(score) % 1048576
end

local function condemn(member, units)
  redis.call('ZREM', index, member)
  redis.call('ZADD', index, marked(now), 'd' .. member)
  used = used - units
end

local function each(members, take)
  for start = 1, #members, 48 do
    local member = string.sub(members, start, start + 47)
    local units = units_of(member)
    if units then take(member, units) end
  end
end

local num_late = 64 + #ARGV  -- more than are entered, or there would be ever more of them
for _, late in ipairs(redis.call('ZRANGEBYSCORE', index, '(0', marked(now - grace), 'LIMIT', 0, num_late)) do
  redis.call('ZREM', index, late)
  victims[#victims + 1] = string.sub(late, 2)
end
each(ARGV[5], condemn)
each(ARGV[6], put)

local function evict(member, units)
  condemn(member, units)
  local named = units > large and victims or small_victims
  named[#named + 1] = member
end

local function first_to_go()
  -- Whatever has a time to come was entered when the clock was ahead: before it was set, or before a failover.
  local found = redis.call('ZRANGEBYSCORE', index, score(now + grace, 0), '+inf', 'LIMIT', 0, 1024)
  local known = redis.call('ZRANGEBYSCORE', index, 1, '(' .. score(now - young, 0), 'LIMIT', 0, 1024 - #found)
  for _, member in ipairs(known) do
    found[#found + 1] = member
  end
  return found
end

local oldest, next_oldest = nil, 1
local function make_room(most)
  if used > most and not oldest then
    oldest = first_to_go()
  end
  while used > most and next_oldest <= #oldest do
    local member = oldest[next_oldest]
    local units = not fresh[member] and units_of(member)
    next_oldest = next_oldest + 1
    if units then
      evict(member, units)
    end
  end
  return used <= most
end

for i = 7, #ARGV, 2 do
  local member, units = ARGV[i], tonumber(ARGV[i + 1])
  local held = units_of(member)
  if held then
    condemn(member, held)
  end
  if units <= limit and make_room(limit - units) then
    redis.call('ZREM', index, 'd' .. member)
    put(member, units)
    used = used + units
    fresh[member] = true
  else
    refused[#refused + 1] = member
    if held then
      victims[#victims + 1] = member
    end
  end
end
make_room(limit)
if used > 0 then
  redis.call('ZADD', index, string.format('%.0f', -used), 'used')
else
  redis.call('ZREM', index, 'used')
end
return {small_victims, victims, refused}
"""


@functools.cache
def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def book_of(name: bytes) -> int:
    """The book of its tenant that the block of this name is in."""
    return int(key_slot(name)) // _SLOTS_PER_BOOK


def book_name(tenant: TenantId, book: int) -> bytes:
    """Returns the name of the book: it lies among the names that blocks have, and is never one of these."""
    return f"kvt1:book:{{{_TAGS[book]}}}:{tenant.hex()}".encode()


def units_of(nbytes: int) -> int:
    """What a block of so many bytes counts, up to what has room in a score: 4 GiB."""
    return min(-(-nbytes // UNIT_BYTES), (1 << 20) - 1)


@dataclass(slots=True)
class BookChange:
    """What one call changes in one book. One thread, and while it is asked, that of the server."""

    name: bytes
    most_units: int
    """What may be in the book."""
    gone: list[StoreKey] = field(default_factory=list)
    """Blocks that are about to be removed, or were not written after all."""
    used: list[StoreKey] = field(default_factory=list)
    """Blocks that were read, which makes them the youngest."""
    added: list[tuple[StoreKey, int]] = field(default_factory=list)
    """Blocks that are about to be written, or offered again, with their units. The oldest make room for them."""
    answer: Any = None
    """Three lists of members: to be removed, of one value each; to be removed, of any number of values; not to be
    written. None while nobody has answered, an exception where the server refuses."""

    def command(self, value_units: int, *, in_full: bool) -> Command:
        """
        :param value_units: the most that a block of one value has.
        :param in_full: sends the script, which a server keeps until it restarts, and not its digest alone.
        """
        gone, used = (b"".join(key[TENANT_ID_BYTES:] for key in keys) for keys in (self.gone, self.used))
        new = [word for key, units in self.added for word in (key[TENANT_ID_BYTES:], units)]
        script = ("EVAL", _SCRIPT) if in_full else ("EVALSHA", _digest(_SCRIPT))
        return (*script, 1, self.name, self.most_units, YOUNG_S, GRACE_S, value_units, gone, used, *new)
