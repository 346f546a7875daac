//! What the launcher believes of its own children. A run's code has the user of its executor and can write to the folder of the
//! run, so a report there counts only if it is sealed, and names this folder.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::report::{FinalReport, MAX_TERMINATION_MESSAGE_BYTES, ReportKey};
use runtime::regular_file;
use uuid::Uuid;

use super::executor::RunFolder;

/// The key of the executors on this machine.
#[derive(Debug)]
pub(super) struct Seal {
    key: ReportKey,
}

impl Seal {
    /// From the key of the surroundings, so that a later launcher has the same. Where there is none, the reports of executors
    /// that outlive this launcher are not believed by the next.
    pub(super) fn new(key: Option<ReportKey>) -> Self {
        let root = key.unwrap_or_else(|| {
            let random = [Uuid::new_v4(), Uuid::new_v4()].map(Uuid::into_bytes);
            ReportKey::parse(&STANDARD.encode(random.concat()))
                .expect("32 bytes in base64 are a key")
        });
        Self { key: root }
    }

    /// What an executor is given.
    pub(super) fn for_executors(&self) -> String {
        self.key.for_children()
    }

    /// The report that the executor of this folder has left.
    pub(super) fn report_in(&self, folder: &RunFolder) -> Option<FinalReport> {
        let key =
            ReportKey::parse(&self.for_executors()).expect("a key that was handed on is a key");
        let limit = u64::try_from(MAX_TERMINATION_MESSAGE_BYTES).unwrap_or(u64::MAX);
        let message = regular_file::read_text(&folder.report(), limit).ok()?;
        let report = key.open(&message)?;
        let author = report.author.as_ref()?;
        (author.run == folder.mark()).then_some(report)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use job_contract::report::Author;

    use super::*;

    #[test]
    fn only_the_report_of_the_executor_of_this_run_is_believed() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::new(temp.path().to_owned());
        let seal = Seal::new(None);
        let key = ReportKey::parse(&seal.for_executors()).unwrap();
        let report = |run: &str| FinalReport {
            unreported: true,
            author: Some(Author {
                run: run.to_owned(),
                exit_code: 1,
            }),
            ..FinalReport::default()
        };
        let told = |message: String| {
            fs::write(folder.report(), message).unwrap();
            seal.report_in(&folder)
        };
        let own = report(&folder.mark());
        assert_eq!(
            told(own.to_termination_message(Some(&key))),
            Some(own.clone())
        );
        assert_eq!(told(own.to_termination_message(None)), None);
        let other = Seal::new(None).for_executors();
        let other = ReportKey::parse(&other).unwrap();
        assert_eq!(told(own.to_termination_message(Some(&other))), None);
        assert_eq!(
            told(report("/elsewhere").to_termination_message(Some(&key))),
            None
        );
        assert_eq!(told("x".repeat(100_000)), None);
        fs::remove_file(folder.report()).unwrap();
        nix::unistd::mkfifo(&folder.report(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(seal.report_in(&folder), None);
    }
}
