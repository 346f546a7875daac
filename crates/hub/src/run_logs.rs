//! The logs of runs on this machine, whose executors did not report. The agent removes a run's folder once the hub has its end,
//! and the report may come much later. So the hub keeps a link to the log until then.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pool_protocol::id::LeaseId;
use pool_store::TaskView;
use tracing::warn;

use crate::pools::RunLogs;

/// The folder of the links, beside the store.
const FOLDER: &str = "logs";
/// Longer than a report is repeated. What is older was left by a hub that was killed.
const LEFT_AFTER: Duration = Duration::from_hours(48);

/// The logs, and the links to them. A link has the id of its lease for a name.
#[derive(Debug)]
pub(crate) struct KeptLogs {
    logs: RunLogs,
    folder: PathBuf,
}

impl KeptLogs {
    /// Opens the folder of the links, and removes what was left there.
    pub(crate) fn open(logs: RunLogs, beside: &Path) -> Self {
        let folder = beside.join(FOLDER);
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let written = entry.metadata().and_then(|known| known.modified());
            let age = written.ok().and_then(|written| written.elapsed().ok());
            if age.is_some_and(|age| age > LEFT_AFTER) {
                forget(&entry.path());
            }
        }
        Self { logs, folder }
    }

    /// Keeps the log of a lease that ends.
    pub(crate) fn keep(&self, lease: LeaseId) {
        let log = (self.logs.of_lease)(&self.logs.data, lease);
        let linked = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::hard_link(&log, self.link_of(lease)));
        match linked {
            Ok(()) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    // An executor that could not be started has none. The call may be a repetition.
                    io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists
                ) => {}
            Err(error) => {
                warn!(%lease, %error, "the log of a run cannot be kept for its report");
            }
        }
    }

    /// Returns the log of a task that is over.
    pub(crate) fn find(&self, task: &TaskView) -> Option<PathBuf> {
        let lease = task.lease?;
        // The agent still has the folder if the hub gave the task up.
        let places = [
            self.link_of(lease),
            (self.logs.of_lease)(&self.logs.data, lease),
        ];
        places.into_iter().find(|path| path.exists())
    }

    /// Removes what was kept of a lease.
    pub(crate) fn forget(&self, lease: LeaseId) {
        forget(&self.link_of(lease));
    }

    fn link_of(&self, lease: LeaseId) -> PathBuf {
        self.folder.join(lease.to_string())
    }
}

fn forget(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!(path = %path.display(), %error, "the log of a run cannot be removed");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use pool_protocol::task::TaskState;

    use super::*;
    use crate::sample_views;

    #[test]
    fn a_log_is_kept_until_its_report_although_its_folder_goes() {
        let folder = tempfile::tempdir().unwrap();
        let logs = RunLogs {
            data: folder.path().to_owned(),
            of_lease: |data, lease| data.join(lease.to_string()),
        };
        let kept = KeptLogs::open(logs, &folder.path().join("pools"));
        let lease = LeaseId::new();
        let task = TaskView {
            lease: Some(lease),
            ..sample_views::task(TaskState::Failed)
        };
        let log = folder.path().join(lease.to_string());
        kept.keep(lease);
        assert_eq!(kept.find(&task), None);
        fs::write(&log, "all of it").unwrap();
        assert_eq!(
            kept.find(&task),
            Some(log.clone()),
            "of a task that was given up"
        );
        for _ in 0..2 {
            kept.keep(lease);
        }
        fs::remove_file(&log).unwrap();
        let found = kept.find(&task).unwrap();
        assert_eq!(fs::read_to_string(found).unwrap(), "all of it");
        kept.forget(lease);
        assert_eq!(kept.find(&task), None);
    }

    #[test]
    fn what_a_killed_hub_left_goes_after_two_days() {
        let folder = tempfile::tempdir().unwrap();
        let links = folder.path().join(FOLDER);
        fs::create_dir(&links).unwrap();
        for (name, age) in [
            ("old", LEFT_AFTER + Duration::from_mins(1)),
            ("new", Duration::ZERO),
        ] {
            let file = fs::File::create(links.join(name)).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        }
        let logs = RunLogs {
            data: folder.path().to_owned(),
            of_lease: |data, _| data.to_owned(),
        };
        KeptLogs::open(logs, folder.path());
        assert!(!links.join("old").exists() && links.join("new").exists());
    }
}
