"""The table of scopes knows each RPC of the contracts, and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path

from google.protobuf import descriptor

import hearth
from services.chassis.scopes import SCOPES, is_open


def contract_methods() -> set[str]:
    root = Path(hearth.__file__).parent
    found: set[str] = set()
    for path in sorted(root.glob("*/v1/*_service_pb2.py")):
        module = importlib.import_module(f"hearth.{path.parent.parent.name}.v1.{path.stem}")
        file: descriptor.FileDescriptor = module.DESCRIPTOR
        for service in file.services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return found


def test_every_rpc_has_a_scope() -> None:
    methods = contract_methods()
    assert len(methods) > 40
    assert methods == set(SCOPES)


def test_only_health_and_reflection_are_open() -> None:
    assert not any(is_open(method) for method in SCOPES)
    assert is_open("/grpc.health.v1.Health/Check")
    assert is_open("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert not is_open("/grpc.health.v1.Healthy/Check")


def test_what_only_services_may_call_is_for_services() -> None:
    assert SCOPES["/hearth.history.v1.HistoryService/AppendEvents"] == "internal"
    assert SCOPES["/hearth.relay.v1.RelayService/Publish"] == "internal"
    assert SCOPES["/hearth.sandbox.v1.SandboxService/Acquire"] == "internal"
    assert SCOPES["/hearth.session.v1.SessionService/DeleteSession"] == "admin"
