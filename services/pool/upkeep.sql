-- What keeps the tables of commands true and small. Sessions that are locked are being changed: they are left for another
-- time, so that nobody waits for any of this. Where requests are looked up by what they made it is one by one, by a scalar
-- subquery: a join would read all of them for each batch.

-- name: return_commands
WITH expired AS (
    SELECT command_id, project, session FROM pool.command
    WHERE state = 'CLAIMED' AND claim_expires_at < now() AND attempts < $1
    ORDER BY created_at LIMIT $2
), locked AS (
    SELECT project, session FROM pool.session
    WHERE (project, session) IN (SELECT project, session FROM expired)
    FOR UPDATE SKIP LOCKED
)
UPDATE pool.command c SET state = 'PENDING', claimed_by = NULL, claim_expires_at = NULL
FROM expired JOIN locked USING (project, session)
WHERE c.command_id = expired.command_id AND c.state = 'CLAIMED' AND c.claim_expires_at < now()
RETURNING c.project, c.session

-- name: late_commands
SELECT DISTINCT c.project, c.session
FROM pool.command c JOIN pool.execution e ON e.execution_id = c.execution_id
WHERE c.state IN ('PENDING', 'CLAIMED') AND e.state = 'TERMINAL'
LIMIT $1

-- name: forsaken_commands
-- What nobody delivers: its execution is driven by nobody whom the table of replicas knows, and nothing ends it yet.
SELECT c.command_id, c.project, c.session, c.attempts >= $1 AS exhausted
FROM pool.command c JOIN pool.execution e ON e.execution_id = c.execution_id
WHERE (c.state = 'PENDING' OR (c.state = 'CLAIMED' AND c.claim_expires_at < now()))
  AND e.state <> 'TERMINAL' AND e.ending_event_id IS NULL
  AND NOT EXISTS (SELECT 1 FROM pool.replica r WHERE r.holder = e.driver)
ORDER BY c.created_at LIMIT $2

-- name: retire_requests
WITH old AS (
    SELECT project, session, request_id FROM pool.request r
    WHERE created_at < now() - make_interval(secs => $1)
      AND NOT EXISTS (
          SELECT 1 FROM pool.input i LEFT JOIN pool.execution e ON e.execution_id = i.execution_id
          WHERE i.input_id = r.input_id
            AND (i.state = 'PENDING' OR e.state <> 'TERMINAL' OR e.settled_at >= now() - make_interval(secs => $1)))
      AND NOT EXISTS (
          SELECT 1 FROM pool.command c
          WHERE c.command_id = r.command_id
            AND (c.settled_at IS NULL OR c.settled_at >= now() - make_interval(secs => $1)))
    LIMIT $2
), locked AS (
    SELECT project, session FROM pool.session
    WHERE (project, session) IN (SELECT project, session FROM old)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pool.request r USING old JOIN locked USING (project, session)
    WHERE r.project = old.project AND r.session = old.session AND r.request_id = old.request_id
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: retire_commands
WITH old AS (
    SELECT command_id, project, session FROM pool.command c
    WHERE settled_at < now() - make_interval(secs => $1)
      AND (SELECT 1 FROM pool.request r WHERE r.command_id = c.command_id LIMIT 1) IS NULL
    LIMIT $2
), locked AS (
    SELECT project, session FROM pool.session
    WHERE (project, session) IN (SELECT project, session FROM old)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pool.command c USING old JOIN locked USING (project, session)
    WHERE c.command_id = old.command_id
      AND NOT EXISTS (SELECT 1 FROM pool.request r WHERE r.command_id = c.command_id)
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: retire_inputs
WITH old AS (
    SELECT input_id, project, session FROM pool.input i
    WHERE state <> 'PENDING' AND created_at < now() - make_interval(secs => $1)
      AND (SELECT 1 FROM pool.request r WHERE r.input_id = i.input_id LIMIT 1) IS NULL
      AND NOT EXISTS (
          SELECT 1 FROM pool.execution e
          WHERE e.execution_id = i.execution_id
            AND (e.state <> 'TERMINAL' OR e.settled_at >= now() - make_interval(secs => $1)))
    LIMIT $2
), locked AS (
    SELECT project, session FROM pool.session
    WHERE (project, session) IN (SELECT project, session FROM old)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pool.input i USING old JOIN locked USING (project, session)
    WHERE i.input_id = old.input_id AND NOT EXISTS (SELECT 1 FROM pool.request r WHERE r.input_id = i.input_id)
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: retire_gates
WITH old AS (
    SELECT interaction_id, project, session FROM pool.gate g
    WHERE state IN ('CONSUMED', 'CLOSED') AND created_at < now() - make_interval(secs => $1)
      AND coalesce(closed_at, answered_at, created_at) < now() - make_interval(secs => $1)
      AND NOT EXISTS (
          SELECT 1 FROM pool.execution e
          WHERE e.execution_id IN (g.execution_id, g.consumed_by)
            AND (e.state <> 'TERMINAL' OR e.settled_at >= now() - make_interval(secs => $1)))
      -- What the next execution may have to tell of.
      AND NOT EXISTS (
          SELECT 1 FROM pool.carried(g.project, g.session) AS carried (id) WHERE carried.id = g.interaction_id)
    LIMIT $2
), locked AS (
    SELECT project, session FROM pool.session
    WHERE (project, session) IN (SELECT project, session FROM old)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pool.gate g USING old JOIN locked USING (project, session)
    WHERE g.interaction_id = old.interaction_id
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: retire_executions
-- The newest of a session stays, the newest whose agent was asked, and whatever anything else still names.
WITH old AS (
    SELECT e.execution_id, e.project, e.session
    FROM pool.execution e JOIN pool.session s ON s.project = e.project AND s.session = e.session
    WHERE e.state = 'TERMINAL' AND e.settled_at < now() - make_interval(secs => $1)
      AND e.execution_id IS DISTINCT FROM s.execution_id
      AND e.execution_id IS DISTINCT FROM s.ended_execution_id
      AND e.execution_id IS DISTINCT FROM s.harness_execution_id
      AND (e.harness_session_id IS NULL OR EXISTS (
          SELECT 1 FROM pool.execution n
          WHERE n.project = e.project AND n.session = e.session AND n.created_at > e.created_at
            AND n.state = 'TERMINAL' AND n.harness_session_id IS NOT NULL))
      AND NOT EXISTS (SELECT 1 FROM pool.input i WHERE i.execution_id = e.execution_id)
      AND NOT EXISTS (SELECT 1 FROM pool.command c WHERE c.execution_id = e.execution_id)
      AND NOT EXISTS (SELECT 1 FROM pool.gate g WHERE g.execution_id = e.execution_id)
      AND NOT EXISTS (
          SELECT 1 FROM pool.outbox o
          WHERE o.project = e.project AND o.session = e.session AND o.execution_id = e.execution_id)
    LIMIT $2
), locked AS (
    SELECT project, session FROM pool.session
    WHERE (project, session) IN (SELECT project, session FROM old)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pool.execution e USING old JOIN locked USING (project, session)
    WHERE e.execution_id = old.execution_id
      AND NOT EXISTS (SELECT 1 FROM pool.command c WHERE c.execution_id = e.execution_id)
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: retire_project_requests
WITH old AS (
    SELECT project, request_id FROM pool.project_request
    WHERE created_at < now() - make_interval(secs => $1)
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pool.project_request p USING old
    WHERE p.project = old.project AND p.request_id = old.request_id
    RETURNING 1
)
SELECT count(*) FROM gone

-- name: figures
-- What waits, of all sessions: how much, and for how many seconds the oldest of it has.
SELECT
    (SELECT count(*) FROM pool.outbox WHERE refused IS NULL) AS outbox,
    coalesce((SELECT extract(epoch FROM now() - min(created_at)) FROM pool.outbox WHERE refused IS NULL), 0)::float8
        AS outbox_seconds,
    (SELECT count(*) FROM pool.outbox WHERE refused IS NOT NULL) AS refused,
    (SELECT count(*) FROM pool.command WHERE state IN ('PENDING', 'CLAIMED')) AS commands,
    coalesce((SELECT extract(epoch FROM now() - min(created_at)) FROM pool.command
              WHERE state IN ('PENDING', 'CLAIMED')), 0)::float8 AS command_seconds,
    (SELECT count(*) FROM pool.input WHERE state = 'PENDING') AS inputs,
    (SELECT count(*) FROM pool.gate WHERE state IN ('PENDING', 'ANSWERED')) AS gates,
    (SELECT count(*) FROM pool.replica) AS replicas

-- name: unfinished
SELECT state, count(*) AS count, extract(epoch FROM now() - min(coalesce(started_at, created_at)))::float8 AS seconds
FROM pool.execution
WHERE state <> 'TERMINAL'
GROUP BY state
