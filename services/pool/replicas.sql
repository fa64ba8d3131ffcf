-- What pool processes know of each other. Nobody compares times: counters are, each by the clock of who reads them.

-- name: register
INSERT INTO pool.replica (holder, address, place, beats) VALUES ($1, $2, $3, $4)
ON CONFLICT (holder) DO UPDATE SET address = $2, place = $3, beats = $4, beat_at = now()

-- name: beat
UPDATE pool.replica SET beats = $2, beat_at = now(), draining = $3, driving = $4, entries = $5
WHERE holder = $1
RETURNING beats

-- name: leave
DELETE FROM pool.replica WHERE holder = $1

-- name: condemn
-- Only at the counter at which it was seen standing still: one that has moved since is alive.
DELETE FROM pool.replica WHERE holder = $1 AND beats = $2 RETURNING beats

-- name: beats
SELECT holder, beats, driving FROM pool.replica WHERE holder <> $1

-- name: in_place
SELECT holder, beats FROM pool.replica WHERE place = $1 AND address = $2 AND holder <> $3

-- name: address
SELECT address FROM pool.replica WHERE holder = $1

-- name: driven
SELECT project, session, execution_id, epoch, driver FROM pool.execution
WHERE state <> 'TERMINAL' AND driver IS NOT NULL AND driver <> $1 AND ending_event_id IS NULL

-- name: standing
SELECT s.holder, s.epoch, e.execution_id, e.driver, e.state = 'PENDING' AS pending,
    e.ending_event_id IS NOT NULL AS ending
FROM pool.session s
LEFT JOIN pool.execution e ON e.project = s.project AND e.session = s.session AND e.state <> 'TERMINAL'
WHERE s.project = $1 AND s.session = $2 AND s.deleted_at IS NULL

-- name: holder
SELECT holder FROM pool.session WHERE project = $1 AND session = $2

-- name: held
SELECT project, session FROM pool.session WHERE holder = $1

-- name: release_held
-- In batches, without waiting for anybody: a session that is locked is being changed, and has another holder soon.
WITH batch AS (
    SELECT project, session FROM pool.session s
    WHERE holder = $1
      AND NOT EXISTS (SELECT 1 FROM pool.execution e
                      WHERE e.project = s.project AND e.session = s.session AND e.state <> 'TERMINAL'
                        AND e.driver = $1)
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
UPDATE pool.session s SET holder = NULL FROM batch
WHERE s.project = batch.project AND s.session = batch.session AND s.holder = $1
RETURNING s.session

-- name: unpicked
SELECT e.project, e.session, e.execution_id, s.holder
FROM pool.execution e JOIN pool.session s ON s.project = e.project AND s.session = e.session
WHERE e.state = 'PENDING' AND e.driver IS NULL AND e.ending_event_id IS NULL
LIMIT $1

-- name: commands_here
SELECT DISTINCT c.project, c.session
FROM pool.command c JOIN pool.execution e ON e.execution_id = c.execution_id
WHERE c.state = 'PENDING' AND e.driver = $1
LIMIT $2

-- name: facts_here
-- Facts of sessions that this replica drives, and those that nobody drives and whoever committed them has not told.
SELECT DISTINCT o.project, o.session
FROM pool.outbox o
LEFT JOIN pool.execution e ON e.project = o.project AND e.session = o.session AND e.state <> 'TERMINAL'
    AND e.ending_event_id IS NULL
WHERE o.refused IS NULL
  AND (e.driver = $1 OR (e.driver IS NULL AND o.created_at < now() - make_interval(secs => $2)))
LIMIT $3
