-- Everything the pool asks of its schema. Whoever writes anything of a session locks its row first; statements that stand
-- alone do both in one. A transition names the state it expects, and no row back means that the race was lost.

-- name: lock_session
SELECT * FROM pool.session WHERE project = $1 AND session = $2 FOR UPDATE

-- name: make_session
INSERT INTO pool.session (project, session) VALUES ($1, $2) ON CONFLICT DO NOTHING

-- name: save_session
WITH facts AS (
    INSERT INTO pool.outbox (project, session, number, event_id, event, execution_id, transition)
    SELECT $1, $2, f.number, f.event_id, f.event, f.execution_id, f.transition
    FROM unnest($11::bigint[], $12::uuid[], $13::bytea[], $14::uuid[], $15::text[])
        AS f (number, event_id, event, execution_id, transition)
    ON CONFLICT (project, session, event_id) DO NOTHING
)
UPDATE pool.session
SET epoch = $3, holder = $4, queue_paused = $5, spec = $6, execution_id = $7, ended_execution_id = $8,
    harness_agent = $9, harness_session_id = $10, harness_execution_id = $18, outbox_number = $16, deleted_at = $17,
    updated_at = now()
WHERE project = $1 AND session = $2

-- name: view
SELECT e.*, r.method AS request_method, r.fingerprint AS request_fingerprint, r.input_id AS request_input_id,
    r.command_id AS request_command_id, r.attachment_id AS request_attachment_id,
    (SELECT count(*) FROM pool.input i WHERE i.project = $1 AND i.session = $2 AND i.state = 'PENDING') AS queued,
    (SELECT count(*) FROM pool.gate g
     WHERE g.project = $1 AND g.session = $2 AND g.state = 'PENDING') AS open_gates,
    EXISTS (SELECT 1 FROM pool.carried($1, $2)) AS carried
FROM (VALUES (1)) one (row)
LEFT JOIN pool.request r ON r.project = $1 AND r.session = $2 AND r.request_id = $3
LEFT JOIN pool.execution e ON e.project = $1 AND e.session = $2 AND e.state <> 'TERMINAL'

-- name: insert_request
INSERT INTO pool.request (project, session, request_id, method, fingerprint, input_id, command_id, attachment_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)

-- name: admit
-- With what `save_session` would write: one round trip less for every message.
WITH accepted AS (
    INSERT INTO pool.request (project, session, request_id, method, fingerprint, input_id)
    VALUES ($1, $2, $3, 'SendInput', $4, $5)
), waiting AS (
    INSERT INTO pool.input (input_id, project, session, state, content, order_key, spec, expected_transcript,
                            execution_id, promoted_at, traceparent, steer_command_id)
    VALUES ($5, $1, $2, CASE WHEN $6::uuid IS NULL THEN 'PENDING' ELSE 'PROMOTED' END, $7,
            (SELECT CASE WHEN $23::boolean THEN coalesce(min(order_key), 1) - 1 ELSE coalesce(max(order_key), 0) + 1 END
             FROM pool.input
             WHERE project = $1 AND session = $2 AND state = 'PENDING'),
            $8, $9, $6, CASE WHEN $6::uuid IS NULL THEN NULL ELSE now() END, $10, $24)
), facts AS (
    INSERT INTO pool.outbox (project, session, number, event_id, event, execution_id, transition)
    SELECT $1, $2, f.number, f.event_id, f.event, f.execution_id, f.transition
    FROM unnest($13::bigint[], $14::uuid[], $15::bytea[], $16::uuid[], $17::text[])
        AS f (number, event_id, event, execution_id, transition)
    ON CONFLICT (project, session, event_id) DO NOTHING
), saved AS (
    UPDATE pool.session
    SET epoch = $11, holder = $18, queue_paused = $19, spec = $20, execution_id = $21, outbox_number = $22,
        updated_at = now()
    WHERE project = $1 AND session = $2
)
INSERT INTO pool.execution (execution_id, project, session, epoch, admitted_epoch, state, input_id, traceparent,
                            driver, picked_up_at, tries)
SELECT $6, $1, $2, $11, $11, 'PENDING', $5, $10,
       $12, CASE WHEN $12::uuid IS NULL THEN NULL ELSE now() END, CASE WHEN $12::uuid IS NULL THEN 0 ELSE 1 END
WHERE $6::uuid IS NOT NULL
RETURNING *

-- name: promote
WITH promoted AS (
    UPDATE pool.input SET state = 'PROMOTED', execution_id = $3, promoted_at = now(), steer_command_id = NULL
    WHERE input_id = $1 AND state = 'PENDING'
    RETURNING *
)
INSERT INTO pool.execution (execution_id, project, session, epoch, admitted_epoch, state, input_id, traceparent)
SELECT $3, project, session, $2, $2, 'PENDING', input_id, traceparent FROM promoted
RETURNING *

-- name: queue
SELECT i.*, row_number() OVER (ORDER BY order_key, created_at, input_id) AS rank
FROM pool.input i
WHERE project = $1 AND session = $2 AND state = 'PENDING'
ORDER BY order_key, created_at, input_id
OFFSET $3 LIMIT $4

-- name: unstarted_inputs
SELECT i.*, 0::bigint AS rank
FROM pool.input i JOIN pool.execution e ON e.execution_id = i.execution_id
WHERE e.project = $1 AND e.session = $2 AND e.state <> 'TERMINAL' AND e.started_at IS NULL

-- name: input
SELECT i.*, CASE WHEN i.state = 'PENDING' THEN (
    SELECT count(*) FROM pool.input o
    WHERE o.project = i.project AND o.session = i.session AND o.state = 'PENDING'
      AND (o.order_key, o.created_at, o.input_id) <= (i.order_key, i.created_at, i.input_id)
) ELSE 0 END AS rank
FROM pool.input i
WHERE i.project = $1 AND i.session = $2 AND i.input_id = $3

-- name: remove_inputs
UPDATE pool.input SET state = 'REMOVED', steer_command_id = NULL
WHERE project = $1 AND session = $2 AND state = 'PENDING' AND ($3::uuid IS NULL OR input_id = $3)
RETURNING input_id

-- name: update_input
UPDATE pool.input SET content = $2 WHERE input_id = $1 AND state = 'PENDING' RETURNING input_id

-- name: session
SELECT * FROM pool.session WHERE project = $1 AND session = $2

-- name: shown_sessions
SELECT s.*,
    (SELECT count(*) FROM pool.input i
     WHERE i.project = s.project AND i.session = s.session AND i.state = 'PENDING') AS queued,
    (SELECT count(*) FROM pool.gate g
     WHERE g.project = s.project AND g.session = s.session AND g.state = 'PENDING') AS open_gates
FROM pool.session s
WHERE s.project = $1 AND s.deleted_at IS NULL
  AND ($2::timestamptz IS NULL OR (s.updated_at, s.session) < ($2, $3))
ORDER BY s.updated_at DESC, s.session DESC
LIMIT $4

-- name: shown_session
SELECT s.*,
    (SELECT count(*) FROM pool.input i WHERE i.project = $1 AND i.session = $2 AND i.state = 'PENDING') AS queued,
    (SELECT count(*) FROM pool.gate g WHERE g.project = $1 AND g.session = $2 AND g.state = 'PENDING') AS open_gates
FROM pool.session s
WHERE s.project = $1 AND s.session = $2

-- name: execution
SELECT * FROM pool.execution WHERE project = $1 AND session = $2 AND execution_id = $3

-- name: executions
SELECT * FROM pool.execution WHERE execution_id = ANY ($1::uuid[])

-- name: active_execution
SELECT * FROM pool.execution WHERE project = $1 AND session = $2 AND state <> 'TERMINAL'

-- name: pick_up
WITH locked AS (
    SELECT * FROM pool.session WHERE project = $1 AND session = $2 AND deleted_at IS NULL FOR UPDATE
), picked AS (
    UPDATE pool.execution
    -- Picked up again by who has it already, it is the same try.
    SET driver = $3, picked_up_at = now(), tries = tries + CASE WHEN driver = $3 THEN 0 ELSE 1 END
    WHERE project = $1 AND session = $2 AND state = 'PENDING' AND ending_event_id IS NULL
      AND (driver IS NULL OR driver = $3) AND EXISTS (SELECT 1 FROM locked)
    RETURNING *
), held AS (
    UPDATE pool.session SET holder = $3
    WHERE project = $1 AND session = $2 AND holder IS DISTINCT FROM $3 AND EXISTS (SELECT 1 FROM picked)
)
SELECT picked.*, locked.spec AS session_spec, locked.ended_execution_id AS ended_execution_id,
    locked.harness_agent AS finished_agent, locked.harness_session_id AS finished_session_id,
    locked.harness_execution_id AS finished_execution_id,
    input.content AS input_content, input.expected_transcript AS expected_transcript,
    picked.source_execution_id IS NOT NULL OR EXISTS (SELECT 1 FROM pool.carried($1, $2)) AS carried
FROM picked CROSS JOIN locked LEFT JOIN pool.input ON input.input_id = picked.input_id

-- name: give_back
UPDATE pool.execution SET driver = NULL, tries = greatest(tries - 1, 0)
WHERE execution_id = $1 AND driver = $2 AND epoch = $3 AND state = 'PENDING' AND ending_event_id IS NULL

-- name: count_try
UPDATE pool.execution SET tries = greatest(tries + $4, 0)
WHERE execution_id = $1 AND driver = $2 AND epoch = $3 AND state = 'PENDING'

-- name: run
WITH locked AS (
    SELECT 1 FROM pool.session WHERE project = $1 AND session = $2 FOR UPDATE
)
UPDATE pool.execution
SET state = 'RUNNING', started_at = coalesce(started_at, now()), agent = $6, harness_session_id = $7
WHERE execution_id = $3 AND epoch = $4 AND driver = $5 AND (state = ANY ($8::text[]) OR state = 'RUNNING')
  AND ending_event_id IS NULL AND EXISTS (SELECT 1 FROM locked)
RETURNING *

-- name: unasked
-- Its agent was not asked after all: the record of that has nothing of it.
UPDATE pool.execution SET harness_session_id = NULL
WHERE execution_id = $1 AND driver = $2 AND epoch = $3 AND state <> 'TERMINAL' AND ending_event_id IS NULL

-- name: settle
WITH ended AS (
    UPDATE pool.execution
    SET state = 'TERMINAL', outcome = $2, failure_code = $3, ending_sequence = $4, settled_at = now()
    WHERE execution_id = $1 AND state <> 'TERMINAL'
    RETURNING *
), closing AS (
    SELECT steer_input_id, greatest(extract(epoch FROM now() - created_at), 0)::float8 AS seconds
    FROM pool.command
    WHERE execution_id = $1 AND state IN ('PENDING', 'CLAIMED') AND kind IN ('CANCEL', 'STEER')
), unbound AS (
    UPDATE pool.input SET steer_command_id = NULL
    WHERE input_id IN (SELECT steer_input_id FROM closing) AND state = 'PENDING' AND EXISTS (SELECT 1 FROM ended)
    RETURNING input_id
), told AS (
    UPDATE pool.command
    SET state = CASE WHEN $5 = 'STOPPED' AND kind IN ('CANCEL', 'STEER') THEN 'APPLIED' ELSE 'OBSOLETE' END,
        outcome = CASE WHEN $5 = 'STOPPED' AND kind NOT IN ('CANCEL', 'STEER') THEN 'NOT_RUNNING' ELSE $5 END,
        settled_at = now()
    WHERE execution_id = $1 AND state IN ('PENDING', 'CLAIMED') AND EXISTS (SELECT 1 FROM ended)
)
SELECT *, EXISTS (
    SELECT 1 FROM pool.input i WHERE i.project = ended.project AND i.session = ended.session AND i.state = 'PENDING'
) AS waiting, EXISTS (
    SELECT 1 FROM pool.gate g WHERE g.execution_id = ended.execution_id AND g.state IN ('PENDING', 'ANSWERED')
) AS asked, (SELECT seconds FROM closing) AS cancelled_for, (SELECT input_id FROM unbound) AS steered
FROM ended

-- name: end_by_pool
UPDATE pool.execution
SET state = $2, ending_event_id = $3, epoch = $4, driver = NULL
WHERE execution_id = $1 AND state <> 'TERMINAL' AND ending_event_id IS NULL
RETURNING *

-- name: open_gates
SELECT interaction_id FROM pool.gate WHERE execution_id = $1 AND state IN ('PENDING', 'ANSWERED')
ORDER BY created_at, interaction_id

-- name: stop
UPDATE pool.execution SET state = 'STOPPING'
WHERE execution_id = $1 AND state = ANY ($2::text[])
RETURNING *

-- name: step
UPDATE pool.execution SET epoch = $3, ending_event_id = coalesce($2, ending_event_id), driver = NULL
WHERE execution_id = $1 AND epoch < $3 AND state <> 'TERMINAL'

-- name: raise_epoch
UPDATE pool.execution SET epoch = $2, driver = $3
WHERE execution_id = $1 AND epoch < $2 AND state <> 'TERMINAL'
RETURNING *

-- name: insert_command
INSERT INTO pool.command (command_id, project, session, kind, execution_id, state, outcome, settled_at, steer_input_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, CASE WHEN $7::text IS NULL THEN NULL ELSE now() END, $8)
RETURNING *

-- name: command
SELECT * FROM pool.command WHERE project = $1 AND session = $2 AND command_id = $3

-- name: open_cancel
SELECT * FROM pool.command
WHERE execution_id = $1 AND state IN ('PENDING', 'CLAIMED') AND kind IN ('CANCEL', 'STEER')

-- name: bind
UPDATE pool.command SET steer_input_id = $2
WHERE command_id = $1 AND state IN ('PENDING', 'CLAIMED') AND steer_input_id IS NULL
RETURNING *

-- name: unbind
WITH unbound AS (
    UPDATE pool.input SET steer_command_id = NULL
    WHERE input_id = (SELECT steer_input_id FROM pool.command WHERE command_id = $1) AND state = 'PENDING'
)
UPDATE pool.command SET kind = 'CANCEL', steer_input_id = NULL
WHERE command_id = $1 AND state IN ('PENDING', 'CLAIMED')
RETURNING *

-- name: move_first
UPDATE pool.input i
SET steer_command_id = $2, order_key = (
    SELECT min(o.order_key) - 1 FROM pool.input o
    WHERE o.project = i.project AND o.session = i.session AND o.state = 'PENDING'
)
WHERE input_id = $1 AND state = 'PENDING'

-- name: parked
SELECT * FROM pool.execution e
WHERE e.project = $1 AND e.session = $2 AND e.state = 'TERMINAL' AND e.outcome = 'PAUSED'
  AND EXISTS (SELECT 1 FROM pool.gate g WHERE g.execution_id = e.execution_id AND g.state = 'PENDING')
ORDER BY e.created_at DESC LIMIT 1

-- name: claim_cancel
-- By who drives it. The try is counted before anything is delivered, and never above the most.
UPDATE pool.command
SET state = 'CLAIMED', claimed_by = $2, claim_expires_at = now() + make_interval(secs => $3), attempts = attempts + 1
WHERE execution_id = $1 AND kind IN ('CANCEL', 'STEER') AND state = 'PENDING' AND attempts < $4
  AND EXISTS (SELECT 1 FROM pool.execution e WHERE e.execution_id = $1 AND e.driver = $2)
RETURNING *

-- name: open_commands
SELECT * FROM pool.command WHERE project = $1 AND session = $2 AND state IN ('PENDING', 'CLAIMED') ORDER BY created_at

-- name: settle_command
WITH unbound AS (
    UPDATE pool.input SET steer_command_id = NULL
    WHERE input_id = (SELECT steer_input_id FROM pool.command WHERE command_id = $1) AND state = 'PENDING'
)
UPDATE pool.command SET state = $2, outcome = $3, settled_at = now()
WHERE command_id = $1 AND state IN ('PENDING', 'CLAIMED')
RETURNING command_id

-- name: outbox
SELECT number, event_id, event, execution_id, transition FROM pool.outbox
WHERE project = $1 AND session = $2 AND refused IS NULL
ORDER BY number
LIMIT $3

-- name: acknowledge
-- Does not wait for the disk: what a crash of the database brings back is told again, to the same answer.
WITH hurried AS (
    SELECT set_config('synchronous_commit', 'off', true)
), locked AS (
    UPDATE pool.session SET history_sequence = greatest(history_sequence, $4)
    WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM hurried)
    RETURNING 1
)
DELETE FROM pool.outbox
WHERE project = $1 AND session = $2 AND number = ANY ($3::bigint[]) AND EXISTS (SELECT 1 FROM locked)

-- name: refuse_fact
UPDATE pool.outbox SET refused = $4
WHERE project = $1 AND session = $2 AND number = $3 AND refused IS NULL

-- name: rewrite_fact
UPDATE pool.outbox SET event_id = $4, event = $5
WHERE project = $1 AND session = $2 AND number = $3 AND refused IS NULL

-- name: outbox_depth
SELECT count(*) FROM pool.outbox WHERE refused IS NULL

-- name: driven_by
SELECT * FROM pool.execution WHERE state <> 'TERMINAL' AND driver = $1 AND ending_event_id IS NULL

-- name: clear_holder
UPDATE pool.session SET holder = NULL
WHERE project = $1 AND session = $2 AND holder = $3
  AND NOT EXISTS (SELECT 1 FROM pool.execution e
                  WHERE e.project = $1 AND e.session = $2 AND e.state <> 'TERMINAL' AND e.driver = $3)

-- name: to_purge
-- At random: the oldest ones are those that fail again and again, and all others would wait for them.
SELECT project, session, epoch FROM pool.session WHERE deleted_at < now() - interval '10 seconds' AND purged_at IS NULL
ORDER BY random() LIMIT $1

-- name: purge
WITH locked AS (
    UPDATE pool.session
    SET purged_at = now(), spec = '', holder = NULL, execution_id = NULL, ended_execution_id = NULL,
        harness_agent = NULL, harness_session_id = NULL, harness_execution_id = NULL
    WHERE project = $1 AND session = $2 AND deleted_at IS NOT NULL
    RETURNING 1
), gates AS (
    DELETE FROM pool.gate WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)
), commands AS (
    DELETE FROM pool.command WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)
), inputs AS (
    DELETE FROM pool.input WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)
), requests AS (
    DELETE FROM pool.request WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)
), facts AS (
    DELETE FROM pool.outbox WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)
), attachments AS (
    DELETE FROM pool.attachment WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)
)
DELETE FROM pool.execution WHERE project = $1 AND session = $2 AND EXISTS (SELECT 1 FROM locked)

-- name: replicas
SELECT * FROM pool.replica WHERE holder > coalesce($1, '00000000-0000-0000-0000-000000000000'::uuid)
ORDER BY holder LIMIT $2

-- name: lock_credential
SELECT pg_advisory_xact_lock(hashtextextended($1, 0))

-- name: next_generation
SELECT nextval('pool.credential_generation')

-- name: accept_project_request
INSERT INTO pool.project_request (project, request_id, method, fingerprint) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING
RETURNING method

-- name: project_request
SELECT * FROM pool.project_request WHERE project = $1 AND request_id = $2

-- name: credential
SELECT * FROM pool.credential WHERE project = $1 AND name = $2

-- name: credentials
SELECT * FROM pool.credential WHERE project = $1 AND name > $2 ORDER BY name LIMIT $3

-- name: credentials_by_name
SELECT * FROM pool.credential WHERE project = $1 AND name = ANY ($2::text[])

-- name: put_credential
INSERT INTO pool.credential (project, name, generation, value_generation, sealed, expires_at)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (project, name) DO UPDATE
SET generation = $3, value_generation = $4, sealed = $5, expires_at = $6, updated_at = now()
RETURNING *

-- name: delete_credential
DELETE FROM pool.credential WHERE project = $1 AND name = $2

-- name: sealed_values
SELECT project, name, value_generation, sealed FROM pool.credential
WHERE (project, name) > ($1, $2)
ORDER BY project, name
LIMIT $3

-- name: seal_anew
UPDATE pool.credential SET sealed = $4 WHERE project = $1 AND name = $2 AND sealed = $3

-- name: insert_attachment
INSERT INTO pool.attachment (attachment_id, project, session, name, media_type, digest, content)
VALUES ($1, $2, $3, $4, $5, $6, $7)

-- name: attachments
SELECT attachment_id, name, media_type, digest, length(content) AS size_bytes FROM pool.attachment
WHERE project = $1 AND session = $2 AND attachment_id = ANY ($3::uuid[])

-- name: attachment_content
SELECT content FROM pool.attachment WHERE project = $1 AND session = $2 AND attachment_id = $3

-- name: wait
-- `moment` is the time of this transaction, from which what is asked in it counts.
UPDATE pool.execution SET state = 'WAITING'
WHERE execution_id = $1 AND epoch = $2 AND driver = $3 AND ending_event_id IS NULL
  AND (state = ANY ($4::text[]) OR state = 'WAITING')
RETURNING now() AS moment

-- name: insert_gates
-- Those of one call lie a microsecond apart, so that they are listed in the order in which they were asked.
INSERT INTO pool.gate (interaction_id, project, session, execution_id, tool_call_id, request_key, kind, state, request,
                       input_digest, created_at, expires_at)
SELECT g.interaction_id, $1, $2, $3, g.tool_call_id, g.request_key, g.kind, 'PENDING', g.request,
       g.input_digest, now() + g.place * interval '1 microsecond', $10
FROM unnest($4::uuid[], $5::text[], $6::text[], $7::text[], $8::bytea[], $9::bytea[]) WITH ORDINALITY
    AS g (interaction_id, tool_call_id, request_key, kind, request, input_digest, place)
ON CONFLICT (interaction_id) DO NOTHING
RETURNING *

-- name: gates
SELECT * FROM pool.gate WHERE project = $1 AND session = $2 AND interaction_id = ANY ($3::uuid[])

-- name: gates_of
SELECT * FROM pool.gate WHERE execution_id = $1 ORDER BY created_at, interaction_id

-- name: list_gates
SELECT * FROM pool.gate
WHERE project = $1 AND session = $2
  AND (NOT $3::boolean OR (state = 'PENDING' AND expires_at > now()))
  AND ($4::timestamptz IS NULL OR (created_at, interaction_id) > ($4, $5::uuid))
ORDER BY created_at, interaction_id
LIMIT $6

-- name: answer_gates
UPDATE pool.gate g
SET state = 'ANSWERED', decision = a.decision, answer_json = a.answer_json, answered_by = $6, answered_at = now()
FROM unnest($3::uuid[], $4::text[], $5::text[]) AS a (interaction_id, decision, answer_json)
WHERE g.project = $1 AND g.session = $2 AND g.interaction_id = a.interaction_id
  AND g.state = 'PENDING' AND g.expires_at > now()
RETURNING g.*

-- name: consume_gates
UPDATE pool.gate SET state = 'CONSUMED', resolution = 'CONSUMED', consumed_by = $3, closed_at = now()
WHERE project = $1 AND session = $2 AND interaction_id = ANY ($4::uuid[]) AND state = 'ANSWERED'
RETURNING *

-- name: close_gates
UPDATE pool.gate SET state = 'CLOSED', resolution = $4, closed_at = now()
WHERE project = $1 AND session = $2 AND state IN ('PENDING', 'ANSWERED') AND ($3::uuid IS NULL OR execution_id = $3)
RETURNING *

-- name: expire_gates
-- An answer that something may be about to use does not go by time.
UPDATE pool.gate SET state = 'CLOSED', resolution = 'EXPIRED', closed_at = now()
WHERE project = $1 AND session = $2 AND state IN ('PENDING', 'ANSWERED') AND expires_at <= now()
  AND (state = 'PENDING' OR NOT EXISTS (
      SELECT 1 FROM pool.execution e WHERE e.project = $1 AND e.session = $2 AND e.state <> 'TERMINAL'))
RETURNING *

-- name: expired_gates
SELECT project, session FROM (
    SELECT g.project, g.session FROM pool.gate g
    WHERE g.state IN ('PENDING', 'ANSWERED') AND g.expires_at <= now()
      AND (g.state = 'PENDING' OR NOT EXISTS (
          SELECT 1 FROM pool.execution e
          WHERE e.project = g.project AND e.session = g.session AND e.state <> 'TERMINAL'))
    ORDER BY g.expires_at
    LIMIT $1
) overdue
GROUP BY project, session

-- name: gate_counts
SELECT count(*) FILTER (WHERE state = 'PENDING') AS pending, count(*) FILTER (WHERE state = 'ANSWERED') AS answered
FROM pool.gate WHERE execution_id = $1

-- name: go_on
UPDATE pool.execution SET state = 'RUNNING'
WHERE execution_id = $1 AND state = 'WAITING'
  AND NOT EXISTS (SELECT 1 FROM pool.gate g WHERE g.execution_id = $1 AND g.state = 'PENDING')
RETURNING *

-- name: run_picked
UPDATE pool.execution
SET state = 'RUNNING', started_at = coalesce(started_at, now()), agent = $4, harness_session_id = $5
WHERE execution_id = $1 AND epoch = $2 AND driver = $3 AND (state = ANY ($6::text[]) OR state = 'RUNNING')
  AND ending_event_id IS NULL
RETURNING *

-- name: carried_gates
-- What executions before this one left to be passed on, and all that its source has asked.
SELECT g.* FROM pool.gate g JOIN pool.carried($1, $2) AS carried (id) ON carried.id = g.interaction_id
UNION
SELECT g.* FROM pool.gate g WHERE g.execution_id = $3::uuid
ORDER BY created_at, interaction_id

-- name: continue_source
INSERT INTO pool.execution (execution_id, project, session, epoch, admitted_epoch, state, source_execution_id,
                            traceparent)
SELECT $3, $1, $2, $4, $4, 'PENDING', s.execution_id, coalesce(nullif($6, ''), s.traceparent)
FROM pool.execution s
WHERE s.execution_id = $5
  AND NOT EXISTS (SELECT 1 FROM pool.execution c WHERE c.source_execution_id = $5)
  AND NOT EXISTS (SELECT 1 FROM pool.execution a
                  WHERE a.project = $1 AND a.session = $2 AND a.state <> 'TERMINAL')
RETURNING *

-- name: continuation
SELECT * FROM pool.execution WHERE source_execution_id = $1

-- name: unheard_gates
SELECT DISTINCT e.project, e.session
FROM pool.execution e JOIN pool.gate g ON g.execution_id = e.execution_id
WHERE e.state = 'WAITING' AND e.driver = $1 AND e.ending_event_id IS NULL AND g.state IN ('ANSWERED', 'CLOSED')
LIMIT $2
