//! Real `sshd` with keys of its own. Each connection gets its own `sshd -i`, so there is no port to fight over and
//! nothing to wait for.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tempfile::TempDir;

/// A running server that lets the current user in with one key.
#[derive(Debug)]
pub struct Sshd {
    address: SocketAddr,
    folder: TempDir,
    stopping: Arc<AtomicBool>,
    sessions: Arc<Mutex<Vec<Child>>>,
    acceptor: Option<JoinHandle<()>>,
}

impl Sshd {
    /// Generates keys and starts to listen.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        let sshd = find_sshd()?;
        let folder = tempfile::tempdir()?;
        generate_key(&folder.path().join("host_key"), "ed25519")?;
        generate_key(&folder.path().join("client_key"), "ed25519")?;
        let config = folder.path().join("sshd_config");
        fs::write(&config, render_config(folder.path()))?;
        prepare_privilege_separation()?;

        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let stopping = Arc::<AtomicBool>::default();
        let sessions = Arc::<Mutex<Vec<Child>>>::default();
        let log = folder.path().join("sshd.log");
        let (stop, running) = (Arc::clone(&stopping), Arc::clone(&sessions));
        let acceptor = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let session = stream.and_then(|stream| start_session(&sshd, &config, &log, stream));
                if let Ok(session) = session {
                    lock(&running).push(session);
                }
            }
        });
        Ok(Self {
            address,
            folder,
            stopping,
            sessions,
            acceptor: Some(acceptor),
        })
    }

    /// `ssh://` address of a path on this machine.
    pub fn url(&self, path: &Path) -> String {
        format!("ssh://{}@{}{}", user_name(), self.address, path.display())
    }

    /// Text of the private key that is let in.
    ///
    /// # Errors
    /// Fails when the key file cannot be read.
    pub fn client_key(&self) -> io::Result<String> {
        fs::read_to_string(self.folder.path().join("client_key"))
    }

    /// The line of a `known_hosts` file that holds this server's key.
    ///
    /// # Errors
    /// Fails when the key file cannot be read.
    pub fn known_hosts_line(&self) -> io::Result<String> {
        let key = fs::read_to_string(self.folder.path().join("host_key.pub"))?;
        let key: Vec<&str> = key.split(' ').take(2).collect();
        Ok(format!(
            "[127.0.0.1]:{} {}\n",
            self.address.port(),
            key.join(" ")
        ))
    }

    /// What the server said so far, for the message of a failed test.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("sshd.log")).unwrap_or_default()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor up.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
        for session in lock(&self.sessions).iter_mut() {
            drop(session.kill());
            drop(session.wait());
        }
    }
}

/// A private key that no server accepts, or one of another type than the server's own.
///
/// # Errors
/// Fails when `ssh-keygen` is missing or fails.
pub fn generate_key(path: &Path, kind: &str) -> io::Result<String> {
    generate(path, &["-t", kind])
}

/// An RSA key in PEM of PKCS #1. To make one here takes seconds without optimisation.
pub(crate) fn generate_rsa_pem() -> io::Result<String> {
    let folder = tempfile::tempdir()?;
    let options = ["-t", "rsa", "-b", "2048", "-m", "PEM"];
    generate(&folder.path().join("key"), &options)
}

fn generate(path: &Path, options: &[&str]) -> io::Result<String> {
    let output = Command::new("ssh-keygen")
        .args(["-q", "-N", ""])
        .args(options)
        .arg("-f")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| {
            io::Error::other(format!(
                "`ssh-keygen` is missing; install openssh-client ({e})"
            ))
        })?;
    if !output.status.success() {
        return Err(io::Error::other(format!(
            "ssh-keygen failed: {}",
            String::from_utf8_lossy(&output.stderr)
        )));
    }
    fs::read_to_string(path)
}

/// sshd starts itself again, so it wants to be called by its absolute path; it is often outside `PATH`.
fn find_sshd() -> io::Result<PathBuf> {
    which::which("sshd")
        .ok()
        .into_iter()
        .chain(["/usr/sbin/sshd", "/usr/local/sbin/sshd"].map(PathBuf::from))
        .find(|path| path.is_file())
        .ok_or_else(|| io::Error::other("`sshd` is missing; install openssh-server"))
}

/// Started by root, sshd refuses to run without the folder it confines its unprivileged half to.
fn prepare_privilege_separation() -> io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        fs::create_dir_all("/run/sshd")?;
    }
    Ok(())
}

fn render_config(folder: &Path) -> String {
    let folder = folder.display();
    let path = std::env::var("PATH").unwrap_or_default();
    format!(
        "HostKey {folder}/host_key\n\
         AuthorizedKeysFile {folder}/client_key.pub\n\
         AuthenticationMethods publickey\n\
         PermitRootLogin yes\n\
         StrictModes no\n\
         UsePAM no\n\
         PidFile none\n\
         AcceptEnv GIT_PROTOCOL\n\
         SetEnv PATH={path}\n"
    )
}

fn start_session(sshd: &Path, config: &Path, log: &Path, stream: TcpStream) -> io::Result<Child> {
    let stream = OwnedFd::from(stream);
    let log = fs::OpenOptions::new().create(true).append(true).open(log)?;
    Command::new(sshd)
        .args(["-i", "-e", "-f"])
        .arg(config)
        .stdin(Stdio::from(stream.try_clone()?))
        .stdout(Stdio::from(stream))
        .stderr(log)
        .spawn()
}

fn user_name() -> String {
    nix::unistd::User::from_uid(nix::unistd::geteuid())
        .ok()
        .flatten()
        .map_or_else(|| "root".to_owned(), |user| user.name)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
