-- One row for each conversation, kept for ever: a deleted one stays as a tombstone, so that its epoch never starts again.
-- Whoever writes anything of a session locks this row first.
CREATE TABLE pool.session (
    project text NOT NULL,
    session text NOT NULL,
    -- Only grows: one for each admission and each takeover.
    epoch bigint NOT NULL DEFAULT 0 CHECK (epoch >= 0),
    -- The replica that keeps its entry or drives it.
    holder uuid,
    queue_paused boolean NOT NULL DEFAULT false,
    -- A serialized hearth.session.v1.SessionSpec: the one of the newest execution.
    spec bytea NOT NULL DEFAULT '',
    -- The newest execution, and the last one that was settled.
    execution_id uuid,
    ended_execution_id uuid,
    -- Who wrote the last finished turn, which `session/load` may be asked for. NULL when that would load something else.
    harness_agent text,
    harness_session_id text,
    harness_execution_id uuid,
    -- The number of the newest fact, and the place in the log up to which facts were acknowledged.
    outbox_number bigint NOT NULL DEFAULT 0,
    history_sequence bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    -- Set when the deletion was accepted; `purged_at` when sandbox, workspace, log and rows are gone.
    deleted_at timestamptz,
    purged_at timestamptz,
    PRIMARY KEY (project, session)
) WITH (fillfactor = 70);

CREATE INDEX session_by_change ON pool.session (project, updated_at DESC, session DESC) WHERE deleted_at IS NULL;
CREATE INDEX session_by_holder ON pool.session (holder) WHERE holder IS NOT NULL;
CREATE INDEX session_to_purge ON pool.session (deleted_at) WHERE deleted_at IS NOT NULL AND purged_at IS NULL;

CREATE TABLE pool.execution (
    execution_id uuid PRIMARY KEY,
    project text NOT NULL,
    session text NOT NULL,
    -- At which it is driven, and at which it was admitted: the first grows with each takeover, the second never changes.
    epoch bigint NOT NULL CHECK (epoch >= 1),
    admitted_epoch bigint NOT NULL CHECK (admitted_epoch >= 1),
    state text NOT NULL CHECK (state IN ('PENDING', 'RUNNING', 'WAITING', 'STOPPING', 'TERMINAL')),
    outcome text CHECK (outcome IN ('COMPLETED', 'PAUSED', 'STOPPED', 'FAILED', 'LOST')),
    failure_code text NOT NULL DEFAULT '',
    input_id uuid,
    source_execution_id uuid,
    tries integer NOT NULL DEFAULT 0,
    -- The replica that picked it up.
    driver uuid,
    picked_up_at timestamptz,
    -- The event by which the pool itself ends it: it is in the outbox, and nobody may run the execution any more.
    ending_event_id uuid,
    -- What the prompt was given to.
    agent text,
    harness_session_id text,
    traceparent text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    settled_at timestamptz,
    ending_sequence bigint NOT NULL DEFAULT 0,
    FOREIGN KEY (project, session) REFERENCES pool.session,
    CHECK ((state = 'TERMINAL') = (outcome IS NOT NULL))
);

CREATE UNIQUE INDEX execution_one_at_a_time ON pool.execution (project, session) WHERE state <> 'TERMINAL';
CREATE UNIQUE INDEX execution_one_continuation ON pool.execution (source_execution_id)
    WHERE source_execution_id IS NOT NULL;
CREATE INDEX execution_by_session ON pool.execution (project, session, created_at);
CREATE INDEX execution_unfinished ON pool.execution (created_at) WHERE state <> 'TERMINAL';

CREATE TABLE pool.input (
    input_id uuid PRIMARY KEY,
    project text NOT NULL,
    session text NOT NULL,
    state text NOT NULL CHECK (state IN ('PENDING', 'PROMOTED', 'REMOVED')),
    -- A serialized hearth.session.v1.Input that holds only the content.
    content bytea NOT NULL,
    -- Where it stands in the queue; the rank is counted at read.
    order_key bigint NOT NULL,
    -- The spec that comes into force with it, and what its sender believed the conversation to be; NULL when not given.
    spec bytea,
    expected_transcript bytea,
    -- The cancel that is asked for its sake.
    steer_command_id uuid,
    execution_id uuid,
    traceparent text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    promoted_at timestamptz,
    FOREIGN KEY (project, session) REFERENCES pool.session,
    CHECK ((state = 'PROMOTED') = (execution_id IS NOT NULL))
);

CREATE INDEX input_queue ON pool.input (project, session, order_key) WHERE state = 'PENDING';
CREATE INDEX input_by_execution ON pool.input (execution_id) WHERE execution_id IS NOT NULL;

CREATE TABLE pool.command (
    command_id uuid PRIMARY KEY,
    project text NOT NULL,
    session text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('CANCEL', 'STEER', 'ANSWER')),
    -- NULL when nothing ran.
    execution_id uuid,
    state text NOT NULL CHECK (state IN ('PENDING', 'CLAIMED', 'APPLIED', 'OBSOLETE')),
    outcome text CHECK (outcome IN ('STOPPED', 'ANSWERED', 'STARTED', 'NOT_RUNNING', 'SUPERSEDED', 'FAILED', 'LOST')),
    -- Deliveries that were begun, by whom the present one, and until when it counts.
    attempts integer NOT NULL DEFAULT 0,
    claimed_by uuid,
    claim_expires_at timestamptz,
    steer_input_id uuid,
    created_at timestamptz NOT NULL DEFAULT now(),
    settled_at timestamptz,
    FOREIGN KEY (project, session) REFERENCES pool.session,
    CHECK ((state IN ('APPLIED', 'OBSOLETE')) = (outcome IS NOT NULL))
);

CREATE UNIQUE INDEX command_one_open_cancel ON pool.command (execution_id)
    WHERE state IN ('PENDING', 'CLAIMED') AND kind IN ('CANCEL', 'STEER');
CREATE INDEX command_by_session ON pool.command (project, session);
CREATE INDEX command_open ON pool.command (created_at) WHERE state IN ('PENDING', 'CLAIMED');

-- What the agent asks people.
CREATE TABLE pool.gate (
    interaction_id uuid PRIMARY KEY,
    project text NOT NULL,
    session text NOT NULL,
    execution_id uuid NOT NULL REFERENCES pool.execution,
    tool_call_id text NOT NULL,
    -- The agent's own id of the request: it may ask twice for one call.
    request_key text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('APPROVAL', 'QUESTION', 'CLIENT_TOOL')),
    state text NOT NULL CHECK (state IN ('PENDING', 'ANSWERED', 'CONSUMED', 'CLOSED')),
    -- A serialized hearth.types.v1.InteractionRequested.
    request bytea NOT NULL,
    input_digest bytea NOT NULL,
    decision text CHECK (decision IN ('ALLOWED', 'DENIED')),
    answer_json text,
    answered_by text,
    resolution text CHECK (resolution IN ('CONSUMED', 'POLICY', 'EXECUTION_ENDED', 'CANCELLED', 'EXPIRED')),
    created_at timestamptz NOT NULL DEFAULT now(),
    answered_at timestamptz,
    closed_at timestamptz,
    expires_at timestamptz NOT NULL,
    FOREIGN KEY (project, session) REFERENCES pool.session,
    UNIQUE (execution_id, tool_call_id, request_key),
    CHECK ((state IN ('CONSUMED', 'CLOSED')) = (resolution IS NOT NULL))
);

CREATE INDEX gate_by_session ON pool.gate (project, session, created_at);
CREATE INDEX gate_open ON pool.gate (expires_at) WHERE state IN ('PENDING', 'ANSWERED');

-- Every request id that was accepted, and what it made. Several may name one command: those are its aliases.
CREATE TABLE pool.request (
    project text NOT NULL,
    session text NOT NULL,
    request_id text NOT NULL,
    method text NOT NULL,
    -- SHA-256 of the request without its id.
    fingerprint bytea NOT NULL,
    input_id uuid,
    command_id uuid,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (project, session, request_id),
    FOREIGN KEY (project, session) REFERENCES pool.session
);

-- Facts that readers must see, written in the transaction that made them true, numbered for each session.
CREATE TABLE pool.outbox (
    project text NOT NULL,
    session text NOT NULL,
    number bigint NOT NULL,
    event_id uuid NOT NULL,
    -- A serialized hearth.types.v1.Event: what is sent again must be the same bytes.
    event bytea NOT NULL,
    -- The execution that it starts or ends, and which of the two.
    execution_id uuid,
    transition text NOT NULL DEFAULT '' CHECK (transition IN ('', 'STARTED', 'ENDED')),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Why history will never take it. Such a row stays for people to see and holds up nothing.
    refused text,
    PRIMARY KEY (project, session, number),
    UNIQUE (project, session, event_id),
    FOREIGN KEY (project, session) REFERENCES pool.session
);

CREATE INDEX outbox_waiting ON pool.outbox (created_at) WHERE refused IS NULL;

-- Pool processes. `beats` only grows while one lives; nobody compares the times.
CREATE TABLE pool.replica (
    holder uuid PRIMARY KEY,
    address text NOT NULL,
    beats bigint NOT NULL DEFAULT 0,
    draining boolean NOT NULL DEFAULT false,
    -- The sessions that it drives, as of its last beat, and how many entries it keeps.
    driving text[] NOT NULL DEFAULT '{}',
    entries integer NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    beat_at timestamptz NOT NULL DEFAULT now()
);
