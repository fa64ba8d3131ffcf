"""Messages of the contract with their inner messages left serialized.

What only passes through a service is delivered byte for byte: parsing and serializing it again would change the order
of its fields, and costs more than the rest of the work. A shadow has the field numbers of its message, and `bytes`
where that holds another message; protobuf's parser then hands out the raw bytes, in C.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

_Field = descriptor_pb2.FieldDescriptorProto


class Shadow(Protocol):
    """A message class; its instances have the attributes of the message it stands for."""

    def __call__(self, **fields: Any) -> Any:
        """A new message."""
        ...

    def FromString(self, data: bytes) -> Any:
        """Parse; raises `google.protobuf.message.DecodeError`."""
        ...


def shadows(opened: Iterable[Descriptor]) -> dict[str, Shadow]:
    """The shadow of each message in `opened`, by its short name.

    A field whose type is in `opened` too holds its shadow; a field of any other message type holds bytes, and an enum
    holds its number.
    """
    descriptors = list(opened)
    file = descriptor_pb2.FileDescriptorProto(name="shadow.proto", package="hearth.shadow", syntax="proto3")
    known = {f".{descriptor.full_name}": f".{file.package}.{descriptor.name}" for descriptor in descriptors}
    for descriptor in descriptors:
        message = file.message_type.add()
        descriptor.CopyToProto(message)
        for field in message.field:
            _open_or_leave(field, known)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        descriptor.name: cast(
            "Shadow",
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{descriptor.name}")),
        )
        for descriptor in descriptors
    }


def _open_or_leave(field: _Field, known: dict[str, str]) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.type_name in known:
        field.type_name = known[field.type_name]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        field.type = _Field.TYPE_BYTES
        field.ClearField("type_name")
    elif field.type == FieldDescriptor.TYPE_ENUM:
        field.type = _Field.TYPE_INT32
        field.ClearField("type_name")
