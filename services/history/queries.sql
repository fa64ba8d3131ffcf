-- name: append_group
SELECT history.append_group(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25,
    $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36
)

-- name: read_logs
SELECT k.place, l.id, l.log_id, l.revision, l.head, l.tail_id, l.epoch, l.execution_id, l.runner_events, l.gap_reason,
    l.deleted_at IS NOT NULL AS deleted
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (project, session, place)
JOIN history.logs l ON l.project = k.project AND l.session = k.session

-- name: lock_logs
SELECT k.place, l.id, l.log_id, l.revision, l.head, l.tail_id, l.epoch, l.execution_id, l.runner_events, l.gap_reason,
    l.deleted_at IS NOT NULL AS deleted
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (project, session, place)
JOIN history.logs l ON l.project = k.project AND l.session = k.session
ORDER BY l.id
FOR UPDATE OF l

-- name: read_executions
SELECT k.place, x.execution_id, x.epoch, x.ending_id, x.ending_type, x.ending_epoch, x.ending_sequence, x.incomplete,
    x.incomplete_reason
FROM unnest($1::bigint[], $2::uuid[]) WITH ORDINALITY AS k (log, id, place)
JOIN history.executions x ON x.log = k.log AND x.execution_id = k.id

-- name: read_stored
SELECT k.place, e.digest, e.sequence, '' AS reason
FROM unnest($1::bigint[], $2::uuid[]) WITH ORDINALITY AS k (log, id, place)
JOIN history.events e ON e.log = k.log AND e.event_id = k.id
UNION ALL
SELECT k.place, q.digest, 0, q.reason
FROM unnest($1::bigint[], $2::uuid[]) WITH ORDINALITY AS k (log, id, place)
JOIN history.quarantine q ON q.log = k.log AND q.event_id = k.id

-- name: read_page
SELECT l.log_id, l.head, l.oldest, l.before_oldest_id, l.deleted_at IS NOT NULL AS deleted,
    (SELECT e.event_id FROM history.events e WHERE e.log = l.id AND e.sequence = $3) AS at_cursor,
    page.sequences, page.ids, page.bodies
FROM history.logs l
CROSS JOIN LATERAL (
    SELECT array_agg(found.sequence) AS sequences, array_agg(found.event_id) AS ids, array_agg(found.body) AS bodies
    FROM (
        SELECT e.sequence, e.event_id, e.body,
            sum(octet_length(e.body) + 128) OVER (ORDER BY e.sequence ROWS UNBOUNDED PRECEDING) AS bytes
        FROM history.events e
        WHERE e.log = l.id AND e.sequence > $3
        ORDER BY e.sequence
        LIMIT $4
    ) AS found
    WHERE found.bytes <= $5 OR found.sequence = $3 + 1
) AS page
WHERE l.project = $1 AND l.session = $2

-- name: read_heads
SELECT k.place, l.log_id, l.head, l.tail_id, l.oldest, l.epoch, l.execution_id, l.ended,
    l.deleted_at IS NOT NULL AS deleted
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (project, session, place)
JOIN history.logs l ON l.project = k.project AND l.session = k.session

-- name: snapshot_log
SELECT l.id, l.log_id, l.head, l.tail_id, l.oldest, l.epoch, l.execution_id, l.ended, l.gap_reason,
    l.deleted_at IS NOT NULL AS deleted,
    (
        SELECT x.incomplete_reason FROM history.executions x WHERE x.log = l.id AND x.incomplete
        ORDER BY x.epoch DESC LIMIT 1
    ) AS incomplete_reason
FROM history.logs l
WHERE l.project = $1 AND l.session = $2

-- name: snapshot_execution
SELECT x.execution_id, x.epoch, x.ending_id, x.ending_type, x.ending_epoch, x.ending_sequence, x.incomplete,
    x.incomplete_reason
FROM history.executions x
WHERE x.log = $1 AND x.execution_id = $2

-- name: snapshot_events
SELECT found.sequence, found.event_id, found.body
FROM (
    SELECT e.sequence, e.event_id, e.body,
        sum(octet_length(e.body) + 128) OVER (ORDER BY e.sequence DESC ROWS UNBOUNDED PRECEDING) AS bytes,
        row_number() OVER (ORDER BY e.sequence DESC) AS place
    FROM history.events e
    WHERE e.log = $1 AND e.sequence < $2
    ORDER BY e.sequence DESC
    LIMIT $3
) AS found
WHERE found.bytes <= $4 OR found.place = 1
ORDER BY found.sequence

-- name: event_id_at
SELECT e.event_id FROM history.events e WHERE e.log = $1 AND e.sequence = $2

-- name: mark_incomplete
WITH log AS (
    UPDATE history.logs l SET revision = gen_random_uuid()
    WHERE l.project = $1 AND l.session = $2 AND l.deleted_at IS NULL
        AND EXISTS (SELECT FROM history.executions x WHERE x.log = l.id AND x.execution_id = $3)
    RETURNING l.id
)
UPDATE history.executions x SET
    incomplete = true,
    incomplete_reason = CASE WHEN x.incomplete THEN x.incomplete_reason ELSE $4 END
FROM log
WHERE x.log = log.id AND x.execution_id = $3
RETURNING x.execution_id, x.epoch, x.ending_id, x.ending_type, x.ending_epoch, x.ending_sequence, x.incomplete,
    x.incomplete_reason

-- name: list_quarantined
SELECT found.id, found.body, found.reason, found.current_epoch, found.quarantined_at
FROM (
    SELECT q.id, q.body, q.reason, q.current_epoch, q.quarantined_at,
        sum(octet_length(q.body) + 128) OVER (ORDER BY q.id ROWS UNBOUNDED PRECEDING) AS bytes,
        row_number() OVER (ORDER BY q.id) AS place
    FROM history.quarantine q
    JOIN history.logs l ON l.id = q.log
    WHERE l.project = $1 AND l.session = $2 AND q.id > $3 AND ($4::uuid IS NULL OR q.execution_id = $4)
    ORDER BY q.id
    LIMIT $5
) AS found
WHERE found.bytes <= $6 OR found.place = 1
ORDER BY found.id

-- name: bounds
SELECT l.id, l.log_id, l.head, l.oldest, l.deleted_at IS NOT NULL AS deleted
FROM history.logs l
WHERE l.project = $1 AND l.session = $2

-- name: trim_batch
SELECT history.trim_batch($1, $2, $3)

-- name: delete_log
INSERT INTO history.logs AS l (project, session, log_id, revision, deleted_at, gap_reason)
VALUES ($1, $2, gen_random_uuid(), gen_random_uuid(), now(), '')
ON CONFLICT (project, session) DO UPDATE SET
    deleted_at = coalesce(l.deleted_at, now()), revision = gen_random_uuid(), gap_reason = ''
RETURNING l.id, l.purged_at IS NOT NULL AS purged

-- name: purge_batch
SELECT history.purge_batch($1, $2)

-- name: logs_to_purge
-- At random: one that fails again and again keeps no other from being removed.
SELECT l.id FROM history.logs l WHERE l.deleted_at IS NOT NULL AND l.purged_at IS NULL ORDER BY random() LIMIT $1

-- name: next_expiry
SELECT n.first, n.last FROM history.next_expiry($1, $2) AS n

-- name: expired_logs
SELECT l.id
FROM history.logs l
WHERE l.id BETWEEN $1 AND $2 AND l.deleted_at IS NULL AND l.oldest <= l.head AND (l.execution_id IS NULL OR l.ended)
    AND (
        SELECT e.appended_at FROM history.events e WHERE e.log = l.id AND e.sequence = l.oldest
    ) < now() - $3::interval
ORDER BY l.id

-- name: expire_batch
SELECT history.expire_batch($1, $2, $3)
