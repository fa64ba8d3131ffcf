CREATE TABLE sample.visit (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    who text NOT NULL
);

CREATE FUNCTION sample.visited(visitor text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    total bigint;
BEGIN
    INSERT INTO sample.visit (who) VALUES (visitor);
    SELECT count(*) INTO total FROM sample.visit;
    RETURN total;
END;
$$;
