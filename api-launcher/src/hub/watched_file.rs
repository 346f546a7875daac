//! A small file of the operator that is read again at each use. If it cannot be used any more, the last good content
//! counts, and readiness names the error.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tracing::{info, warn};

/// The largest file that is read.
const MAX_BYTES: u64 = 1024 * 1024;

/// Reads the content of a file. There is one text for each error, without a secret.
pub(crate) type Parse<T> = fn(&str) -> Result<T, Vec<String>>;

/// The file and what was in it last.
#[derive(Debug)]
pub(crate) struct WatchedFile<T> {
    path: PathBuf,
    parse: Parse<T>,
    seen: Mutex<Seen<T>>,
    changes: watch::Sender<()>,
}

struct Seen<T> {
    good: Arc<T>,
    /// What the file had at the last look, good or not.
    text: String,
    /// Why that text cannot be used.
    wrong: Option<String>,
    /// Why the file could not be read at the last look.
    away: Option<String>,
}

// The text may have secrets.
impl<T: std::fmt::Debug> std::fmt::Debug for Seen<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seen")
            .field("good", &self.good)
            .field("wrong", &self.wrong)
            .field("away", &self.away)
            .finish_non_exhaustive()
    }
}

impl<T> WatchedFile<T> {
    /// Reads the file for the first time.
    pub(crate) fn open(path: &Path, parse: Parse<T>) -> Result<Self, Vec<String>> {
        let text = read(path).map_err(|error| vec![error])?;
        let good = Arc::new(parse(&text)?);
        Ok(Self {
            path: path.to_owned(),
            parse,
            seen: Mutex::new(Seen {
                good,
                text,
                wrong: None,
                away: None,
            }),
            changes: watch::Sender::new(()),
        })
    }

    /// Returns what is in the file now, or what was in it when it could be used last.
    pub(crate) fn current(&self) -> Arc<T> {
        let found = read(&self.path);
        let mut seen = self.lock();
        match found {
            Ok(text) => {
                seen.away = None;
                if text != seen.text {
                    let parsed = (self.parse)(&text);
                    seen.text = text;
                    self.take(&mut seen, parsed);
                }
            }
            Err(error) => {
                let problem = format!("`{}` cannot be read any more: {error}", self.path.display());
                if seen.away.is_none() {
                    warn!(problem, "the last content of a file counts");
                }
                seen.away = Some(problem);
            }
        }
        Arc::clone(&seen.good)
    }

    fn take(&self, seen: &mut Seen<T>, parsed: Result<T, Vec<String>>) {
        match parsed {
            Ok(good) => {
                seen.good = Arc::new(good);
                seen.wrong = None;
                info!(file = %self.path.display(), "the new content of a file counts");
                self.changes.send_replace(());
            }
            Err(errors) => {
                let problem = format!("`{}` {}", self.path.display(), errors.join("; "));
                warn!(problem, "the last good content of a file counts");
                seen.wrong = Some(problem);
            }
        }
    }

    /// Returns why the file cannot be used any more.
    pub(crate) fn problem(&self) -> Option<String> {
        drop(self.current());
        let seen = self.lock();
        seen.away.clone().or_else(|| seen.wrong.clone())
    }

    /// Tells each change that counts. Somebody must call [`current`](Self::current).
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Seen<T>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> Result<String, String> {
    runtime::regular_file::read_text(path, MAX_BYTES).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn number(text: &str) -> Result<u32, Vec<String>> {
        text.trim()
            .parse()
            .map_err(|_| vec!["is no number".to_owned()])
    }

    #[test]
    fn a_change_counts_at_once_and_a_mistake_never() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "1").unwrap();
        let file = WatchedFile::open(&path, number).unwrap();
        let changes = file.changes();
        assert_eq!((*file.current(), file.problem()), (1, None));
        assert!(!changes.has_changed().unwrap());

        fs::write(&path, "2").unwrap();
        assert_eq!((*file.current(), file.problem()), (2, None));
        assert!(changes.has_changed().unwrap());

        fs::write(&path, "two").unwrap();
        assert_eq!(*file.current(), 2);
        let problem = file.problem().unwrap();
        assert!(problem.contains("is no number"), "{problem}");

        fs::remove_file(&path).unwrap();
        assert_eq!(*file.current(), 2);
        let problem = file.problem().unwrap();
        assert!(problem.contains("cannot be read any more"), "{problem}");

        fs::write(&path, "3").unwrap();
        assert_eq!((*file.current(), file.problem()), (3, None));
    }

    #[test]
    fn a_file_that_was_away_for_a_moment_is_no_problem_any_more() {
        let folder = tempfile::tempdir().unwrap();
        let (path, aside) = (folder.path().join("file"), folder.path().join("aside"));
        fs::write(&path, "1").unwrap();
        let file = WatchedFile::open(&path, number).unwrap();
        fs::rename(&path, &aside).unwrap();
        assert!(file.problem().is_some());
        fs::rename(&aside, &path).unwrap();
        assert_eq!(file.problem(), None);
    }

    #[test]
    fn the_first_content_must_be_good() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(WatchedFile::open(&path, number).is_err());
        fs::write(&path, "one").unwrap();
        assert_eq!(
            WatchedFile::open(&path, number).map(|_| ()),
            Err(vec!["is no number".to_owned()])
        );
    }
}
