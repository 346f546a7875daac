//! Runs one git command to its end, or kills it with its child processes. This module does not know the command's
//! purpose.

use std::io;
use std::process::Stdio;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use runtime::reaper;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

/// The limit of each kept output stream. The server decides how much text git passes on.
const KEPT_BYTES: usize = 64 * 1024;

/// The result of a git process.
pub(super) struct Finished {
    pub(super) success: bool,
    /// Whether all of its standard output was kept.
    pub(super) is_whole: bool,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Kills a process group on drop, because git's ssh and remote helpers would outlive git.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // An error means that the group has ended already.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Runs `command` in a new process group. Dropping the returned future kills the group.
pub(super) async fn run(mut command: Command) -> io::Result<Finished> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    let mut child = reaper::spawn(&mut command)?;
    let leader = child.id().and_then(|id| i32::try_from(id).ok());
    let mut group = Group(leader.map(Pid::from_raw));
    let ((stdout, is_whole), (stderr, _)) = tokio::try_join!(
        read_tail(child.stdout.take()),
        read_tail(child.stderr.take())
    )?;
    let status = child.wait().await?;
    group.0 = None;
    Ok(Finished {
        success: status.success(),
        is_whole,
        stdout,
        stderr,
    })
}

/// The end of a stream, and whether that is all of it.
async fn read_tail(stream: Option<impl AsyncRead + Unpin>) -> io::Result<(String, bool)> {
    let (mut tail, mut is_whole) = (Vec::new(), true);
    let Some(mut stream) = stream else {
        return Ok((String::new(), true));
    };
    while stream.read_buf(&mut tail).await? > 0 {
        if tail.len() > 2 * KEPT_BYTES {
            tail.drain(..tail.len() - KEPT_BYTES);
            is_whole = false;
        }
    }
    Ok((String::from_utf8_lossy(&tail).into_owned(), is_whole))
}

#[cfg(test)]
mod tests {
    use test_peers::process::ends;
    use test_peers::wait::until;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn only_the_end_of_endless_output_is_kept() {
        let finished = run(shell("seq 1 200000; echo last >&2; exit 3"))
            .await
            .unwrap();
        assert!(!finished.success);
        assert!(finished.stdout.len() <= 3 * KEPT_BYTES);
        assert!(finished.stdout.ends_with("200000\n"));
        assert_eq!(finished.stderr, "last\n");
    }

    #[tokio::test]
    async fn dropping_kills_the_child_processes_of_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let pid_file = folder.path().join("pid");
        let script = format!(
            "sleep 600 & echo $! > '{0}.new'; mv '{0}.new' '{0}'; wait",
            pid_file.display()
        );
        let running = tokio::spawn(run(shell(&script)));
        let noted = until("the command starts", async || {
            std::fs::read_to_string(&pid_file)
        });
        let pid: i32 = noted.await.trim().parse().unwrap();
        running.abort();
        assert!(running.await.is_err());
        assert!(ends(pid), "the grandchild outlived the future");
    }
}
