"""What is done inside an instance, as shell scripts, and how their answers are read. No IO here.

A script is one command of the toolbox. It needs sh, grep, awk and sleep, and nothing that the image may lack: no ps, no
Python. Answers are lines that begin with `hearth:`, so that what a profile of the shell prints does no harm.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hearth.secret import Secret, revealed
from services.sandbox.providers.port import DaemonRequest

TOKEN = "HEARTH_AGENTD_TOKEN"  # noqa: S105 - the name of the variable
AGENTS = "HEARTH_DAEMON_AGENTS"
# Agents behind sandbox-agent may think for longer than its default of 2 min; past it, it hangs for ever.
_DEFAULTS = {"SANDBOX_AGENT_ACP_REQUEST_TIMEOUT_MS": "86400000"}
_PLACEHOLDER = re.compile(r"\{(host|port|token|agents|logs)\}")
_HOST = "0.0.0.0"  # noqa: S104 - the proxy in front of the instance must reach it
_ANSWER = re.compile(r"^hearth: (\w+) ?(.*)$", re.MULTILINE)
_POLL_SECONDS = 0.05
_LOG = "hearth-daemon.log"
_LOG_BYTES = 2000

# Names of variables begin with h_, since those of the daemon are here too.
#
# Members are all processes of the instance but its base and this listing. The base is what this shell descends from:
# pid 1 and the toolbox. Everything in an instance carries the sandbox's id in its environment or descends from what
# does; going by that, and not by what /proc shows, keeps to the instance also where /proc shows more than it.
# `status` and not `stat`: a process chooses its own name, and `stat` does not escape it.
_LIST = r"""
h_base=
[ -r /proc/$PPID/environ ] || h_base=$PPID
members() {
  {
    grep -lszFx -e "DAYTONA_SANDBOX_ID=$h_id" /proc/[0-9]*/environ
    grep -Hs -e '^State:' -e '^PPid:' /proc/[0-9]*/status
  } 2>/dev/null | awk -F '[/: \t]+' -v me=$$ -v base="$h_base" '
    $4 == "environ" { marked[$3] = 1; next }
    $5 == "State" { if ($6 != "Z" && $6 != "X") alive[$3] = 1; next }
    $5 == "PPid" { parent[$3] = $6 }
    END {
      spared["1"] = 1
      n = 0
      for (p = me; p in parent && n < 10000; p = parent[p]) { spared[p] = 1; n++ }
      for (p in alive) {
        if (p in spared) continue
        mine = 0; own = 0; n = 0
        for (q = p; q in parent && n < 10000; q = parent[q]) {
          if (q == me) { own = 1; break }
          if (q in marked || q == base) mine = 1
          n++
        }
        if (mine && !own) print p
      }
    }'
}
"""

# Nothing is left when two listings in a row are empty: what forks and ends all the time could slip through one.
_KILL = r"""
h_rounds=0
h_empty=0
while [ $h_empty -lt 2 ]; do
  h_found=$(members)
  if [ -z "$h_found" ]; then
    h_empty=$((h_empty + 1))
    continue
  fi
  h_empty=0
  if [ $h_rounds -ge $h_most ]; then
    echo "hearth: alive" $h_found
    exit 3
  fi
  if [ $h_rounds -eq 0 ] && [ $h_grace -gt 0 ]; then
    kill -TERM $h_found 2>/dev/null
  elif [ $h_rounds -ge $h_grace ]; then
    kill -KILL $h_found 2>/dev/null
  fi
  h_rounds=$((h_rounds + 1))
  sleep $h_poll
done
"""

_START = r"""
mkdir -p "$h_workspace/.home" && cd "$h_workspace" || { echo "hearth: failed no workspace"; exit 4; }
# What the image has installed for its user stays where it is; what an agent remembers goes into the workspace.
XDG_DATA_HOME=${XDG_DATA_HOME:-${HOME:-/root}/.local/share}
HOME=$h_workspace/.home
export XDG_DATA_HOME HOME
h_logs=${TMPDIR:-/tmp}
h_log=$h_logs/%(log)s
rm -f -- "$h_log"
(umask 077; : >"$h_log") || { echo "hearth: failed no log"; exit 4; }
h_setsid=
command -v setsid >/dev/null 2>&1 && h_setsid=setsid
h_agents=${%(agents)s:-}
unset %(agents)s
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The last answer of a script: `word` is started, alive, failed, ended or empty when it gave none."""

    word: str
    rest: str


def restart_script(
    sandbox_id: str,
    workspace: str,
    command: Sequence[str],
    *,
    port: int,
    logins: Sequence[str] = (),
    grace: float,
    kill: float,
) -> str:
    """Kill all but the base, list again, start the daemon. Answers `started <pid>`, `alive <pids>` or `failed <why>`.

    The daemon's variables are those of the script, see `variables`. `logins` are files below HOME that are removed in
    between. `grace` and `kill` are seconds, see `DaytonaOptions`.
    """
    polite = round(grace / _POLL_SECONDS)
    settings = (
        f"h_id={shlex.quote(sandbox_id)}\nh_workspace={shlex.quote(workspace)}\n"
        f"h_grace={polite}\nh_most={polite + round(kill / _POLL_SECONDS)}\nh_poll={_POLL_SECONDS}\n"
    )
    start = _START % {"log": _LOG, "agents": AGENTS}
    if logins:
        start += f'(cd "$HOME" && rm -f -- {shlex.join(logins)})\n'
    return _command(settings + _LIST + _KILL + start + _launch(command, port) + 'echo "hearth: started $!"\n')


def look_script(pid: int) -> str:
    """Whether the daemon lives. Answers `alive <pid>` or `ended`, with the end of its log behind it."""
    return _command(
        f"if grep -qs '^State:.[^ZX]' /proc/{pid}/status; then echo 'hearth: alive {pid}'; else echo 'hearth: ended'; "
        f'fi\ntail -c {_LOG_BYTES} "${{TMPDIR:-/tmp}}/{_LOG}" 2>/dev/null\n'
    )


def empty_script(directory: str) -> str:
    """Remove everything in a directory. Answers `emptied`."""
    path = shlex.quote(directory.rstrip("/") + "/")
    return _command(f"find {path} -mindepth 1 -delete && echo 'hearth: emptied'\n")


def read(output: str) -> Answer:
    """The last answer in what a script wrote."""
    found = _ANSWER.findall(output)
    return Answer(*found[-1]) if found else Answer("", "")


def log_tail(output: str, secrets: Sequence[Secret]) -> str:
    """What `look_script` showed of the daemon's log, in one line and without these values."""
    for secret in secrets:
        output = output.replace(secret.reveal(), "***") if secret else output
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("hearth: ")]
    return " | ".join(lines[-5:]) or "it wrote nothing"


def variables(request: DaemonRequest, workspace: str, command: Sequence[str]) -> dict[str, str]:
    """The variables of a restart: those of the daemon, and what the script itself takes out of its environment.

    A daemon that is given its agents in a file passes each its own variables. Any other runs one agent, which inherits.
    """
    own: dict[str, str] = {TOKEN: request.token.reveal()}
    inherited: Mapping[str, Secret] = {}
    if _takes_agents(command):
        own[AGENTS] = json.dumps(
            {
                name: {"command": list(agent.command), "env": revealed(request.variables_of(agent)), "cwd": workspace}
                for name, agent in request.agents.items()
            }
        )
    else:
        agent = request.agents.get(request.agent)
        inherited = {**(agent.env if agent is not None else {}), **request.env}
    return {**_DEFAULTS, **revealed(inherited), **revealed(request.secrets), **own}


def _takes_agents(command: Sequence[str]) -> bool:
    return any("{agents}" in word for word in command)


def _launch(command: Sequence[str], port: int) -> str:
    """The line that starts the daemon in the background, its output in the log."""
    words = " ".join(_word(word, port) for word in command)
    # By its arguments it knows the token already; then its agents need not find it in their environment too.
    hide = f"env -u {TOKEN} " if any("{token}" in word for word in command) else ""
    line = f'$h_setsid {hide}{words} >"$h_log" 2>&1 &\n'
    # Through a pipe, so that no disk sees it; printf is part of the shell, so no list of processes does.
    return (
        f'printf %s "$h_agents" 2>/dev/null | {line}'
        if _takes_agents(command)
        else line.replace(" >", " </dev/null >", 1)
    )


def _word(word: str, port: int) -> str:
    """A word of the daemon's command line for the shell, placeholders filled in."""
    filled = {"host": _HOST, "port": str(port), "agents": "/dev/stdin", "token": f'"${TOKEN}"', "logs": '"$h_logs"'}
    parts = []
    end = 0
    for match in _PLACEHOLDER.finditer(word):
        parts += [shlex.quote(word[end : match.start()]) if match.start() > end else "", filled[match[1]]]
        end = match.end()
    if end < len(word) or not word:
        parts.append(shlex.quote(word[end:]))
    return "".join(parts)


def _command(script: str) -> str:
    """As a command for whatever shell the toolbox uses; that one is replaced, so the script's parent is the toolbox."""
    return f"exec sh -c {shlex.quote(script)}"
