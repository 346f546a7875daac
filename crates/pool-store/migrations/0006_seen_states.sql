-- What each task has seen of the state of its workspace. What it stores must follow that.
-- `seen` is a SHA-256, '' if there was no state, and '*' if an earlier version of the hub has served it.
-- `storing` is the SHA-256 of the state that the task stores. It may be stored, because an answer of the store may be lost.
-- `kept` is where a state of the task is that the hub has refused.
CREATE TABLE seen_states (task TEXT NOT NULL PRIMARY KEY, seen TEXT NOT NULL, storing TEXT, kept TEXT);
INSERT INTO seen_states (task, seen) SELECT id, '*' FROM tasks WHERE state IN ('running', 'orphaned');
