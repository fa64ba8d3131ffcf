"""The bus clients on a real Valkey: confirmed subscriptions, loss and return of the connection, cancelled commands."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
import redis.exceptions

from hearth.embedded import daemons
from hearth.embedded.valkey import EmbeddedValkey
from hearth.secret import Secret
from services.chassis import valkey
from services.chassis.errors import Unavailable, as_hearth_error
from services.chassis.pubsub import PubSub, PubSubError
from services.chassis.settings import StartupError, ValkeySettings

_numbers = itertools.count()


class Ear:
    """Hears a bus, and can be waited for."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes]] = []
        self.lost = 0
        self.back = 0
        self._changed = asyncio.Event()

    def on_message(self, channel: bytes, data: bytes) -> None:
        self.messages.append((channel, data))
        self._changed.set()

    def on_lost(self) -> None:
        self.lost += 1
        self._changed.set()

    def on_reconnect(self) -> None:
        self.back += 1
        self._changed.set()

    async def hears(self, count: int = 0, *, lost: int = 0, back: int = 0) -> None:
        async with asyncio.timeout(15):
            while len(self.messages) < count or self.lost < lost or self.back < back:
                self._changed.clear()
                await self._changed.wait()


@pytest_asyncio.fixture
async def client(valkey_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with await valkey.create_client(ValkeySettings(valkey_url=Secret(valkey_url))) as client:
        yield client


@pytest.fixture
def channel() -> bytes:
    return f"test:{os.getpid()}:{next(_numbers)}".encode()


@pytest_asyncio.fixture
async def ear() -> Ear:
    return Ear()


@pytest_asyncio.fixture
async def bus(valkey_url: str, ear: Ear) -> AsyncIterator[PubSub]:
    bus = await PubSub.connect(Secret(valkey_url), ear.on_message, on_lost=ear.on_lost, on_reconnect=ear.on_reconnect)
    yield bus
    await bus.close()


@pytest.fixture
def own(scratch: Path) -> Iterator[EmbeddedValkey]:
    """A server of this test, to be broken."""
    server = EmbeddedValkey(scratch / "own-valkey")
    server.start_detached()
    yield server
    server.remove()


async def test_what_is_published_after_the_confirmation_is_heard(
    client: redis.asyncio.Redis, bus: PubSub, ear: Ear, channel: bytes
) -> None:
    for n in range(30):
        name = channel + b":%d" % n
        await bus.subscribe(name)
        assert await client.publish(name, b"\x00\r\n%d" % n) == 1
    await ear.hears(30)
    assert ear.messages == [(channel + b":%d" % n, b"\x00\r\n%d" % n) for n in range(30)]


async def test_big_and_many_messages_keep_their_order(
    client: redis.asyncio.Redis, bus: PubSub, ear: Ear, channel: bytes
) -> None:
    await bus.subscribe(channel)
    sent = [b"%d:" % n + b"x" * (n % 7) * 20_000 for n in range(300)]
    async with client.pipeline(transaction=False) as pipeline:
        for data in sent:
            pipeline.publish(channel, data)
        await pipeline.execute()
    await ear.hears(300)
    assert [data for _, data in ear.messages] == sent


async def test_after_unsubscribe_there_is_silence(
    client: redis.asyncio.Redis, bus: PubSub, ear: Ear, channel: bytes
) -> None:
    await bus.subscribe(channel)
    bus.unsubscribe(channel)
    await bus.subscribe(channel + b":other")
    await client.publish(channel, b"not for us")
    await client.publish(channel + b":other", b"x")
    await ear.hears(1)
    assert ear.messages == [(channel + b":other", b"x")]


async def test_subscribing_again_at_once_waits_for_its_own_confirmation(
    client: redis.asyncio.Redis, bus: PubSub, ear: Ear, channel: bytes
) -> None:
    for n in range(20):
        name = channel + b":%d" % n
        first = asyncio.create_task(bus.subscribe(name))
        await asyncio.sleep(0)
        bus.unsubscribe(name)
        with pytest.raises(PubSubError):
            await first
        await bus.subscribe(name)
        assert await client.publish(name, b"x") == 1
    await ear.hears(20)


async def test_two_who_want_one_channel(client: redis.asyncio.Redis, bus: PubSub, ear: Ear, channel: bytes) -> None:
    await asyncio.gather(*(bus.subscribe(channel) for _ in range(5)))
    assert await client.publish(channel, b"once") == 1
    await ear.hears(1)


async def test_a_handler_that_fails_does_not_stop_the_rest(
    valkey_url: str, client: redis.asyncio.Redis, channel: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear()

    def on_message(name: bytes, data: bytes) -> None:
        if data == b"bad":
            raise ValueError("bad")
        ear.on_message(name, data)

    bus = await PubSub.connect(Secret(valkey_url), on_message)
    await bus.subscribe(channel)
    await client.publish(channel, b"bad")
    await client.publish(channel, b"good")
    await ear.hears(1)
    assert "handling a bus message failed" in caplog.text
    await bus.close()


async def test_a_broken_connection_comes_back_with_its_channels(
    client: redis.asyncio.Redis, bus: PubSub, ear: Ear, channel: bytes
) -> None:
    names = [channel + b":%d" % n for n in range(50)]
    await asyncio.gather(*(bus.subscribe(name) for name in names))
    killed: Any = await client.client_kill_filter(_type="pubsub")
    assert killed >= 1
    await ear.hears(lost=1, back=1)
    for name in names:
        assert await client.publish(name, name) == 1
    await ear.hears(50)
    assert (ear.lost, ear.back) == (1, 1)


async def test_a_server_that_dies_and_comes_back(own: EmbeddedValkey, channel: bytes) -> None:
    ear = Ear()
    running = own.find()
    assert running is not None
    bus = await PubSub.connect(Secret(running.url), ear.on_message, on_lost=ear.on_lost, on_reconnect=ear.on_reconnect)
    await bus.subscribe(channel)
    os.kill(running.pid, signal.SIGKILL)
    assert daemons.wait_gone(running.pid, 20)
    await ear.hears(lost=1)
    assert not bus.connected
    # Asked for while nobody answers: confirmed when somebody does.
    waiting = asyncio.create_task(bus.subscribe(channel + b":late"))
    given_up = asyncio.create_task(asyncio.wait_for(bus.subscribe(channel + b":later"), 0.1))
    with pytest.raises(TimeoutError):
        await given_up
    await asyncio.to_thread(EmbeddedValkey(own.directory, port=running.port).start_detached)
    await ear.hears(back=1)
    await waiting
    async with redis.asyncio.Redis.from_url(running.url) as client:
        assert await client.publish(channel, b"1") == 1
        assert await client.publish(channel + b":late", b"2") == 1
    await ear.hears(2)
    await bus.close()


async def test_a_server_that_hangs_counts_as_lost(
    own: EmbeddedValkey, channel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.chassis.pubsub._PING_EVERY_SECONDS", 0.1)
    monkeypatch.setattr("services.chassis.pubsub._SILENCE_SECONDS", 0.4)
    ear = Ear()
    running = own.find()
    assert running is not None
    bus = await PubSub.connect(Secret(running.url), ear.on_message, on_lost=ear.on_lost, on_reconnect=ear.on_reconnect)
    await bus.subscribe(channel)
    os.kill(running.pid, signal.SIGSTOP)
    try:
        await ear.hears(lost=1)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    await ear.hears(back=1)
    await bus.close()


async def test_no_server_at_the_first_connection() -> None:
    with pytest.raises(OSError):
        await PubSub.connect(Secret("redis://127.0.0.1:1/0"), lambda channel, data: None)


async def test_a_closed_client_says_so(bus: PubSub, channel: bytes) -> None:
    await bus.close()
    with pytest.raises(PubSubError):
        await bus.subscribe(channel)


async def test_a_password_is_sent(own: EmbeddedValkey, channel: bytes) -> None:
    running = own.find()
    assert running is not None
    async with redis.asyncio.Redis.from_url(running.url) as client:
        await client.config_set("requirepass", "geheim")
    with pytest.raises(PubSubError):
        await PubSub.connect(Secret(running.url), lambda channel, data: None)
    secret = running.url.replace("redis://", "redis://:geheim@")
    bus = await PubSub.connect(Secret(secret), lambda channel, data: None)
    await bus.subscribe(channel)
    await bus.close()
    with pytest.raises(StartupError, match="HEARTH_VALKEY_URL is wrong"):
        await valkey.create_client(ValkeySettings(valkey_url=Secret(running.url)))


async def test_a_cancelled_command_drops_its_connection(valkey_url: str) -> None:
    settings = ValkeySettings(valkey_url=Secret(valkey_url))
    async with await valkey.create_client(settings, size=1, blocks=5.0) as client:
        before: Any = await client.client_id()
        blocked: asyncio.Future[Any] = asyncio.ensure_future(client.blpop(["list"], timeout=5))
        await asyncio.sleep(0.1)
        blocked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked
        # The answer of the cancelled command must not become that of another one.
        await client.rpush("list", "late")
        assert [await client.echo(f"{n}") for n in range(20)] == [b"%d" % n for n in range(20)]
        assert await client.client_id() != before
        assert await client.llen("list") == 1


async def test_arguments_of_every_kind_arrive(valkey_url: str) -> None:
    async with await valkey.create_client(ValkeySettings(valkey_url=Secret(valkey_url))) as client:
        text, raw = "ä two words\r\n", bytes(range(256))
        assert await client.rpush("list", text, raw, 7, 2.5, "", b"") == 6
        assert await client.lrange("list", 0, -1) == [text.encode(), raw, b"7", b"2.5", b"", b""]
        large = b"x" * 2_000_000
        async with client.pipeline(transaction=True) as both:
            both.set("large", large)
            both.get("large")
            assert await both.execute() == [True, large]
        # Commands of two words.
        assert await client.client_getname() == "hearth"
        sha = await client.script_load("return {ARGV[1], #ARGV}")
        assert await client.evalsha(sha, 0, "a b", 1) == [b"a b", 2]


async def test_the_pool_is_bounded_and_says_so(valkey_url: str) -> None:
    settings = ValkeySettings(valkey_url=Secret(valkey_url), valkey_acquire_timeout=0.2)
    async with await valkey.create_client(settings, size=1, blocks=1.0) as client:
        blocked: asyncio.Future[Any] = asyncio.ensure_future(client.blpop(["list"], timeout=1))
        await asyncio.sleep(0.05)
        with pytest.raises(redis.exceptions.ConnectionError) as caught:
            await client.ping()
        assert isinstance(as_hearth_error(caught.value), Unavailable)
        assert await blocked is None


async def test_a_blocking_command_outlasts_the_command_timeout(valkey_url: str) -> None:
    settings = ValkeySettings(valkey_url=Secret(valkey_url), valkey_command_timeout=0.2)
    async with await valkey.create_client(settings, blocks=0.6) as client:
        assert await client.blpop(["list"], timeout=0.6) is None


async def test_a_command_that_gets_no_answer_is_not_repeated(own: EmbeddedValkey) -> None:
    running = own.find()
    assert running is not None
    settings = ValkeySettings(valkey_url=Secret(running.url), valkey_command_timeout=0.3)
    async with await valkey.create_client(settings) as client:
        os.kill(running.pid, signal.SIGSTOP)
        try:
            with pytest.raises(redis.exceptions.TimeoutError):
                await client.incr("n")
        finally:
            os.kill(running.pid, signal.SIGCONT)
        assert await client.get("n") in (None, b"1")


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_may_evict_is_refused(own: EmbeddedValkey, policy: str) -> None:
    running = own.find()
    assert running is not None
    async with redis.asyncio.Redis.from_url(running.url) as client:
        await client.config_set("maxmemory-policy", policy)
    with pytest.raises(StartupError, match=policy) as caught:
        await valkey.create_client(ValkeySettings(valkey_url=Secret(running.url)))
    assert caught.value.exit_code == 2


async def test_no_server_at_start() -> None:
    settings = ValkeySettings(valkey_url=Secret("redis://127.0.0.1:1/0"), valkey_start_timeout=0.1)
    with pytest.raises(StartupError, match="HEARTH_VALKEY_URL"):
        await valkey.create_client(settings)
