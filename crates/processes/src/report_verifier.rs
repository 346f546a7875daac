//! Verifies the final reports of executors on this machine. The code of a run has the user of its executor and can write to
//! the folder of the run. A report counts only if it has the code (HMAC) of this run's key, names this run, and names the
//! exit code of its executor.

use std::process::ExitStatus;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::report::{FinalReport, MAX_TERMINATION_MESSAGE_BYTES, ReportKey};
use runtime::regular_file;
use uuid::Uuid;

use crate::run_folder::RunFolder;

/// Derives the key of each run on this machine, and verifies reports with it.
#[derive(Debug)]
pub struct ReportVerifier {
    root: ReportKey,
}

impl ReportVerifier {
    /// Creates a verifier from the key of the environment, which a later launcher shares. Without such a key, a later
    /// launcher cannot verify the reports of executors that outlive this one.
    pub fn new(key: Option<ReportKey>) -> Self {
        let root = key.unwrap_or_else(|| {
            let random = [Uuid::new_v4(), Uuid::new_v4()].map(Uuid::into_bytes);
            ReportKey::parse(&STANDARD.encode(random.concat()))
                .expect("32 bytes in base64 are a key")
        });
        Self { root }
    }

    /// Returns the key of the run, as its executor is given it.
    pub fn secret_of(&self, folder: &RunFolder) -> String {
        self.root.secret_of_run(&folder.run_name())
    }

    /// Returns the verified report of the executor of this folder. `status` is `None` if a former launcher started it.
    pub fn read_report(
        &self,
        folder: &RunFolder,
        status: Option<ExitStatus>,
    ) -> Option<FinalReport> {
        let key = ReportKey::parse(&self.secret_of(folder)).expect("a run's secret is a key");
        let limit = u64::try_from(MAX_TERMINATION_MESSAGE_BYTES).unwrap_or(u64::MAX);
        let message = regular_file::read_text_unlinked(&folder.report(), limit).ok()?;
        let report = key.open(&message)?;
        let author = report.author.as_ref()?;
        let matches_exit_code = |status: ExitStatus| status.code() == Some(author.exit_code.into());
        (author.run == folder.run_name() && status.is_none_or(matches_exit_code)).then_some(report)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::process::ExitStatusExt as _;

    use job_contract::report::Author;

    use super::*;

    fn key_of(verifier: &ReportVerifier, folder: &RunFolder) -> ReportKey {
        ReportKey::parse(&verifier.secret_of(folder)).unwrap()
    }

    #[test]
    fn only_the_report_of_the_executor_of_this_run_is_believed() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::new(temp.path().to_owned());
        let verifier = ReportVerifier::new(None);
        let key = key_of(&verifier, &folder);
        let report = |run: &str| FinalReport {
            unreported: true,
            author: Some(Author {
                run: run.to_owned(),
                exit_code: 1,
            }),
            ..FinalReport::default()
        };
        let report_after = |message: String, status| {
            fs::write(folder.report(), message).unwrap();
            verifier.read_report(&folder, status)
        };
        let report_from = |message| report_after(message, None);
        let own = report(&folder.run_name());
        let sealed = own.to_termination_message(Some(&key));
        assert_eq!(report_from(sealed.clone()), Some(own.clone()));
        let exit = |code| Some(ExitStatus::from_raw(code << 8));
        assert_eq!(report_after(sealed.clone(), exit(1)), Some(own.clone()));
        assert_eq!(report_after(sealed.clone(), exit(0)), None);
        let killed = Some(ExitStatus::from_raw(9));
        assert_eq!(report_after(sealed, killed), None);
        assert_eq!(report_from(own.to_termination_message(None)), None);
        let other_launcher = key_of(&ReportVerifier::new(None), &folder);
        let other_run = key_of(&verifier, &RunFolder::new("/runs/other".into()));
        for other in [other_launcher, other_run] {
            assert_eq!(report_from(own.to_termination_message(Some(&other))), None);
        }
        assert_eq!(
            report_from(report("/elsewhere").to_termination_message(Some(&key))),
            None
        );
        assert_eq!(report_from("x".repeat(100_000)), None);
        fs::remove_file(folder.report()).unwrap();
        nix::unistd::mkfifo(&folder.report(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(verifier.read_report(&folder, None), None);
    }
}
