//! A real `redis-server`: one server, with TLS, users and an append-only file, a cluster, or with sentinels.
//! Each has a folder and ports of its own and is stopped by its process.

use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};

use tempfile::TempDir;

use crate::evidence;
use crate::port::Port;
use crate::times::Start;
use crate::wait::{self, DEADLINE};

/// For how many milliseconds a sentinel bears the silence of a server, until it loses its patience and then.
const PATIENT: u32 = 60_000;
const IMPATIENT: u32 = 300;
/// What a server says once it listens.
const READY: &str = "Ready to accept connections";

/// What a server is like. The plain one forgets everything when it ends.
#[derive(Clone, Debug, Default)]
pub struct Options {
    tls: bool,
    keeps: bool,
    arguments: Vec<String>,
}

impl Options {
    /// Speaks TLS and nothing else, with a certificate for `127.0.0.1` and `localhost`.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// What it acknowledged survives its end.
    #[must_use]
    pub fn keeps(mut self) -> Self {
        self.keeps = true;
        self
    }

    /// A line of its configuration, as name and value.
    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.arguments.push(format!("--{name}"));
        self.arguments.extend(value.split(' ').map(str::to_owned));
        self
    }

    /// Requires this password.
    #[must_use]
    pub fn password(self, password: &str) -> Self {
        self.set("requirepass", password)
    }

    /// Admits only this user.
    #[must_use]
    pub fn user(self, name: &str, password: &str, rights: &str) -> Self {
        self.set("user", &format!("{name} on >{password} {rights}"))
            .set("user", "default off")
    }
}

/// A running server.
#[derive(Debug)]
pub struct RedisServer {
    folder: TempDir,
    options: Options,
    // Its own also while it is away.
    port: Port,
    process: Option<Child>,
}

impl RedisServer {
    /// A plain server.
    ///
    /// # Errors
    /// Fails with one line that names what is missing, or what the server said.
    pub fn start() -> io::Result<Self> {
        Self::with(Options::default())
    }

    /// A server that is like that.
    ///
    /// # Errors
    /// See [`RedisServer::start`].
    pub fn with(options: Options) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        if options.tls {
            write_certificate(folder.path())?;
        }
        let mut server = Self {
            folder,
            options,
            port: Port::take()?,
            process: None,
        };
        server.resume_from_disk()?;
        Ok(server)
    }

    /// The port on `127.0.0.1`.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `127.0.0.1:port`
    pub fn address(&self) -> String {
        self.socket().to_string()
    }

    /// The same.
    pub fn socket(&self) -> SocketAddr {
        self.port.address()
    }

    /// Of the authority its certificate comes from; only with TLS.
    pub fn ca_file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// A client of the plain kind, to see what is there.
    ///
    /// # Errors
    /// Fails when the server wants TLS or a password, or does not run.
    pub fn connect(&self) -> redis::RedisResult<redis::Connection> {
        redis::Client::open(format!("redis://{}/", self.address()))?.get_connection()
    }

    /// Ends it at once, as a crash does.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            drop(process.kill());
            drop(process.wait());
        }
    }

    /// Starts it again at the same port, with what it kept.
    ///
    /// # Errors
    /// See [`RedisServer::start`].
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill();
        self.resume_from_disk()
    }

    /// Keeps it from doing anything, connections open, until [`RedisServer::thaw`].
    ///
    /// # Errors
    /// Fails when it does not run.
    pub fn freeze(&self) -> io::Result<()> {
        self.signal(nix::sys::signal::Signal::SIGSTOP)
    }

    /// See [`RedisServer::freeze`].
    ///
    /// # Errors
    /// Fails when it does not run.
    pub fn thaw(&self) -> io::Result<()> {
        self.signal(nix::sys::signal::Signal::SIGCONT)
    }

    fn signal(&self, signal: nix::sys::signal::Signal) -> io::Result<()> {
        let process = self
            .process
            .as_ref()
            .ok_or_else(|| io::Error::other("this redis-server does not run"))?;
        let pid = i32::try_from(process.id()).map_err(io::Error::other)?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal)?;
        Ok(())
    }

    fn resume_from_disk(&mut self) -> io::Result<()> {
        let mut command = Command::new(find("redis-server")?);
        let folder = self.folder.path();
        command
            .args(["--bind", "127.0.0.1", "--daemonize", "no", "--save", ""])
            .arg("--dir")
            .arg(folder);
        let port = self.port.number().to_string();
        if self.options.tls {
            command.args([
                "--port",
                "0",
                "--tls-port",
                &port,
                "--tls-auth-clients",
                "no",
            ]);
            for (name, file) in [
                ("--tls-cert-file", "server.pem"),
                ("--tls-key-file", "server.key"),
                ("--tls-ca-cert-file", "ca.pem"),
            ] {
                command.arg(name).arg(folder.join(file));
            }
        } else {
            command.args(["--port", &port]);
        }
        if self.options.keeps {
            command.args(["--appendonly", "yes", "--appendfsync", "always"]);
        }
        command.args(&self.options.arguments);
        self.process = Some(start(command, READY)?);
        Ok(())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A sentinel that watches one server under the name `mymaster`.
#[derive(Debug)]
pub struct Sentinel {
    // Rewritten by the sentinel while it runs.
    _folder: TempDir,
    port: Port,
    process: Child,
}

impl Sentinel {
    /// Watches a plain server; `lines` are added to the sentinel's configuration.
    ///
    /// # Errors
    /// See [`RedisServer::start`].
    pub fn watch(server: &RedisServer, lines: &str) -> io::Result<Self> {
        let (folder, port) = (tempfile::tempdir()?, Port::take()?);
        let config = folder.path().join("sentinel.conf");
        let text = format!(
            "bind 127.0.0.1\nport {}\ndir {}\nsentinel monitor mymaster 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds mymaster {PATIENT}\n\
             sentinel failover-timeout mymaster 2000\n{lines}\n",
            port.number(),
            folder.path().display(),
            server.port(),
        );
        fs::write(&config, text)?;
        let mut command = Command::new(find("redis-sentinel")?);
        command.arg(&config);
        Ok(Self {
            process: start(command, "+monitor master")?,
            _folder: folder,
            port,
        })
    }

    /// From now on a server that is silent for a moment is given up for another. Before, none is: on a busy machine any
    /// may be.
    ///
    /// # Errors
    /// Fails when the sentinel does not answer.
    pub fn lose_patience(&self) -> redis::RedisResult<()> {
        let client = redis::Client::open(format!("redis://{}/", self.address()))?;
        redis::cmd("SENTINEL")
            .arg("SET")
            .arg("mymaster")
            .arg("down-after-milliseconds")
            .arg(IMPATIENT)
            .exec(&mut client.get_connection()?)
    }

    /// The port on `127.0.0.1`.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `127.0.0.1:port`
    pub fn address(&self) -> String {
        self.port.address().to_string()
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// A cluster of three nodes that share all slots.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    /// Where the nodes hear each other.
    _buses: Vec<Port>,
}

impl RedisCluster {
    /// Starts three nodes, makes them known to each other, and waits until each of them says that all is well.
    ///
    /// # Errors
    /// See [`RedisServer::start`].
    pub fn start() -> io::Result<Self> {
        let options = Options::default()
            .set("cluster-enabled", "yes")
            // None fails here, and on a busy machine any may be silent for a moment.
            .set("cluster-node-timeout", "15000");
        let (mut nodes, mut buses) = (Vec::new(), Vec::new());
        for slots in [0..=5460, 5461..=10_922, 10_923..=16_383] {
            let bus = Port::take()?;
            let node = RedisServer::with(
                options
                    .clone()
                    .set("cluster-port", &bus.number().to_string()),
            )?;
            let mut client = node.connect().map_err(io::Error::other)?;
            redis::cmd("CLUSTER")
                .arg("ADDSLOTSRANGE")
                .arg(*slots.start())
                .arg(*slots.end())
                .exec(&mut client)
                .map_err(io::Error::other)?;
            nodes.push(node);
            buses.push(bus);
        }
        let cluster = Self {
            nodes,
            _buses: buses,
        };
        cluster.meet().map_err(io::Error::other)?;
        cluster.wait_until_whole()?;
        Ok(cluster)
    }

    /// The nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// `host:port` of all nodes, comma-separated.
    pub fn addresses(&self) -> String {
        let addresses: Vec<_> = self.nodes.iter().map(RedisServer::address).collect();
        addresses.join(",")
    }

    fn meet(&self) -> redis::RedisResult<()> {
        let mut first = self.nodes[0].connect()?;
        for node in &self.nodes[1..] {
            let bus: Vec<String> = redis::cmd("CONFIG")
                .arg("GET")
                .arg("cluster-port")
                .query(&mut node.connect()?)?;
            redis::cmd("CLUSTER")
                .arg("MEET")
                .arg("127.0.0.1")
                .arg(node.port())
                .arg(&bus[1])
                .exec(&mut first)?;
        }
        Ok(())
    }

    /// Nodes tell each other by and by; there is nothing to wait on but their own word.
    fn wait_until_whole(&self) -> io::Result<()> {
        for node in &self.nodes {
            let mut client = node.connect().map_err(io::Error::other)?;
            let is_whole = || {
                let info = redis::cmd("CLUSTER")
                    .arg("INFO")
                    .query::<String>(&mut client);
                let info = info.map_err(|error| error.to_string())?;
                let signs = ["cluster_state:ok", "cluster_slots_ok:16384"];
                let whole = signs.iter().all(|sign| info.contains(sign));
                if whole { Ok(()) } else { Err(info) }
            };
            wait::within_blocking(DEADLINE, "the cluster forms", is_whole)
                .map_err(io::Error::other)?;
        }
        Ok(())
    }
}

fn find(program: &str) -> io::Result<PathBuf> {
    which::which(program).map_err(|_| {
        io::Error::other(format!(
            "`{program}` is missing; `cargo xtask setup` installs it (Debian: redis-server, redis-sentinel)"
        ))
    })
}

/// Starts a server and waits until it says that it is ready.
fn start(mut command: Command, ready: &'static str) -> io::Result<Child> {
    let start = Start::of(&command);
    let mut process = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let output = process.stdout.take().expect("it is piped");
    match wait_for_line(output, ready).and_then(|()| start.ready()) {
        Ok(()) => Ok(process),
        Err(error) => {
            drop(process.kill());
            drop(process.wait());
            Err(error)
        }
    }
}

fn wait_for_line(output: ChildStdout, ready: &'static str) -> io::Result<()> {
    let (tell, told) = mpsc::channel();
    let said = Arc::<Mutex<String>>::default();
    let shown = Arc::clone(&said);
    evidence::keep("Redis", move || Some(evidence::lock(&shown)?.clone()));
    // Output is read to its end: a full pipe would stop the server.
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let is_ready = line.contains(ready);
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            said.extend([&*line, "\n"]);
            drop(said);
            if is_ready {
                drop(tell.send(Ok(())));
            }
        }
        let said = said.lock().unwrap_or_else(PoisonError::into_inner);
        drop(tell.send(Err(io::Error::other(said.clone()))));
    });
    told.recv_timeout(DEADLINE)
        .unwrap_or_else(|_| Err(io::Error::other("the server does not become ready")))
}

fn write_certificate(folder: &Path) -> io::Result<()> {
    let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
    let signed = rcgen::generate_simple_self_signed(names).map_err(io::Error::other)?;
    fs::write(folder.join("ca.pem"), signed.cert.pem())?;
    fs::write(folder.join("server.pem"), signed.cert.pem())?;
    fs::write(
        folder.join("server.key"),
        signed.signing_key.serialize_pem(),
    )
}
