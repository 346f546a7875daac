//! Ends the process at the end of its grace period. After a stop order, each part of a run's end has a deadline. This
//! module is for a run that still does not end, because a task never yields or a write never returns.
//!
//! It waits on a thread of its own, takes no lock and writes nothing, so that the rest of the process cannot block it. It ends
//! what the run has started too.

use std::fs::File;
use std::io;
use std::process;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use job_contract::StepType;
use nix::unistd::{dup2_stderr, dup2_stdout};
use runtime::reaper;

use crate::stop::{Budget, Stop};

/// How late the end may be if the grace period becomes known only after the stop order.
const TICK: Duration = Duration::from_millis(200);

/// When the process ends at the latest, and with which exit code. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LastDeadline {
    grace: Arc<OnceLock<Duration>>,
    code: Arc<OnceLock<u8>>,
}

impl LastDeadline {
    /// Starts the thread that waits for the stop order. The grace period starts with the order.
    pub fn enforce(&self, stop: &Stop) -> io::Result<()> {
        // It is opened now, because the process may later run out of descriptors.
        let dev_null = File::options().write(true).open("/dev/null")?;
        let (deadline, stop) = (self.clone(), stop.clone());
        let wait = move || {
            let order = stop.wait();
            let since: Instant = order.at.into_std();
            loop {
                let remaining = deadline.grace().saturating_sub(since.elapsed());
                if remaining.is_zero() {
                    break;
                }
                thread::sleep(remaining.min(TICK));
            }
            let code = deadline.code.get().copied();
            end(&dev_null, code.unwrap_or_else(|| order.cause.exit().code()))
        };
        thread::Builder::new()
            .name("last deadline".to_owned())
            .spawn(wait)
            .map(drop)
    }

    /// Sets the grace period, once the step is known.
    pub fn set_grace_period(&self, grace: Duration) {
        let _ = self.grace.set(grace);
    }

    /// Sets the exit code, once the outcome is known.
    pub fn set_exit_code(&self, code: u8) {
        let _ = self.code.set(code);
    }

    /// If the step is not known yet, it gets the longest default.
    fn grace(&self) -> Duration {
        let grace = self.grace.get().copied();
        grace.unwrap_or_else(|| Budget::default_grace(StepType::Apply))
    }
}

/// Ends the process. Buffered output is dropped, because the process may be waiting for the reader of that output.
#[expect(
    clippy::exit,
    reason = "a blocked task or write keeps the process from returning"
)]
fn end(dev_null: &File, code: u8) -> ! {
    // An error means that the stream is closed already.
    let _ = dup2_stdout(dev_null);
    let _ = dup2_stderr(dev_null);
    reaper::kill_descendants();
    process::exit(code.into())
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use tokio::runtime;

    use super::*;
    use crate::stop;

    const PART: &str = "LAST_DEADLINE_PART";

    /// A process in which no task makes progress. No process reads its stdout, and its main thread blocks on stdout
    /// with the lock held.
    fn stuck(part: &str) {
        let (stop, deadline) = (Stop::default(), LastDeadline::default());
        stop::listen(&stop).unwrap();
        deadline.enforce(&stop).unwrap();
        deadline.set_grace_period(Duration::from_millis(500));
        if part == "outcome known" {
            deadline.set_exit_code(0);
        }
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .build()
            .unwrap();
        for _ in 0..2 {
            runtime.spawn(async {
                loop {
                    thread::park();
                }
            });
        }
        eprintln!("stuck");
        let mut stdout = io::stdout().lock();
        loop {
            stdout.write_all(&[b'x'; 4096]).unwrap();
        }
    }

    fn code_of(part: &str) -> Option<i32> {
        let name = "last_deadline::tests::a_process_without_progress_ends_with_its_grace_period";
        let mut child = Command::new(env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture"])
            .env(PART, part)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut lines = stderr.lines().map(Result::unwrap);
        assert!(lines.any(|line| line == "stuck"), "it is not ready");
        let pid = i32::try_from(child.id()).unwrap();
        kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
        // Its stdout stays open, but is not read.
        child.wait().unwrap().code()
    }

    #[test]
    fn a_process_without_progress_ends_with_its_grace_period() {
        if let Ok(part) = env::var(PART) {
            return stuck(&part);
        }
        assert_eq!(code_of("at work"), Some(143));
        assert_eq!(code_of("outcome known"), Some(0));
    }
}
