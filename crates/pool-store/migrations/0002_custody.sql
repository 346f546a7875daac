-- See `Task::credential` in src/state/task.rs.
ALTER TABLE tasks ADD COLUMN credential TEXT;

-- Documents are encrypted from here on. Those of an earlier version were not: their tasks fail with a reason.
DROP TABLE payloads;
CREATE TABLE payloads (
    task TEXT NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    -- The key of the pool's agents to which the document is sealed.
    key_id TEXT,
    -- The key with which the store has encrypted it.
    stored_key TEXT NOT NULL,
    -- What counts towards the limit of the pool.
    size BIGINT NOT NULL,
    data BYTEA NOT NULL
);
CREATE INDEX payloads_of_pool ON payloads (pool, size);
