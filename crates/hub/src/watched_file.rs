//! A small file of the operator that is read again at each use. If it can no longer be used, the last valid content
//! counts, and the readiness names the error. Content of the launcher itself has no file and does not change.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::watch;
use tracing::{info, warn};

/// The largest file that is read.
const MAX_BYTES: u64 = 1024 * 1024;

/// Parses the content of a file. Returns a text for each error, without secrets.
type Parse<T> = dyn Fn(&str) -> Result<T, Vec<String>> + Send + Sync;

/// The file and its last content.
#[derive(Debug)]
pub(crate) struct WatchedFile<T> {
    file: Option<File<T>>,
    last: Mutex<LastContent<T>>,
    changes: watch::Sender<()>,
}

struct File<T> {
    path: PathBuf,
    parse: Box<Parse<T>>,
}

impl<T> std::fmt::Debug for File<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("File").field(&self.path).finish()
    }
}

struct LastContent<T> {
    valid: Arc<T>,
    /// The last content, valid or not.
    text: String,
    /// Why that content cannot be used.
    content_error: Option<String>,
    /// Why the file could not be read the last time.
    read_error: Option<String>,
}

// The output does not contain the text, because it may contain secrets.
impl<T: std::fmt::Debug> std::fmt::Debug for LastContent<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LastContent")
            .field("valid", &self.valid)
            .field("content_error", &self.content_error)
            .field("read_error", &self.read_error)
            .finish_non_exhaustive()
    }
}

impl<T> WatchedFile<T> {
    /// Reads the file for the first time.
    pub(crate) fn open(
        path: &Path,
        parse: impl Fn(&str) -> Result<T, Vec<String>> + Send + Sync + 'static,
    ) -> Result<Self, Vec<String>> {
        let text = read(path).map_err(|error| vec![error])?;
        let valid = parse(&text)?;
        let file = File {
            path: path.to_owned(),
            parse: Box::new(parse) as Box<Parse<T>>,
        };
        Ok(Self::new(Some(file), valid, text))
    }

    /// Content that no file has.
    pub(crate) fn without_file(content: T) -> Self {
        Self::new(None, content, String::new())
    }

    fn new(file: Option<File<T>>, valid: T, text: String) -> Self {
        Self {
            file,
            last: Mutex::new(LastContent {
                valid: Arc::new(valid),
                text,
                content_error: None,
                read_error: None,
            }),
            changes: watch::Sender::new(()),
        }
    }

    /// Reads the file, and returns its content, or the last valid content.
    pub(crate) fn current(&self) -> Arc<T> {
        // A reader that waits for the lock must not put an older content in the place of a newer one.
        let mut last = self.lock();
        let Some(File { path, parse }) = &self.file else {
            return Arc::clone(&last.valid);
        };
        match read(path) {
            Ok(text) => {
                last.read_error = None;
                if text != last.text {
                    let parsed = parse(&text);
                    last.text = text;
                    self.apply(path, &mut last, parsed);
                }
            }
            Err(error) => {
                let problem = format!("`{}` cannot be read any more: {error}", path.display());
                if last.read_error.is_none() {
                    warn!(
                        problem,
                        "a file cannot be read, and its last content counts"
                    );
                }
                last.read_error = Some(problem);
            }
        }
        Arc::clone(&last.valid)
    }

    fn apply(&self, path: &Path, last: &mut LastContent<T>, parsed: Result<T, Vec<String>>) {
        match parsed {
            Ok(valid) => {
                last.valid = Arc::new(valid);
                last.content_error = None;
                info!(file = %path.display(), "the new content of a file counts");
                self.changes.send_replace(());
            }
            Err(errors) => {
                let problem = format!("`{}` {}", path.display(), errors.join("; "));
                warn!(problem, "the last valid content of a file counts");
                last.content_error = Some(problem);
            }
        }
    }

    /// Returns why the file can no longer be used.
    pub(crate) fn problem(&self) -> Option<String> {
        drop(self.current());
        let last = self.lock();
        last.read_error
            .clone()
            .or_else(|| last.content_error.clone())
    }

    /// Returns a receiver that is notified of each valid change. Changes are detected only in
    /// [`current`](Self::current).
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, LastContent<T>> {
        runtime::lock(&self.last)
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
    fn a_change_counts_at_once_and_an_error_never() {
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
    fn a_file_that_is_back_is_no_problem() {
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
    fn the_first_content_must_be_valid() {
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
