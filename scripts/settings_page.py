"""Write the tables of settings at the end of docs/operating.md from the settings classes, so that they cannot differ.

`python scripts/settings_page.py` writes them; `--check` only compares and exits with 1 when the page is out of date.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from hearth.secret import Secret

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.chassis.settings import PREFIX, ChassisSettings, PostgresSettings, ValkeySettings  # noqa: E402
from services.history.settings import HistorySettings  # noqa: E402
from services.pool.settings import PoolSettings  # noqa: E402
from services.relay.settings import RelaySettings  # noqa: E402
from services.sandbox.settings import SandboxSettings  # noqa: E402

PAGE = ROOT / "docs" / "operating.md"
BEGIN = "<!-- From here on made by scripts/settings_page.py -->\n"
# Title, class, and the classes whose settings stand in a table of their own.
SECTIONS: tuple[tuple[str, type[ChassisSettings], tuple[type[ChassisSettings], ...]], ...] = (
    ("Every service", ChassisSettings, ()),
    ("Services with rows in Postgres: pool, history, sandbox", PostgresSettings, (ChassisSettings,)),
    ("Services on the bus: history, relay", ValkeySettings, (ChassisSettings,)),
    ("pool", PoolSettings, (PostgresSettings,)),
    ("history", HistorySettings, (PostgresSettings, ValkeySettings)),
    ("relay", RelaySettings, (ValkeySettings,)),
    ("sandbox", SandboxSettings, (PostgresSettings,)),
)


def render(page: str) -> str:
    """The page with its tables made anew. Raises SystemExit when it has no place for them."""
    by_hand, found, _ = page.partition(BEGIN)
    if not found:
        raise SystemExit(f"docs/operating.md has no line {BEGIN.strip()}")
    parts = [by_hand, BEGIN]
    for title, settings, elsewhere in SECTIONS:
        parts.append(f"\n### {title}\n\n| variable | default | meaning |\n|---|---|---|\n")
        parts += rows(settings, elsewhere)
    return "".join(parts)


def rows(settings: type[ChassisSettings], elsewhere: tuple[type[ChassisSettings], ...]) -> Iterator[str]:
    """One line for each setting that is no setting of `elsewhere`."""
    known = {name for other in elsewhere for name in other.model_fields}
    for name, info in settings.model_fields.items():
        if name not in known:
            meaning = info.description or name.replace("_", " ")
            if allowed := choices(info.annotation):
                meaning = f"{meaning}; one of {allowed}" if info.description else f"one of {allowed}"
            yield f"| `{variable(name, info)}` | {default(info)} | {meaning.replace('|', chr(92) + '|')} |\n"


def variable(name: str, info: FieldInfo) -> str:
    """The name in the environment."""
    return info.validation_alias if isinstance(info.validation_alias, str) else PREFIX + name.upper()


def choices(annotation: object) -> str:
    """The values that a setting may have, where they are listed."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return next((found for part in typing.get_args(annotation) if (found := choices(part))), "")
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    return ""


def default(info: FieldInfo) -> str:
    """The default as it would be written in the environment."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Secret) or value is None or value in ("", [], {}, frozenset()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, (list, tuple)):
        # The path of this Python is no part of a default.
        return f"`{' '.join('python' if part == sys.executable else part for part in value)}`"
    return f"`{value}`"


def main() -> None:
    """Write or compare."""
    page = PAGE.read_text()
    wanted = render(page)
    if "--check" in sys.argv[1:]:
        if page != wanted:
            raise SystemExit("docs/operating.md is out of date; run python scripts/settings_page.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
