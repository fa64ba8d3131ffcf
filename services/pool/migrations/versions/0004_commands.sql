-- Replicas of two versions run side by side: the older one must be able to read and settle what the newer one writes.
-- squawk-ignore ban-drop-constraint
ALTER TABLE pool.command DROP CONSTRAINT command_kind_check;

-- By which settled rows are found when their time is over. Rows are added in the order of these times, so the smallest
-- kind of index will do where nothing is looked up by it.
CREATE INDEX request_by_age ON pool.request USING brin (created_at);
CREATE INDEX request_by_input ON pool.request (input_id) WHERE input_id IS NOT NULL;
CREATE INDEX request_by_command ON pool.request (command_id) WHERE command_id IS NOT NULL;
CREATE INDEX command_by_age ON pool.command (settled_at) WHERE settled_at IS NOT NULL;
CREATE INDEX command_by_execution ON pool.command (execution_id);
CREATE INDEX input_by_age ON pool.input USING brin (created_at);
CREATE INDEX gate_by_age ON pool.gate USING brin (created_at);
CREATE INDEX execution_by_age ON pool.execution (settled_at) WHERE state = 'TERMINAL';
CREATE INDEX project_request_by_age ON pool.project_request USING brin (created_at);
