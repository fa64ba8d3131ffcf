-- One row for each session that was ever written to. It is never removed: a deleted log leaves its tombstone here.
CREATE TABLE history.logs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    project text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    log_id uuid NOT NULL,
    -- Replaced by every change of anything that belongs to this log: what a writer decided on is compared with it.
    revision uuid NOT NULL,
    head bigint NOT NULL DEFAULT 0,
    -- Id of the event at the head.
    tail_id uuid,
    -- Sequence of the first event kept; head + 1 when none is.
    oldest bigint NOT NULL DEFAULT 1,
    -- Id of the event before it, once that was trimmed: a cursor there is still good and still checked.
    before_oldest_id uuid,
    -- Highest epoch seen, the execution that holds it, whether that has ended, and how many events a manifest of it may count.
    epoch bigint NOT NULL DEFAULT 0,
    execution_id uuid,
    ended boolean NOT NULL DEFAULT false,
    runner_events bigint NOT NULL DEFAULT 0,
    -- Why the log is known to lack something that no manifest can bring back; empty when it is not.
    gap_reason text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    deleted_at timestamptz,
    purged_at timestamptz,
    CONSTRAINT logs_session UNIQUE (project, session)
) WITH (fillfactor = 70);

CREATE INDEX logs_to_purge ON history.logs (id) WHERE deleted_at IS NOT NULL AND purged_at IS NULL;

CREATE TABLE history.events (
    log bigint NOT NULL,
    sequence bigint NOT NULL,
    appended_at timestamptz NOT NULL DEFAULT now(),
    event_id uuid NOT NULL,
    -- SHA-256 over what makes two events equal.
    digest bytea NOT NULL,
    -- The serialized hearth.types.v1.Event, as its producer sent it.
    body bytea NOT NULL,
    CONSTRAINT events_sequence PRIMARY KEY (log, sequence),
    CONSTRAINT events_event_id UNIQUE (log, event_id)
);

CREATE TABLE history.executions (
    log bigint NOT NULL,
    execution_id uuid NOT NULL,
    -- Highest epoch at which it was driven.
    epoch bigint NOT NULL,
    ending_id uuid,
    ending_type text,
    ending_epoch bigint,
    ending_sequence bigint,
    incomplete boolean NOT NULL DEFAULT false,
    incomplete_reason text NOT NULL DEFAULT '',
    PRIMARY KEY (log, execution_id),
    CONSTRAINT executions_ending_whole CHECK (num_nulls(ending_id, ending_type, ending_epoch, ending_sequence) IN (0, 4))
) WITH (fillfactor = 80);

CREATE INDEX executions_incomplete ON history.executions (log) WHERE incomplete;

-- Runner output that came too late: kept for whoever asks what a fenced runner wrote, seen by no reader.
CREATE TABLE history.quarantine (
    log bigint NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    current_epoch bigint NOT NULL,
    quarantined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    event_id uuid NOT NULL,
    execution_id uuid NOT NULL,
    reason text NOT NULL,
    digest bytea NOT NULL,
    body bytea NOT NULL,
    CONSTRAINT quarantine_order PRIMARY KEY (log, id),
    CONSTRAINT quarantine_event_id UNIQUE (log, event_id)
);

-- lz4 unpacks several times faster than the default; not every build of Postgres has it.
DO $$
BEGIN
    IF 'lz4' = ANY (SELECT unnest(enumvals) FROM pg_settings WHERE name = 'default_toast_compression') THEN
        ALTER TABLE history.events ALTER COLUMN body SET COMPRESSION lz4;
        ALTER TABLE history.quarantine ALTER COLUMN body SET COMPRESSION lz4;
    END IF;
END
$$;

-- Writes what was decided for a group of logs, each of them whole or not at all. Returns the row id of each log, 0 where
-- nothing was written because the log is no longer as it was when that was decided: read it again and decide again.
--
-- The locks come first and the lookups in later statements, which see what the wait for a lock was waiting for. Rows are
-- locked in the order of their ids, new ones made in the order of their keys, so that two groups never wait in a ring.
-- Lookups are scalar subqueries: of EXISTS the planner may make a hash of everything that the logs hold.
CREATE FUNCTION history.append_group(
    -- The logs. `l_id` 0: to be made. `l_before`: revision that was decided on (of a new one: that it is made with).
    l_id bigint[], l_before uuid[],
    -- Their state after it; `l_after` becomes the revision of all of them.
    l_after uuid, l_head bigint[], l_tail uuid[], l_runner_events bigint[],
    -- Those to be made. Here and below, `_log` is the place of the log in the arrays above, from 1.
    n_log integer[], n_project text[], n_session text[], n_log_id uuid[],
    -- Those whose epoch, execution or gap changes.
    d_log integer[], d_epoch bigint[], d_execution uuid[], d_ended boolean[], d_gap_reason text[],
    -- Events.
    e_log integer[], e_sequence bigint[], e_id uuid[], e_digest bytea[], e_body bytea[],
    -- Ledger rows; `x_new` false: changes a row that has no ending.
    x_log integer[], x_id uuid[], x_new boolean[], x_epoch bigint[], x_ending_id uuid[], x_ending_type text[],
    x_ending_sequence bigint[], x_incomplete boolean[], x_incomplete_reason text[],
    -- Quarantine.
    q_log integer[], q_id uuid[], q_execution uuid[], q_digest bytea[], q_body bytea[], q_reason text[], q_epoch bigint[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    ids bigint[] := l_id;
    made record;
    new_id bigint;
    place integer;
    stale integer[];
    written integer;
    wanted integer;
BEGIN
    IF cardinality(n_log) > 0 THEN
        FOR made IN
            SELECT k.log, k.project, k.session, k.log_id
            FROM unnest(n_log, n_project, n_session, n_log_id) AS k (log, project, session, log_id)
            ORDER BY k.project COLLATE "C", k.session COLLATE "C"
        LOOP
            INSERT INTO history.logs (project, session, log_id, revision)
            VALUES (made.project, made.session, made.log_id, l_before[made.log])
            ON CONFLICT DO NOTHING
            RETURNING id INTO new_id;
            ids[made.log] := coalesce(new_id, 0);
        END LOOP;
    END IF;

    PERFORM 1 FROM history.logs WHERE id = ANY (ids) ORDER BY id FOR UPDATE;

    SELECT array_agg(
        coalesce((SELECT l.id FROM history.logs l WHERE l.id = k.id AND l.revision = k.before), 0) ORDER BY k.place
    ) INTO ids
    FROM unnest(ids, l_before) WITH ORDINALITY AS k (id, before, place);

    SELECT array_agg(DISTINCT found.log) INTO stale FROM (
        SELECT k.log FROM unnest(e_log || q_log, e_id || q_id) AS k (log, id)
        WHERE (SELECT e.sequence FROM history.events e WHERE e.log = ids[k.log] AND e.event_id = k.id) IS NOT NULL
            OR (SELECT q.id FROM history.quarantine q WHERE q.log = ids[k.log] AND q.event_id = k.id) IS NOT NULL
        UNION ALL
        SELECT k.log FROM unnest(x_log, x_id, x_new) AS k (log, id, is_new)
        WHERE k.is_new AND (
            SELECT x.epoch FROM history.executions x WHERE x.log = ids[k.log] AND x.execution_id = k.id
        ) IS NOT NULL
    ) AS found;
    IF stale IS NOT NULL THEN
        FOREACH place IN ARRAY stale LOOP
            ids[place] := 0;
        END LOOP;
    END IF;

    INSERT INTO history.events (log, sequence, event_id, digest, body)
    SELECT ids[k.log], k.sequence, k.id, k.digest, k.body
    FROM unnest(e_log, e_sequence, e_id, e_digest, e_body) AS k (log, sequence, id, digest, body)
    WHERE ids[k.log] > 0;

    IF cardinality(x_log) > 0 THEN
        INSERT INTO history.executions (
            log, execution_id, epoch, ending_id, ending_type, ending_epoch, ending_sequence, incomplete, incomplete_reason
        )
        SELECT ids[k.log], k.id, k.epoch, k.ending_id, k.ending_type,
            CASE WHEN k.ending_id IS NOT NULL THEN k.epoch END, k.ending_sequence, k.incomplete, k.reason
        FROM unnest(
            x_log, x_id, x_new, x_epoch, x_ending_id, x_ending_type, x_ending_sequence, x_incomplete, x_incomplete_reason
        ) AS k (log, id, is_new, epoch, ending_id, ending_type, ending_sequence, incomplete, reason)
        WHERE ids[k.log] > 0 AND k.is_new;

        UPDATE history.executions x SET
            epoch = k.epoch, ending_id = k.ending_id, ending_type = k.ending_type,
            ending_epoch = CASE WHEN k.ending_id IS NOT NULL THEN k.epoch END, ending_sequence = k.ending_sequence,
            incomplete = k.incomplete, incomplete_reason = k.reason
        FROM unnest(
            x_log, x_id, x_new, x_epoch, x_ending_id, x_ending_type, x_ending_sequence, x_incomplete, x_incomplete_reason
        ) AS k (log, id, is_new, epoch, ending_id, ending_type, ending_sequence, incomplete, reason)
        WHERE ids[k.log] > 0 AND NOT k.is_new
            AND x.log = ids[k.log] AND x.execution_id = k.id AND x.ending_id IS NULL;
        GET DIAGNOSTICS written = ROW_COUNT;
        SELECT count(*) INTO wanted FROM unnest(x_log, x_new) AS k (log, is_new) WHERE ids[k.log] > 0 AND NOT k.is_new;
        -- The revision says that the row is as it was read, so this is a defect, and must not end an execution twice.
        IF written <> wanted THEN
            RAISE EXCEPTION 'ledger rows changed under their revision: % of %', written, wanted;
        END IF;
    END IF;

    IF cardinality(q_log) > 0 THEN
        INSERT INTO history.quarantine (log, event_id, execution_id, digest, body, reason, current_epoch)
        SELECT ids[k.log], k.id, k.execution, k.digest, k.body, k.reason, k.epoch
        FROM unnest(q_log, q_id, q_execution, q_digest, q_body, q_reason, q_epoch) WITH ORDINALITY
            AS k (log, id, execution, digest, body, reason, epoch, place)
        WHERE ids[k.log] > 0 ORDER BY k.place;
    END IF;

    UPDATE history.logs l SET revision = l_after, head = k.head, tail_id = k.tail, runner_events = k.runner_events
    FROM unnest(ids, l_head, l_tail, l_runner_events) AS k (id, head, tail, runner_events)
    WHERE k.id > 0 AND l.id = k.id;

    IF cardinality(d_log) > 0 THEN
        UPDATE history.logs l SET
            epoch = k.epoch, execution_id = k.execution, ended = k.ended, gap_reason = k.gap_reason
        FROM unnest(d_log, d_epoch, d_execution, d_ended, d_gap_reason) AS k (log, epoch, execution, ended, gap_reason)
        WHERE ids[k.log] > 0 AND l.id = ids[k.log];
    END IF;

    RETURN ids;
END
$$;

-- Removes at most `batch` of the oldest events up to `through`, and moves `oldest`. Returns the new `oldest`.
CREATE FUNCTION history.trim_batch(of_log bigint, through bigint, batch integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    first bigint;
    last bigint;
    last_id uuid;
BEGIN
    SELECT l.oldest, least(through, l.head, l.oldest + batch - 1) INTO first, last
    FROM history.logs l WHERE l.id = of_log AND l.deleted_at IS NULL FOR UPDATE;
    IF first IS NULL OR last < first THEN
        RETURN first;
    END IF;
    SELECT e.event_id INTO last_id FROM history.events e WHERE e.log = of_log AND e.sequence = last;
    DELETE FROM history.events e WHERE e.log = of_log AND e.sequence BETWEEN first AND last;
    UPDATE history.logs SET oldest = last + 1, before_oldest_id = last_id, revision = gen_random_uuid() WHERE id = of_log;
    RETURN last + 1;
END
$$;

-- Removes at most `batch` rows of a deleted log from each of its tables. Returns how many; after 0 the log is purged.
CREATE FUNCTION history.purge_batch(of_log bigint, batch integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    removed bigint;
    total bigint := 0;
BEGIN
    IF NOT EXISTS (SELECT FROM history.logs WHERE id = of_log AND deleted_at IS NOT NULL) THEN
        RAISE EXCEPTION 'log % is not deleted', of_log;
    END IF;
    DELETE FROM history.events WHERE ctid = ANY (ARRAY(
        SELECT e.ctid FROM history.events e WHERE e.log = of_log ORDER BY e.sequence LIMIT batch
    ));
    GET DIAGNOSTICS removed = ROW_COUNT;
    total := total + removed;
    DELETE FROM history.quarantine WHERE ctid = ANY (ARRAY(
        SELECT q.ctid FROM history.quarantine q WHERE q.log = of_log ORDER BY q.id LIMIT batch
    ));
    GET DIAGNOSTICS removed = ROW_COUNT;
    total := total + removed;
    DELETE FROM history.executions WHERE ctid = ANY (ARRAY(
        SELECT x.ctid FROM history.executions x WHERE x.log = of_log LIMIT batch
    ));
    GET DIAGNOSTICS removed = ROW_COUNT;
    total := total + removed;
    IF total = 0 THEN
        UPDATE history.logs SET purged_at = now() WHERE id = of_log AND deleted_at IS NOT NULL AND purged_at IS NULL;
    END IF;
    RETURN total;
END
$$;
