"""What every call goes through: key, rate limit, fault, delay, log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from tests.support.daytona.delays import Chance, Delays
from tests.support.daytona.faults import Fault, Faults, Kind
from tests.support.daytona.journal import Journal
from tests.support.daytona.limits import RateLimiter
from tests.support.daytona.problems import API, Problem, bad, dumps, reason
from tests.support.daytona.sandbox import Sandbox

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAULT: web.RequestKey[Fault] = web.RequestKey("fault", Fault)
_AFTER = frozenset({Kind.LOSE_REPLY, Kind.FAIL_AFTER})


class Gate:
    """Stands before each handler."""

    def __init__(
        self,
        api_key: str,
        faults: Faults,
        journal: Journal,
        limiter: RateLimiter,
        delays: Delays,
        find: Callable[[str], Sandbox | None],
    ) -> None:
        """`find` gives the sandbox that a path names, if there is one."""
        self._api_key = api_key
        self._faults = faults
        self._journal = journal
        self._limiter = limiter
        self._delays = delays
        self._chance = Chance(delays.seed)
        self._find = find

    def guard(
        self,
        call: str,
        handler: Handler,
        *,
        classes: Sequence[str] = ("authenticated",),
        source: str = API,
        keyed: bool = True,
        streams: bool = False,
    ) -> Handler:
        """`handler` behind everything that stands before the call of this name.

        `classes`: the rate limits it counts in. `keyed`: whether it needs the API key. `streams`: the handler itself
        applies what goes wrong after the work, because its reply is under way by then.
        """

        async def guarded(request: web.Request) -> web.StreamResponse:
            began = time.monotonic()
            sandbox = self._find(request.match_info.get("sandbox", ""))
            named = (sandbox.id, sandbox.name) if sandbox is not None else ()
            fault: Fault | None = None
            headers: dict[str, str] = {}
            status = 0
            try:
                headers = self._enter(request, classes) if keyed else {}
                fault = self._faults.decide(call, named)
                response = await self._answer(request, handler, fault, sandbox, call, source, streams)
                if not response.prepared:
                    response.headers.update(headers)
                status = response.status
            except Problem as problem:
                response = problem.response(request)
                response.headers.update(headers)
                status = problem.status
            finally:
                self._journal.write(
                    "call",
                    sandbox=sandbox.id if sandbox is not None else "",
                    session=sandbox.session if sandbox is not None else "",
                    call=call,
                    method=request.method,
                    path=request.path,
                    status=status,
                    fault=fault.kind.value if fault is not None else "",
                    began=began,
                )
            return response

        return guarded

    def _enter(self, request: web.Request, classes: Sequence[str]) -> dict[str, str]:
        if request.headers.get("Authorization") != f"Bearer {self._api_key}":
            raise Problem(401, "Invalid credentials")
        return dict(self._limiter.count(classes))

    async def _answer(
        self,
        request: web.Request,
        handler: Handler,
        fault: Fault | None,
        sandbox: Sandbox | None,
        call: str,
        source: str,
        streams: bool,
    ) -> web.StreamResponse:
        await asyncio.sleep(self._chance.seconds(self._delays.call))
        if fault is None:
            return await handler(request)
        named = {"sandbox": sandbox.id, "session": sandbox.session} if sandbox is not None else {}
        self._journal.write("fault", **named, call=call, fault=fault.kind.value)
        request[FAULT] = fault
        if fault.kind is Kind.STATUS:
            raise refusal(fault, source)
        if fault.kind is Kind.DROP:
            return cut(request)
        if fault.kind is Kind.DELAY:
            await asyncio.sleep(fault.seconds)
        response = await handler(request)
        if fault.kind in _AFTER and not streams:
            if fault.kind is Kind.FAIL_AFTER:
                raise refusal(fault, source)
            return cut(request)
        return _lying(response, fault) if fault.kind is Kind.LIE else response


def refusal(fault: Fault, source: str) -> Problem:
    """What a fault answers in place of the truth."""
    headers = {"Retry-After": f"{fault.retry_after:g}"} if fault.retry_after is not None else {}
    return Problem(fault.status, fault.message or reason(fault.status), source=source, headers=headers)


def cut(request: web.Request) -> web.Response:
    """Cut the connection; the response goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=499)


def transition_fault(request: web.Request) -> Fault | None:
    """The fault of a call that is about its transition and not about its reply."""
    fault = request.get(FAULT)
    return fault if fault is not None and fault.kind in (Kind.STUCK, Kind.BREAK) else None


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object that a request carries."""
    try:
        body = await request.json()
    except json.JSONDecodeError:
        raise bad("Unexpected token in JSON") from None
    if not isinstance(body, dict):
        raise bad("Expected a JSON object")
    return body


def reply(value: Any, status: int = 200) -> web.Response:
    """A JSON reply."""
    return web.json_response(value, status=status, dumps=dumps)


def _lying(response: web.StreamResponse, fault: Fault) -> web.StreamResponse:
    """The same response with another state in it."""
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        return response
    value = json.loads(response.body)
    for shown in value.get("items", [value]):
        if "state" in shown:
            shown["state"] = fault.state
            shown["desiredState"] = fault.desired or shown["desiredState"]
    return reply(value, response.status)
