"""What the relay keeps in Valkey of each session: names of its keys, and reading back the frames kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import ConnectionError as ValkeyConnectionError

from hearth.relay.v1 import bus_pb2
from services.relay.order import FrameIn

if TYPE_CHECKING:
    from redis.asyncio import Redis

Key = tuple[str, str]

_T = TypeVar("_T")

# A session is named again with each of its frames.
_REMEMBERED = 8_192


# What the channels of all sessions begin with.
BUS = "hearth:live"


@lru_cache(maxsize=_REMEMBERED)
def channel(key: Key) -> bytes:
    """Where history tells of events and the relay of frames. Two sessions may share one by their names."""
    return f"{BUS}:{key[0]}/{key[1]}".encode()


@lru_cache(maxsize=_REMEMBERED)
def state_key(key: Key) -> bytes:
    """Who writes the frames of a session, and how far."""
    return _name(key, "writer")


@lru_cache(maxsize=_REMEMBERED)
def frames_key(key: Key) -> bytes:
    """The frames kept of a session."""
    return _name(key, "frames")


def _name(key: Key, what: str) -> bytes:
    # The length keeps ("a:b", "c") and ("a", "b:c") apart.
    project, session = key
    return f"hearth:relay:{len(project)}:{project}:{session}:{what}".encode()


@dataclass(frozen=True, slots=True)
class Kept:
    """The frames kept of one (execution, epoch), ascending; `through` is the last index taken, kept or not, or -1."""

    execution: str
    epoch: int
    through: int
    frames: Sequence[FrameIn]


class Buffer:
    """Reads what the ingress script wrote."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def written(self, keys: Sequence[Key]) -> dict[Key, bool]:
        """Whether each session has a writer. Raises `RedisError`."""
        return await _once_more(lambda: self._written(keys))

    async def read(self, key: Key) -> Kept | None:
        """The frames kept of a session, in one view; None when it has no writer. Raises `RedisError`."""
        return await _once_more(lambda: self._read(key))

    async def _written(self, keys: Sequence[Key]) -> dict[Key, bool]:
        async with self._client.pipeline(transaction=False) as all_of_them:
            for key in keys:
                all_of_them.exists(state_key(key))
            return dict(zip(keys, map(bool, await all_of_them.execute()), strict=True))

    async def _read(self, key: Key) -> Kept | None:
        async with self._client.pipeline(transaction=True) as both:
            both.hmget(state_key(key), ["x", "e", "n"])
            both.xrange(frames_key(key))
            (execution, epoch, following), entries = await both.execute()
        if not execution:
            return None
        name, number = execution.decode(), int(epoch)
        frames = [
            FrameIn(name, number, frame.index, frame.index, frame.reply)
            for _, fields in entries
            for frame in bus_pb2.LiveFrames.FromString(fields[b"f"]).frames
        ]
        return Kept(name, number, int(following) - 1, frames)


async def _once_more(read: Callable[[], Awaitable[_T]]) -> _T:
    """A connection from the pool may have been broken since it was last used, which only its use shows."""
    try:
        return await read()
    except ValkeyConnectionError:
        return await read()
