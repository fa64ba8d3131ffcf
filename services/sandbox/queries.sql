-- name: deployment
SELECT deployment_id::text FROM sandbox.deployment

-- name: admit
-- One statement sees the session as it was before and makes the claim its standing one, unless it is not higher or is
-- closed. $1 project, $2 session, $3 epoch, $4 attempt, $5 holder.
-- It does not wait for the disk: nothing is answered or asked of a provider by it alone, and the statement that comes
-- before either is written behind it in the same log.
WITH hurried AS (
    SELECT set_config('synchronous_commit', 'off', true)
), admitted AS (
    INSERT INTO sandbox.sessions AS s (project, session, claim_epoch, claim_attempt, holder)
    VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (project, session) DO UPDATE
    SET claim_epoch = excluded.claim_epoch, claim_attempt = excluded.claim_attempt, holder = excluded.holder
    WHERE (s.claim_epoch, s.claim_attempt) < (excluded.claim_epoch, excluded.claim_attempt)
      AND (s.closed_epoch, s.closed_attempt) < (excluded.claim_epoch, excluded.claim_attempt)
    RETURNING true
)
SELECT EXISTS (SELECT FROM admitted) AS admitted,
       s.claim_epoch AS standing_epoch, s.claim_attempt AS standing_attempt, s.holder AS standing_holder,
       s.closed_epoch, s.closed_attempt,
       b.*, coalesce(b.deadline < clock_timestamp(), false) AS overdue
FROM hurried
LEFT JOIN sandbox.sessions AS s ON s.project = $1 AND s.session = $2
LEFT JOIN sandbox.sandboxes AS b
    ON b.project = $1 AND b.session = $2 AND b.tenure <> 'ORPHAN' AND b.observed <> 'GONE'

-- name: attach
-- `admit` and the `move` that gives a running sandbox to the claim, in one statement, for a caller that believes to know
-- the row: nothing moves unless the row is at that version and the claim became the standing one by this.
-- $1 project, $2 session, $3 epoch, $4 attempt, $5 holder, $6 sandbox, $7 version, $8 token, $9 address, $10 headers.
WITH admitted AS (
    INSERT INTO sandbox.sessions AS s (project, session, claim_epoch, claim_attempt, holder)
    VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (project, session) DO UPDATE
    SET claim_epoch = excluded.claim_epoch, claim_attempt = excluded.claim_attempt, holder = excluded.holder
    WHERE (s.claim_epoch, s.claim_attempt) < (excluded.claim_epoch, excluded.claim_attempt)
      AND (s.closed_epoch, s.closed_attempt) < (excluded.claim_epoch, excluded.claim_attempt)
    RETURNING true
), moved AS (
    UPDATE sandbox.sandboxes AS b
    SET desired = 'RUNNING', tenure = 'ACTIVE', holder = $5, claim_epoch = $3, claim_attempt = $4, how = 'ATTACHED',
        token = $8, endpoint_url = $9, endpoint_headers = $10, worker = NULL, deadline = NULL,
        version = b.version + 1,
        changed_at = clock_timestamp(),
        used_at = clock_timestamp(),
        tier_since = clock_timestamp(),
        active_seconds = b.active_seconds + CASE WHEN b.tier = 'active'
            THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END,
        parked_seconds = b.parked_seconds + CASE WHEN b.tier = 'parked'
            THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END
    WHERE b.sandbox_id = $6 AND b.version = $7 AND b.project = $1 AND b.session = $2 AND b.observed = 'RUNNING'
      AND EXISTS (SELECT FROM admitted)
    RETURNING b.*
), given_back AS (
    UPDATE sandbox.warm_slots AS w SET sandbox_id = NULL FROM moved WHERE w.sandbox_id = moved.sandbox_id
)
SELECT moved.*, false AS overdue FROM moved

-- name: view
SELECT false AS admitted,
       s.claim_epoch AS standing_epoch, s.claim_attempt AS standing_attempt, s.holder AS standing_holder,
       s.closed_epoch, s.closed_attempt,
       b.*, coalesce(b.deadline < clock_timestamp(), false) AS overdue
FROM (SELECT 1) AS one
LEFT JOIN sandbox.sessions AS s ON s.project = $1 AND s.session = $2
LEFT JOIN sandbox.sandboxes AS b
    ON b.project = $1 AND b.session = $2 AND b.tenure <> 'ORPHAN' AND b.observed <> 'GONE'

-- name: close_claims
-- Every claim up to ($3, $4) is closed; also for a session that was never seen, so that a late call finds it closed.
INSERT INTO sandbox.sessions AS s (project, session, closed_epoch, closed_attempt)
VALUES ($1, $2, $3, $4)
ON CONFLICT (project, session) DO UPDATE
SET closed_epoch = excluded.closed_epoch, closed_attempt = excluded.closed_attempt
WHERE (s.closed_epoch, s.closed_attempt) < (excluded.closed_epoch, excluded.closed_attempt)

-- name: get
SELECT b.*, coalesce(b.deadline < clock_timestamp(), false) AS overdue
FROM sandbox.sandboxes AS b WHERE b.sandbox_id = $1

-- name: insert
-- The intent, before the provider is asked. No row comes back when the session has a sandbox already, or the claim was
-- closed, or a higher one stands. $1 id, $2 project, $3 session, $4 provider, $5 agent, $6 fingerprint, $7 daemon
-- fingerprint, $8 holder, $9 epoch, $10 attempt, $11 worker, $12 seconds until the deadline, $13 network policy.
INSERT INTO sandbox.sandboxes AS b (
    sandbox_id, project, session, provider, agent, fingerprint, daemon_fingerprint, holder, claim_epoch, claim_attempt,
    worker, deadline, network, desired, observed, tenure)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, clock_timestamp() + make_interval(secs => $12), $13,
       'RUNNING', 'CREATING', 'ACTIVE'
WHERE NOT EXISTS (
    SELECT FROM sandbox.sessions AS s
    WHERE s.project = $2 AND s.session = $3
      AND ((s.closed_epoch, s.closed_attempt) >= ($9, $10) OR (s.claim_epoch, s.claim_attempt) > ($9, $10)))
ON CONFLICT (project, session) WHERE tenure <> 'ORPHAN' AND observed <> 'GONE' DO NOTHING
RETURNING b.*, false AS overdue

-- name: insert_orphan
-- An instance that no living row has, written down so that it is counted, and deleted again and again until it is seen
-- gone. $1 id, $2 project, $3 session (null where the session is not known), $4 provider, $5 provider id, $6 error.
INSERT INTO sandbox.sandboxes AS b (
    sandbox_id, project, session, provider, provider_id, last_error, desired, observed, tenure)
VALUES ($1, $2, $3, $4, $5, $6, 'GONE', 'UNKNOWN', 'ORPHAN')
ON CONFLICT DO NOTHING
RETURNING b.*, false AS overdue

-- name: gone
-- Which of the sandboxes $1 were seen gone.
SELECT sandbox_id::text FROM sandbox.sandboxes WHERE sandbox_id = ANY ($1::uuid[]) AND observed = 'GONE'

-- name: move
-- Every change of a row: compare-and-set on its version. Time spent in the tier is added up, a warm slot is given back
-- as soon as the sandbox is in use again or is seen not to run. $1 id, $2 version; $3 to $16 the new values;
-- $17 seconds until the deadline of the worker; $18 true: only while the claim is open; $19 only at this count of
-- renewals, null: at any; $20 true: only while no higher claim stands; $21 network policy.
WITH moved AS (
    UPDATE sandbox.sandboxes AS b
    SET provider_id = $3, daemon_fingerprint = $4, desired = $5, observed = $6, tenure = $7, holder = $8,
        claim_epoch = $9, claim_attempt = $10, how = $11, token = $12, endpoint_url = $13, endpoint_headers = $14,
        worker = $15, last_error = $16, network = $21,
        deadline = CASE WHEN $15::uuid IS NOT NULL THEN clock_timestamp() + make_interval(secs => $17) END,
        version = b.version + 1,
        changed_at = clock_timestamp(),
        used_at = CASE WHEN $7 IN ('ACTIVE', 'PARKED') THEN clock_timestamp() ELSE b.used_at END,
        tier_since = clock_timestamp(),
        active_seconds = b.active_seconds + CASE WHEN b.tier = 'active'
            THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END,
        parked_seconds = b.parked_seconds + CASE WHEN b.tier = 'parked'
            THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END,
        stopped_seconds = b.stopped_seconds + CASE WHEN b.tier = 'stopped'
            THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END,
        orphan_seconds = b.orphan_seconds + CASE WHEN b.tier = 'orphan'
            THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END
    WHERE b.sandbox_id = $1 AND b.version = $2
      AND ($19::bigint IS NULL OR b.renewals = $19)
      AND (NOT $18 OR NOT EXISTS (
          SELECT FROM sandbox.sessions AS s
          WHERE s.project = b.project AND s.session = b.session
            AND (s.closed_epoch, s.closed_attempt) >= ($9, $10)))
      AND (NOT $20 OR NOT EXISTS (
          SELECT FROM sandbox.sessions AS s
          WHERE s.project = b.project AND s.session = b.session AND (s.claim_epoch, s.claim_attempt) > ($9, $10)))
    RETURNING b.*
), given_back AS (
    UPDATE sandbox.warm_slots AS w SET sandbox_id = NULL FROM moved
    WHERE w.sandbox_id = moved.sandbox_id AND (moved.tenure = 'ACTIVE' OR moved.observed IN ('STOPPED', 'GONE'))
)
SELECT moved.*, false AS overdue FROM moved

-- name: renew
-- All renewals of one holder in one statement. $1 holder; $2 projects, $3 sessions, $4 epochs, $5 attempts, $6 whether
-- the holder calls it active; $7 seconds after which an active one tells the provider that it is in use.
WITH asked AS (
    SELECT * FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::boolean[])
        WITH ORDINALITY AS a (project, session, epoch, attempt, active, place)
), locked AS (
    -- In one order, so that two renewals of the same claims do not wait for each other.
    SELECT b.sandbox_id,
           b.tenure = 'ACTIVE' AND b.worker IS NULL
               AND b.refreshed_at < clock_timestamp() - make_interval(secs => $7)
               AND EXISTS (SELECT FROM asked AS a
                           WHERE a.active AND a.project = b.project AND a.session = b.session) AS refresh
    FROM sandbox.sandboxes AS b
    WHERE b.tenure IN ('ACTIVE', 'PARKED') AND b.observed IN ('CREATING', 'STARTING', 'RUNNING')
      AND b.tenure <> 'ORPHAN' AND b.observed <> 'GONE' AND b.holder = $1
      AND (b.project, b.session, b.claim_epoch, b.claim_attempt)
          IN (SELECT project, session, epoch, attempt FROM asked)
    ORDER BY b.sandbox_id FOR NO KEY UPDATE OF b
), renewed AS (
    UPDATE sandbox.sandboxes AS b
    SET renewals = b.renewals + 1,
        refreshed_at = CASE WHEN locked.refresh THEN clock_timestamp() ELSE b.refreshed_at END
    FROM locked WHERE b.sandbox_id = locked.sandbox_id
    RETURNING b.project, b.session, b.claim_epoch, b.claim_attempt, b.sandbox_id, b.provider, b.provider_id,
              locked.refresh
)
SELECT r.sandbox_id, r.provider, r.provider_id, coalesce(r.refresh, false) AS refresh,
       s.claim_epoch AS standing_epoch, s.claim_attempt AS standing_attempt, s.holder AS standing_holder,
       s.closed_epoch, s.closed_attempt
FROM asked AS a
LEFT JOIN renewed AS r
    ON r.project = a.project AND r.session = a.session AND r.claim_epoch = a.epoch AND r.claim_attempt = a.attempt
LEFT JOIN sandbox.sessions AS s ON s.project = a.project AND s.session = a.session
ORDER BY a.place

-- name: leases
-- What an observer reads; also of what is being made for a claim, since its holder may be gone. What is being ended is
-- not judged.
SELECT sandbox_id::text, claim_epoch, claim_attempt, renewals
FROM sandbox.sandboxes
WHERE tenure IN ('ACTIVE', 'PARKED') AND observed <> 'GONE'
  AND (worker IS NULL OR observed IN ('CREATING', 'STARTING'))

-- name: hold_worker_lock
-- Held by the session of worker $1 for as long as its process lives; Postgres lets it go with the connection.
SELECT pg_try_advisory_lock(('x' || left(replace($1::text, '-', ''), 16))::bit(64)::bigint)

-- name: workers_without_lock
-- Workers other than $1 that have work and hold no lock.
SELECT DISTINCT b.worker::text FROM sandbox.sandboxes AS b
WHERE b.worker IS NOT NULL AND b.worker <> $1 AND b.deadline > clock_timestamp()
  AND NOT EXISTS (
    SELECT FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND ((l.classid::bigint << 32) | l.objid::bigint)
          = ('x' || left(replace(b.worker::text, '-', ''), 16))::bit(64)::bigint)

-- name: expire_workers
-- The deadlines of the workers $1 are over, unless one took its lock meanwhile. The version stays: if one lives after
-- all, it may finish as long as nobody took over.
UPDATE sandbox.sandboxes AS b SET deadline = clock_timestamp()
WHERE b.worker = ANY ($1::uuid[]) AND b.deadline > clock_timestamp()
  AND NOT EXISTS (
    SELECT FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND ((l.classid::bigint << 32) | l.objid::bigint)
          = ('x' || left(replace(b.worker::text, '-', ''), 16))::bit(64)::bigint)
RETURNING b.sandbox_id::text

-- name: not_gone
SELECT b.*, coalesce(b.deadline < clock_timestamp(), false) AS overdue
FROM sandbox.sandboxes AS b WHERE b.provider = $1 AND b.observed <> 'GONE'
ORDER BY b.created_at, b.sandbox_id

-- name: least_recently_parked
SELECT b.*, false AS overdue FROM sandbox.sandboxes AS b
WHERE b.provider = $1 AND b.tenure = 'PARKED' AND b.observed = 'RUNNING' AND b.worker IS NULL
ORDER BY b.used_at LIMIT 1

-- name: parked_beyond
-- Parked sandboxes of $1 whose warm slot has a number above $2, as after the cap was lowered.
SELECT b.*, false AS overdue FROM sandbox.sandboxes AS b
WHERE b.provider = $1 AND b.tenure = 'PARKED' AND b.observed = 'RUNNING' AND b.worker IS NULL
  AND NOT EXISTS (SELECT FROM sandbox.warm_slots AS w WHERE w.sandbox_id = b.sandbox_id AND w.number <= $2)

-- name: breaker
SELECT unknown FROM sandbox.breakers WHERE provider = $1

-- name: trip_breaker
INSERT INTO sandbox.breakers (provider, unknown) VALUES ($1, $2)
ON CONFLICT (provider) DO UPDATE SET unknown = excluded.unknown

-- name: reset_breaker
DELETE FROM sandbox.breakers WHERE provider = $1

-- name: page
-- $1 project, $2 session, $3 tenure: null is any; $4 whether with those that are gone; after ($5, $6); at most $7.
SELECT b.*, coalesce(b.deadline < clock_timestamp(), false) AS overdue
FROM sandbox.sandboxes AS b
WHERE ($1::text IS NULL OR b.project = $1) AND ($2::text IS NULL OR b.session = $2)
  AND ($3::text IS NULL OR b.tenure = $3) AND ($4 OR b.observed <> 'GONE')
  AND ($5::timestamptz IS NULL OR (b.created_at, b.sandbox_id) > ($5, $6::uuid))
ORDER BY b.created_at, b.sandbox_id
LIMIT $7

-- name: ensure_slots
INSERT INTO sandbox.warm_slots (provider, number)
SELECT $1, number FROM generate_series(1, $2::integer) AS number
ON CONFLICT DO NOTHING

-- name: take_slot
-- A free slot of $1 with a number up to $2, for sandbox $3; the one it has, if it has one.
WITH held AS (
    SELECT number FROM sandbox.warm_slots WHERE sandbox_id = $3
), taken AS (
    UPDATE sandbox.warm_slots SET sandbox_id = $3
    WHERE NOT EXISTS (SELECT FROM held)
      AND (provider, number) = (
        SELECT provider, number FROM sandbox.warm_slots
        WHERE provider = $1 AND number <= $2 AND sandbox_id IS NULL
        ORDER BY number LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING number
)
SELECT number FROM held UNION ALL SELECT number FROM taken

-- name: return_slot
-- Taken for a sandbox that was not parked after all.
UPDATE sandbox.warm_slots AS w SET sandbox_id = NULL
WHERE w.sandbox_id = $1 AND NOT EXISTS (
    SELECT FROM sandbox.sandboxes AS b WHERE b.sandbox_id = $1 AND b.tenure IN ('PARKED', 'ORPHAN'))

-- name: slots
SELECT provider, count(sandbox_id)::integer AS used FROM sandbox.warm_slots GROUP BY provider

-- name: usage
-- Seconds and present count for each provider and tier; $1 project, null is all.
SELECT provider, tier, sum(count)::bigint AS count, sum(seconds) AS seconds
FROM (
    SELECT b.provider, t.tier, (b.tier = t.tier)::integer AS count,
           t.seconds + CASE WHEN b.tier = t.tier
               THEN greatest(0, extract(epoch FROM clock_timestamp() - b.tier_since)) ELSE 0 END AS seconds
    FROM sandbox.sandboxes AS b
    CROSS JOIN LATERAL (VALUES ('active', b.active_seconds), ('parked', b.parked_seconds),
                               ('stopped', b.stopped_seconds), ('orphan', b.orphan_seconds)) AS t (tier, seconds)
    WHERE $1::text IS NULL OR b.project = $1
    UNION ALL
    SELECT provider, tier, 0, seconds FROM sandbox.usage_of_removed WHERE $1::text IS NULL OR project = $1
) AS every
GROUP BY provider, tier

-- name: orphans
SELECT count(*) AS orphans, clock_timestamp() AS as_of
FROM sandbox.sandboxes
WHERE tenure = 'ORPHAN' AND observed <> 'GONE' AND ($1::text IS NULL OR project = $1)

-- name: remove_old
-- Rows gone for $1 seconds; what they used is kept.
WITH removed AS (
    DELETE FROM sandbox.sandboxes AS b
    WHERE b.observed = 'GONE' AND b.changed_at < clock_timestamp() - make_interval(secs => $1)
      AND NOT EXISTS (SELECT FROM sandbox.warm_slots AS w WHERE w.sandbox_id = b.sandbox_id)
    RETURNING b.*
), kept AS (
    INSERT INTO sandbox.usage_of_removed AS u (project, provider, tier, seconds)
    SELECT coalesce(r.project, ''), r.provider, t.tier, sum(t.seconds)
    FROM removed AS r
    CROSS JOIN LATERAL (VALUES ('active', r.active_seconds), ('parked', r.parked_seconds),
                               ('stopped', r.stopped_seconds), ('orphan', r.orphan_seconds)) AS t (tier, seconds)
    GROUP BY 1, 2, 3
    ON CONFLICT (project, provider, tier) DO UPDATE SET seconds = u.seconds + excluded.seconds
)
SELECT count(*) FROM removed

-- name: present
-- What there is by provider, state and tier, and how much of it is past the deadline of its worker.
SELECT provider, observed, tier, count(*) AS count,
       count(*) FILTER (WHERE worker IS NOT NULL AND deadline < clock_timestamp()) AS overdue
FROM sandbox.sandboxes
WHERE observed <> 'GONE'
GROUP BY provider, observed, tier

-- name: breakers
SELECT provider, unknown FROM sandbox.breakers
