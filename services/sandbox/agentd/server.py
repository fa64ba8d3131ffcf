"""The HTTP side: the token in front of everything, the agent servers behind `/v1/acp`."""

import asyncio
import hmac
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web

from services.sandbox.agentd import files, problems
from services.sandbox.agentd.agents import AgentCommand, AgentServer
from services.sandbox.agentd.children import Children
from services.sandbox.agentd.jsonrpc import LINE_BYTES, MalformedMessage, read_client_message
from services.sandbox.agentd.logfile import LogFile
from services.sandbox.agentd.problems import Problem
from services.sandbox.agentd.processes import read_run_request, run

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

READER_S = 60.0
NEWEST_HEADER = "Hearth-Newest-Event"
SERVER_ID_LENGTH = 256


class Daemon:
    """All agent servers of one agentd, and the HTTP application over them."""

    def __init__(
        self,
        *,
        token: str,
        agents: Mapping[str, AgentCommand],
        children: Children,
        environment: Mapping[str, str],
        log_dir: Path,
        initialize_timeout: float,
        heartbeat: float,
    ) -> None:
        self._token = token.encode()
        self._agents = agents
        self._children = children
        self._environment = environment
        self._initialize_timeout = initialize_timeout
        self._heartbeat = heartbeat
        self._logs = {name: LogFile(log_dir / f"agent-{name}.log") for name in agents}
        self._servers: dict[str, AgentServer] = {}
        self._starting: dict[str, asyncio.Task[AgentServer]] = {}
        self._stopping = False

    def application(self) -> web.Application:
        """The routes, each behind the token."""
        app = web.Application(middlewares=[self._guard], client_max_size=LINE_BYTES)
        app.add_routes(
            [
                web.get("/v1/health", self._health),
                web.get("/v1/agents", self._list_agents),
                web.get("/v1/acp", self._list_servers),
                web.post("/v1/acp/{server_id}", self._post),
                web.get("/v1/acp/{server_id}", self._stream, allow_head=False),
                web.delete("/v1/acp/{server_id}", self._delete),
                web.post("/v1/processes/run", self._run),
                *files.routes(),
            ]
        )
        return app

    async def stop(self, grace: float) -> None:
        """End all agents with their trees, and everything else below this process."""
        self._stopping = True
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(server.close(grace) for server in self._servers.values()), return_exceptions=True)
        await self._children.kill_strays()
        for log in self._logs.values():
            log.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
            given = credentials.strip().encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._token) or scheme.lower() != "bearer":
                raise problems.token_invalid()
            return await handler(request)
        except Problem as problem:
            return problem.response()
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return problems.http_error(error).response()
        except Exception:
            logger.exception("request failed", extra={"method": request.method, "route": _route(request)})
            return Problem(500, "internal_error", "internal error").response()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _list_agents(self, _request: web.Request) -> web.Response:
        agents = [
            {"id": name, "installed": shutil.which(agent.command[0]) is not None, "capabilities": {}}
            for name, agent in self._agents.items()
        ]
        return web.json_response({"agents": agents})

    async def _list_servers(self, _request: web.Request) -> web.Response:
        servers = [
            {"serverId": name, "agent": server.agent, "createdAtMs": server.created_at_ms, "pid": server.pid}
            for name, server in self._servers.items()
        ]
        return web.json_response({"servers": servers})

    async def _post(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            raise Problem(
                415, "unsupported_media_type", "unsupported media type: content-type must be application/json"
            )
        try:
            message = read_client_message(await request.read())
        except MalformedMessage as error:
            raise problems.invalid_request(str(error)) from None
        server = await self._server_for(request)
        if message.request is None:
            server.send(message)
            return web.Response(status=202)
        return web.Response(body=await server.request(message), content_type="application/json")

    async def _server_for(self, request: web.Request) -> AgentServer:
        server_id = _server_id(request)
        agent = request.query.get("agent")
        server = self._servers.get(server_id)
        if server is None:
            # Two first posts of one id must not start two agents, and one that hangs up must not leave half of one.
            start = self._starting.get(server_id)
            if start is None:
                start = asyncio.create_task(self._start(server_id, self._known_agent(server_id, agent)))
                self._starting[server_id] = start
            server = await asyncio.shield(start)
        if agent is not None and agent != server.agent:
            raise problems.conflict(
                f"server '{server_id}' already exists for agent '{server.agent}'; requested '{agent}'"
            )
        if server.closing:
            raise problems.conflict(f"server '{server_id}' is being deleted")
        return server

    async def _start(self, server_id: str, agent: str) -> AgentServer:
        try:
            server = await AgentServer.start(
                server_id,
                agent,
                self._agents[agent],
                children=self._children,
                environment=self._environment,
                log=self._logs[agent],
                initialize_timeout=self._initialize_timeout,
            )
            self._servers[server_id] = server
            return server
        finally:
            del self._starting[server_id]

    def _known_agent(self, server_id: str, agent: str | None) -> str:
        if agent is None:
            raise problems.invalid_request(f"missing required 'agent' query parameter for first POST to {server_id}")
        if agent not in self._agents:
            raise problems.unsupported_agent(agent)
        if self._stopping:
            raise problems.agent_start_failed("the daemon is stopping")
        return agent

    async def _delete(self, request: web.Request) -> web.Response:
        server_id = _server_id(request)
        if server_id in self._starting:
            await asyncio.wait([self._starting[server_id]])
        server = self._servers.get(server_id)
        if server is not None:
            await server.close()
            if self._servers.get(server_id) is server:
                del self._servers[server_id]
        return web.Response(status=204)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        accepted = request.headers.get("Accept", "*/*")
        if not any(kind in accepted for kind in ("*/*", "text/*", "text/event-stream")):
            raise Problem(406, "not_acceptable", "not acceptable: accept must allow text/event-stream")
        server_id = _server_id(request)
        server = self._servers.get(server_id)
        if server is None:
            raise problems.session_not_found(server_id)
        last = _last_event_id(request, server)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                # A reader that comes back learns where what it missed ends and what is new begins.
                NEWEST_HEADER: str(server.ring.newest),
            }
        )
        try:
            await response.prepare(request)
            await _follow(server, last, response, self._heartbeat)
        except ConnectionError:
            logger.debug("reader gone", extra={"server": server_id})
        except TimeoutError:
            logger.warning("reader takes nothing", extra={"server": server_id, "seconds": READER_S})
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _run(self, request: web.Request) -> web.Response:
        job = read_run_request(await request.read())
        if self._stopping:
            raise problems.stream_error("the daemon is stopping")
        return web.json_response(await run(job, self._children, self._environment))


async def _follow(server: AgentServer, last: int, response: web.StreamResponse, heartbeat: float) -> None:
    """Write what the ring holds after `last` and what comes, until the ring is closed."""
    ring = server.ring
    while True:
        if batch := ring.after(last):
            last = batch[-1][0]
            data = b"".join(b"event: message\nid: %d\ndata: %b\n\n" % (number, message) for number, message in batch)
        elif ring.closed:
            await response.write_eof()
            return
        elif await ring.wait(last, heartbeat):
            continue
        else:
            data = b": heartbeat\n\n"
        await asyncio.wait_for(response.write(data), READER_S)


def _last_event_id(request: web.Request, server: AgentServer) -> int:
    text = request.headers.get("Last-Event-ID")
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise problems.invalid_request("Last-Event-ID must be a positive integer")
    # It was given out by an earlier server of this id; waiting for a higher number would hide all messages until then.
    if int(text) > server.ring.newest:
        raise problems.invalid_request(f"Last-Event-ID {text} is ahead of the newest message {server.ring.newest}")
    return int(text)


def _server_id(request: web.Request) -> str:
    server_id = request.match_info["server_id"]
    if len(server_id) > SERVER_ID_LENGTH or not server_id.isprintable():
        raise problems.invalid_request(f"the server id must be printable and at most {SERVER_ID_LENGTH} characters")
    return server_id


def _route(request: web.Request) -> str | None:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else None
