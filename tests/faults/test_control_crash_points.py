"""kill -9, and freeze and thaw, of a replica of the pool at every point at which something is half done, while another
one is there: it takes over what design §10 says, C1 to C5, P1 and H6 hold, and the next message is answered.

The points come from the registry of the code. A point without a story in `control_stories`, and a story that does not
reach its point, fail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from services.chassis import crashpoints
from services.pool import __main__ as pool_points
from tests.faults.control_acts import Act
from tests.faults.control_stories import STORIES, Moment
from tests.support.control_stage import Stage
from tests.support.servers import Servers

# A dead replica is noticed after seconds, and started again.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(150)]

# Of each kind of change one is always run.
ALWAYS = {
    ("answer.committed", "kill"),
    ("promote.committed", "kill"),
    ("stop.committed", "stop"),
    ("gate.consumed", "stop"),
}
# The points are declared by what the pool is made of.
assert pool_points
POINTS = [point.partition(".")[2] for point in crashpoints.declared("pool")]
CASES = [(point, how) for point in POINTS for how in ("kill", "stop")]


@pytest.fixture(scope="module")
def both(servers: Servers) -> Iterator[Stage]:
    """Two replicas, one of which is soon noticed when it is dead."""
    found = Stage(servers)
    with found.house.running():
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def stage(both: Stage) -> AsyncIterator[Stage]:
    """Both replicas serve."""
    yield both
    await both.close()


async def test_every_point_has_its_story() -> None:
    assert set(STORIES) == set(POINTS)


@pytest.mark.parametrize(
    ("point", "how"),
    [case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES],
)
async def test_what_a_replica_left_half_done_is_taken_over(stage: Stage, point: str, how: str) -> None:
    act = Act(stage)
    moment = Moment(act, point, how)
    try:
        after = await STORIES[point](moment)
        await moment.taken_over()
        await after()
        if not moment.gone:
            await act.goes_on()
            await act.check()
            await act.kill()
    finally:
        for pool in stage.house.pools:
            process = stage.process(pool)
            if process.running:
                process.thaw()
        await moment.all_there()
