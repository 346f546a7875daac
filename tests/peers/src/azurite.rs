//! Azure Blob Storage: Azurite with one account, whose signatures it verifies.

use std::io;
use std::net::SocketAddr;
use std::process::Command;

use crate::daemon::{Daemon, address_in, installed};

/// The account that is there.
pub const ACCOUNT: &str = "mayflystore";
/// Its key.
pub const ACCOUNT_KEY: &str =
    "bWF5Zmx5LW1heWZseS1tYXlmbHktbWF5Zmx5LW1heWZseS1tYXlmbHktbWF5Zmx5LW1heWZseQ==";

/// A service without containers.
#[derive(Debug)]
pub struct Azurite {
    address: SocketAddr,
    daemon: Daemon,
}

impl Azurite {
    /// Starts a service that keeps everything in memory.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        let mut command = Command::new("node");
        command
            .arg(installed("node/node_modules/azurite/dist/src/blob/main.js"))
            .args(["--blobHost", "127.0.0.1", "--blobPort", "0"])
            .args(["--inMemoryPersistence", "--disableTelemetry"])
            .arg("--skipApiVersionCheck")
            .env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{ACCOUNT_KEY}"));
        let (daemon, address) = Daemon::start(&mut command, |line| {
            line.contains("successfully").then(|| address_in(line))?
        })?;
        Ok(Self { address, daemon })
    }

    /// Where it listens; the account is the first part of a host's name, or of the path.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Address of the account.
    pub fn url(&self) -> String {
        format!("http://{}/{ACCOUNT}", self.address)
    }

    /// One line for each request so far.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}
