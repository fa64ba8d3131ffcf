"""The history and relay that a test talks to: those that somebody named, or ones of its own.

`HEARTH_TEST_TARGET=history=host:port[+host:port...],relay=host:port[+...]` names replicas of running services.
`HEARTH_TEST_TOKEN` is sent to them as bearer token, `HEARTH_TEST_CA_FILE` holds the PEM roots of their certificates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from hearth.channel import open_channel
from tests.support.processes import ServiceProcess

VARIABLE = "HEARTH_TEST_TARGET"
_SERVICES = ("history", "relay")


@dataclass(frozen=True)
class Target:
    """Addresses (host:port) of all replicas of both services, and what it takes to talk to them."""

    history: tuple[str, ...]
    relay: tuple[str, ...]
    token: str = ""
    root_certificates: bytes | None = None

    @classmethod
    def given(cls, environment: Mapping[str, str]) -> Target | None:
        """The target named in `environment`; None when none is. Raises ValueError when it cannot be read."""
        text = environment.get(VARIABLE, "")
        if not text:
            return None
        found: dict[str, tuple[str, ...]] = {}
        for part in text.split(","):
            service, _, addresses = part.strip().partition("=")
            if service not in _SERVICES or service in found or not all(map(_is_address, addresses.split("+"))):
                raise ValueError(
                    f"{VARIABLE}={text!r}: expected history=host:port[+host:port...],relay=host:port[+...]"
                )
            found[service] = tuple(addresses.split("+"))
        missing = [service for service in _SERVICES if service not in found]
        if missing:
            raise ValueError(f"{VARIABLE}={text!r} does not name {' and '.join(missing)}")
        roots = environment.get("HEARTH_TEST_CA_FILE", "")
        return cls(
            found["history"],
            found["relay"],
            environment.get("HEARTH_TEST_TOKEN", ""),
            Path(roots).read_bytes() if roots else None,
        )

    def __str__(self) -> str:
        return f"history={'+'.join(self.history)},relay={'+'.join(self.relay)}"

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to one of them; close it. It sends messages of any size, so that the server has to refuse them."""
        return open_channel(
            address,
            token=self.token,
            root_certificates=self.root_certificates,
            options=[("grpc.max_send_message_length", -1)],
        )


@dataclass(frozen=True)
class Stores:
    """What our services stand on."""

    postgres_dsn: str
    valkey_url: str


class Replicas:
    """Our services as processes: any number of histories on one database, and of relays on one bus.

    Each relay reads a history of its own where there are enough. Addresses stay the same over restarts. With
    `mute_valkey_url` the last history tells its commits to that bus, where no relay hears them.
    """

    def __init__(
        self,
        directory: Path,
        stores: Stores,
        *,
        histories: int,
        relays: int,
        relay_env: Mapping[str, str] | None = None,
        mute_valkey_url: str = "",
    ) -> None:
        self._directory = directory
        self._env = {"HEARTH_POSTGRES_DSN": stores.postgres_dsn, "HEARTH_VALKEY_URL": stores.valkey_url}
        self._relay_env = {"HEARTH_VALKEY_URL": stores.valkey_url, **(relay_env or {})}
        self._relays = relays
        envs = [self._env] * histories
        if mute_valkey_url:
            envs[-1] = {**self._env, "HEARTH_VALKEY_URL": mute_valkey_url}
        self.histories = [ServiceProcess("services.history", directory, env) for env in envs]
        self.relays: list[ServiceProcess] = []

    @property
    def all(self) -> list[ServiceProcess]:
        """Every process."""
        return [*self.histories, *self.relays]

    @property
    def target(self) -> Target:
        """Where they are."""
        return Target(tuple(each.address for each in self.histories), tuple(each.address for each in self.relays))

    def start(self) -> None:
        """Start everything; the first history makes the tables, the others come together."""
        self.histories[0].start_blocking()
        _start_together(self.histories[1:])
        for place in range(self._relays):
            history = self.histories[place % len(self.histories)]
            env = {**self._relay_env, "HEARTH_HISTORY_ADDRESS": history.address}
            self.relays.append(ServiceProcess("services.relay", self._directory, env))
        _start_together(self.relays)

    def stop(self, *, expected: Sequence[str] = ()) -> list[str]:
        """End everything that runs; what was wrong with the way it ended or with what it logged, in words.

        Errors in a log are wrong, but those with one of the `expected` words.
        """
        wrong = []
        for process in reversed(self.all):
            code = process.stop()
            if code not in (0, None):
                wrong.append(f"{process.module} ended with {code}:\n{process.log_tail()}")
            lines = [line for line in process.log().splitlines() if '"ERROR"' in line or '"CRITICAL"' in line]
            errors = [line for line in lines if not any(words in line for words in expected)]
            if errors:
                wrong.append(f"{process.module} logged errors:\n" + "\n".join(errors[:5]))
        return wrong


def _start_together(processes: list[ServiceProcess]) -> None:
    for process in processes:
        process.launch()
    for process in processes:
        process.wait_serving()


@contextmanager
def running(replicas: Replicas, *, expected: Sequence[str] = ()) -> Iterator[Replicas]:
    """Runs `replicas` for a block, which fails when they end badly or log errors that were not `expected`."""
    wrong: list[str] = []
    try:
        replicas.start()
        yield replicas
    finally:
        wrong += replicas.stop(expected=expected)
    assert not wrong, "\n".join(wrong)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()
