-- Removes at most `batch` rows of a deleted log from each of its tables. Returns how many; after 0 the log is purged.
--
-- The log's row is locked first, and the rows are looked for in later statements: of two who purge one log, the second would
-- wait for the very rows that the first one removes, look for no others, and call a log purged of which most is left.
CREATE OR REPLACE FUNCTION history.purge_batch(of_log bigint, batch integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    removed bigint;
    total bigint := 0;
BEGIN
    PERFORM 1 FROM history.logs WHERE id = of_log AND deleted_at IS NOT NULL FOR UPDATE;
    IF NOT FOUND THEN
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

-- Lookups are scalar subqueries, as in `append_group`.
UPDATE history.logs l SET purged_at = NULL
WHERE l.purged_at IS NOT NULL AND (
    (SELECT e.sequence FROM history.events e WHERE e.log = l.id LIMIT 1) IS NOT NULL
    OR (SELECT q.id FROM history.quarantine q WHERE q.log = l.id LIMIT 1) IS NOT NULL
    OR (SELECT x.epoch FROM history.executions x WHERE x.log = l.id LIMIT 1) IS NOT NULL
);
