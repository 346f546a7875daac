-- No document is sealed to a key of its pool any more. Those that are cannot be read: their tasks fail with a reason.
DELETE FROM payloads WHERE key_id IS NOT NULL;
ALTER TABLE payloads DROP COLUMN key_id;
ALTER TABLE tasks DROP COLUMN sealed_for;

CREATE INDEX tasks_leased ON tasks (pool, agent, id) WHERE state = 'leased';
CREATE INDEX tasks_over ON tasks (pool, id) WHERE end_reason IS NOT NULL;
