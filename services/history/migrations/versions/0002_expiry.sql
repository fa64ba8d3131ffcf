-- How far the walk over all logs for old events is. One row, for all replicas.
CREATE TABLE history.expiry (
    id smallint PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    -- Highest log id given out in the round that runs; null between two rounds.
    through bigint,
    begun_at timestamptz NOT NULL DEFAULT '-infinity'
);

INSERT INTO history.expiry DEFAULT VALUES;

-- Gives out the next logs of the round, at most `slice`, to whoever asks first; a round begins `every` after the last one
-- began. Returns their lowest and highest possible id, nulls when there is nothing to do now. Whoever took a slice and dies
-- leaves it to the next round.
CREATE FUNCTION history.next_expiry(slice integer, every interval, OUT first bigint, OUT last bigint) LANGUAGE plpgsql AS $$
DECLARE
    given bigint;
    begun timestamptz;
BEGIN
    SELECT x.through, x.begun_at INTO given, begun FROM history.expiry x WHERE x.id = 1 FOR UPDATE;
    IF given IS NULL THEN
        IF clock_timestamp() < begun + every THEN
            RETURN;
        END IF;
        given := 0;
        begun := clock_timestamp();
    END IF;
    SELECT max(found.id) INTO last FROM (
        SELECT l.id FROM history.logs l WHERE l.id > given ORDER BY l.id LIMIT slice
    ) AS found;
    UPDATE history.expiry x SET through = last, begun_at = begun WHERE x.id = 1;
    IF last IS NOT NULL THEN
        first := given + 1;
    END IF;
END
$$;

-- Removes at most `batch` of the oldest events of a log, up to the first one that is younger than `age`, and returns how
-- many. While the execution that may write has not ended its log is left as it is: who follows it, and who takes it over,
-- needs its beginning, and an event that its producer sends again must be known.
CREATE FUNCTION history.expire_batch(of_log bigint, age interval, batch integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    first bigint;
    last bigint;
    young bigint;
BEGIN
    SELECT l.oldest, least(l.head, l.oldest + batch - 1) INTO first, last
    FROM history.logs l
    WHERE l.id = of_log AND l.deleted_at IS NULL AND (l.execution_id IS NULL OR l.ended)
    FOR UPDATE;
    IF first IS NULL OR last < first THEN
        RETURN 0;
    END IF;
    SELECT e.sequence INTO young FROM history.events e
    WHERE e.log = of_log AND e.sequence BETWEEN first AND last AND e.appended_at >= now() - age
    ORDER BY e.sequence LIMIT 1;
    last := coalesce(young - 1, last);
    IF last < first THEN
        RETURN 0;
    END IF;
    PERFORM history.trim_batch(of_log, last, batch);
    RETURN last - first + 1;
END
$$;
