"""Calls every RPC of a running stack with hostile messages, and keeps what each was answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio

from tests.fuzz.messages import Maker
from tests.support.rpcs import RPCS, Rpc

# A status that says that nobody thought of the case.
DEFECTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})
_HEADERS = (
    ("traceparent", "00-zz-zz-01"),
    ("traceparent", "00-" + "f" * 32 + "-" + "f" * 16 + "-ff"),
    ("tracestate", "a" * 600),
    ("authorization", "Bearer"),
    ("authorization", "Bearer \x7e\x21" + "a" * 2_000),
    ("authorization", "Basic eDp5"),
    ("grpc-timeout-of-mine", "1n"),
    ("x-bin", b"\x00\xff"),
)
_CUT = "Internal error from Core"
# What is not known to end by itself is given up after this; a stream of answers is.
_SECONDS = (0.001, 0.05, 2.0, 2.0, 5.0)


class Fuzzer:
    """`answers` counts statuses of each RPC; `defects` are calls that were answered as no call may be."""

    def __init__(self, addresses: Mapping[str, str], seed: int) -> None:
        self._addresses = addresses
        self._seed = seed
        self.answers: Counter[tuple[str, str]] = Counter()
        self.defects: list[str] = []

    @property
    def calls(self) -> int:
        """How many were made."""
        return self.answers.total()

    async def run(self, seconds: float, workers: int) -> None:
        """Call for that long; each worker takes every RPC in turn, in an order of its own."""
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for worker in range(workers):
                group.create_task(self._work(random.Random(f"{self._seed}-{worker}-{self.calls}"), ends))

    async def _work(self, chance: random.Random, ends: float) -> None:
        maker = Maker(chance)
        while time.monotonic() < ends:
            channels = {name: grpc.aio.insecure_channel(to) for name, to in self._addresses.items()}
            try:
                for _ in range(5):
                    for rpc in chance.sample(RPCS, len(RPCS)):
                        if time.monotonic() >= ends:
                            return
                        await self._call(rpc, channels[rpc.process], maker, chance)
            finally:
                for channel in channels.values():
                    await channel.close()

    async def _call(self, rpc: Rpc, channel: grpc.aio.Channel, maker: Maker, chance: random.Random) -> None:
        sent: list[bytes] = []
        metadata = (chance.choice(_HEADERS),) if chance.random() < 0.1 else ()
        seconds = chance.choice(_SECONDS)
        if rpc.streams_in or rpc.streams_out:
            seconds = min(seconds, 0.5)
        try:
            if rpc.streams_in:
                request: Any = _requests(rpc, maker, chance, sent)
            else:
                request = maker.wire(rpc.request)
                sent.append(request)
            call = rpc.on(channel)(request, timeout=seconds, metadata=metadata)
            if rpc.streams_out:
                async for _ in call:
                    if chance.random() < 0.05:
                        call.cancel()
            else:
                await call
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if error.details() == _CUT:
                # Said by gRPC at this side alone, when the server had ended the stream that was being written to.
                self.answers[rpc.path, "CUT"] += 1
                return
            if code in DEFECTS:
                shown = [one[:2000].hex() for one in sent]
                self.defects.append(f"{rpc.path} {code.name} {error.details()!r} sent={shown}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            code = grpc.StatusCode.CANCELLED
        self.answers[rpc.path, code.name] += 1


async def _requests(rpc: Rpc, maker: Maker, chance: random.Random, sent: list[bytes]) -> AsyncIterator[bytes]:
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        sent.append(maker.wire(rpc.request))
        yield sent[-1]
    if chance.random() < 0.2:
        # Neither more, nor the end of it.
        await asyncio.sleep(1.0)
