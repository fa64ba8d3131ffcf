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
     WHERE g.project = $1 AND g.session = $2 AND g.state = 'PENDING') AS open_gates
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
                            execution_id, promoted_at, traceparent)
    VALUES ($5, $1, $2, CASE WHEN $6::uuid IS NULL THEN 'PENDING' ELSE 'PROMOTED' END, $7,
            (SELECT coalesce(max(order_key), 0) + 1 FROM pool.input
             WHERE project = $1 AND session = $2 AND state = 'PENDING'),
            $8, $9, $6, CASE WHEN $6::uuid IS NULL THEN NULL ELSE now() END, $10)
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
    UPDATE pool.input SET state = 'PROMOTED', execution_id = $3, promoted_at = now()
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
WHERE e.project = $1 AND e.session = $2 AND e.state = 'PENDING'

-- name: input
SELECT i.*, CASE WHEN i.state = 'PENDING' THEN (
    SELECT count(*) FROM pool.input o
    WHERE o.project = i.project AND o.session = i.session AND o.state = 'PENDING'
      AND (o.order_key, o.created_at, o.input_id) <= (i.order_key, i.created_at, i.input_id)
) ELSE 0 END AS rank
FROM pool.input i
WHERE i.project = $1 AND i.session = $2 AND i.input_id = $3

-- name: remove_inputs
UPDATE pool.input SET state = 'REMOVED'
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
    input.content AS input_content, input.expected_transcript AS expected_transcript
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

-- name: settle
WITH ended AS (
    UPDATE pool.execution
    SET state = 'TERMINAL', outcome = $2, failure_code = $3, ending_sequence = $4, settled_at = now()
    WHERE execution_id = $1 AND state <> 'TERMINAL'
    RETURNING *
), told AS (
    UPDATE pool.command
    SET state = CASE WHEN $5 = 'STOPPED' AND kind <> 'ANSWER' THEN 'APPLIED' ELSE 'OBSOLETE' END,
        outcome = CASE WHEN $5 = 'STOPPED' AND kind = 'ANSWER' THEN 'NOT_RUNNING' ELSE $5 END,
        settled_at = now()
    WHERE execution_id = $1 AND state IN ('PENDING', 'CLAIMED') AND EXISTS (SELECT 1 FROM ended)
)
SELECT *, EXISTS (
    SELECT 1 FROM pool.input i WHERE i.project = ended.project AND i.session = ended.session AND i.state = 'PENDING'
) AS waiting
FROM ended

-- name: end_by_pool
UPDATE pool.execution
SET state = $2, ending_event_id = $3, epoch = $4, driver = NULL
WHERE execution_id = $1 AND state <> 'TERMINAL' AND ending_event_id IS NULL
RETURNING *

-- name: open_gates
SELECT interaction_id FROM pool.gate WHERE execution_id = $1 AND state IN ('PENDING', 'ANSWERED') ORDER BY created_at

-- name: stop
UPDATE pool.execution SET state = 'STOPPING'
WHERE execution_id = $1 AND state = ANY ($2::text[])
RETURNING *

-- name: step
UPDATE pool.execution SET epoch = $3, ending_event_id = coalesce($2, ending_event_id), driver = NULL
WHERE execution_id = $1 AND epoch < $3 AND state <> 'TERMINAL'

-- name: raise_epoch
UPDATE pool.execution SET epoch = $2, driver = NULL
WHERE execution_id = $1 AND epoch < $2 AND state <> 'TERMINAL'
RETURNING *

-- name: insert_command
INSERT INTO pool.command (command_id, project, session, kind, execution_id, state, outcome, settled_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, CASE WHEN $7::text IS NULL THEN NULL ELSE now() END)
RETURNING *

-- name: command
SELECT * FROM pool.command WHERE project = $1 AND session = $2 AND command_id = $3

-- name: open_cancel
SELECT * FROM pool.command
WHERE execution_id = $1 AND state IN ('PENDING', 'CLAIMED') AND kind IN ('CANCEL', 'STEER')

-- name: claim_cancel
UPDATE pool.command
SET state = 'CLAIMED', claimed_by = $2, claim_expires_at = now() + make_interval(secs => $3), attempts = attempts + 1
WHERE execution_id = $1 AND kind IN ('CANCEL', 'STEER') AND state = 'PENDING'
RETURNING *

-- name: return_commands
UPDATE pool.command SET state = 'PENDING', claimed_by = NULL, claim_expires_at = NULL
WHERE state = 'CLAIMED' AND claim_expires_at < now()
RETURNING project, session

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

-- name: outbox_overdue
SELECT DISTINCT project, session FROM pool.outbox
WHERE refused IS NULL AND created_at < now() - make_interval(secs => $1)
LIMIT $2

-- name: outbox_depth
SELECT count(*) FROM pool.outbox WHERE refused IS NULL

-- name: waiting_work
SELECT project, session FROM pool.execution
WHERE state = 'PENDING' AND driver IS NULL AND ending_event_id IS NULL
UNION
SELECT project, session FROM pool.command WHERE state = 'PENDING'
LIMIT $1

-- name: unfinished
SELECT * FROM pool.execution WHERE state <> 'TERMINAL' ORDER BY created_at

-- name: driven_by
SELECT * FROM pool.execution WHERE state <> 'TERMINAL' AND driver = $1 AND ending_event_id IS NULL

-- name: clear_holder
UPDATE pool.session SET holder = NULL
WHERE project = $1 AND session = $2 AND holder = $3
  AND NOT EXISTS (SELECT 1 FROM pool.execution e
                  WHERE e.project = $1 AND e.session = $2 AND e.state <> 'TERMINAL' AND e.driver = $3)

-- name: forget_holders
UPDATE pool.session SET holder = NULL WHERE holder <> $1

-- name: to_purge
SELECT project, session, epoch FROM pool.session WHERE deleted_at < now() - interval '10 seconds' AND purged_at IS NULL
ORDER BY deleted_at LIMIT $1

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

-- name: register_replica
INSERT INTO pool.replica (holder, address) VALUES ($1, $2)

-- name: beat
UPDATE pool.replica SET beats = beats + 1, beat_at = now(), draining = $2, driving = $3, entries = $4 WHERE holder = $1

-- name: remove_replica
DELETE FROM pool.replica WHERE holder = $1

-- name: forget_replicas
DELETE FROM pool.replica WHERE holder <> $1

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
