-- `platform` is the system that orders runs.
ALTER TABLE instances RENAME COLUMN platform TO operating_system;
