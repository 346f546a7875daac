//! Real providers, and both places from which a tool installs them: a registry that speaks the provider registry protocol over
//! TLS, with a key of its own that signs what it serves, and a filesystem mirror.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Cursor, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs};

use pgp::composed::{
    ArmorOptions, DetachedSignature, EncryptionCaps, KeyType, SecretKeyParamsBuilder,
    SignedPublicKey, SignedSecretKey,
};
use pgp::crypto::hash::HashAlgorithm;
use pgp::ser::Serialize as _;
use pgp::types::{KeyDetails as _, Password};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::http::{Request, Response, Server};
use crate::installed;

/// All of them, and the versions under which they are published here.
pub const PROVIDERS: [(&str, &str); 5] = [
    ("local", "1.4.0"),
    ("null", "2.2.0"),
    ("random", "3.6.0"),
    ("time", "0.14.2"),
    ("tls", "4.0.4"),
];
/// The name of the file with their digests.
const SUMS: &str = "SHA256SUMS";
/// Whose they are, in every address.
pub const NAMESPACE: &str = "acme";

/// The program of a provider, as `cargo xtask ci tools` made it.
fn program(name: &str) -> PathBuf {
    installed(&format!("tools/terraform-provider-{name}"))
}

/// Whether all of them are there; the error says what to do about it.
pub fn present() -> Result<(), String> {
    match PROVIDERS.iter().find(|(name, _)| !program(name).is_file()) {
        None => Ok(()),
        Some((name, _)) => Err(format!(
            "the provider `{name}` is not there: `cargo xtask ci tools` builds it, with Go"
        )),
    }
}

/// The platform, as providers are published for it.
fn platform() -> (&'static str, &'static str) {
    let architecture = match env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    (env::consts::OS, architecture)
}

/// Makes a filesystem mirror of that registry's providers.
pub fn mirror(folder: &Path, host: &str) -> io::Result<()> {
    let (os, architecture) = platform();
    for (name, version) in PROVIDERS {
        let folder = folder.join(format!(
            "{host}/{NAMESPACE}/{name}/{version}/{os}_{architecture}"
        ));
        fs::create_dir_all(&folder)?;
        let file = folder.join(format!("terraform-provider-{name}_v{version}"));
        symlink(fs::canonicalize(program(name))?, file)?;
    }
    Ok(())
}

/// A running registry.
#[derive(Debug)]
pub struct Registry {
    server: Server,
}

/// What a registry publishes.
struct Publisher {
    key: SignedSecretKey,
    /// Made when they are asked for first.
    archives: Mutex<HashMap<String, Vec<u8>>>,
}

impl Registry {
    /// Starts a registry that has all providers.
    pub fn start() -> io::Result<Self> {
        let publisher = Publisher {
            key: signing_key().map_err(io::Error::other)?,
            archives: Mutex::default(),
        };
        let server = Server::start_tls(move |request| {
            publisher
                .answer(request)
                .unwrap_or_else(|error| Response::new(500, error.to_string()))
        })?;
        Ok(Self { server })
    }

    /// Host and port, as an address of a provider names them.
    pub fn host(&self) -> String {
        format!("localhost:{}", self.server.address().port())
    }

    /// The certificate that a tool has to trust, in PEM.
    pub fn certificate(&self) -> &str {
        self.server.certificate().unwrap_or_default()
    }

    /// How many requests there were.
    pub fn asked(&self) -> usize {
        self.server.requests().len()
    }

    /// How often archives of providers were asked for.
    pub fn downloads(&self) -> usize {
        let requests = self.server.requests();
        let files = requests
            .iter()
            .filter(|request| request.method == "GET" && request.path.starts_with("/files/"));
        files.filter(|request| !request.path.contains(SUMS)).count()
    }
}

fn signing_key() -> Result<SignedSecretKey, Box<dyn std::error::Error + Send + Sync>> {
    let key = SecretKeyParamsBuilder::default()
        .key_type(KeyType::Ed25519Legacy)
        .can_certify(true)
        .can_sign(true)
        .can_encrypt(EncryptionCaps::None)
        .primary_user_id("Provider Test <providers@example.com>".into())
        .build()?;
    Ok(key.generate(rand::thread_rng())?)
}

impl Publisher {
    fn answer(&self, request: &Request) -> io::Result<Response> {
        let path: Vec<&str> = request.path.split('/').skip(1).collect();
        let document = match path[..] {
            [".well-known", "terraform.json"] => json!({"providers.v1": "/v1/providers/"}),
            ["v1", "providers", NAMESPACE, name, "versions"] => {
                let Some(version) = version_of(name) else {
                    return Ok(Response::new(404, "no such provider"));
                };
                versions(version)
            }
            ["v1", "providers", NAMESPACE, name, _, "download", ..] => {
                let Some(version) = version_of(name) else {
                    return Ok(Response::new(404, "no such provider"));
                };
                self.package(name, version)?
            }
            ["files", name, file] => return self.file(name, file),
            _ => return Ok(Response::new(404, "no such path")),
        };
        let response = Response::new(200, document.to_string());
        Ok(response.with_header("Content-Type", "application/json"))
    }

    fn package(&self, name: &str, version: &str) -> io::Result<Value> {
        let (os, architecture) = platform();
        let archive = archive_name(name, version);
        let key = SignedPublicKey::from(self.key.clone());
        let armored = key
            .to_armored_string(ArmorOptions::default())
            .map_err(io::Error::other)?;
        Ok(json!({
            "protocols": ["5.0"],
            "os": os,
            "arch": architecture,
            "filename": archive,
            "download_url": format!("/files/{name}/{archive}"),
            "shasums_url": format!("/files/{name}/{SUMS}"),
            "shasums_signature_url": format!("/files/{name}/{SUMS}.sig"),
            "shasum": hex(&Sha256::digest(self.archive(name, version)?)),
            "signing_keys": {"gpg_public_keys": [{
                "key_id": self.key.primary_key.legacy_key_id().to_string().to_uppercase(),
                "ascii_armor": armored,
            }]},
        }))
    }

    fn file(&self, name: &str, file: &str) -> io::Result<Response> {
        let Some(version) = version_of(name) else {
            return Ok(Response::new(404, "no such provider"));
        };
        let archive = self.archive(name, version)?;
        if file == archive_name(name, version) {
            return Ok(Response::new(200, archive));
        }
        let digest = hex(&Sha256::digest(archive));
        let sums = format!("{digest}  {}\n", archive_name(name, version));
        match file {
            SUMS => Ok(Response::new(200, sums)),
            "SHA256SUMS.sig" => Ok(Response::new(200, self.sign(sums.as_bytes())?)),
            _ => Ok(Response::new(404, "no such file")),
        }
    }

    fn sign(&self, document: &[u8]) -> io::Result<Vec<u8>> {
        let signature = DetachedSignature::sign_binary_data(
            rand::thread_rng(),
            &self.key.primary_key,
            &Password::empty(),
            HashAlgorithm::Sha256,
            document,
        );
        let signature = signature.map_err(io::Error::other)?;
        signature.to_bytes().map_err(io::Error::other)
    }

    fn archive(&self, name: &str, version: &str) -> io::Result<Vec<u8>> {
        let mut archives = self.archives.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(archive) = archives.get(name) {
            return Ok(archive.clone());
        }
        let archive = zipped(name, version)?;
        archives.insert(name.to_owned(), archive.clone());
        Ok(archive)
    }
}

fn version_of(name: &str) -> Option<&'static str> {
    let found = PROVIDERS.iter().find(|(known, _)| *known == name);
    found.map(|(_, version)| *version)
}

fn versions(version: &str) -> Value {
    let (os, architecture) = platform();
    json!({"versions": [{
        "version": version,
        "protocols": ["5.0"],
        "platforms": [{"os": os, "arch": architecture}],
    }]})
}

fn archive_name(name: &str, version: &str) -> String {
    let (os, architecture) = platform();
    format!("terraform-provider-{name}_{version}_{os}_{architecture}.zip")
}

/// Not compressed: an unoptimised compressor is slow.
fn zipped(name: &str, version: &str) -> io::Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .unix_permissions(0o755);
    let file = format!("terraform-provider-{name}_v{version}");
    zip.start_file(file, options).map_err(io::Error::other)?;
    zip.write_all(&fs::read(program(name))?)?;
    Ok(zip.finish().map_err(io::Error::other)?.into_inner())
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
