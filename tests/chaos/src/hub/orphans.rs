//! Processes of executors and of what they started.

use std::fs;
use std::io::{self, ErrorKind::NotADirectory, ErrorKind::PermissionDenied};
use std::path::Path;

use job_contract::env;
use nix::errno::Errno;

/// Every process of a run below this folder, as id and command line. Ended processes that wait for their parent do not count.
pub(super) fn processes(folder: &Path) -> io::Result<Vec<String>> {
    let mark = format!("{}={}/", env::RUN_MARK, folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let environment = match fs::read(path.join("environ")) {
            // Files that are about no process, and processes of other users.
            Err(error) if matches!(error.kind(), NotADirectory | PermissionDenied) => continue,
            Err(error) if has_ended(&error) => continue,
            environment => environment?,
        };
        let mut variables = environment.split(|byte| *byte == 0);
        if variables.any(|variable| variable.starts_with(mark.as_bytes())) {
            // It may end meanwhile.
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let id = path.file_name().unwrap_or_default().to_string_lossy();
            found.push(format!("{id} {line}"));
        }
    }
    Ok(found)
}

/// Whether a process runs.
pub(super) fn runs(pid: i32) -> io::Result<bool> {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(error) if has_ended(&error) => Ok(false),
        stat => Ok(!stat?.contains(") Z ")),
    }
}

/// Whether a file of `/proc` cannot be read because its process has ended.
fn has_ended(error: &io::Error) -> bool {
    let errors = [Errno::ENOENT, Errno::ESRCH].map(|errno| errno as i32);
    error
        .raw_os_error()
        .is_some_and(|error| errors.contains(&error))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_counts_by_its_mark_until_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("agent-0/work");
        let mut process = Command::new("cat")
            .env(env::RUN_MARK, &mark)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Its environment cannot be read before it has begun.
        process.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        process
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut [0])
            .unwrap();
        let found = processes(folder.path()).unwrap();
        assert!(found.len() == 1 && found[0].contains("cat"), "{found:?}");
        assert!(processes(&mark).unwrap().is_empty());
        process.kill().unwrap();
        let pid = i32::try_from(process.id()).unwrap();
        process.wait().unwrap();
        assert!(!runs(pid).unwrap() && processes(folder.path()).unwrap().is_empty());
        assert!(runs(i32::try_from(std::process::id()).unwrap()).unwrap());
    }
}
