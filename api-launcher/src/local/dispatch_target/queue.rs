//! The queue on disk: one file per accepted run, one marker per finished one, and a folder for each run in
//! progress. Files appear whole, by rename after fsync, so a crash leaves the state before or after.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use job_contract::{Document, JobData};
use runtime::{regular_file, tree_removal};
use serde::{Deserialize, Serialize};
use tracing::warn;

/// How long a finished pair is remembered (contract 2.5).
pub(super) const MEMORY: Duration = Duration::from_hours(24);

/// More than the platform's request with a document has.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// What makes a dispatch the same as another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RunKey {
    job: i32,
    step: String,
}

impl RunKey {
    /// The key of a valid job.
    pub(super) fn of(job: &JobData) -> Option<Self> {
        Some(Self {
            job: job.job_id.parse().ok()?,
            step: job.step_id.clone(),
        })
    }

    /// As the platform writes it.
    pub(super) fn job_id(&self) -> String {
        self.job.to_string()
    }

    fn parse(name: &str) -> Option<Self> {
        let (job, step) = name.split_once('_')?;
        Some(Self {
            job: job.parse().ok()?,
            step: step.to_owned(),
        })
    }
}

impl std::fmt::Display for RunKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}_{}", self.job, self.step)
    }
}

/// Microseconds since 1970, also the order of the queue.
pub(super) type Stamp = u64;

/// First line of an entry; the document follows as it came.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    accepted_at: Stamp,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Marker {
    finished_at: Stamp,
}

/// What a former launcher has left.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Accepted and not finished, oldest first.
    pub(super) waiting: Vec<(Stamp, RunKey)>,
    pub(super) finished: Vec<RunKey>,
}

/// The folder of the queue.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    root: PathBuf,
}

impl Queue {
    /// Opens the queue in `root`, made for its owner alone: entries hold secrets.
    pub(super) fn open(root: PathBuf) -> io::Result<Self> {
        let queue = Self { root };
        for folder in [queue.entries(), queue.markers(), queue.root.join("runs")] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)?;
        }
        Ok(queue)
    }

    /// Held by the one launcher that may work on the queue.
    pub(super) fn lock_path(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// The folder a run works in while it is in progress.
    pub(super) fn run_folder(&self, key: &RunKey) -> PathBuf {
        self.root.join("runs").join(key.to_string())
    }

    /// Keeps an accepted document. On disk when this returns.
    pub(super) fn store(&self, key: &RunKey, accepted_at: Stamp, raw: &[u8]) -> io::Result<()> {
        let head = serde_json::to_vec(&Head { accepted_at })?;
        write_durably(&self.entry(key), &[&head, b"\n", raw])
    }

    /// The document of an accepted run, as it came.
    pub(super) fn load(&self, key: &RunKey) -> io::Result<Document> {
        let mut text = regular_file::read_unlinked(&self.entry(key), MAX_BYTES)?;
        let body = text.iter().position(|byte| *byte == b'\n');
        let body = body.ok_or(io::ErrorKind::InvalidData)? + 1;
        Ok(Document::from_json(text.split_off(body))?)
    }

    /// Remembers that a run is over and forgets the rest of it, secrets included.
    pub(super) fn finish(&self, key: &RunKey, finished_at: Stamp) -> io::Result<()> {
        let marker = serde_json::to_vec(&Marker { finished_at })?;
        write_durably(&self.marker(key), &[&marker])?;
        self.forget(key)
    }

    fn forget(&self, key: &RunKey) -> io::Result<()> {
        absent_is_fine(fs::remove_file(self.entry(key)))?;
        tree_removal::remove(&self.run_folder(key))
    }

    /// Looks through what is there, and completes what a crash left half done. Code of a run can change these files, and one that
    /// cannot be used does not stop the other runs.
    pub(super) fn scan(&self) -> io::Result<Found> {
        let mut found = Found::default();
        for name in names(&self.markers())? {
            found.finished.extend(key_of(&name, MARKER));
        }
        for name in names(&self.entries())? {
            let Some(key) = key_of(&name, ENTRY) else {
                // A document that was never whole was never answered.
                let path = self.entries().join(&name);
                fs::remove_file(&path).unwrap_or_else(|error| warn_of(&path, &error));
                continue;
            };
            if self.marker(&key).exists() {
                // Otherwise one folder that cannot be removed would stop all runs.
                if let Err(error) = self.forget(&key) {
                    warn!(run = %key, %error, "a finished run could not be removed from the queue");
                }
            } else {
                let at = self.accepted_at(&key).unwrap_or_else(|error| {
                    warn_of(&self.entry(&key), &error);
                    0
                });
                found.waiting.push((at, key));
            }
        }
        found.waiting.sort();
        Ok(found)
    }

    fn accepted_at(&self, key: &RunKey) -> io::Result<Stamp> {
        let mut start = Vec::new();
        regular_file::open_unlinked(&self.entry(key))?
            .take(64)
            .read_to_end(&mut start)?;
        let line = start.split(|byte| *byte == b'\n').next();
        let head = line.and_then(|line| serde_json::from_slice::<Head>(line).ok());
        Ok(head.map_or(0, |head| head.accepted_at))
    }

    /// Forgets the runs that finished longer than [`MEMORY`] before `now`.
    pub(super) fn expire(&self, now: Stamp) -> io::Result<Vec<RunKey>> {
        let limit = u64::try_from(MEMORY.as_micros()).unwrap_or(u64::MAX);
        let mut expired = Vec::new();
        for name in names(&self.markers())? {
            let path = self.markers().join(&name);
            let Some(key) = key_of(&name, MARKER) else {
                continue;
            };
            let remove_old = || {
                let marker = regular_file::read_unlinked(&path, MAX_BYTES)?;
                let marker = serde_json::from_slice::<Marker>(&marker)?;
                let is_old = now.saturating_sub(marker.finished_at) > limit;
                if is_old {
                    fs::remove_file(&path)?;
                }
                Ok(is_old)
            };
            match remove_old() {
                Ok(true) => expired.push(key),
                Ok(false) => {}
                Err(error) => warn_of(&path, &error),
            }
        }
        Ok(expired)
    }

    /// Whether a document could be kept now.
    pub(super) fn probe(&self) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(&self.root)?;
        file.write_all(&[0; 4096])?;
        file.as_file().sync_data()
    }

    fn entries(&self) -> PathBuf {
        self.root.join("entries")
    }

    fn markers(&self) -> PathBuf {
        self.root.join("finished")
    }

    fn entry(&self, key: &RunKey) -> PathBuf {
        self.entries().join(format!("{key}{ENTRY}"))
    }

    fn marker(&self, key: &RunKey) -> PathBuf {
        self.markers().join(format!("{key}{MARKER}"))
    }
}

fn warn_of(path: &Path, error: &io::Error) {
    warn!(path = %path.display(), %error, "a file of the queue cannot be used");
}

const ENTRY: &str = ".run";
const MARKER: &str = ".json";

fn key_of(name: &str, suffix: &str) -> Option<RunKey> {
    RunKey::parse(name.strip_suffix(suffix)?)
}

fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?;
    let name =
        |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    entries.map(name).collect()
}

/// The file appears whole and stays, whatever fails afterwards.
pub(super) fn write_durably(path: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut draft = tempfile::NamedTempFile::new_in(folder)?;
    for piece in pieces {
        draft.write_all(piece)?;
    }
    draft.as_file().sync_all()?;
    draft.persist(path)?;
    File::open(folder)?.sync_all()
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn key(job: i32) -> RunKey {
        RunKey {
            job,
            step: "a_step.1".into(),
        }
    }

    fn queue() -> (tempfile::TempDir, Queue) {
        let temp = tempfile::tempdir().unwrap();
        let queue = Queue::open(temp.path().join("queue")).unwrap();
        (temp, queue)
    }

    #[test]
    fn stored_documents_are_found_oldest_first_and_are_private() {
        let (_temp, queue) = queue();
        for (job, at) in [(1, 30), (2, 10), (3, 20)] {
            let text = format!("{{\n\"jobId\":\"{job}\"}}");
            queue.store(&key(job), at, text.as_bytes()).unwrap();
        }
        let found = Queue::open(queue.root.clone()).unwrap().scan().unwrap();
        assert_eq!(found.waiting, [(10, key(2)), (20, key(3)), (30, key(1))]);
        assert_eq!(queue.load(&key(3)).unwrap().job_id, "3");
        let mode = |path: PathBuf| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(queue.entry(&key(1))), 0o600);
        assert_eq!(mode(queue.entries()), 0o700);
    }

    #[test]
    fn a_crash_between_marker_and_removal_is_completed() {
        let (_temp, queue) = queue();
        queue.store(&key(1), 5, b"{}").unwrap();
        write_durably(&queue.marker(&key(1)), &[br#"{"finishedAt":7}"#]).unwrap();
        fs::create_dir(queue.run_folder(&key(1))).unwrap();
        fs::write(queue.entries().join(".tmpX"), "{\"half").unwrap();
        let found = queue.scan().unwrap();
        assert_eq!(found.waiting, []);
        assert_eq!(found.finished, [key(1)]);
        assert!(!queue.run_folder(&key(1)).exists());
        assert_eq!(names(&queue.entries()).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn files_that_cannot_be_used_do_not_stop_the_other_runs() {
        let (_temp, queue) = queue();
        queue.store(&key(1), 5, b"{}").unwrap();
        nix::unistd::mkfifo(&queue.entry(&key(2)), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::create_dir(queue.entries().join("junk")).unwrap();
        fs::write(queue.marker(&key(3)), "junk").unwrap();
        queue.finish(&key(4), 0).unwrap();
        assert_eq!(queue.expire(Stamp::MAX).unwrap(), [key(4)]);
        let found = queue.scan().unwrap();
        assert_eq!(found.waiting, [(0, key(2)), (5, key(1))]);
        assert_eq!(found.finished, [key(3)]);
    }

    #[test]
    fn finished_runs_are_remembered_for_a_day() {
        let (_temp, queue) = queue();
        queue.store(&key(1), 5, b"{}").unwrap();
        queue.finish(&key(1), 1000).unwrap();
        let day = u64::try_from(MEMORY.as_micros()).unwrap();
        assert_eq!(queue.expire(1000 + day).unwrap(), []);
        assert_eq!(queue.expire(1001 + day).unwrap(), [key(1)]);
        assert_eq!(queue.scan().unwrap(), Found::default());
    }
}
