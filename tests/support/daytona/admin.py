"""The admin API at `/_stand_in`, for tests that run a stand-in in another process. It needs no key.

GET    /_stand_in/state                    {"running", "counts", "url", "sandboxes": [..], "usage", "overlaps"}
GET    /_stand_in/log?after=N&kind=K       [entry ..] with a number above N
GET    /_stand_in/faults                   {"counts": {..}, "switches": [..]}
POST   /_stand_in/faults                   a fault, or {"everything": probability, "seed", "seconds"}
DELETE /_stand_in/faults                   switches all off
POST   /_stand_in/release                  lets stuck transitions go on
POST   /_stand_in/kill/{sandbox}           lets a sandbox die
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.support.daytona import faults
from tests.support.daytona.problems import Problem, bad
from tests.support.daytona.serving import Handler, body_of, reply

if TYPE_CHECKING:
    from tests.support.daytona.stand_in import RunningStandIn

PREFIX = "/_stand_in"


class AdminApi:
    """Its handlers."""

    def __init__(self, stand_in: RunningStandIn) -> None:
        self._stand_in = stand_in

    def routes(self) -> Sequence[web.RouteDef]:
        """Its routes, from the root of the server."""
        return [
            web.get(f"{PREFIX}/state", _answered(self._state)),
            web.get(f"{PREFIX}/log", _answered(self._log)),
            web.get(f"{PREFIX}/faults", _answered(self._faults)),
            web.post(f"{PREFIX}/faults", _answered(self._add_fault)),
            web.delete(f"{PREFIX}/faults", _answered(self._clear_faults)),
            web.post(f"{PREFIX}/release", _answered(self._release)),
            web.post(f"{PREFIX}/kill/{{sandbox}}", _answered(self._kill)),
        ]

    async def _state(self, _: web.Request) -> web.StreamResponse:
        stand_in = self._stand_in
        sandboxes = [
            {"id": one.id, "name": one.name, "state": one.state, "labels": one.labels, "session": one.session}
            for one in stand_in.sandboxes()
        ]
        state: dict[str, Any] = {
            "url": stand_in.url,
            "running": stand_in.running(),
            "counts": stand_in.counts(),
            "sandboxes": sandboxes,
            "usage": asdict(stand_in.usage()),
            "overlaps": [asdict(overlap) for overlap in stand_in.overlaps()],
        }
        return reply(state)

    async def _log(self, request: web.Request) -> web.StreamResponse:
        after, kind = int(request.query.get("after", "0")), request.query.get("kind", "")
        return reply(
            [asdict(entry) for entry in self._stand_in.log if entry.number > after and kind in ("", entry.kind)]
        )

    async def _faults(self, _: web.Request) -> web.StreamResponse:
        switches = self._stand_in.faults
        return reply({"counts": switches.counts(), "switches": switches.shown()})

    async def _add_fault(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        try:
            if "everything" in body:
                probability = float(body.pop("everything"))
                self._stand_in.faults.everything(probability, **body)
            else:
                self._stand_in.faults.add(faults.from_json(body))
        except (KeyError, TypeError, ValueError) as error:
            raise bad(str(error)) from None
        return await self._faults(request)

    async def _clear_faults(self, request: web.Request) -> web.StreamResponse:
        self._stand_in.faults.clear()
        return await self._faults(request)

    async def _release(self, _: web.Request) -> web.StreamResponse:
        self._stand_in.release()
        return reply({})

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        self._stand_in.kill(request.match_info["sandbox"])
        return reply({})


def _answered(handler: Handler) -> Handler:
    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Problem as problem:
            return problem.response(request)

    return answered
