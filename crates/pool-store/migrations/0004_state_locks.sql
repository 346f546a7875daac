-- Tasks whose executor may have locked the state of its workspace.
-- `late` is 1 if the task was over: it rescues its state.
CREATE TABLE state_locks (task TEXT NOT NULL PRIMARY KEY, late BIGINT NOT NULL);
