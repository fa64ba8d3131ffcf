"""What every service stands on: settings, start and stop, auth, errors, telemetry, database, bus."""

import os

# gRPC's C core writes its own unstructured lines to stderr, between our JSON ones, for things we report ourselves. It
# reads its variables when it is first imported, so they are set before any module of ours can import it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# We start programs, never copies of ourselves; its handlers around a fork could only delay that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
