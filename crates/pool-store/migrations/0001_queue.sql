-- One text for both engines: SQLite takes BYTEA for a name it does not know, and stores bytes as bytes.
-- All times but `events.at` are milliseconds of the store's own time (src/clock.rs).

-- The store's time when it was swept last.
CREATE TABLE clock (id BIGINT PRIMARY KEY CHECK (id = 1), at BIGINT NOT NULL);
INSERT INTO clock (id, at) VALUES (1, 0);

CREATE TABLE tasks (
    id TEXT NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    organization TEXT NOT NULL,
    workspace TEXT NOT NULL,
    job TEXT NOT NULL,
    step TEXT NOT NULL,
    kind TEXT NOT NULL,
    traceparent TEXT,
    state TEXT NOT NULL,
    fencing_token BIGINT NOT NULL,
    lease TEXT,
    instance TEXT,
    agent TEXT,
    attempts BIGINT NOT NULL,
    -- A JSON array.
    reasons TEXT NOT NULL,
    sealed_for TEXT,
    submitted_at BIGINT NOT NULL,
    not_before BIGINT NOT NULL,
    leased_at BIGINT NOT NULL,
    heard_at BIGINT NOT NULL,
    executor TEXT,
    holder_uid TEXT,
    holder_name TEXT,
    phase TEXT,
    cancel_requested BIGINT NOT NULL,
    end_reason TEXT,
    end_diagnostic TEXT,
    end_exit_code BIGINT,
    end_verdict TEXT,
    end_log_sequence BIGINT,
    -- A JSON object.
    end_report TEXT,
    ended_at BIGINT,
    reported BIGINT NOT NULL,
    -- When the state ends by itself, or the task is forgotten. NULL while it must be reported.
    deadline BIGINT,
    -- How often it was due to be checked or reported since its state changed, and when it is due next.
    asks BIGINT NOT NULL,
    ask_at BIGINT,
    UNIQUE (job, step)
);
CREATE INDEX tasks_available ON tasks (pool, organization, submitted_at, id) WHERE state = 'available';
CREATE INDEX tasks_active ON tasks (pool, organization) WHERE state IN ('leased', 'started', 'running', 'orphaned');
CREATE INDEX tasks_of_agent ON tasks (pool, agent) WHERE state IN ('leased', 'started', 'running', 'orphaned');
CREATE INDEX tasks_of_instance ON tasks (instance) WHERE state IN ('leased', 'started', 'running', 'orphaned');
CREATE INDEX tasks_unfinished ON tasks (pool, state) WHERE reported = 0;
CREATE INDEX tasks_open ON tasks (id) WHERE end_reason IS NULL;
CREATE INDEX tasks_deadline ON tasks (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX tasks_ask ON tasks (ask_at) WHERE ask_at IS NOT NULL AND state <> 'available';
-- There may be thousands.
CREATE INDEX tasks_ask_queued ON tasks (ask_at) WHERE state = 'available';

-- Apart from the tasks, which are written often. Deleted when the task is accepted or over.
CREATE TABLE payloads (
    task TEXT NOT NULL PRIMARY KEY,
    key_id TEXT,
    data BYTEA NOT NULL
);

CREATE TABLE events (
    task TEXT NOT NULL,
    seq BIGINT NOT NULL,
    -- Wall time: milliseconds since 1970.
    at BIGINT NOT NULL,
    from_state TEXT,
    to_state TEXT NOT NULL,
    actor TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (task, seq)
);

CREATE TABLE instances (
    id TEXT NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    agent TEXT NOT NULL,
    system_id TEXT NOT NULL,
    installation TEXT NOT NULL,
    version TEXT NOT NULL,
    platform TEXT NOT NULL,
    architecture TEXT NOT NULL,
    target TEXT NOT NULL,
    -- A JSON array.
    tags TEXT NOT NULL,
    capacity BIGINT NOT NULL,
    free BIGINT NOT NULL,
    draining BIGINT NOT NULL,
    -- Failed leases in a row.
    failures BIGINT NOT NULL,
    seen_at BIGINT NOT NULL,
    UNIQUE (pool, agent, system_id)
);
