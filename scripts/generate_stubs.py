"""Generate the typed Python stubs of every contract under protos/ into hearth/*/v1/.

Run by `make setup` and by the wheel build; the output is never committed. Files that nothing generates any more
are removed, so a renamed proto leaves no ghost module behind.
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PLUGINS = Path(sys.executable).parent


def generate(out: Path = ROOT) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their `.pyi` below `out`; exits with protoc's code on an error."""
    for stale in out.glob("hearth/*/v1/*_pb2*"):
        stale.unlink()
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    services = [source for source in sources if source.endswith("_service.proto")]
    include = [f"-I{PROTOS}", f"-I{importlib.resources.files('grpc_tools') / '_proto'}", f"-I{_google_protos()}"]
    plugin = f"--plugin=protoc-gen-mypy={PLUGINS / 'protoc-gen-mypy'}"
    plugin_grpc = f"--plugin=protoc-gen-mypy_grpc={PLUGINS / 'protoc-gen-mypy_grpc'}"
    messages = [f"--python_out={out}", f"--mypy_out=quiet:{out}"]
    grpc = [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]
    for arguments in ([plugin, *messages, *sources], [plugin_grpc, *grpc, *services]):
        code = protoc.main(["protoc", *include, *arguments])
        if code != 0:
            raise SystemExit(code)


def _google_protos() -> Path:
    """Where googleapis-common-protos keeps `google/rpc/*.proto`."""
    import google.rpc

    return Path(next(iter(google.rpc.__path__))).parent.parent


if __name__ == "__main__":
    generate()
