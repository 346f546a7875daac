-- Locks of states that a hub removes from an artifact store that may delete late.
-- `lock_id` is the id that its holder has given it, and `at` is when the removal was decided.
CREATE TABLE lock_removals (
    organization TEXT NOT NULL,
    workspace TEXT NOT NULL,
    lock_id TEXT NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (organization, workspace)
);
