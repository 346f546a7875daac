-- Tasks whose executor may have locked the state of its workspace.
CREATE TABLE state_locks (task TEXT NOT NULL PRIMARY KEY);
