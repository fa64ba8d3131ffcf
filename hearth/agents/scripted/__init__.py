"""A deterministic agent for demos, tests and benchmarks, spoken to in ACP over stdio.

`python -m hearth.agents.scripted`. It has no model. What it does is written in the prompt, so that whoever reads a demo
or a test sees it there. The text of a prompt is taken line by line. A line that is a directive of this table is carried
out; the other lines are talk. A turn in which nothing was said ends with "Done.", unless it says `empty`.

Directives (N, BYTES, CODE are integers, S and R numbers, {json} a JSON object that may be left out):

    stream N words at R/s       N deltas of one word each, R a second; without "at R/s" as fast as possible
    think N                     N deltas of thought
    tool NAME {json}            a tool call with this input, from pending to completed
    ask NAME {json}             the same, but asks for permission first (allow_once, allow_always, reject_once)
    parallel ask NAME {json}    neighbouring lines that begin with "parallel" are begun all at once; each goes on when
                                it is answered, the turn when all are. Also: parallel run COMMAND, parallel hearth-ask
                                {json}, parallel hearth-client-tool {json}
    run COMMAND                 a shell command in the session's directory, as a tool call; a cancel kills it
    leave-child S               leaves a process, in a session of its own, that sleeps S seconds
    sleep S                     waits
    flood N BYTES               N deltas of BYTES each, as fast as possible
    line BYTES                  one delta of BYTES
    plan                        a plan of three entries, worked off
    fs-write PATH TEXT          writes a file in the session's directory
    read PATH                   reads a file, and says what is in it
    hearth-ask {json}           the extension request _hearth/ask, then says what was answered
    hearth-client-tool {json}   the extension request _hearth/client_tool, likewise
    commands                    an update of the list of commands, which says nothing to anybody
    usage                       an update of the tokens in use, which is no answer either
    later S TEXT                says something S seconds later, whether or not the turn still runs
    later-ask S NAME            asks for permission to use a tool S seconds later, likewise
    error TEXT                  answers the prompt with a JSON-RPC error
    empty                       ends the turn without a word
    cancelled-unasked           ends the turn as cancelled though nobody cancelled it
    garbage                     writes lines that are not JSON-RPC
    hang                        waits for ever; a cancel ends it
    hang-hard                   waits for ever; neither a cancel nor the end of the input ends it
    ignore-eof                  from now on the end of the input does not end the process
    crash CODE                  says something on stderr and exits with CODE
    crash-silent                is gone without a word, by SIGKILL

Talk: "remember my name is Ada" is remembered with the session (any word in place of name), "what is my name?" is
answered from it, "who are you?" with the process id and the turns this process knows. Anything else is echoed. What an
embedded resource of the prompt says of this kind is remembered too, without an answer.

What Hearth says of requests that were open when an earlier turn ended is understood: a call that was approved is asked
for again and then run, once. Its input may hold `"asks": N`, to ask so often for the same call all at once, and
`"instead": {json}`, to ask with this input instead. The other sentences are repeated.

Sessions are kept in $HEARTH_AGENT_STATE (default $HOME/.hearth-scripted), so another process can load them. With
$HEARTH_SCRIPTED_LOG set, opened sessions, prompts, cancels, permissions and tool runs are written there, one JSON
object a line, synced to the disk before their effects are seen. Of the variables and headers that it is given only
those that $HEARTH_SCRIPTED_LOG_VALUES names, with spaces between, are written with their values.
$HEARTH_SCRIPTED_START makes the start fail: `exit:CODE`, `hang`, `garbage`.
"""
