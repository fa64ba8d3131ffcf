"""A stand-in of the Daytona API whose sandboxes are real processes on this machine.

The real SDK (`daytona`, async) talks to it unchanged: the API under `<url>` (which ends in `/api`), the toolbox of each
sandbox, Socket.IO, and the preview proxy that leads to ports in a sandbox. It follows the rules and error bodies of the
real server, takes as long as `Delays` says, fails as `faults` says, and writes down everything in `log`.

    async with StandIn.running(tmp_path) as stand_in:
        config = DaytonaConfig(api_key=stand_in.api_key, api_url=stand_in.url, target="us")

What a sandbox is here
    A directory `<directory>/sandboxes/<id>` with `home/` (HOME, the working directory of commands, what relative paths
    of the file API are relative to), `bin/` (first in PATH) and `tmp/` (TMPDIR). There is no root of its own: absolute
    paths are paths of this machine.
    A base process, the toolbox of this sandbox: everything executed is its child, and what loses its parent becomes
    its child. It is what pid 1 is in a real sandbox. Who kills it breaks the sandbox: it goes to `error`.
    Volumes are directories `<directory>/volumes/<id>`. A mount is a symbolic link, on this machine, from the mount path
    to the subpath in the volume; it goes away with the last running sandbox that mounts it. Tests mount below a
    directory of their own.

What a command sees that is executed inside
    DAYTONA_SANDBOX_ID, DAYTONA_SANDBOX_SNAPSHOT, DAYTONA_SANDBOX_USER, DAYTONA_ORGANIZATION_ID, DAYTONA_REGION_ID as
    in a real one, then the `env` of the create request, HOME, PATH, TMPDIR, LANG; nothing else of this process.
    `/proc` of the WHOLE machine: there is no namespace, most of it is somebody else's. A listing must keep to processes
    whose environment holds the lister's DAYTONA_SANDBOX_ID and to what descends from one of them; in a real sandbox,
    where pid 1 holds that variable, these are all there are. The base holds it too, and is an ancestor of every
    executed command, as pid 1 is in a real one: whoever kills all others spares its own ancestors.
    An address of loopback of its own (DAYTONA_STAND_IN_ADDRESS, 127.x.y.z): sandboxes share this machine's ports, so
    the word `0.0.0.0` in an executed command stands for this address. The preview proxy and `port/.../in-use` look
    there. So `sandbox-agent server --host 0.0.0.0 --port 3000` runs in many sandboxes at once, as it is.
    `sandbox-agent` in PATH: a launcher of `agent_command`, when one was given, with the arguments it gets.

Preview URLs have a path (`http://127.0.0.1:PORT/preview/3000-<id>`) where real ones have a host name of their own.
Linux only, for its loopback network and its /proc.

Rules of the real server that are easily overlooked
    create (from a snapshot), start and recover answer when it runs, or after `patience` with what it is by then;
    a failure meanwhile is a 400, and the sandbox stays there in `error`.
    A transition under way refuses every other order, deletion included, with 409; the wrong state is a 400.
    DELETE gives the name away at once: by its name a sandbox is a 404 from then on, by its id only when it is gone.
    An errored sandbox that was told to go is a 404 as well; the server finishes it later, nothing of it runs by then.
    Traffic through the preview proxy is no activity, calls of the toolbox are. The preview token is another after each
    start, which is stricter than what was seen of the real one.

What there is to check a run by
    `log` (see `journal.Entry`), `overlaps()`, `most_running()`, `most_idle(grace)`, `usage()`, `faults.counts()`; the
    same from another process by `remote.started`.

Not served: PTYs, code runs, git, language servers, computer use, search and replace in files, SSH, creating snapshots.
Pause and fork are refused as the real server refuses them for containers.
"""

from __future__ import annotations

from tests.support.daytona.delays import Delays
from tests.support.daytona.faults import Fault, Faults, Kind
from tests.support.daytona.journal import Entry, Journal
from tests.support.daytona.stand_in import RunningStandIn, StandIn

__all__ = ["Delays", "Entry", "Fault", "Faults", "Journal", "Kind", "RunningStandIn", "StandIn"]
