//! Processes of executors and of what they started.

use std::fs;
use std::path::Path;

use job_contract::env;

/// Every process of a run below this folder, as id and command line. Ended processes that wait for their parent do not count.
pub(super) fn processes(folder: &Path) -> Vec<String> {
    let mark = format!("{}={}/", env::RUN_MARK, folder.display());
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    // A process that ends meanwhile cannot be read.
    paths
        .filter(|path| {
            let environment = fs::read(path.join("environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|variable| variable.starts_with(mark.as_bytes()))
        })
        .map(|path| {
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let id = path.file_name().unwrap_or_default().to_string_lossy();
            format!("{id} {line}")
        })
        .collect()
}

/// Whether a process runs.
pub(super) fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
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
        let found = processes(folder.path());
        assert!(found.len() == 1 && found[0].contains("cat"), "{found:?}");
        assert!(processes(&mark).is_empty());
        process.kill().unwrap();
        let pid = i32::try_from(process.id()).unwrap();
        process.wait().unwrap();
        assert!(!runs(pid) && processes(folder.path()).is_empty());
        assert!(runs(i32::try_from(std::process::id()).unwrap()));
    }
}
