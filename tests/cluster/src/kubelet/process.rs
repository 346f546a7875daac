//! Processes in groups of their own, all of which end with the cluster.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use crate::front::logs;

/// The process groups of running containers; nothing once the cluster has ended.
#[derive(Debug)]
pub(crate) struct Groups(Mutex<Option<HashSet<i32>>>);

impl Default for Groups {
    fn default() -> Self {
        Self(Mutex::new(Some(HashSet::new())))
    }
}

fn end(group: i32) {
    let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
}

impl Groups {
    fn add(&self, group: i32) {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(groups) => {
                groups.insert(group);
            }
            // Started while the cluster ended.
            None => end(group),
        }
    }

    /// What a container leaves behind ends with its first process.
    fn end(&self, group: i32) {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if groups.as_mut().is_some_and(|groups| groups.remove(&group)) {
            end(group);
        }
    }

    /// Ends everything, and whatever is still to be started.
    pub(crate) fn end_all(&self) {
        let groups = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        groups.into_iter().flatten().for_each(end);
    }
}

/// What to start.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) dir: PathBuf,
    pub(crate) log: PathBuf,
}

/// A container's first process, which leads its group.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    id: i32,
    /// Ends when no process can write any more.
    log: JoinHandle<io::Result<()>>,
}

/// How long a log is waited for that a process outside the group holds open. No runtime would let it live.
const STRAY: Duration = Duration::from_secs(10);

impl Process {
    pub(crate) fn start(groups: &Groups, start: &Start) -> io::Result<Self> {
        let file = open_log(&start.log)?;
        let (reader, writer) = io::pipe()?;
        let child = Command::new(&start.program)
            .args(&start.args)
            .env_clear()
            .envs(start.env.iter().map(|(name, value)| (name, value)))
            .current_dir(&start.dir)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0)
            .spawn()?;
        let id = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .unwrap_or_default();
        groups.add(id);
        let log = tokio::task::spawn_blocking(move || logs::stamp(reader, file));
        Ok(Self { child, id, log })
    }

    /// As a kubelet does: only the first process gets the signal.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.id), signal);
    }

    /// As the end of a container does: nothing of it goes on, whichever process group it is in.
    pub(crate) fn kill(&self) {
        let mut tree = vec![self.id];
        let mut next = 0;
        while let Some(process) = tree.get(next).copied() {
            // Stopped first, so that it has no more children than are found.
            let _ = kill(Pid::from_raw(process), Signal::SIGSTOP);
            tree.extend(children_of(process));
            next += 1;
        }
        for process in tree {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }

    /// The exit code as a container runtime reports it.
    pub(crate) async fn wait(&mut self, groups: &Groups) -> i32 {
        use std::os::unix::process::ExitStatusExt as _;
        let status = self.child.wait().await;
        groups.end(self.id);
        // What cannot be written is missing from the log, as on a node with a full disk.
        let _ = tokio::time::timeout(STRAY, &mut self.log).await;
        status.map_or(255, |status| {
            status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
        })
    }
}

fn children_of(process: i32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task"));
    let threads = threads.into_iter().flatten().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            let ids = list.split_whitespace().filter_map(|id| id.parse().ok());
            ids.collect::<Vec<i32>>()
        })
        .collect()
}

fn open_log(path: &Path) -> io::Result<std::fs::File> {
    OpenOptions::new().create(true).append(true).open(path)
}
