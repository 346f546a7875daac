//! A real PostgreSQL server. Each test gets its own empty database.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, chown, geteuid};
use tempfile::TempDir;

use crate::daemon::Daemon;
use crate::port::Port;
use crate::times::Start;

/// The id of the user `nobody`. PostgreSQL refuses to run as root.
const NOBODY: u32 = 65_534;
/// The folder of all versions on Debian. It is not on `PATH`.
const DEBIAN: &str = "/usr/lib/postgresql";

/// A running server. Its data is deleted when it ends.
#[derive(Debug)]
pub struct PostgresServer {
    programs: PathBuf,
    port: Port,
    databases: AtomicU32,
    // The server ends before its folder is deleted.
    daemon: Daemon,
    _folder: TempDir,
}

impl PostgresServer {
    /// Starts a server.
    ///
    /// # Errors
    /// Returns a line that names what is missing, or the message of the server.
    pub fn start() -> io::Result<Self> {
        let programs = programs()?;
        let folder = tempfile::tempdir()?;
        if geteuid().is_root() {
            let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            chown(folder.path(), Some(user), Some(group))?;
        }
        let data = folder.path().join("data");
        run(program(&programs, "initdb")
            .arg("--pgdata")
            .arg(&data)
            .args(["--username=postgres", "--auth=trust", "--encoding=UTF8"])
            .args(["--locale=C", "--no-sync"]))?;
        let port = Port::take()?;
        let mut server = program(&programs, "postgres");
        server
            .arg("-D")
            .arg(&data)
            .args(["-h", "127.0.0.1", "-p", &port.number().to_string()])
            .args(["-c", "unix_socket_directories=", "-c", "fsync=off"])
            .args(["-c", "max_connections=200"]);
        let (daemon, ()) = Daemon::start(&mut server, |line| {
            line.contains("ready to accept connections").then_some(())
        })?;
        Ok(Self {
            programs,
            port,
            databases: AtomicU32::new(0),
            daemon,
            _folder: folder,
        })
    }

    /// Returns the server that concurrent tests of this process share. It stops with the last of them.
    ///
    /// # Errors
    /// See [`PostgresServer::start`].
    pub fn shared() -> io::Result<Arc<Self>> {
        static SHARED: Mutex<Weak<PostgresServer>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(server) = shared.upgrade() {
            return Ok(server);
        }
        let server = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&server);
        Ok(server)
    }

    /// Creates an empty database, and returns its URL.
    ///
    /// # Errors
    /// Returns the message of the server.
    pub fn database(&self) -> io::Result<String> {
        self.create("template1")
    }

    /// Creates a copy of a database without connections, as from a backup, and returns its URL.
    ///
    /// # Errors
    /// Returns the message of the server.
    pub fn copy(&self, url: &str) -> io::Result<String> {
        let name = url.rsplit('/').next().unwrap_or_default();
        self.create(name)
    }

    fn create(&self, template: &str) -> io::Result<String> {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let (name, port) = (format!("test{number}"), self.port.number());
        run(program(&self.programs, "createdb")
            .args(["-h", "127.0.0.1", "-U", "postgres", "-p", &port.to_string()])
            .args(["-T", template, &name]))?;
        Ok(format!("postgres://postgres@127.0.0.1:{port}/{name}"))
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // After SIGKILL, its shared memory would remain.
        self.daemon.end(Signal::SIGQUIT);
    }
}

/// Returns the folder with the programs of the newest version.
fn programs() -> io::Result<PathBuf> {
    let on_path = which::which("postgres").ok();
    let on_path = on_path.and_then(|program| program.canonicalize().ok());
    if let Some(folder) = on_path.as_deref().and_then(Path::parent) {
        return Ok(folder.to_owned());
    }
    let versions = fs::read_dir(DEBIAN).into_iter().flatten().flatten();
    let versions = versions.filter_map(|entry| {
        let version: u32 = entry.file_name().to_str()?.parse().ok()?;
        let folder = entry.path().join("bin");
        folder
            .join("postgres")
            .exists()
            .then_some((version, folder))
    });
    versions.max().map(|(_, folder)| folder).ok_or_else(|| {
        io::Error::other(
            "`postgres` is missing; `cargo xtask setup` installs it (Debian: postgresql)",
        )
    })
}

/// Returns the command of a program, with a user that may run it.
fn program(programs: &Path, name: &str) -> Command {
    let mut command = Command::new(programs.join(name));
    command.env("LC_ALL", "C").current_dir("/");
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

fn run(command: &mut Command) -> io::Result<()> {
    let start = Start::of(command);
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return start.ready();
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{command:?}: {said}")))
}
