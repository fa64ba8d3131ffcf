"""The daemon in an instance: everything else in there ended, then one started, and seen to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import aiohttp

from hearth.secret import Secret
from services.chassis import http_client
from services.chassis.clock import Clock
from services.sandbox.providers import daytona_inside as inside
from services.sandbox.providers.daytona_options import DaytonaOptions
from services.sandbox.providers.port import Address, DaemonFailed, DaemonRequest, ProviderUnavailable, StillAlive

if TYPE_CHECKING:
    from services.sandbox.providers.daytona_sdk import Sdk

_PREVIEW_HEADER = "X-Daytona-Preview-Token"
_PROBE_SECONDS = 2.0
# The way through the proxy paces these more than the pause, which every start pays once.
_PROBE_PAUSE = 0.01
_PROBE_BYTES = 64 * 1024
# A daemon that does not answer is looked at from inside as often as this.
_LOOK_INSIDE_SECONDS = 0.5


class DaemonStarter:
    """Starts daemons and finds out where they answer."""

    def __init__(self, sdk: Sdk, options: DaytonaOptions, clock: Clock) -> None:
        self._sdk = sdk
        self._options = options
        self._clock = clock
        self._http = http_client.new_session(timeout=aiohttp.ClientTimeout(total=_PROBE_SECONDS))

    async def restart(self, sandbox_id: str, workspace: str, daemon: DaemonRequest, until: float) -> Address:
        """End every process but the base, see that none is left, start the daemon and see it answer."""
        options = self._options
        script = inside.restart_script(
            sandbox_id,
            workspace,
            options.daemon,
            port=options.port,
            logins=sorted({path for agent in daemon.agents.values() for path in agent.auth_paths}),
            grace=options.grace_seconds,
            kill=options.kill_seconds,
        )
        env = inside.variables(daemon, workspace, options.daemon)
        secrets = (daemon.token, *daemon.secrets.values())
        seconds = options.grace_seconds + options.kill_seconds + options.call_seconds
        done = await self._sdk.execute(sandbox_id, script, env, seconds, secrets=secrets)
        answer = inside.read(done.output)
        if answer.word == "alive":
            raise StillAlive(f"processes still alive: {answer.rest}")
        if answer.word == "failed":
            raise DaemonFailed(f"the daemon was not started: {answer.rest}")
        if answer.word != "started" or not answer.rest.isdigit():
            # Another one that restarts it ended our script, or there is something wrong with the shell.
            raise ProviderUnavailable(f"the restart of the daemon gave no answer (exit code {done.code})")
        kept = {name: value for name, value in env.items() if name == "TMPDIR"}
        return await self._until_up(sandbox_id, int(answer.rest), daemon.token, env=kept, secrets=secrets, until=until)

    async def address(self, sandbox_id: str) -> Address:
        """Where the daemon answers, asked anew."""
        preview = await self._sdk.preview(sandbox_id, self._options.port)
        return Address(preview.url, {_PREVIEW_HEADER: preview.token.reveal()} if preview.token else {})

    async def close(self) -> None:
        """Let go of connections."""
        await self._http.close()

    async def _until_up(
        self,
        sandbox_id: str,
        pid: int,
        token: Secret,
        *,
        env: Mapping[str, str],
        secrets: Sequence[Secret],
        until: float,
    ) -> Address:
        """Wait for the daemon through its preview URL; one that ended or stays silent is told with its log."""
        address = await self.address(sandbox_id)
        look = self._clock.monotonic() + _LOOK_INSIDE_SECONDS
        while not await self._healthy(address, token):
            await self._clock.sleep(_PROBE_PAUSE)
            if self._clock.monotonic() < look:
                continue
            done = await self._sdk.execute(sandbox_id, inside.look_script(pid), env, self._options.call_seconds)
            late = self._clock.monotonic() >= until
            if late or inside.read(done.output).word != "alive":
                tail = inside.log_tail(done.output, secrets)
                raise DaemonFailed(f"the daemon {'does not answer' if late else 'ended'}: {tail}")
            # The token of the preview may be another one by now.
            address = await self.address(sandbox_id)
            look = self._clock.monotonic() + _LOOK_INSIDE_SECONDS
        return address

    async def _healthy(self, address: Address, token: Secret) -> bool:
        headers = {**address.headers, "Authorization": f"Bearer {token.reveal()}"}
        try:
            # What answers there may be anything: nobody is asked whom it names.
            async with self._http.get(f"{address.url}/v1/health", headers=headers, allow_redirects=False) as response:
                await http_client.read_body(response, _PROBE_BYTES)
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError):
            return False
