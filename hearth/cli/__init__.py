"""The command line: `hearth --help`."""

import os

# Set before gRPC is imported: the stack starts processes, and gRPC would warn of each that it cannot follow the fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# It would also write of each handshake that fails, beside what a command says of it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
