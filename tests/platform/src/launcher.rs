//! Launchers, hubs and agents as processes, and requests to them as the platform sends them.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use reqwest::{Client, RequestBuilder};
use serde::Serialize;
use serde_json::Value;
use test_peers::process::{Running, Stream};
use test_peers::wait::DEADLINE;

use crate::token::Secret;

/// Where dispatches go.
pub const DISPATCH: &str = "/api/v1/terraform-rs";

/// Whether it can take them.
pub const READINESS: &str = "/actuator/health/readiness";

/// Returns a command of the launcher's program, [at this home](at_home).
#[must_use]
pub fn command(program: impl AsRef<OsStr>, home: &Path) -> Command {
    let mut command = Command::new(program);
    at_home(&mut command, home);
    command
}

/// Leaves a launcher nothing of the environment but the search path. Its log is JSON.
pub fn at_home<'a>(command: &'a mut Command, home: &Path) -> &'a mut Command {
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", home)
        .env("MAYFLY_LOG_FORMAT", "json")
}

/// Makes this the command of a launcher that listens on a free port, and stops without delay.
pub fn serve<'a>(command: &'a mut Command, target: &str) -> &'a mut Command {
    command
        .args(["serve", "--target", target])
        .env("MAYFLY_LISTEN", "127.0.0.1:0")
        .env("MAYFLY_DRAIN_SECONDS", "0")
}

/// Returns the command of a hub with the `pools.yaml` of this folder.
#[must_use]
pub fn hub(program: impl AsRef<OsStr>, folder: &Path) -> Command {
    let mut command = command(program, folder);
    serve(&mut command, "none")
        .arg("--pools")
        .arg(folder.join("pools.yaml"))
        .env("MAYFLY_DATA_DIR", folder.join("data"));
    command
}

/// Makes this the command of an agent with the token of a pool.
pub fn agent<'a>(command: &'a mut Command, name: &str, hub: &str, token: &str) -> &'a mut Command {
    command
        .args(["agent", "--name", name])
        .env("MAYFLY_AGENT_SERVICE_URL", hub)
        .env("MAYFLY_AGENT_TOKEN", token)
}

/// A launcher or hub that listens. Killed when dropped.
#[derive(Debug)]
pub struct Launcher {
    /// The process.
    pub running: Running,
    /// Where it takes dispatches, with tokens of [`Secret::long`]. For another secret there is
    /// [`Platform::endpoint`](crate::Platform::endpoint).
    pub endpoint: Endpoint,
}

impl Launcher {
    /// Starts it, and waits until it listens.
    pub fn start(command: &mut Command) -> Self {
        let running = Running::start(command);
        Self {
            endpoint: Endpoint::new(address(&running), Secret::long()),
            running,
        }
    }

    /// Kills it as a crash would.
    pub fn crash(self) {
        self.running.kill();
    }
}

/// Waits until a program listens. Returns its address.
pub fn address(running: &Running) -> SocketAddr {
    running.find_line(Stream::Stderr, "listening", address_in)
}

/// Returns the address at which a program listens, from the line of its log that names it.
#[must_use]
pub fn address_in(line: &str) -> Option<SocketAddr> {
    let line: Value = serde_json::from_str(line).ok()?;
    let listens = line["message"] == "listening";
    listens.then(|| line["address"].as_str()?.parse().ok())?
}

/// Where a launcher or hub takes dispatches. It outlives the process, as the platform's knowledge of the address does.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The address at which it listens.
    pub address: SocketAddr,
    /// A client without a proxy.
    pub client: Client,
    secret: Secret,
}

impl Endpoint {
    /// Dispatches to this address carry tokens of the secret.
    #[must_use]
    pub fn new(address: SocketAddr, secret: Secret) -> Self {
        let client = Client::builder().no_proxy().timeout(DEADLINE);
        Self {
            address,
            client: client.build().unwrap(),
            secret,
        }
    }

    /// The URL of a path.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// A dispatch of this document to a path.
    pub fn request(&self, path: &str, document: String) -> RequestBuilder {
        self.client
            .post(self.url(path))
            .bearer_auth(self.secret.dispatch_token(DEADLINE))
            .header("content-type", "application/json")
            .body(document)
    }

    /// Dispatches a job. Returns the status of the answer.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn post(&self, job: &impl Serialize) -> reqwest::Result<u16> {
        let document = serde_json::to_string(job).unwrap();
        let answer = self.request(DISPATCH, document).send().await?;
        Ok(answer.status().as_u16())
    }

    /// Dispatches a job, which must be accepted.
    pub async fn accept(&self, job: &impl Serialize) {
        let document = serde_json::to_string(job).unwrap();
        let answer = self.request(DISPATCH, document).send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert_eq!((status.as_u16(), text.as_str()), (202, "{}"));
    }

    /// Returns the status of the answer to a GET.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn get(&self, path: &str) -> reqwest::Result<u16> {
        let answer = self.client.get(self.url(path)).send().await?;
        Ok(answer.status().as_u16())
    }
}
