//! Real providers, and both places from which a tool installs them: a registry that speaks the provider registry protocol over
//! TLS, with a key of its own that signs what it serves, and a filesystem mirror.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{env, fs};

use pgp::composed::{
    ArmorOptions, DetachedSignature, EncryptionCaps, KeyType, SecretKeyParamsBuilder,
    SignedPublicKey, SignedSecretKey,
};
use pgp::crypto::hash::HashAlgorithm;
use pgp::ser::Serialize as _;
use pgp::types::{KeyDetails as _, Password};
use rand::RngCore as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
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
/// Older versions, which the registry has too.
const OLDER: [(&str, &str); 1] = [("null", "2.1.0")];
const BALLAST_BLOCK: usize = 1024 * 1024;
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

/// The architectures for which providers are published: the one of this machine, and another one.
fn architectures() -> [&'static str; 2] {
    match env::consts::ARCH {
        "aarch64" => ["arm64", "amd64"],
        _ => ["amd64", "arm64"],
    }
}

/// Makes a filesystem mirror of that registry's providers.
pub fn mirror(folder: &Path, host: &str) -> io::Result<()> {
    let (os, [architecture, _]) = (env::consts::OS, architectures());
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
    publisher: Arc<Publisher>,
}

/// What a registry publishes.
struct Publisher {
    key: SignedSecretKey,
    /// Archives are made when they are asked for first.
    folder: TempDir,
    archives: Mutex<HashMap<String, String>>,
    faults: Mutex<Faults>,
    ballast: u64,
    bytes_per_second: Option<u64>,
}

#[derive(Debug, Default)]
struct Faults {
    hidden: Option<(String, String)>,
    has_lost_archives: bool,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").finish_non_exhaustive()
    }
}

/// One of the packages of a registry.
#[derive(Clone, Copy)]
struct Published<'r> {
    name: &'r str,
    version: &'r str,
    architecture: &'r str,
}

impl Registry {
    /// Starts a registry that has all providers.
    pub fn start() -> io::Result<Self> {
        Self::start_with(0, None)
    }

    /// Starts a registry whose archives for this machine have so many more bytes, which cannot be compressed, and are sent at this
    /// rate over each connection.
    pub fn start_with(ballast: u64, bytes_per_second: Option<u64>) -> io::Result<Self> {
        let publisher = Arc::new(Publisher {
            key: signing_key().map_err(io::Error::other)?,
            folder: tempfile::tempdir()?,
            archives: Mutex::default(),
            faults: Mutex::default(),
            ballast,
            bytes_per_second,
        });
        let answering = Arc::clone(&publisher);
        let server = Server::start_tls(move |request| {
            answering
                .answer(request)
                .unwrap_or_else(|error| Response::new(500, error.to_string()))
        })?;
        Ok(Self { server, publisher })
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

    /// Does not publish a version any more, or until another one is hidden.
    pub fn hide(&self, name: &str, version: &str) {
        self.publisher.faults().hidden = Some((name.to_owned(), version.to_owned()));
    }

    /// Answers 404 for every archive from now on.
    pub fn lose_archives(&self) {
        self.publisher.faults().has_lost_archives = true;
    }

    /// The archives of a provider, for this platform and for the other one. They are made when they are needed first, and large ones
    /// take longer than a tool waits.
    pub fn archives(&self, name: &str, version: &str) -> io::Result<[PathBuf; 2]> {
        let [own, other] = architectures().map(|architecture| {
            let package = Published {
                name,
                version,
                architecture,
            };
            self.publisher.archive(package)
        });
        Ok([own?.0, other?.0])
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
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, request: &Request) -> io::Result<Response> {
        let path: Vec<&str> = request.path.split('/').skip(1).collect();
        let not_found = || Ok(Response::new(404, "no such path"));
        let document = match path[..] {
            // Other services of the host are not the business of providers.
            [".well-known", "terraform.json"] => {
                json!({"modules.v1": "/v1/modules/", "providers.v1": "/v1/providers/"})
            }
            ["v1", "providers", NAMESPACE, name, "versions"] => {
                let versions = self.versions(name);
                if versions.is_empty() {
                    return not_found();
                }
                listed(&versions)
            }
            [
                "v1",
                "providers",
                NAMESPACE,
                name,
                version,
                "download",
                _,
                architecture,
            ] => {
                let package = Published {
                    name,
                    version,
                    architecture,
                };
                if !self.has(package) {
                    return not_found();
                }
                self.package(package)?
            }
            ["files", name, version, file] => return self.file(name, version, file),
            _ => return not_found(),
        };
        let response = Response::new(200, document.to_string());
        Ok(response.with_header("Content-Type", "application/json"))
    }

    fn versions(&self, name: &str) -> Vec<&'static str> {
        let all = PROVIDERS.into_iter().chain(OLDER);
        let mut versions: Vec<_> = all
            .filter(|(known, _)| *known == name)
            .map(|(_, version)| version)
            .collect();
        if let Some((_, hidden)) = self.faults().hidden.as_ref().filter(|(of, _)| of == name) {
            versions.retain(|version| version != hidden);
        }
        versions
    }

    fn has(&self, package: Published<'_>) -> bool {
        self.versions(package.name).contains(&package.version)
            && architectures().contains(&package.architecture)
    }

    fn package(&self, package: Published<'_>) -> io::Result<Value> {
        let Published {
            name,
            version,
            architecture,
        } = package;
        let archive = package.archive_name();
        let key = SignedPublicKey::from(self.key.clone());
        let armored = key
            .to_armored_string(ArmorOptions::default())
            .map_err(io::Error::other)?;
        let folder = format!("/files/{name}/{version}");
        Ok(json!({
            "protocols": ["5.0"],
            "os": env::consts::OS,
            "arch": architecture,
            "filename": archive,
            "download_url": format!("{folder}/{archive}"),
            "shasums_url": format!("{folder}/{SUMS}"),
            "shasums_signature_url": format!("{folder}/{SUMS}.sig"),
            "shasum": self.archive(package)?.1,
            "signing_keys": {"gpg_public_keys": [{
                "key_id": self.key.primary_key.legacy_key_id().to_string().to_uppercase(),
                "ascii_armor": armored,
            }]},
        }))
    }

    fn file(&self, name: &str, version: &str, file: &str) -> io::Result<Response> {
        let mut sums = String::new();
        for architecture in architectures() {
            let package = Published {
                name,
                version,
                architecture,
            };
            if !self.has(package) {
                return Ok(Response::new(404, "no such provider"));
            }
            let (path, digest) = self.archive(package)?;
            if file == package.archive_name() && !self.faults().has_lost_archives {
                return Ok(Response::of_file(path, self.bytes_per_second));
            }
            // Writing to a string cannot fail.
            let _ = writeln!(sums, "{digest}  {}", package.archive_name());
        }
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

    /// The archive of a package, and its SHA-256.
    fn archive(&self, package: Published<'_>) -> io::Result<(PathBuf, String)> {
        let mut archives = self.archives.lock().unwrap_or_else(PoisonError::into_inner);
        let name = package.archive_name();
        let path = self.folder.path().join(&name);
        if let Some(digest) = archives.get(&name) {
            return Ok((path, digest.clone()));
        }
        package.zip(&path, self.ballast)?;
        let digest = sha256_of(&path)?;
        archives.insert(name, digest.clone());
        Ok((path, digest))
    }
}

fn listed(versions: &[&str]) -> Value {
    let platforms: Vec<_> = architectures()
        .iter()
        .map(|architecture| json!({"os": env::consts::OS, "arch": architecture}))
        .collect();
    let versions: Vec<_> = versions
        .iter()
        .map(|version| json!({"version": version, "protocols": ["5.0"], "platforms": platforms}))
        .collect();
    json!({"versions": versions})
}

impl Published<'_> {
    fn archive_name(self) -> String {
        let Self {
            name,
            version,
            architecture,
        } = self;
        let os = env::consts::OS;
        format!("terraform-provider-{name}_{version}_{os}_{architecture}.zip")
    }

    /// Writes its archive. It is not compressed: an unoptimised compressor is slow.
    fn zip(self, path: &Path, ballast: u64) -> io::Result<()> {
        let mut zip = ZipWriter::new(File::create(path)?);
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .unix_permissions(0o755);
        let file = format!("terraform-provider-{}_v{}", self.name, self.version);
        zip.start_file(file, options).map_err(io::Error::other)?;
        let mut program = fs::read(program(self.name))?;
        let [_, other] = architectures();
        let is_other = self.architecture == other;
        if is_other {
            // The machine, in the header of an ELF file.
            program[18] = if other == "arm64" { 183 } else { 62 };
        }
        zip.write_all(&program)?;
        if ballast > 0 && !is_other {
            zip.start_file("ballast", options)
                .map_err(io::Error::other)?;
            let mut block = vec![0; BALLAST_BLOCK];
            rand::thread_rng().fill_bytes(&mut block);
            let mut left = ballast;
            while left > 0 {
                // No two blocks are equal.
                block[..8].copy_from_slice(&left.to_le_bytes());
                let length = left.min(BALLAST_BLOCK as u64);
                let length = usize::try_from(length).map_err(io::Error::other)?;
                zip.write_all(&block[..length])?;
                left -= length as u64;
            }
        }
        zip.finish().map_err(io::Error::other)?;
        Ok(())
    }
}

fn sha256_of(path: &Path) -> io::Result<String> {
    let (mut file, mut hasher) = (File::open(path)?, Sha256::new());
    let mut buffer = vec![0; BALLAST_BLOCK];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            read => hasher.update(&buffer[..read]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
