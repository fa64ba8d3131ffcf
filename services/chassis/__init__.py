"""What every service stands on: settings, start and stop, auth, errors, telemetry, database, bus."""

import os

# gRPC's C core writes its own unstructured lines to stderr, between our JSON ones, for things we report ourselves. It
# reads this when it is first imported, so it is set before any module of ours can import it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
