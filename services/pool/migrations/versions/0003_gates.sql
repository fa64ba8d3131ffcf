-- The execution that handed the answer to an agent: the one that asked, or one that came after it.
ALTER TABLE pool.gate ADD COLUMN consumed_by uuid;
-- squawk-ignore constraint-missing-not-valid
ALTER TABLE pool.gate ADD CHECK ((state = 'CONSUMED') = (consumed_by IS NOT NULL));

CREATE INDEX gate_open_by_session ON pool.gate (project, session) WHERE state IN ('PENDING', 'ANSWERED');
CREATE INDEX gate_by_consumer ON pool.gate (consumed_by) WHERE consumed_by IS NOT NULL;
