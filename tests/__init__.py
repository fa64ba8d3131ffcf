"""Tests of Hearth."""

import os

# gRPC's C core would write to stderr about each process that a test starts. Read when gRPC is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
