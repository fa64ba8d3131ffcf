"""How Hearth uses Daytona: what an operator sets, and how long each thing may take. Importing this loads no SDK."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.secret import Secret

NAME = "daytona"
API_URL = "https://app.daytona.io/api"
VOLUME = "hearth-workspaces"
# Below it each session has a directory of its own, at the same path in every sandbox.
MOUNT = "/home/daytona/hearth"
PORT = 3000

# sandbox-agent takes its token from its arguments only. What is sent to Daytona names the variable, not the token.
SANDBOX_AGENT = (
    *("sandbox-agent", "server", "--no-telemetry"),
    *("--token", "{token}", "--host", "{host}", "--port", "{port}"),
)


@dataclass(frozen=True, slots=True)
class DaytonaOptions:
    """Where the API is, what sandboxes are made of, and how long to wait for it. Times are seconds but where named.

    `daemon` is the command line of the daemon in an instance. In its words `{host}` and `{port}` are where it must
    listen, `{token}` what it must accept (also in the variable HEARTH_AGENTD_TOKEN), `{agents}` a file with the agents
    as agentd reads it, `{logs}` a directory for logs. `volume` empty: workspaces die with their sandbox.
    """

    api_url: str
    api_key: Secret
    target: str = ""
    snapshot: str = ""
    image: str = ""
    volume: str = VOLUME
    daemon: tuple[str, ...] = SANDBOX_AGENT
    mount: str = MOUNT
    port: int = PORT
    auto_stop_minutes: int = 15
    auto_delete_minutes: int = 30

    # Of one request that waits for nothing; a start or stop may take this long before we look ourselves.
    call_seconds: float = 10.0
    # The real server keeps the request of a create or start for up to 30 s.
    slice_seconds: float = 35.0
    create_seconds: float = 90.0
    start_seconds: float = 45.0
    stop_seconds: float = 22.0
    delete_seconds: float = 22.0
    daemon_seconds: float = 30.0
    # Between a polite end of processes and SIGKILL, and between SIGKILL and giving up.
    grace_seconds: float = 1.5
    kill_seconds: float = 5.0
    # How long to look for what a create may have left that was given up.
    clean_up_seconds: float = 12.0
    first_pause: float = 0.1
    longest_pause: float = 1.0
