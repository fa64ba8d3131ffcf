"""Calls every RPC of a running stack with hostile messages, and keeps what each was answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import grpc
import grpc.aio

from tests.fuzz import callers, http, verdicts, wire
from tests.fuzz.callers import Caller
from tests.fuzz.calls import Answer, call
from tests.fuzz.messages import Maker
from tests.fuzz.tls import Tls
from tests.support.rpcs import OPEN_RPCS, RPCS, Rpc

# What is not known to end by itself is given up after this; a stream of answers is.
_SECONDS = (0.001, 0.05, 2.0, 2.0, 5.0)
_MIB = 1024 * 1024
# Between two attacks that are no calls, so that most of the time is for calls.
_PAUSE_SECONDS = 0.05


class Fuzzer:
    """`answers` counts statuses of each RPC, `of_grpc` those that gRPC made itself, by their words, `attacks` what was
    sent that is no call; `problems` are what was answered as nothing may be."""

    def __init__(
        self, addresses: Mapping[str, str], pages: Sequence[http.Target], seed: int, tls: Tls | None = None
    ) -> None:
        """`addresses` of the services by name, `pages` that speak HTTP, `tls` if the services speak that."""
        self._addresses = addresses
        self._tls = tls
        self._large = True
        self._pages = pages
        self._seed = seed
        self.answers: Counter[tuple[str, str]] = Counter()
        self.of_grpc: Counter[str] = Counter()
        self.attacks: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def calls(self) -> int:
        """How many were made."""
        return self.answers.total()

    async def run(self, seconds: float, workers: int, *, large: bool = True) -> None:
        """Call for that long; each worker takes every RPC in turn, in an order of its own.

        `large`: also send what fills megabytes before it is refused.
        """
        self._large = large
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._batter(random.Random(f"{self._seed}-wire-{self.calls}"), ends))
            for worker in range(workers):
                group.create_task(self._work(random.Random(f"{self._seed}-{worker}-{self.calls}"), ends))

    async def _work(self, chance: random.Random, ends: float) -> None:
        maker = Maker(chance)
        rpcs = [*RPCS, *(Rpc(name, method) for name in self._addresses for method in OPEN_RPCS)]
        while time.monotonic() < ends:
            channels = {name: self._channel(to) for name, to in self._addresses.items()}
            try:
                for _ in range(5):
                    for rpc in chance.sample(rpcs, len(rpcs)):
                        if time.monotonic() >= ends:
                            return
                        await self._call(rpc, channels[rpc.process], maker, chance)
            finally:
                for channel in channels.values():
                    await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address)
        return grpc.aio.secure_channel(address, self._tls.credentials())

    async def _call(self, rpc: Rpc, channel: grpc.aio.Channel, maker: Maker, chance: random.Random) -> None:
        caller = callers.choose(chance)
        count = chance.choice((0, 1, 1, 2, 5)) if rpc.streams_in else 1
        sent = [self._message(rpc, maker, chance) for _ in range(count)]
        seconds = chance.choice(_SECONDS)
        if rpc.streams_in or rpc.streams_out:
            seconds = min(seconds, 0.5)
        large = any(len(message) > _MIB for message in sent)
        packs = large or chance.random() < 0.05
        metadata = callers.metadata(caller, chance)
        answer = await call(
            rpc,
            channel,
            sent,
            chance,
            seconds=seconds,
            metadata=metadata,
            compression=chance.choice(tuple(grpc.Compression)) if packs else grpc.Compression.NoCompression,
        )
        self._judge(rpc, caller, sent, answer, laden=callers.laden(metadata))

    def _message(self, rpc: Rpc, maker: Maker, chance: random.Random) -> bytes:
        """Mostly one for the RPC; sometimes one that no server may take, small only while it is compressed."""
        if self._large and chance.random() < 0.003:
            return bytes(chance.choice((5, 16)) * _MIB)
        return maker.wire(rpc.request)

    def _judge(self, rpc: Rpc, caller: Caller, sent: Sequence[bytes], answer: Answer, *, laden: bool) -> None:
        self.answers[rpc.path, answer.code.name] += 1
        if answer.code is not grpc.StatusCode.OK and not answer.reason:
            self.of_grpc[f"{answer.code.name} {answer.detail[:40]}"] += 1
        if wrong := verdicts.problem(rpc, caller, sent, answer, laden=laden):
            shown = [one[:2000].hex() for one in sent]
            self.problems.append(f"{rpc.path} {wrong}: {answer} to {caller.project!r}, sent={shown}")

    async def _batter(self, chance: random.Random, ends: float) -> None:
        """Send what is no call, to every port."""
        context = self._tls.context() if self._tls is not None else None
        while time.monotonic() < ends:
            if chance.random() < 0.5:
                name, address = chance.choice(list(self._addresses.items()))
                try:
                    self.attacks[await wire.attack(address, chance, context, large=self._large)] += 1
                except OSError as error:
                    self.problems.append(f"{name} takes no connection: {error}")
            else:
                page = chance.choice(self._pages)
                self.attacks[page.name] += 1
                try:
                    wrong = await http.ask(page, chance)
                except OSError as error:
                    wrong = f"{page.name} takes no connection: {error}"
                if wrong:
                    self.problems.append(wrong)
            await asyncio.sleep(_PAUSE_SECONDS)
