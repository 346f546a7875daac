//! Servers of moto, which have the interfaces of AWS. Each is a process of its own, with its own users, buckets and secrets.
//!
//! Loading moto takes more than a second of a processor. So the first server of a test binary starts a process that loads it,
//! and all servers are forks of that process (`moto_servers.py`).

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};

use crate::daemon::{Daemon, Said, address_in, installed};
use crate::times::Start;

const SCRIPT: &str = include_str!("moto_servers.py");
const NAME: &str = "moto_server";

/// A running server.
#[derive(Debug)]
pub(crate) struct Moto {
    address: SocketAddr,
    said: Said,
    _connection: Connection,
}

impl Moto {
    /// Starts a server that has nothing yet.
    pub(crate) fn start() -> io::Result<Self> {
        let start = Start::named(NAME);
        let connection = Connection(new_server()?);
        let (said, (sender, lines)) = (Said::default(), mpsc::channel());
        said.follow(connection.0.try_clone()?, sender);
        said.keep(NAME);
        let address = said.wait_for(NAME, &lines, address_in)?;
        start.ready()?;
        Ok(Self {
            address,
            said,
            _connection: connection,
        })
    }

    /// Where it listens.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// One line for each request so far, and for what went wrong.
    pub(crate) fn log(&self) -> String {
        self.said.text()
    }
}

/// The output of a server, which ends when this does.
#[derive(Debug)]
struct Connection(TcpStream);

impl Drop for Connection {
    fn drop(&mut self) {
        // Another thread reads from it, so closing this side would not be enough.
        drop(self.0.shutdown(Shutdown::Write));
    }
}

/// The process that has loaded moto. It ends with its input, and so with this process.
struct Loaded {
    daemon: Daemon,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Loaded {
    fn start() -> io::Result<Self> {
        let mut command = Command::new(installed("python/bin/python3"));
        command.args(["-I", "-c", SCRIPT]).stdin(Stdio::piped());
        let (mut daemon, lines) = Daemon::spawn(&mut command)?;
        let input = daemon.take_input();
        let input = input.ok_or_else(|| io::Error::other("the input of moto is no pipe"))?;
        Ok(Self {
            daemon,
            input,
            lines,
        })
    }

    /// The output of a new server.
    fn fork(&mut self) -> io::Result<TcpStream> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        // If the process has ended, its output says why.
        drop(writeln!(self.input, "{}", listener.local_addr()?.port()));
        let forked = |line: &str| (line == "forked").then_some(());
        self.daemon.said().wait_for(NAME, &self.lines, forked)?;
        Ok(listener.accept()?.0)
    }
}

fn new_server() -> io::Result<TcpStream> {
    static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
    let mut kept = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    // One that fails is not kept.
    let mut loaded = match kept.take() {
        Some(loaded) => loaded,
        None => Loaded::start()?,
    };
    let connection = loaded.fork()?;
    *kept = Some(loaded);
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::s3::S3;
    use crate::wait::until_blocking;

    #[test]
    fn servers_share_nothing() {
        let (first, second) = (S3::start_open().unwrap(), S3::start_open().unwrap());
        assert_ne!(first.access_key(), second.access_key());
        first.put("a/b", b"of the first").unwrap();
        assert_eq!(second.object("a/b").unwrap(), None);
        until_blocking("the request in the log", || {
            first.log().contains("PUT /states/a/b")
        });
        assert!(!second.log().contains("PUT /states/a/b"));
    }

    #[test]
    fn a_server_ends_with_its_connection() {
        let mut connection = new_server().unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        // The output ends with the process that has it.
        connection.read_to_end(&mut Vec::new()).unwrap();
    }
}
