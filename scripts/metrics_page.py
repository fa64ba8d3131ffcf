"""Write the tables at the end of docs/metrics.md from the catalogue of metrics and from the alert rules.

`python scripts/metrics_page.py` writes them; `--check` only compares and exits with 1 when the page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import services.history.metrics  # noqa: E402
import services.pool.metrics  # noqa: E402
import services.relay.metrics  # noqa: E402
import services.sandbox.metrics  # noqa: E402, F401
from services.chassis.metrics import Family, Of, catalogue  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
RULES = ROOT / "deploy" / "prometheus" / "hearth.rules.yml"
BEGIN = "<!-- From here on made by scripts/metrics_page.py -->\n"
# What the alerts put into their texts.
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_VALUE = re.compile(r"\{\{ \$value[^}]*\}\}")
SECTIONS = {
    "pool": "The pool",
    "sandbox": "The sandbox service",
    "history": "History",
    "relay": "The relay",
    "": "Every service",
}


def alerts() -> list[dict[str, Any]]:
    """The alerts of the rules file, in its order."""
    groups = YAML(typ="safe").load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def render(page: str) -> str:
    """The page with its tables anew."""
    return page.partition(BEGIN)[0] + BEGIN + "".join(_tables()) + "".join(_alerts())


def _tables() -> Iterator[str]:
    for service, title in SECTIONS.items():
        yield f"\n## {title}\n\n| metric | labels | what it is |\n|---|---|---|\n"
        for family in catalogue():
            if _service(family) == service:
                yield _row(family)


def _service(family: Family) -> str:
    part = family.name.split(".")[1]
    return part if part in SECTIONS else ""


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label.replace('.', '_')}`" for label in family.labels)
    whose = " (of the deployment)" if family.of is Of.DEPLOYMENT else ""
    return f"| `{family.exposed}` | {labels} | {family.kind.value}{whose}: {family.help} |\n"


def _alerts() -> Iterator[str]:
    yield "\n## Alerts\n\n| alert | severity | says |\n|---|---|---|\n"
    for alert in alerts():
        says = _VALUE.sub("N", _LABEL.sub(lambda found: found[1].upper(), alert["annotations"]["summary"]))
        yield f"| `{alert['alert']}` | {alert['labels']['severity']} | {says} |\n"


def main() -> None:
    """Write or compare."""
    before = PAGE.read_text()
    page = render(before)
    if "--check" in sys.argv[1:]:
        if page != before:
            raise SystemExit("docs/metrics.md is out of date; run python scripts/metrics_page.py")
    else:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
