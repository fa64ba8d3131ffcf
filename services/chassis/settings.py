"""Settings of a process, all from the environment, checked once at start.

A service subclasses `ChassisSettings`, or `PostgresSettings` and `ValkeySettings` where it cannot run without them, and
loads its class with `load`, which names the wrong variable and ends the process instead of running half configured.
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from hearth.channel import MAX_MESSAGE_BYTES, SCHEMES, certificate_name, target
from hearth.secret import Secret
from services.chassis.limits import Quota

PREFIX = "HEARTH_"
# Exit code of a process that was started wrongly: a supervisor that restarts it would see the same again.
EXIT_USAGE = 2


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host:port` or `[v6]:port`; raises ValueError that says what is wrong."""
        host, separator, port = text.rpartition(":")
        if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not host:port, for example 127.0.0.1:7400")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: an IPv6 host goes in brackets, for example [::1]:7400")
        if not host:
            raise ValueError(f"{text!r} has no host; use 127.0.0.1:{port}, or 0.0.0.0:{port} for every interface")
        return cls(host, int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ChassisSettings(BaseSettings):
    """What every service process reads. Durations are seconds, sizes are counts unless said otherwise."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True, hide_input_in_errors=True
    )

    listen: str = Field(default="127.0.0.1:0", description="host:port to bind; port 0 takes a free one")
    address_file: Path | None = Field(
        default=None, description="the bound address is written here once the port is open"
    )

    pool_address: str = Field(
        default="127.0.0.1:7400",
        description="where the pool service is: host:port, those of several replicas with commas between them, or"
        " dns:///name:port for a name with an address for each",
    )
    history_address: str = Field(default="127.0.0.1:7401", description="the same of the history service")
    relay_address: str = Field(default="127.0.0.1:7402", description="the same of the relay service")
    sandbox_address: str = Field(default="127.0.0.1:7403", description="the same of the sandbox service")

    auth_file: Path | None = Field(default=None, description="JSON file of token hashes; none = no auth, loopback only")
    token: Secret = Field(default=Secret(), description="bearer token that this process sends to other services")
    tls_certificate_file: Path | None = Field(
        default=None,
        description="PEM certificate chain of this process: set = it serves TLS; shown too where it calls and is asked"
        " who it is",
    )
    tls_key_file: Path | None = Field(default=None, description="PEM key of that certificate")
    tls_ca_file: Path | None = Field(
        default=None, description="PEM roots for calls to other services; set = calls use TLS"
    )
    tls_client_ca_file: Path | None = Field(
        default=None,
        description="PEM roots of callers; set = who shows no certificate signed by one of them cannot connect",
    )
    tls_server_name: str = Field(
        default="",
        description="the name in the certificates of the other services, where it is not the host of their address",
    )

    call_timeout: float = Field(default=10.0, gt=0, description="deadline of an outgoing unary call that sets none")
    shutdown_grace: float = Field(default=30.0, gt=0, description="from the signal to the end of the process, at most")
    connection_age: float = Field(default=3600.0, gt=0, description="a client connection is asked to move after this")
    connection_age_grace: float = Field(default=600.0, gt=0, description="what its open calls get after that")
    auth_recheck: float = Field(
        default=300.0, gt=0, description="how often the rights of an open stream are checked again"
    )
    project_rate: float = Field(
        default=0.0,
        ge=0,
        description="calls a second that one project may make at this process, for each scope; twice as many at once;"
        " 0 = no limit",
    )
    project_streams: int = Field(
        default=0, ge=0, description="streams that one project may have open at this process; 0 = no limit"
    )
    project_message_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_MESSAGE_BYTES,
        description="size of a message that one project may send; 0 = no limit but the 4 MiB of all messages",
    )

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto = text on a terminal, else json"
    )
    trace_file: Path | None = Field(
        default=None, description="finished spans are appended here, one JSON object a line"
    )
    trace_file_bytes: int = Field(
        default=16 * 1024 * 1024,
        gt=0,
        description="a trace file of this size is set aside with `.1` at its name, and the one before is gone",
    )
    trace_sample: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="which part of the traces that begin here is kept; a caller's own trace goes by its caller",
    )
    otlp_endpoint: str = Field(
        default="", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT", description="OTLP/gRPC collector"
    )
    metrics_listen: str | None = Field(
        default=None,
        description="host:port where Prometheus reads the metrics, by HTTP and without a token; none = nowhere",
    )
    metrics_tls: bool = Field(
        default=False, description="the metrics are served by HTTPS, with the certificate of this process"
    )
    metrics_address_file: Path | None = Field(
        default=None, description="the address bound for the metrics is written here"
    )

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            Address.parse(value)
        return value

    @field_validator("pool_address", "history_address", "relay_address", "sandbox_address")
    @classmethod
    def _is_target(cls, value: str) -> str:
        found, balanced = target(value)
        if found == value and not value.startswith(SCHEMES):
            Address.parse(value)
        # gRPC would take the port of HTTPS for one that is missing.
        elif balanced and not value.rpartition(":")[2].isdecimal():
            raise ValueError(f"{value!r} has no port, for example dns:///history:7401")
        return value

    @field_validator("auth_file", "tls_certificate_file", "tls_key_file", "tls_ca_file", "tls_client_ca_file")
    @classmethod
    def _is_file(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"{value} is not a file")
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _safe_together(self) -> ChassisSettings:
        if self.auth_file is None and not Address.parse(self.listen).loopback:
            raise ValueError(
                f"{PREFIX}LISTEN={self.listen} is reachable from other machines and {PREFIX}AUTH_FILE is not set;"
                " set it, or listen on 127.0.0.1"
            )
        if self.auth_file is None and self.metrics_listen and not Address.parse(self.metrics_listen).loopback:
            raise ValueError(
                f"{PREFIX}METRICS_LISTEN={self.metrics_listen} is reachable from other machines and {PREFIX}AUTH_FILE"
                " is not set; set it, or listen on 127.0.0.1"
            )
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError(f"{PREFIX}TLS_CERTIFICATE_FILE and {PREFIX}TLS_KEY_FILE go together, one is missing")
        if self.tls_ca_file is not None and not self.tls_server_name:
            for address in (self.pool_address, self.history_address, self.relay_address, self.sandbox_address):
                certificate_name(address)
        for name, wanted in (("TLS_CLIENT_CA_FILE", self.tls_client_ca_file), ("METRICS_TLS", self.metrics_tls)):
            if wanted and self.tls_certificate_file is None:
                raise ValueError(f"{PREFIX}{name} needs {PREFIX}TLS_CERTIFICATE_FILE and {PREFIX}TLS_KEY_FILE")
        return self

    @property
    def quota(self) -> Quota:
        """What a project may ask of which the auth file says nothing."""
        return Quota(self.project_rate, self.project_streams, self.project_message_bytes)


class PostgresSettings(ChassisSettings):
    """Settings of a service that keeps its rows in Postgres."""

    postgres_dsn: Secret = Field(description="postgresql://user:password@host:port/database")
    postgres_pool_size: int = Field(default=10, ge=1, description="connections of this process, at most")
    postgres_acquire_timeout: float = Field(
        default=5.0, gt=0, description="wait for a free connection, then UNAVAILABLE"
    )
    postgres_connect_timeout: float = Field(default=5.0, gt=0, description="time to open one connection")
    postgres_statement_timeout: float = Field(default=15.0, gt=0, description="one statement, at the server")
    postgres_lock_timeout: float = Field(default=5.0, gt=0, description="one wait for a row lock, at the server")
    postgres_start_timeout: float = Field(
        default=30.0, ge=0, description="how long a start waits for Postgres to answer"
    )

    @field_validator("postgres_dsn")
    @classmethod
    def _is_dsn(cls, value: Secret) -> Secret:
        if not value.reveal().startswith(("postgresql://", "postgres://")):
            raise ValueError("must start with postgresql://")
        _check_hosts(value)
        return value


class ValkeySettings(ChassisSettings):
    """Settings of a service that uses the bus."""

    valkey_url: Secret = Field(description="redis://[user:password@]host:port/db, rediss:// for TLS")
    valkey_pool_size: int = Field(default=32, ge=1, description="command connections of this process, at most")
    valkey_acquire_timeout: float = Field(default=2.0, gt=0, description="wait for a free connection, then UNAVAILABLE")
    valkey_connect_timeout: float = Field(default=2.0, gt=0, description="time to open one connection")
    valkey_command_timeout: float = Field(default=5.0, gt=0, description="one command that does not block")
    valkey_start_timeout: float = Field(default=30.0, ge=0, description="how long a start waits for Valkey to answer")

    @field_validator("valkey_url")
    @classmethod
    def _is_url(cls, value: Secret) -> Secret:
        if not value.reveal().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://")
        _check_hosts(value)
        return value


def _check_hosts(url: Secret) -> None:
    """Raise ValueError for a URL whose hosts and ports cannot be read, and say nothing of it.

    A library that finds it out would: what it takes for a port is often the rest of a password with a slash in it.
    """
    problem = "has a host or port that cannot be read; in a password, / ? # [ ] must be written as %2F %3F %23 %5B %5D"
    try:
        hosts = urlsplit(url.reveal()).netloc.rpartition("@")[2].split(",")
    except ValueError:
        raise ValueError(problem) from None
    for host in hosts:
        port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
        if port and not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(problem)


class StartupError(Exception):
    """A start that cannot succeed; the message says what to change.

    `exit_code` 2 = the settings are wrong, 1 = the surroundings are.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_S = TypeVar("_S", bound=ChassisSettings)


def load(settings_class: type[_S]) -> _S:
    """Read `settings_class` from the environment; on a wrong value say which on stderr and exit with 2."""
    try:
        return settings_class()
    except ValidationError as error:
        for line in problems(settings_class, error):
            print(line, file=sys.stderr)
        _exit()
    except SettingsError as error:
        # Raised for a list or object that is no JSON, before anything is validated; only its text names the field.
        field = next((name for name in settings_class.model_fields if f'"{name}"' in str(error)), "")
        print(f"{_variable(settings_class, field)} is wrong: it is not JSON" if field else error, file=sys.stderr)
        _exit()


def problems(settings_class: type[ChassisSettings], error: ValidationError) -> list[str]:
    """One line for each wrong variable, by its name in the environment. Values of hidden fields are not shown."""
    lines = []
    for found in error.errors(include_url=False, include_input=False, include_context=False):
        path = [str(part) for part in found["loc"]]
        message = found["msg"].removeprefix("Value error, ")
        if not path:
            lines.append(message)
            continue
        name = _variable(settings_class, path[0])
        if found["type"] == "missing":
            lines.append(f"{name} is not set: {_describe(settings_class, path[0])}")
        else:
            lines.append(f"{name} is wrong: {message}")
    return lines


def _variable(settings_class: type[ChassisSettings], field: str) -> str:
    known = settings_class.model_fields
    if field not in known:
        return field if field.isupper() else PREFIX + field.upper()
    alias = known[field].validation_alias
    return alias if isinstance(alias, str) else PREFIX + field.upper()


def _describe(settings_class: type[ChassisSettings], field: str) -> str:
    for name, info in settings_class.model_fields.items():
        if field in {name, info.validation_alias, PREFIX + name.upper()}:
            return info.description or "it is required"
    return "it is required"


def _exit() -> NoReturn:
    raise SystemExit(EXIT_USAGE)
