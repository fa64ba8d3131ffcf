-- What people decided that the agent of the next execution is to be told of: it was passed on to an execution that did
-- not complete, or to none. It is of no more interest once a later agent was asked, which was told of it; an execution
-- whose agent was never asked (harness_session_id is NULL) has told nobody anything.
CREATE FUNCTION pool.carried(of_project text, of_session text) RETURNS SETOF uuid LANGUAGE sql STABLE AS $$
    SELECT interaction_id FROM pool.gate
    WHERE project = of_project AND session = of_session AND state = 'ANSWERED'
    UNION ALL
    -- An array, so that no plan begins with the gates of all sessions.
    SELECT interaction_id FROM pool.gate
    WHERE consumed_by = ANY (ARRAY(
        SELECT execution_id FROM pool.execution
        WHERE project = of_project AND session = of_session AND state = 'TERMINAL' AND outcome <> 'COMPLETED'
          AND created_at >= coalesce((
              SELECT max(created_at) FROM pool.execution
              WHERE project = of_project AND session = of_session AND state = 'TERMINAL'
                AND harness_session_id IS NOT NULL), '-infinity')))
$$;
