//! The programs of a control plane as processes. Each has a log, and all end with the value.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use tokio::signal::unix::{SignalKind, signal};

/// How many lines of a log are shown.
const LAST_LINES: usize = 8;

/// A program that has ended, and was not to.
#[derive(Debug, thiserror::Error)]
#[error("`{program}` of the control plane ended ({status}), its log ends:\n{log}")]
pub struct EndedProgram {
    /// Its name.
    pub program: String,
    /// How it ended.
    pub status: ExitStatus,
    /// The last lines of its log.
    pub log: String,
}

#[derive(Debug)]
pub(crate) struct Processes {
    /// Where the logs are.
    folder: PathBuf,
    /// In the order in which they were started, with the names of their programs.
    running: Vec<(String, Child)>,
}

impl Processes {
    pub(crate) const fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            running: Vec::new(),
        }
    }

    pub(crate) fn start(&mut self, program: &Path, flags: &[(&str, String)]) -> io::Result<()> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let log = fs::File::create(self.log_file(&name))?;
        let flags = flags.iter();
        let process = Command::new(program)
            .args(flags.map(|(flag, value)| format!("--{flag}={value}")))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.running.push((name.into_owned(), process));
        Ok(())
    }

    /// The first program that has ended, if there is one.
    pub(crate) fn ended(&mut self) -> io::Result<Option<EndedProgram>> {
        for (name, process) in &mut self.running {
            if let Some(status) = process.try_wait()? {
                let program = name.clone();
                let log = self.log(&program);
                return Ok(Some(EndedProgram {
                    program,
                    status,
                    log,
                }));
            }
        }
        Ok(None)
    }

    /// Waits until a program ends.
    pub(crate) async fn until_ended(&mut self) -> io::Result<EndedProgram> {
        let mut children = signal(SignalKind::child())?;
        loop {
            if let Some(ended) = self.ended()? {
                return Ok(ended);
            }
            children.recv().await;
        }
    }

    /// The last lines of all logs.
    pub(crate) fn logs(&self) -> String {
        let names = self.running.iter().map(|(name, _)| name);
        let logs: Vec<_> = names.map(|name| self.log(name)).collect();
        logs.join("\n")
    }

    fn log_file(&self, program: &str) -> PathBuf {
        self.folder.join(format!("{program}.log"))
    }

    fn log(&self, program: &str) -> String {
        let log = fs::read_to_string(self.log_file(program)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        while let Some((_, mut process)) = self.running.pop() {
            // One that has ended already needs no end.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn a_program_that_ends_is_named_with_its_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let program = |name: &str, script: &str| {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/bash\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let gate = folder.path().join("gate");
        nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let forever = program("kube-apiserver", "exec sleep 600");
        let ending = program(
            "kube-scheduler",
            "seq 20; read -r _ < \"${1#--gate=}\"; echo \"no port\" >&2; exit 3",
        );
        let mut processes = Processes::new(folder.path().to_owned());
        processes.start(&forever, &[]).unwrap();
        let flag = ("gate", gate.display().to_string());
        processes.start(&ending, &[flag]).unwrap();
        assert!(processes.ended().unwrap().is_none());
        // Opening the gate waits for its reader.
        let open = tokio::task::spawn_blocking(move || fs::write(gate, "open\n"));
        let ended = processes.until_ended().await.unwrap();
        open.await.unwrap().unwrap();
        assert_eq!(
            (&*ended.program, ended.status.code()),
            ("kube-scheduler", Some(3))
        );
        assert_eq!(ended.log, "14\n15\n16\n17\n18\n19\n20\nno port");
    }
}
