"""Whether what a turn runs in is still there, looked after while the agent works.

An agent that says nothing may think, and a stream that breaks may come back: neither is a reason to end a turn. But
nobody should wait for minutes for what is dead. So at the first sign of trouble the sandbox service is asked whether
the sandbox is there, and its daemon whether it lives; only a plain answer ends the turn. Where no plain answer can be
had, the stream's own patience decides.
"""

from __future__ import annotations

import dataclasses
import logging

from services.chassis.clock import Clock
from services.chassis.errors import HearthError
from services.pool.harness.port import HarnessSession, Pulse, Silence
from services.pool.rows import Claim, Key
from services.pool.turns import leftovers
from services.pool.turns.sandboxes import Sandboxes
from services.pool.turns.signals import Signals
from services.pool.warm.entries import Live

logger = logging.getLogger(__name__)

# How often to look for signs, which costs nothing, and how long to leave it at a doubt before asking again.
LOOK_EVERY = 1.0
ASK_EVERY = 3.0
# A daemon sends a heartbeat every 15 s.
_SILENT_BYTES = 20.0
# Without a message for so long the agent's process is looked for, and again after as long.
_SILENT_AGENT = 15.0
# Looks in a row that must find nothing listening where the daemon was: its port may be in the middle of a restart.
_REFUSALS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """What is gone: a name of `hearth.types.v1.Reason`, and words for people."""

    code: str
    message: str


def doubtful(silence: Silence) -> bool:
    """Whether the sandbox gives reason to ask for it."""
    return not silence.connected or silence.bytes >= _SILENT_BYTES


def judge(pulse: Pulse, refusals: int) -> Loss | None:
    """What is lost by the answer of the daemon of a sandbox that is there; None: nothing, as far as anybody can tell.

    `refusals` counts the looks in a row, this one included, that found nothing listening.
    """
    if pulse is Pulse.FENCED:
        return Loss("HARNESS_UNREACHABLE", "another daemon runs in the sandbox")
    if pulse is Pulse.REFUSED and refusals >= _REFUSALS:
        return Loss("DAEMON_UNREACHABLE", "the daemon in the sandbox has ended")
    return None


class Liveness:
    """Looks after one prompt; what it finds lost it tells the signals, and returns."""

    def __init__(
        self, sandboxes: Sandboxes, clock: Clock, signals: Signals, *, key: Key, claim: Claim, live: Live
    ) -> None:
        self._sandboxes = sandboxes
        self._clock = clock
        self._signals = signals
        self._key = key
        self._claim = claim
        self._live = live
        self._refusals = 0

    async def watch(self) -> None:
        """Look until something is lost."""
        asked, pause = self._clock.monotonic(), LOOK_EVERY
        while True:
            await self._clock.sleep(pause)
            pause, loss = LOOK_EVERY, None
            silence = self._live.harness.silence
            if doubtful(silence):
                loss = await self._ask(self._live.harness)
                pause = LOOK_EVERY if self._refusals else ASK_EVERY
            elif min(silence.messages, self._clock.monotonic() - asked) >= _SILENT_AGENT:
                if await leftovers.agent_gone(self._live.harness, self._live.processes):
                    loss = Loss("AGENT_EXITED", "the agent's process is gone")
                asked = self._clock.monotonic()
            if loss is not None:
                logger.warning("lost during a turn", extra={"session": str(self._key), "reason": loss.code})
                self._signals.lose(loss.code, loss.message)
                return

    async def _ask(self, harness: HarnessSession) -> Loss | None:
        try:
            endpoint = await self._sandboxes.endpoint(self._key, self._claim)
        except HearthError as error:
            if error.reason == "FENCED":
                self._signals.raise_(fenced=True)
                return None
            # The daemon can be asked all the same.
            logger.info("nobody knows of the sandbox", extra={"session": str(self._key), "reason": error.reason})
        else:
            if endpoint is None:
                return Loss("HARNESS_UNREACHABLE", "the sandbox is gone")
            if endpoint.token == self._live.token:
                harness.reach(endpoint)
        pulse = await harness.pulse()
        self._refusals = self._refusals + 1 if pulse is Pulse.REFUSED else 0
        return judge(pulse, self._refusals)
