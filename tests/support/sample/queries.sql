-- name: visited
SELECT sample.visited($1);

-- name: sleep
SELECT pg_sleep($1);
