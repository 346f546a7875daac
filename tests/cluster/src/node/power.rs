//! The switch of the node: a socket in its folder over which a test kills everything that runs pods, or starts it again.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_peers::wait;

use super::{Folder, runtime};

/// Where control groups are.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// How long containerd may take to listen, on a busy machine.
const START: Duration = Duration::from_mins(5);
const POLL: Duration = Duration::from_millis(20);

/// containerd and kubelet of a node.
#[derive(Debug)]
pub(super) struct Power {
    folder: Folder,
    kubelet: PathBuf,
    running: Vec<Service>,
}

impl Power {
    /// A node on which nothing runs.
    pub(super) fn new(folder: &Folder, kubelet: &Path) -> Self {
        Self {
            folder: folder.clone(),
            kubelet: kubelet.to_owned(),
            running: Vec::new(),
        }
    }

    /// Starts containerd, without the kubelet. Returns when it listens: no kubelet waits for it.
    ///
    /// # Errors
    /// Fails when it does not start.
    pub(super) fn containerd(&mut self) -> Result<()> {
        let command = runtime::containerd(&self.folder)?;
        let service = Service::start("containerd", command, &self.folder)?;
        self.running.push(service);
        let listens = || UnixStream::connect(self.folder.path("containerd.sock")).map(drop);
        wait::within_blocking(
            START,
            "containerd listens; its log is beside its socket",
            listens,
        )?;
        Ok(())
    }

    /// Starts the kubelet.
    ///
    /// # Errors
    /// Fails when it does not start.
    pub(super) fn kubelet(&mut self) -> Result<()> {
        self.make_control_groups()?;
        let command = runtime::kubelet(&self.kubelet, &self.folder)?;
        let service = Service::start("kubelet", command, &self.folder)?;
        self.running.push(service);
        Ok(())
    }

    /// The kubelet makes those of pods, and wants the one they are in to be there.
    fn make_control_groups(&self) -> io::Result<()> {
        let name = self.folder.control_group();
        for hierarchy in hierarchies()? {
            let group = hierarchy.join(&name);
            if !group.exists() {
                fs::create_dir(group)?;
            }
        }
        Ok(())
    }

    fn off(&mut self) -> Result<()> {
        for service in self.running.drain(..) {
            service.kill()?;
        }
        // Each shim first: it would tell the next containerd of the end of its container.
        let socket = self.folder.path("containerd.sock");
        let of_shims = processes_with(&socket.to_string_lossy())?;
        let of_pods = processes_in(&self.folder.control_group())?;
        // None of them sees another end: an executor whose tool is killed first would report that.
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for pid in of_shims.iter().chain(&of_pods) {
                match kill(*pid, signal) {
                    // It ended with another.
                    Ok(()) | Err(nix::Error::ESRCH) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    fn turn(&mut self, word: &str) -> Result<()> {
        match word.trim_end() {
            "off" => self.off(),
            "on" => {
                self.containerd()?;
                self.kubelet()
            }
            other => bail!("there is no `{other}`, only `on` and `off`"),
        }
    }

    /// Does what is asked for on the socket, for as long as the process lives.
    ///
    /// # Errors
    /// Fails when there is no socket.
    pub(super) fn serve(mut self) -> Result<()> {
        let listener = UnixListener::bind(self.folder.switch())?;
        thread::spawn(move || {
            for stream in listener.incoming() {
                // Who has gone away needs no answer.
                let _ = stream.and_then(|stream| self.answer(stream));
            }
        });
        Ok(())
    }

    fn answer(&mut self, mut stream: UnixStream) -> io::Result<()> {
        let mut word = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut word)?;
        match self.turn(&word) {
            Ok(()) => writeln!(stream, "done"),
            Err(error) => write!(stream, "{error:#}"),
        }
    }
}

/// A program that is started again when it ends, as the service manager of a node does: a kubelet gives up if containerd is slow.
#[derive(Debug)]
struct Service(Arc<Mutex<Option<Child>>>);

impl Service {
    fn start(name: &'static str, mut command: Command, folder: &Folder) -> Result<Self> {
        let child = runtime::start(name, &mut command, folder)?;
        let running = Arc::new(Mutex::new(Some(child)));
        let (watched, folder) = (Arc::clone(&running), folder.clone());
        thread::spawn(move || {
            loop {
                thread::sleep(POLL);
                let mut running = watched.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(child) = &mut *running else { return };
                if !matches!(child.try_wait(), Ok(None)) {
                    // What does not start fails the tests, and its log says why.
                    *running = runtime::start(name, &mut command, &folder).ok();
                }
            }
        });
        Ok(Self(running))
    }

    fn kill(self) -> io::Result<()> {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut child) = running else {
            return Ok(());
        };
        child.kill()?;
        child.wait().map(drop)
    }
}

/// Processes with this text in their command lines.
fn processes_with(text: &str) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // It may have ended.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(text) && pid != std::process::id().cast_signed()
        {
            found.push(Pid::from_raw(pid));
        }
    }
    Ok(found)
}

/// Where there are control groups: one folder on machines of today, one for each controller on older ones.
fn hierarchies() -> io::Result<Vec<PathBuf>> {
    let root = PathBuf::from(CONTROL_GROUPS);
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Processes in a control group and those below it.
fn processes_in(group: &str) -> io::Result<Vec<Pid>> {
    let hierarchies = hierarchies()?.into_iter();
    let mut folders: Vec<_> = hierarchies.map(|root| root.join(group)).collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        // One that is removed meanwhile has no processes.
        let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        found.extend(
            text.lines()
                .filter_map(|line| Some(Pid::from_raw(line.parse().ok()?))),
        );
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        let below = entries.filter_map(|entry| Some(entry.ok()?.path()));
        folders.extend(below.filter(|path| path.is_dir()));
    }
    Ok(found)
}
