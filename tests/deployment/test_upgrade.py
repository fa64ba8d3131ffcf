"""An upgrade that nobody notices: of each service a new version runs beside the old one and takes its place, while
people talk and read. It is shown with the release before, and with schemas to come."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from hearth.secret import Secret
from hearth.version import version
from services.chassis.migrations import current_revision, known_revisions
from tests.deployment import released
from tests.deployment.compose import ROOT
from tests.deployment.conftest import Deployed, operator
from tests.deployment.front import Front, fronts
from tests.deployment.placed import Container, Placed
from tests.deployment.talkers import Talkers, agents, talking

# The called before their callers, as docs/operating.md says.
ORDER = ("history", "sandbox", "relay", "pool")
SCHEMAS = ("history", "sandbox", "pool")
# What every revision may do: every table gets columns, those that must be given have a default.
GROWS = """
DO $$ DECLARE one text; BEGIN
  FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = '{schema}' AND tablename NOT LIKE 'schema\\_%' LOOP
    EXECUTE format('ALTER TABLE {schema}.%I ADD COLUMN new_number int NOT NULL DEFAULT 7', one);
    EXECUTE format('ALTER TABLE {schema}.%I ADD COLUMN new_text text', one);
  END LOOP;
END $$;
"""


def grown(directory: Path) -> Path:
    """This tree, with a revision more in each schema."""
    for package in ("services", "hearth"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    for schema in SCHEMAS:
        versions = directory / "services" / schema / "migrations" / "versions"
        last = known_revisions(versions)[-1]
        name = f"{int(last) + 1:04d}_to_come"
        (versions / f"{name}.sql").write_text(GROWS.format(schema=schema))
        text = (next(versions.glob(f"{last}_*.py"))).read_text()
        before = text[: text.index("revision = ")]
        upgrade = text[text.index("def upgrade") :]
        (versions / f"{name}.py").write_text(
            f'{before}revision = "{name[:4]}"\ndown_revision = "{last}"\n\n\n{upgrade}'
        )
    return directory


async def versions(placed: Placed) -> set[str]:
    """Of everything that runs."""
    told = set()
    for container in placed.containers:
        if container.process.poll() is None:
            health = await operator(placed).run("health", container.address, "--json")
            told.add(health.json()["version"])
    return told


async def replace(placed: Placed, front: Front, name: str, number: int, talkers: Talkers) -> Container:
    """A replica of `name` from the image as it is now takes the place of the one that runs."""
    (old,) = placed.of(name)
    new = await placed.add(name, number)
    front.lead_to(new.address)
    # Both of them have connections now.
    await talkers.more(1)
    code = await asyncio.to_thread(old.stop)
    assert code == 0, f"{old.name} ended with {code}"
    await talkers.more(1)
    return new


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_the_release_before_is_replaced_under_load(scratch: Path, deployed: Deployed) -> None:
    old = released.runnable(scratch / "released")
    async with fronts(ORDER) as front, deployed(HEARTH_AGENTS=agents(scratch)) as placed:
        placed.fronts = {name: one.address for name, one in front.items()}
        placed.image = {"PYTHONPATH": str(old)}
        for name in ORDER:
            (container,) = await placed.start(name)
            front[name].lead_to(container.address)
        async with talking(placed) as talkers:
            await talkers.more(2)
            assert await versions(placed) == {released.version()}
            placed.image = {}
            for name in ORDER:
                await replace(placed, front[name], name, 2, talkers)
            await talkers.more(1)
            found = await talkers.finish()
        assert found["H3 of readers"] > 0
        assert found["C4"] > 0
        assert await versions(placed) == {version()}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_this_release_runs_on_schemas_that_grew_and_comes_back_to_them(scratch: Path, deployed: Deployed) -> None:
    new = grown(scratch / "grown")
    async with fronts(ORDER) as front, deployed(HEARTH_AGENTS=agents(scratch)) as placed:
        placed.fronts = {name: one.address for name, one in front.items()}
        for name in ORDER:
            (container,) = await placed.start(name)
            front[name].lead_to(container.address)
        async with talking(placed) as talkers:
            await talkers.more(2)
            placed.image = {"PYTHONPATH": str(new)}
            for name in ORDER:
                await replace(placed, front[name], name, 2, talkers)
            # And back: whoever started after the schema grew is of the release that does not know of it.
            placed.image = {}
            for name in reversed(ORDER):
                await replace(placed, front[name], name, 3, talkers)
            found = await talkers.finish()
        assert found["C4"] > 0
        for schema in SCHEMAS:
            known = known_revisions(ROOT / "services" / schema / "migrations" / "versions")
            assert await current_revision(Secret(placed.stores["HEARTH_POSTGRES_DSN"]), schema) not in known
        assert (await operator(placed).run("doctor")).code in (0, 1)
