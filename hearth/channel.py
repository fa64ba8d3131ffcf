"""Opening connections to the services of a deployment, with the options that their servers are made for."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio
from opentelemetry import propagate, trace

from hearth.secret import Secret
from hearth.tls import Tls

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Servers end a connection that pings more often than every 10 s.
KEEPALIVE_MILLISECONDS = 30_000
KEEPALIVE_ANSWER_MILLISECONDS = 10_000

# Every RPC is safe to repeat (request ids, event ids, claims), so gRPC may repeat one whose answer never came. It makes
# CANCELLED of calls that reach a server while that ends. Any other code says that the request arrived.
_METHODS: dict[str, Any] = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
_SERVICE_CONFIG = json.dumps(_METHODS)
# Calls go around the replicas that serve; one that is being shut down says so, and gets none.
BALANCED_CONFIG = json.dumps(
    {**_METHODS, "loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
)

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.enable_retries", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MILLISECONDS),
    # What decides how long a ping may go unanswered is this; its default of a minute outlasts the option above.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MILLISECONDS),
    # A channel without calls is checked too, else its next call waits for TCP to find out that the other side is gone.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Its growing windows let a stalled reader swallow megabytes before the writer notices.
    ("grpc.http2.bdp_probe", 0),
    # One connection for each channel object, so that closing a channel closes its connection.
    ("grpc.use_local_subchannel_pool", 1),
)

_OF_GRPC = ("ipv4:", "ipv6:", "unix:")
# With one of these an address is in the words of gRPC.
SCHEMES = ("dns:", *_OF_GRPC)

# A bearer token, or what tells the one that counts now.
Token = str | Secret | Callable[[], str | Secret]

_Metadata = grpc.aio.Metadata | Sequence[tuple[str, str | bytes]] | None


def open_channel(
    address: str,
    *,
    token: Token = "",
    tls: Tls | None = None,
    root_certificates: bytes | None = None,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """A channel to the service at `address`; it connects at its first call. Close it when done.

    The address is host:port; or that of several replicas, separated by commas, or `dns:///name:port` for a name with
    an address for each: then calls go around those that serve. What gRPC itself has a scheme for, as `ipv4:`, is taken
    as it is: then the first of several that answers gets all calls. Raises ValueError for one that is none of these.

    `token` is sent as bearer token with each call, and the span of OpenTelemetry that it is made in as its trace
    context. With `tls` the connection uses TLS; `root_certificates` (PEM) is short for `Tls(root_certificates)`.
    `options` come after `OPTIONS` and win over them.
    """
    return _CallerChannel(channel_of(address, tls_of(tls, root_certificates), options), token)


def tls_of(tls: Tls | None, root_certificates: bytes | None) -> Tls | None:
    """The one of two ways to ask for TLS that is used; raises ValueError for both at once."""
    if tls is not None and root_certificates is not None:
        raise ValueError("give tls or root_certificates, the first one holds the second")
    return tls if root_certificates is None else Tls(root_certificates)


def channel_of(address: str, tls: Tls | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """The channel of gRPC itself, with `OPTIONS` and those for several replicas. Raises ValueError."""
    name = ""
    if tls is not None:
        # For a list gRPC knows of no name to expect, for all else it takes the host of the address.
        name = tls.server_name or (certificate_name(address) if "," in address else "")
    address, balanced = target(address)
    own = {"grpc.service_config": BALANCED_CONFIG} if balanced else {}
    if tls is None:
        merged = dict(OPTIONS) | own | dict(options)
        return grpc.aio.insecure_channel(address, options=list(merged.items()))
    if name:
        own["grpc.ssl_target_name_override"] = name
    merged = dict(OPTIONS) | own | dict(options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=list(merged.items()))


def target(address: str) -> tuple[str, bool]:
    """What gRPC calls an address, and whether it may stand for several replicas."""
    if address.startswith("dns:"):
        return address, True
    if "," not in address or address.startswith(_OF_GRPC):
        return address, False
    schemes, replicas = set(), []
    for one in address.split(","):
        host, _, port = one.strip().rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host
        try:
            version = ipaddress.ip_address(host.strip("[]")).version if port.isdecimal() else None
        except ValueError:
            version = None
        if version is None:
            raise ValueError(f"{one.strip()!r} is not IP:port; for replicas behind a name use dns:///name:port")
        schemes.add(f"ipv{version}")
        replicas.append(f"{host}:{port}")
    if len(schemes) > 1:
        raise ValueError(f"{address!r} has addresses of IPv4 and IPv6; use those of one of them")
    return f"{schemes.pop()}:{','.join(replicas)}", True


def certificate_name(address: str) -> str:
    """The host of an address as `open_channel` takes one, which certificates of its servers hold; empty for none.

    Raises ValueError for a list of several hosts: gRPC expects one name in the certificates of all of them.
    """
    if address.startswith(_OF_GRPC):
        return ""
    hosts = {one.strip().rpartition("/")[2].rpartition(":")[0].strip("[]") for one in address.split(",")}
    if len(hosts) > 1:
        raise ValueError(
            f"{address!r} has several hosts, and TLS expects one name for all of them: set HEARTH_TLS_SERVER_NAME to"
            " a name that each certificate holds, or use dns:///name:port"
        )
    return hosts.pop()


def kept(token: Token) -> Secret | Callable[[], str | Secret]:
    """The form in which a token is kept: nothing that prints who keeps it shows it."""
    return Secret(token) if isinstance(token, str) else token


def token_of(token: Token) -> Secret:
    """The token to send now; empty for none."""
    now = token if isinstance(token, str | Secret) else token()
    return Secret(now) if isinstance(now, str) else now


def trace_context() -> Sequence[tuple[str, str]]:
    """What carries the current span of OpenTelemetry in metadata; nothing outside of a span."""
    if not trace.get_current_span().get_span_context().is_valid:
        return ()
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


class _CallerChannel(grpc.aio.Channel):
    """A channel that says with each call who calls: by the token, and by the span that the call is made in.

    Not an interceptor: gRPC hands the messages of an intercepted stream through a queue of its own, one by one, and
    that costs more than the message.
    """

    def __init__(self, inner: grpc.aio.Channel, token: Token) -> None:
        self._inner = inner
        self._token = kept(token)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_caller(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_caller(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_caller(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_caller(self._inner.stream_stream(*args, **kwargs))

    def _with_caller(self, multi_callable: Any) -> Any:
        def call(*request: Any, metadata: _Metadata = None, **options: Any) -> Any:
            given = cast("Any", metadata or ())
            token = token_of(self._token)
            authorization = (("authorization", f"Bearer {token.reveal()}"),) if token else ()
            sent = grpc.aio.Metadata(*given, *authorization, *trace_context())
            return multi_callable(*request, metadata=sent, **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()
