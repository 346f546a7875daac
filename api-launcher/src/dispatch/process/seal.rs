//! What the launcher believes of its own children. A run's code has the user of its executor and can write to the folder of the
//! run, so a report there counts only if it is sealed with the key of this run, names this folder, and names the code its
//! executor ended with.

use std::process::ExitStatus;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::report::{FinalReport, MAX_TERMINATION_MESSAGE_BYTES, ReportKey};
use runtime::regular_file;
use uuid::Uuid;

use super::executor::RunFolder;

/// What the keys of the runs on this machine are made of.
#[derive(Debug)]
pub(super) struct Seal {
    root: ReportKey,
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
        Self { root }
    }

    /// What the executor of this folder is given.
    pub(super) fn secret_of(&self, folder: &RunFolder) -> String {
        self.root.secret_of_run(&folder.mark())
    }

    /// The report that the executor of this folder has left. How it ended is not known where a former launcher started it.
    pub(super) fn report_in(
        &self,
        folder: &RunFolder,
        status: Option<ExitStatus>,
    ) -> Option<FinalReport> {
        let key = ReportKey::parse(&self.secret_of(folder)).expect("a run's secret is a key");
        let limit = u64::try_from(MAX_TERMINATION_MESSAGE_BYTES).unwrap_or(u64::MAX);
        let message = regular_file::read_text(&folder.report(), limit).ok()?;
        let report = key.open(&message)?;
        let author = report.author.as_ref()?;
        let is_its_end = |status: ExitStatus| status.code() == Some(author.exit_code.into());
        (author.run == folder.mark() && status.is_none_or(is_its_end)).then_some(report)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::process::ExitStatusExt as _;

    use job_contract::report::Author;

    use super::*;

    fn key_of(seal: &Seal, folder: &RunFolder) -> ReportKey {
        ReportKey::parse(&seal.secret_of(folder)).unwrap()
    }

    #[test]
    fn only_the_report_of_the_executor_of_this_run_is_believed() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::new(temp.path().to_owned());
        let seal = Seal::new(None);
        let key = key_of(&seal, &folder);
        let report = |run: &str| FinalReport {
            unreported: true,
            author: Some(Author {
                run: run.to_owned(),
                exit_code: 1,
            }),
            ..FinalReport::default()
        };
        let told_after = |message: String, status| {
            fs::write(folder.report(), message).unwrap();
            seal.report_in(&folder, status)
        };
        let told = |message| told_after(message, None);
        let own = report(&folder.mark());
        let sealed = own.to_termination_message(Some(&key));
        assert_eq!(told(sealed.clone()), Some(own.clone()));
        let exit = |code| Some(ExitStatus::from_raw(code << 8));
        assert_eq!(told_after(sealed.clone(), exit(1)), Some(own.clone()));
        assert_eq!(told_after(sealed.clone(), exit(0)), None);
        let killed = Some(ExitStatus::from_raw(9));
        assert_eq!(told_after(sealed, killed), None);
        assert_eq!(told(own.to_termination_message(None)), None);
        let other_launcher = key_of(&Seal::new(None), &folder);
        let other_run = key_of(&seal, &RunFolder::new("/runs/other".into()));
        for other in [other_launcher, other_run] {
            assert_eq!(told(own.to_termination_message(Some(&other))), None);
        }
        assert_eq!(
            told(report("/elsewhere").to_termination_message(Some(&key))),
            None
        );
        assert_eq!(told("x".repeat(100_000)), None);
        fs::remove_file(folder.report()).unwrap();
        nix::unistd::mkfifo(&folder.report(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(seal.report_in(&folder, None), None);
    }
}
