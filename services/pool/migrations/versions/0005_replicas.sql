-- The network place in which its address is: who binds the same address in the same place comes after it.
ALTER TABLE pool.replica ADD COLUMN place text NOT NULL DEFAULT '';

CREATE INDEX execution_by_driver ON pool.execution (driver) WHERE state <> 'TERMINAL' AND driver IS NOT NULL;
