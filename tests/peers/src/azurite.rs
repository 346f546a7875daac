//! Azure Blob Storage: Azurite, whose signatures it verifies. One server takes seconds to start, so all tests of a process share
//! it. Each has an account of its own, and accounts share nothing.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::daemon::{Daemon, address_in, installed};
use crate::times::Start;

/// The key of all accounts.
pub const ACCOUNT_KEY: &str =
    "bWF5Zmx5LW1heWZseS1tYXlmbHktbWF5Zmx5LW1heWZseS1tYXlmbHktbWF5Zmx5LW1heWZseQ==";
/// How many accounts a server has.
const ACCOUNTS: u32 = 99;
const NAME: &str = "azurite";
/// Ends a program of Node with its input.
const ENDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ends_with_input.js");

/// An account without containers.
#[derive(Debug)]
pub struct Azurite {
    address: SocketAddr,
    account: String,
}

impl Azurite {
    /// Takes an account that no other test has. The first one starts the server, which keeps everything in memory.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        static SHARED: Mutex<Option<Shared>> = Mutex::new(None);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut server = match shared.take() {
            Some(server) => server,
            None => Shared::start()?,
        };
        server.taken += 1;
        server.daemon.said().keep(NAME);
        let (address, number) = (server.address, server.taken);
        *shared = Some(server);
        if number > ACCOUNTS {
            return Err(io::Error::other("Azurite has no account left"));
        }
        Ok(Self {
            address,
            account: account(number),
        })
    }

    /// Where it listens; the account is the first part of a host's name, or of the path.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Name of the account.
    pub fn account(&self) -> &str {
        &self.account
    }

    /// The host of the account at the service itself.
    pub fn host(&self) -> String {
        format!("{}.blob.core.windows.net", self.account)
    }

    /// Address of the account.
    pub fn url(&self) -> String {
        format!("http://{}/{}", self.address, self.account)
    }
}

fn account(number: u32) -> String {
    format!("mayflystore{number}")
}

/// The server. It ends with its input, and so with this process.
struct Shared {
    daemon: Daemon,
    address: SocketAddr,
    /// How many accounts have a test.
    taken: u32,
    _input: ChildStdin,
}

impl Shared {
    fn start() -> io::Result<Self> {
        let mut accounts = String::new();
        for number in 1..=ACCOUNTS {
            let _ = write!(accounts, "{}:{ACCOUNT_KEY};", account(number));
        }
        let mut command = Command::new("node");
        command
            .args(["--require", ENDS])
            .arg(installed("node/node_modules/azurite/dist/src/blob/main.js"))
            .args(["--blobHost", "127.0.0.1", "--blobPort", "0"])
            .args(["--inMemoryPersistence", "--disableTelemetry"])
            .arg("--skipApiVersionCheck")
            .env("AZURITE_ACCOUNTS", accounts.trim_end_matches(';'))
            .stdin(Stdio::piped());
        let start = Start::of(&command);
        let (mut daemon, lines) = Daemon::spawn(&mut command)?;
        let input = daemon.take_input();
        let input = input.ok_or_else(|| io::Error::other("the input of Azurite is no pipe"))?;
        let ready = |line: &str| line.contains("successfully").then(|| address_in(line))?;
        let address = daemon.said().wait_for(NAME, &lines, ready)?;
        start.ready()?;
        Ok(Self {
            daemon,
            address,
            taken: 0,
            _input: input,
        })
    }
}
