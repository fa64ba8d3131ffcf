"""`hearth bench`: measure history, relay, and whole turns on this machine."""

from __future__ import annotations

import asyncio
import enum
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from hearth.cli.output import Exit, err, fail, out, print_json, say
from hearth.embedded.daemons import EmbeddedError


class Workload(enum.StrEnum):
    """What is measured."""

    APPEND = "append"
    REPLAY = "replay"
    FANOUT = "fanout"
    SESSIONS = "sessions"
    WARM = "warm"
    CONTROL = "control"
    TRAFFIC = "traffic"


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(bench)


def bench(
    workload: Annotated[Workload, typer.Argument(help="what to measure")],
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of tables")] = False,
    runs: Annotated[int, typer.Option(min=1, help="figures are the medians of this many runs")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="one small run: does it all work?")] = False,
    large: Annotated[bool, typer.Option("--large", help="replay: beside ten million stored events")] = False,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for a quiet machine before each part")] = 0.0,
    peers: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="directory with drivers of other systems")
    ] = None,
    peers_python: Annotated[
        str, typer.Option(envvar="HEARTH_PEERS_PYTHON", help="Python that has what those drivers need")
    ] = "",
    minutes: Annotated[float, typer.Option(min=0.1, help="traffic: how long, at least")] = 3.0,
    seed: Annotated[int, typer.Option(help="traffic and control: what chance is drawn from")] = 1,
    part: Annotated[list[str], typer.Option(help="control: only stops, kills, inputs or away; may be repeated")] = [],  # noqa: B006 - typer reads it
) -> None:
    """Start Postgres, Valkey and services of its own, load them, check every result, and say how fast it was.

    Exit code 0: all targets hold; 1: one does not, or a result was wrong; 2: void, as other processes used more than
    0.3 cores. Needs a checkout of the sources, which hold the benchmarks.
    """
    try:
        from benchmarks.clients import ClientError
        from benchmarks.control import PARTS
        from benchmarks.rig import RigError
        from benchmarks.runs import Options
        from benchmarks.workloads import WORKLOADS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        fail(
            "the benchmarks are no part of an installed Hearth: clone the repository, run `make setup` in it and then"
            " `.venv/bin/hearth bench` from that directory",
            Exit.USAGE,
        )
    unknown = [name for name in part if workload is not Workload.CONTROL or name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"{workload} has no part {', '.join(unknown)}", param_hint="--part")
    chosen = Options(
        runs=1 if quick else runs,
        quick=quick,
        large=large,
        patience=wait,
        peers=None if peers is None else peers.resolve(),
        peers_python=peers_python,
        minutes=minutes,
        seed=seed,
        parts=tuple(part),
    )
    try:
        report = asyncio.run(_to_its_end(WORKLOADS[workload], chosen))
    except (EmbeddedError, RigError) as error:
        fail(str(error), Exit.UNREACHABLE)
    except ClientError as error:
        fail(str(error))
    except asyncio.CancelledError:
        raise typer.Exit(143) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json:
        print_json(report.content())
    else:
        for table in report.tables():
            out.print(table)
        out.print(f"others used {report.others_cores:.2f} cores")
    for problem in report.problems[:20]:
        err.print(f"[red]wrong[/red] {problem}", soft_wrap=True)
    raise typer.Exit(report.exit_code)


async def _to_its_end(run: Any, options: Any) -> Any:
    """Run a workload; a SIGTERM cancels it, so that what it started is stopped and removed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(options, say)
