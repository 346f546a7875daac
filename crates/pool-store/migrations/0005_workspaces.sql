-- A task waits for the active one of its workspace. It also counts the active tasks of an organization.
CREATE INDEX tasks_of_workspace ON tasks (pool, organization, workspace)
    WHERE state IN ('leased', 'started', 'running', 'orphaned');
DROP INDEX tasks_active;
