"""JSON-RPC with one agent: our messages by POST, the agent's by the event stream, answers to requests by both.

The stream gives the order. A call that asks for it gets its answer only when the stream has brought it, and so after
everything that the agent said before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol

import aiohttp
from opentelemetry.semconv._incubating.attributes.jsonrpc_attributes import JSONRPC_PROTOCOL_VERSION
from opentelemetry.semconv._incubating.attributes.rpc_attributes import (
    RPC_METHOD,
    RPC_RESPONSE_STATUS_CODE,
    RPC_SYSTEM_NAME,
)
from opentelemetry.trace import SpanKind

from services.chassis import telemetry
from services.chassis.clock import Clock
from services.pool.harness.daemon import Daemon, Refused, Unreached
from services.pool.harness.port import HarnessError
from services.pool.harness.sse import EventStream, StreamLimits
from services.pool.harness.updates import short_id

logger = logging.getLogger(__name__)

Message = dict[str, Any]
# NaN and the infinities are not JSON; what an agent means by them is nothing to us.
_decoder = json.JSONDecoder(parse_constant=lambda _name: None)
# Of a proxy that gave up waiting, or asks to wait: says nothing about the message, which may have arrived.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclasses.dataclass(frozen=True, slots=True)
class RpcLimits:
    """Times in seconds."""

    stream: StreamLimits = dataclasses.field(default_factory=StreamLimits)
    # For messages that nobody works on: cancel, answers to requests of the agent.
    call: float = 10.0
    # How long the stream may lag behind an answer that came by POST and bring nothing, until it is made anew, and then
    # until it counts as lost.
    lag: float = 1.0
    lost: float = 15.0
    # How long the news of an agent's end may take once a call has shown that it is gone.
    last_words: float = 2.0
    # How long nothing must come after the news of an agent's end, until what it said is believed to be all.
    last_lines: float = 0.1
    tries: int = 3


class Listener(Protocol):
    """Who hears what the agent says by itself."""

    async def notified(self, method: str, params: object, size: int) -> None:
        """A notification of `size` bytes. The stream waits until this returns."""
        ...

    async def requested(self, number: object, method: str, params: object, size: int) -> None:
        """A request, once for each number. The stream waits until this returns."""
        ...

    def gone(self, error: HarnessError) -> None:
        """Nothing more comes, and nothing can be sent."""
        ...


_P = ParamSpec("_P")


def _traced(
    call: Callable[Concatenate[RpcConnection, str, _P], Awaitable[Message]],
) -> Callable[Concatenate[RpcConnection, str, _P], Awaitable[Message]]:
    """Put a span around a call, from its first POST until its answer is here, by whichever way that came."""

    @functools.wraps(call)
    async def traced(self: RpcConnection, method: str, /, *args: _P.args, **options: _P.kwargs) -> Message:
        attributes = {RPC_SYSTEM_NAME: "jsonrpc", RPC_METHOD: method, JSONRPC_PROTOCOL_VERSION: "2.0"}
        with telemetry.span(method, kind=SpanKind.CLIENT, attributes=attributes) as span:
            answer = await call(self, method, *args, **options)
            error = answer.get("error")
            if error is not None:
                # Its number only: the text is the agent's.
                number = error.get("code") if isinstance(error, dict) else None
                code = str(number) if isinstance(number, int) else "unknown"
                span.set_attribute(RPC_RESPONSE_STATUS_CODE, code)
                telemetry.mark_failed(span, code)
        return answer

    return traced


class RpcConnection:
    """The line to one agent server. `HarnessError` is all that its methods raise."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        daemon: Daemon,
        listener: Listener,
        *,
        clock: Clock,
        limits: RpcLimits,
    ) -> None:
        self.stream = EventStream(http, daemon.server_url, daemon.headers, clock=clock, limits=limits.stream)
        self._clock = clock
        self._said = clock.monotonic()
        self._daemon = daemon
        self._listener = listener
        self._limits = limits
        self._reading: asyncio.Task[None] | None = None
        self._number = 0
        # Our requests by number: who waits, and what is to be done when the stream brings the answer.
        self._pending: dict[int, tuple[asyncio.Future[Message], Callable[[Message], None] | None]] = {}
        self._seen: set[str] = set()
        self.dead: HarnessError | None = None
        # What the daemon said of the agent's end, and when that is believed to be all: it may overtake the last lines.
        self._ended: HarnessError | None = None
        self._closing: asyncio.TimerHandle | None = None
        # Messages of the agent, and lines of it that were none.
        self.messages = 0
        self.garbage = 0

    def start(self) -> None:
        """Follow the stream from now on."""
        if self._reading is None and self.dead is None:
            self._reading = asyncio.create_task(self._read(), name="agent stream")

    async def resume(self) -> None:
        """Follow the stream again, once what came since `stop` was heard; raises at once what can be seen at once."""
        self.check()
        if self._reading is None:
            try:
                await self.stream.connect()
                while waiting := await self.stream.read_waiting():
                    for data in waiting:
                        await self._dispatch(data)
            except HarnessError as error:
                self.die(error)
                raise
            if self._ended is not None:
                self.die(self._ended)
            self.check()
            self.start()

    def reach(self) -> None:
        """The daemon is reached elsewhere from now on."""
        self.stream.reach(self._daemon.server_url, self._daemon.headers)

    @property
    def said(self) -> float:
        """When the agent sent its last message, on the clock's monotonic time."""
        return self._said

    async def stop(self) -> None:
        """Let go of the stream; `start` goes on where it was."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait((reading,))
        self.stream.disconnect()
        if self._ended is not None:
            self.die(self._ended)

    def die(self, error: HarnessError) -> None:
        """The agent or the way to it is gone; the first reason stands."""
        if self.dead is not None:
            return
        if self._closing is not None:
            self._closing.cancel()
        self.dead = error = self._ended or error
        for waiting, _ in self._pending.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()
        self._listener.gone(error)

    def check(self) -> None:
        """Raise what the agent died of."""
        if self.dead is not None:
            raise self.dead

    @_traced
    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        *,
        timeout: float,
        agent: str = "",
        headers: Mapping[str, str] | None = None,
        sent: asyncio.Event | None = None,
        in_order: bool = False,
        answered: Callable[[Message], None] | None = None,
        explain: Callable[[Refused], HarnessError] = Refused.as_error,
        again: bool = False,
        patience: float | None = None,
    ) -> Message:
        """Send a request and give the answer, which has a `result` or an `error`.

        `sent` is set once the request is on its way. `in_order` waits for the stream; `answered` is called at the very
        place in the stream where the answer is. `explain` says what an HTTP error means. `again`: what may not have
        arrived is asked again, under a number of its own; only for what an agent may be asked twice. `patience`: how
        many seconds the stream may say nothing of one that may not have arrived; then it raises HARNESS_UNREACHABLE.
        """
        self.check()
        waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        numbers: list[int] = []
        tries = self._limits.tries if again else 1
        try:
            for tried in range(tries):
                self._number += 1
                numbers.append(self._number)
                self._pending[self._number] = (waiting, answered)
                message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
                posting = asyncio.create_task(
                    self._daemon.post(message, timeout=timeout, agent=agent, headers=headers, sent=sent),
                    name=f"post {method}",
                )
                try:
                    await asyncio.wait((posting, waiting), return_when=asyncio.FIRST_COMPLETED)
                    if waiting.done():
                        return waiting.result()
                    answer = await self._posted(posting, waiting, explain, again=tried + 1 < tries)
                finally:
                    posting.cancel()
                    await asyncio.wait((posting,))
                    if not posting.cancelled():
                        posting.exception()
                if answer is not None:
                    return await self._catch_up(waiting) if in_order or waiting.done() else answer
                if tried + 1 < tries:
                    # It may have arrived: then the stream tells.
                    await asyncio.wait((waiting,), timeout=self._limits.lag * 2**tried)
                    if waiting.done():
                        return waiting.result()
                    logger.warning("agent is asked again", extra={"method": method})
            return await self._heard(waiting, method, patience)
        finally:
            for number in numbers:
                del self._pending[number]

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a notification; tried again when it may not have arrived."""
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def respond(self, number: object, body: Mapping[str, Any]) -> None:
        """Answer a request of the agent; `body` holds `result` or `error`. An agent takes the first answer only."""
        await self._send({"jsonrpc": "2.0", "id": number, **body})

    async def _posted(
        self,
        posting: asyncio.Task[Message | None],
        waiting: asyncio.Future[Message],
        explain: Callable[[Refused], HarnessError],
        *,
        again: bool,
    ) -> Message | None:
        """What the POST brought; None when only the stream can tell, or another try (`again`)."""
        try:
            return await posting
        except Refused as refused:
            error = explain(refused)
            if refused.agent_gone and self._reading is not None:
                # The stream knows more: what the agent said last, and how it ended.
                await asyncio.wait((waiting,), timeout=self._limits.last_words)
                if waiting.done():
                    return waiting.result()
            elif not refused.agent_gone and refused.status in _PASSING and error.reason == "HARNESS_UNREACHABLE":
                return None
            elif again and not refused.slug and refused.status in _PASSING - {504}:
                # Not the daemon's own words, and it says so where a start takes too long.
                return None
            self.die(error)
            raise error from None
        except Unreached as unreached:
            if unreached.sent:
                return None
            self.die(unreached.as_error())
            raise unreached.as_error() from None

    async def _heard(self, waiting: asyncio.Future[Message], method: str, patience: float | None) -> Message:
        """Wait for the stream to bring the answer; no longer than `patience` after the agent said something."""
        if patience is None:
            return await waiting
        asked = self._clock.monotonic()
        while (left := max(asked, self._said) + patience - self._clock.monotonic()) > 0:
            await asyncio.wait((waiting,), timeout=left)
            if waiting.done():
                return waiting.result()
        raise HarnessError("HARNESS_UNREACHABLE", f"{method} was not answered, and may not have arrived")

    async def _catch_up(self, waiting: asyncio.Future[Message]) -> Message:
        """Wait for the stream to bring the answer that the POST has brought already."""
        seconds = self._limits.lag
        while True:
            before = self.stream.last_number
            await asyncio.wait((waiting,), timeout=seconds)
            if waiting.done():
                return waiting.result()
            if self.stream.last_number != before:
                continue
            if seconds == self._limits.lost:
                self.die(HarnessError("HARNESS_STREAM_LOST", "the stream does not bring the answer"))
                self.check()
            # A connection may be dead without a sign; a new one brings at once what this one did not.
            self.stream.drop_connection()
            seconds = self._limits.lost

    async def _send(self, message: Message) -> None:
        self.check()
        for tried in range(self._limits.tries):
            last = tried + 1 == self._limits.tries
            try:
                await self._daemon.post(message, timeout=self._limits.call)
            except Refused as refused:
                if last or refused.status not in _PASSING or refused.agent_gone:
                    if refused.fenced:
                        self.die(refused.as_error())
                    raise refused.as_error() from None
            except Unreached as unreached:
                if last:
                    raise unreached.as_error() from None
            else:
                return
            await asyncio.sleep(0.1 * 2**tried)

    async def _read(self) -> None:
        try:
            while True:
                for data in await self.stream.read():
                    await self._dispatch(data)
        except HarnessError as error:
            self.die(error)
        except Exception as error:
            logger.exception("reading the agent failed")
            self.die(HarnessError("RUN_DEFECT", f"{type(error).__name__} while reading the agent"))

    async def _dispatch(self, data: bytes) -> None:
        self._said = self._clock.monotonic()
        if self._ended is not None and self.dead is None:
            self._end_soon(self._ended)
        try:
            message: object = _decoder.decode(data.decode())
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.garbage += 1
            return
        method, params = message.get("method"), message.get("params")
        if not isinstance(method, str):
            self._answered(message)
        elif method == "_adapter/agent_exited":
            self._end_soon(self._ended or _exited(params))
        elif method == "_adapter/invalid_stdout":
            self.garbage += 1
        elif message.get("id") is None:
            self.messages += 1
            await self._listener.notified(method, params, len(data))
        elif (key := request_key(message["id"])) not in self._seen:
            self.messages += 1
            self._seen.add(key)
            await self._listener.requested(message["id"], method, params, len(data))

    def _end_soon(self, error: HarnessError) -> None:
        """Die of it once nothing has come for a moment."""
        self._ended = error
        if self._closing is not None:
            self._closing.cancel()
        self._closing = asyncio.get_running_loop().call_later(self._limits.last_lines, self.die, error)

    def _answered(self, message: Message) -> None:
        number = message.get("id")
        if "result" not in message and "error" not in message:
            self.garbage += 1
            return
        self.messages += 1
        found = self._pending.get(number) if isinstance(number, int) else None
        if found is None or found[0].done():
            return
        waiting, answered = found
        if answered is not None:
            answered(message)
        waiting.set_result(message)


def request_key(number: object) -> str:
    """A JSON-RPC id as text: 1 and "1" differ."""
    return short_id(json.dumps(number, sort_keys=True))


def _exited(params: object) -> HarnessError:
    found = params if isinstance(params, dict) else {}
    how = f"signal {found['signal']}" if found.get("signal") else f"code {found.get('code')}"
    return HarnessError("AGENT_EXITED", f"the agent ended with {how}")
