//! The resolver with a release server, and with the real Terraform if the binary matters.

mod server;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt as _;
use job_contract::Exit;
use provider_store::ProviderStore;
use rstest::rstest;
use tempfile::TempDir;
use test_peers::port::Port;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::fetch::IDLE_TIMEOUT;
use super::*;
use crate::volume::Volume;
use server::{Publication, Reply, Server, Signer, zip};
use test_peers::clock::hold_clock;

const TERRAFORM_INDEX: &str = "/terraform/index.json";
const TOFU_INDEX: &str = "/tofu/index.json";
const LIMIT: Duration = Duration::from_mins(1);

/// A release server, a cache, and a publisher whose key is trusted.
struct Fixture {
    server: Server,
    directory: TempDir,
    signer: Signer,
    config: ToolConfig,
    messages: Arc<Mutex<Vec<String>>>,
}

impl Fixture {
    async fn new() -> Self {
        // It fails if another test of this process was first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::start().await;
        let directory = TempDir::new().unwrap();
        let signer = Signer::new();
        let keys = directory.path().join("keys.asc");
        fs::write(&keys, signer.public_key()).unwrap();
        let config = ToolConfig {
            cache_dir: directory.path().join("tools"),
            shared: None,
            terraform_index: Url::parse(&server.url(TERRAFORM_INDEX)).unwrap(),
            tofu_index: Url::parse(&server.url(TOFU_INDEX)).unwrap(),
            mirror: None,
            selection: Selection::Installed,
            signatures: SignaturePolicy::Required,
            extra_keys: Some(keys),
            path: OsString::new(),
            retry_for: Duration::ZERO,
        };
        Self {
            server,
            directory,
            signer,
            config,
            messages: Arc::default(),
        }
    }

    /// A setup with one Terraform release for each of `versions`.
    async fn with(versions: &[&str]) -> Self {
        let fixture = Self::new().await;
        let releases: Vec<_> = versions
            .iter()
            .map(|version| fixture.release(version).serve(&fixture.server))
            .collect();
        fixture.index(&releases);
        fixture
    }

    fn release(&self, version: &str) -> Publication {
        let archive = zip(&[
            ("LICENSE.txt", b"free"),
            ("terraform", script(version).as_bytes()),
        ]);
        Publication::new("terraform", version, archive, Some(&self.signer))
    }

    fn index(&self, releases: &[Publication]) {
        self.index_at(&self.server.url(""), releases);
    }

    fn index_at(&self, origin: &str, releases: &[Publication]) {
        let versions: serde_json::Map<_, _> = releases
            .iter()
            .map(|release| (release.version.clone(), release.terraform_entry(origin)))
            .collect();
        let index = serde_json::json!({"name": "terraform", "versions": versions});
        self.server
            .set(TERRAFORM_INDEX, Reply::body(index.to_string()));
    }

    async fn resolve(&self, range: &str) -> Result<ResolvedTool, StepError> {
        self.resolve_tool(Tool::Terraform, range).await
    }

    async fn resolve_tool(&self, tool: Tool, range: &str) -> Result<ResolvedTool, StepError> {
        let messages = Arc::clone(&self.messages);
        let notify = move |line: &str| messages.lock().unwrap().push(line.to_owned());
        tokio::time::timeout(LIMIT, resolve(tool, range, &self.config, &notify))
            .await
            .expect("resolving takes no minute")
    }

    fn messages(&self) -> String {
        self.messages.lock().unwrap().join("\n")
    }

    fn slot(&self, version: &str) -> PathBuf {
        self.config.cache_dir.join("terraform").join(version)
    }

    /// What a person learns of a Terraform in the cache.
    fn checked(&self, version: &str) -> CachedTool {
        let cache = ProviderStore::new(&self.config.cache_dir);
        let keys = self.config.extra_keys.as_deref();
        check_cached_tool(&cache, "terraform", version, keys).unwrap()
    }

    /// Puts a tool on the searched PATH.
    fn put_on_path(&mut self, content: &str) -> PathBuf {
        let directory = self.directory.path().join("bin");
        fs::create_dir_all(&directory).unwrap();
        let binary = directory.join("terraform");
        write_executable(&binary, content);
        self.config.path = directory.into_os_string();
        binary
    }
}

/// A fake tool, for tests that need no real one.
fn script(version: &str) -> String {
    format!("#!/bin/sh\necho '{{\"terraform_version\":\"{version}\"}}'\n")
}

/// Another process writes the file. A file that this process has open for writing cannot be executed while a forked
/// child has not yet called `exec`.
fn write_executable(path: &Path, content: &str) {
    let source = path.with_extension("source");
    fs::write(&source, content).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o755)).unwrap();
    let copied = Command::new("cp").arg(&source).arg(path).status().unwrap();
    assert!(copied.success());
    fs::remove_file(source).unwrap();
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn real_terraform() -> PathBuf {
    which::which("terraform").expect("`terraform` is not on PATH; install it to run this test")
}

fn reported_version(binary: &Path) -> String {
    let output = Command::new(binary)
        .args(["version", "-json"])
        .env("CHECKPOINT_DISABLE", "1")
        .output()
        .unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["terraform_version"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_terraform_is_downloaded_verified_and_runs() {
    let real = real_terraform();
    let version = reported_version(&real);
    let fixture = Fixture::new().await;
    let archive = zip(&[("terraform", &fs::read(&real).unwrap())]);
    let release = Publication::new("terraform", &version, archive, Some(&fixture.signer))
        .serve(&fixture.server);
    fixture.index(&[release]);

    let found = fixture.resolve("latest").await.unwrap();
    assert_eq!(found.origin, Origin::Download);
    assert_eq!(found.version.to_string(), version);
    assert_eq!(found.path, fixture.slot(&version).join("terraform"));
    assert_eq!(reported_version(&found.path), version);
    let slot = fixture.slot(&version);
    assert_eq!(names(&slot), [".lock", "terraform", "terraform.sha256"]);
    assert_eq!(fixture.checked(&version), CachedTool::Verified);
    let mode = fs::metadata(&found.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    assert!(
        fixture.messages().starts_with(&format!(
            "downloading Terraform {version} from http://127.0.0.1"
        )),
        "{}",
        fixture.messages()
    );

    let again = fixture.resolve("latest").await.unwrap();
    assert_eq!(again.origin, Origin::Cache);
    assert_eq!(fixture.server.requests(".zip"), 1);
}

#[tokio::test]
async fn the_version_of_the_real_terraform_on_path_is_queried_once() {
    let real = real_terraform();
    let version = reported_version(&real);
    let mut fixture = Fixture::with(&[]).await;
    fixture.config.path = real.parent().unwrap().as_os_str().to_owned();
    let found = fixture.resolve(&version).await.unwrap();
    assert_eq!(found.origin, Origin::Path);
    assert_eq!(found.path, real);

    // A changed cache entry appears in the answer, so the binary was not asked again.
    let cache_file = fixture.config.cache_dir.join("probe.json");
    let cached = fs::read_to_string(&cache_file).unwrap();
    fs::write(&cache_file, cached.replace(&version, "1.2.3")).unwrap();
    assert_eq!(fixture.resolve("1.2.3").await.unwrap().origin, Origin::Path);
    // An entry for another version of the file, or a broken cache file, is ignored.
    let outdated = cached
        .replace(&version, "1.2.3")
        .replace("\"size\":", "\"size\":1");
    for unusable in [outdated, "{".into()] {
        fs::write(&cache_file, unusable).unwrap();
        assert_eq!(
            fixture.resolve(&version).await.unwrap().origin,
            Origin::Path
        );
    }
    assert_eq!(fixture.server.requests(""), 0);
}

#[tokio::test]
async fn installed_prefers_path_then_cache_then_the_index() {
    let mut fixture = Fixture::with(&["1.9.8", "1.9.9", "1.10.0", "1.11.0-rc1"]).await;
    fixture.resolve("1.9.8").await.unwrap();
    let binary = fixture.put_on_path(&script("1.9.7"));

    let found = fixture.resolve("~1.9").await.unwrap();
    assert_eq!((found.origin, found.path), (Origin::Path, binary));
    let found = fixture.resolve(">=1.9.8").await.unwrap();
    assert_eq!(
        (found.origin, found.version.to_string().as_str()),
        (Origin::Cache, "1.9.8")
    );
    let found = fixture.resolve(">1.9.8").await.unwrap();
    assert_eq!(
        (found.origin, found.version.to_string().as_str()),
        (Origin::Download, "1.10.0")
    );
    // A script may be a version manager's, so its answer is not cached.
    assert!(!fixture.config.cache_dir.join("probe.json").exists());
}

#[tokio::test]
async fn newest_uses_the_greatest_published_version_and_reuses_its_copy() {
    let mut fixture = Fixture::with(&["1.9.8", "1.9.9"]).await;
    fixture.config.selection = Selection::Newest;
    fixture.put_on_path(&script("1.9.8"));
    let found = fixture.resolve("~1.9").await.unwrap();
    assert_eq!(
        (found.origin, found.version.to_string().as_str()),
        (Origin::Download, "1.9.9")
    );
    assert_eq!(fixture.resolve("~1.9").await.unwrap().origin, Origin::Cache);
    assert_eq!(
        fixture.resolve("<1.9.9").await.unwrap().origin,
        Origin::Path
    );
    assert_eq!(fixture.server.requests(TERRAFORM_INDEX), 3);
    // An exact version that is installed needs no index.
    fixture.resolve("1.9.9").await.unwrap();
    assert_eq!(fixture.server.requests(TERRAFORM_INDEX), 3);
}

#[rstest]
#[case(Reply::Status(503))]
#[case(Reply::Status(404))]
#[case(Reply::body("<html>log in</html>"))]
#[tokio::test]
async fn newest_falls_back_to_an_installed_tool(#[case] reply: Reply) {
    let mut fixture = Fixture::with(&[]).await;
    fixture.server.set(TERRAFORM_INDEX, reply);
    fixture.config.selection = Selection::Newest;
    fixture.resolve("~1.9").await.unwrap_err();
    fixture.put_on_path(&script("1.9.8"));
    let found = fixture.resolve("~1.9").await.unwrap();
    assert_eq!(found.origin, Origin::Path);
    assert!(
        fixture.messages().contains("warning: "),
        "{}",
        fixture.messages()
    );
}

#[tokio::test]
async fn a_binary_that_does_not_answer_is_skipped() {
    let mut fixture = Fixture::with(&["1.9.8"]).await;
    fixture.put_on_path("#!/bin/sh\nexit 3\n");
    let found = fixture.resolve("1.9.8").await.unwrap();
    assert_eq!(found.origin, Origin::Download);
    assert!(
        fixture.messages().contains("warning: ignoring"),
        "{}",
        fixture.messages()
    );
}

#[tokio::test]
async fn relative_entries_of_path_are_not_searched() {
    let mut fixture = Fixture::with(&["1.9.8"]).await;
    let binary = fixture.put_on_path(&script("1.9.8"));
    let up: PathBuf = std::env::current_dir()
        .unwrap()
        .components()
        .skip(1)
        .map(|_| "..")
        .collect();
    let relative = up.join(binary.parent().unwrap().strip_prefix("/").unwrap());
    assert!(relative.join("terraform").exists());
    fixture.config.path = relative.into_os_string();
    assert_eq!(
        fixture.resolve("1.9.8").await.unwrap().origin,
        Origin::Download
    );
}

#[tokio::test]
async fn tofu_is_found_on_the_second_page_of_its_index() {
    let fixture = Fixture::new().await;
    let release = |version: &str| {
        let archive = zip(&[("tofu", script(version).as_bytes())]);
        Publication::new("tofu", version, archive, Some(&fixture.signer)).serve(&fixture.server)
    };
    let origin = fixture.server.url("");
    let first = serde_json::json!([
        release("1.10.0").tofu_entry(&origin),
        release("1.10.0-rc1").tofu_entry(&origin),
        release("1.8.6").tofu_entry(&origin),
    ]);
    let second = serde_json::json!([release("1.8.7").tofu_entry(&origin)]);
    let next = format!("{TOFU_INDEX}?page=2");
    fixture.server.set(
        TOFU_INDEX,
        Reply::Page(Arc::new(first.to_string().into()), next.clone()),
    );
    fixture.server.set(&next, Reply::body(second.to_string()));

    let found = fixture.resolve_tool(Tool::OpenTofu, "~1.8").await.unwrap();
    let expected = fixture.config.cache_dir.join("tofu/v1.8.7/tofu");
    assert_eq!((found.origin, found.path), (Origin::Download, expected));
    let found = fixture
        .resolve_tool(Tool::OpenTofu, "1.10.0-rc1")
        .await
        .unwrap();
    assert_eq!(found.version.to_string(), "1.10.0-rc1");
    // The first page decides which version is the newest.
    assert_eq!(fixture.server.requests("page=2"), 1);
    assert_eq!(
        fixture
            .resolve_tool(Tool::OpenTofu, "v1.10.0-rc1")
            .await
            .unwrap()
            .origin,
        Origin::Cache
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn executors_sharing_a_cache_download_once() {
    let fixture = Arc::new(Fixture::with(&["1.9.8"]).await);
    let children: Vec<_> = (0..2)
        .map(|_| resolve_in_another_process(&fixture))
        .collect();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move { fixture.resolve("~1.9").await.unwrap().origin })
        })
        .collect();
    let mut downloads = 0;
    for task in tasks {
        downloads += usize::from(task.await.unwrap() == Origin::Download);
    }
    for child in children {
        let output = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap())
            .await
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("1 passed"), "{text}");
        downloads += usize::from(text.contains("origin: Download"));
    }
    assert_eq!(downloads, 1);
    assert_eq!(fixture.server.requests(".zip"), 1);
}

const OTHER_CACHE: &str = "MAYFLY_TEST_CACHE";
const OTHER_INDEX: &str = "MAYFLY_TEST_INDEX";
const OTHER_KEYS: &str = "MAYFLY_TEST_KEYS";

fn resolve_in_another_process(fixture: &Fixture) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tool::tests::another_process"])
        .args(["--ignored", "--nocapture"])
        .env(OTHER_CACHE, &fixture.config.cache_dir)
        .env(OTHER_INDEX, fixture.config.terraform_index.as_str())
        .env(OTHER_KEYS, fixture.config.extra_keys.as_ref().unwrap())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test]
#[ignore = "the other process of `executors_sharing_a_cache_download_once`"]
async fn another_process() {
    let Ok(cache) = std::env::var(OTHER_CACHE) else {
        return;
    };
    let mut fixture = Fixture::new().await;
    fixture.config.cache_dir = cache.into();
    fixture.config.terraform_index = std::env::var(OTHER_INDEX).unwrap().parse().unwrap();
    fixture.config.extra_keys = Some(std::env::var(OTHER_KEYS).unwrap().into());
    let found = fixture.resolve("~1.9").await.unwrap();
    println!("origin: {:?}", found.origin);
}

#[tokio::test]
async fn a_cache_with_the_tool_is_only_read() {
    let fixture = Fixture::with(&["1.9.8"]).await;
    let found = fixture.resolve("1.9.8").await.unwrap();
    let lock = fixture.slot("1.9.8").join(".lock");
    fs::remove_file(&lock).unwrap();
    let before = fs::metadata(fixture.slot("1.9.8"))
        .unwrap()
        .modified()
        .unwrap();
    let again = fixture.resolve("~1.9").await.unwrap();
    assert_eq!((again.origin, again.path), (Origin::Cache, found.path));
    let after = fs::metadata(fixture.slot("1.9.8"))
        .unwrap()
        .modified()
        .unwrap();
    assert_eq!(before, after);
    assert_eq!(names(&fixture.config.cache_dir), ["terraform"]);
}

/// What a run finds in the cache if others can write it, and what it does with that.
#[tokio::test]
async fn a_tool_that_others_can_write_is_used_only_as_a_checked_copy() {
    let mut fixture = Fixture::with(&["1.9.8", "1.9.9"]).await;
    let run = |fixture: &mut Fixture, name: &str| {
        let private = fixture.directory.path().join(name);
        let volume = Volume::new(LIMIT);
        let cache = fixture.config.cache_dir.clone();
        fixture.config.shared = Some(SharedCache::new(cache, volume, private.clone()));
        private
    };
    let downloads = |fixture: &Fixture| fixture.server.requests(".zip");
    let first = run(&mut fixture, "first");
    let found = fixture.resolve("1.9.8").await.unwrap();
    assert_eq!(found.origin, Origin::Download);
    assert!(found.path.starts_with(first));
    let kept = fixture.slot("1.9.8");
    let archive = format!("terraform_1.9.8_{}.zip", index::OsArch::current());
    assert_eq!(names(&kept), ["SHA256SUMS", "SHA256SUMS.sig", &archive]);

    let second = run(&mut fixture, "second");
    let found = fixture.resolve("~1.9").await.unwrap();
    assert_eq!(found.origin, Origin::Cache);
    assert!(found.path.starts_with(&second));
    assert_eq!(fs::read_to_string(&found.path).unwrap(), script("1.9.8"));
    assert_eq!(downloads(&fixture), 1);

    assert_eq!(fixture.checked("1.9.8"), CachedTool::Verified);

    // A program, an archive or a list of somebody else is not used, and the right ones come back. A lock is not waited for.
    let forged = zip(&[("terraform", script("6.6.6").as_bytes())]);
    let other = fixture.release("1.9.9");
    let lock = fs::File::create(kept.join(".lock")).unwrap();
    lock.lock().unwrap();
    write_executable(&kept.join("terraform"), &script("6.6.6"));
    let replaced = |name: &str, content: &[u8]| {
        let path = kept.join(name);
        fs::remove_file(&path).unwrap();
        fs::write(path, content).unwrap();
    };
    let sums = String::from_utf8(other.sums.clone()).unwrap();
    let renamed = sums.replace("1.9.9", "1.9.8");
    let spoils: [&dyn Fn(); 5] = [
        &|| replaced(&archive, &forged),
        // Signed, but another version.
        &|| {
            replaced(&archive, &other.archive);
            replaced("SHA256SUMS", &other.sums);
            replaced("SHA256SUMS.sig", other.signature.as_ref().unwrap());
        },
        &|| {
            replaced(&archive, &other.archive);
            replaced("SHA256SUMS", renamed.as_bytes());
            replaced("SHA256SUMS.sig", other.signature.as_ref().unwrap());
        },
        &|| fs::remove_file(kept.join("SHA256SUMS.sig")).unwrap(),
        &|| {
            fs::remove_file(kept.join(&archive)).unwrap();
            std::os::unix::fs::symlink("/dev/zero", kept.join(&archive)).unwrap();
        },
    ];
    for (number, spoil) in spoils.iter().enumerate() {
        spoil();
        let is_altered = fixture.checked("1.9.8") == CachedTool::Altered;
        // Without a signature, nothing is known.
        assert_eq!(is_altered, number != 3, "{number}");
        let before = downloads(&fixture);
        run(&mut fixture, &format!("spoilt-{number}"));
        let found = fixture.resolve("1.9.8").await.unwrap();
        assert_eq!(found.origin, Origin::Download, "{number}");
        assert_eq!(fs::read_to_string(&found.path).unwrap(), script("1.9.8"));
        run(&mut fixture, &format!("mended-{number}"));
        assert_eq!(
            fixture.resolve("1.9.8").await.unwrap().origin,
            Origin::Cache
        );
        assert_eq!(downloads(&fixture), before + 1);
    }
}

#[tokio::test]
async fn a_tool_in_the_cache_is_checked_by_what_was_noted_when_it_came() {
    let fixture = Fixture::with(&["1.9.8"]).await;
    let slot = fixture.slot("1.9.8");
    fixture.resolve("1.9.8").await.unwrap();
    assert_eq!(fixture.checked("1.9.8"), CachedTool::Verified);
    let note = fs::read_to_string(slot.join("terraform.sha256")).unwrap();
    let checked = Command::new("sha256sum")
        .args(["--check", "--status", "terraform.sha256"])
        .current_dir(&slot)
        .status();
    assert!(checked.unwrap().success(), "{note}");
    fs::remove_file(slot.join("terraform")).unwrap();
    write_executable(&slot.join("terraform"), &script("6.6.6"));
    assert_eq!(fixture.checked("1.9.8"), CachedTool::Altered);
    fs::remove_file(slot.join("terraform.sha256")).unwrap();
    assert!(matches!(fixture.checked("1.9.8"), CachedTool::Unknown(_)));
    assert!(matches!(
        fixture.checked("no-version"),
        CachedTool::Unknown(_)
    ));
}

#[tokio::test]
async fn not_every_version_that_others_have_planted_is_tried() {
    let mut fixture = Fixture::with(&["1.9.8"]).await;
    let cache = fixture.config.cache_dir.clone();
    let mut origin = async |planted: &str| {
        let cache = cache.clone();
        fs::create_dir_all(cache.join("terraform").join(planted)).unwrap();
        let private = fixture.directory.path().join(planted);
        fixture.config.shared = Some(SharedCache::new(cache, Volume::new(LIMIT), private));
        fixture.resolve("~1.9").await.unwrap().origin
    };
    assert_eq!(origin("1.9.100").await, Origin::Download);
    for number in 101..115 {
        fs::create_dir(cache.join(format!("terraform/1.9.{number}"))).unwrap();
    }
    assert_eq!(origin("1.8.0").await, Origin::Cache);
    assert_eq!(origin("1.9.115").await, Origin::Download);
}

#[tokio::test]
async fn files_of_a_crash_are_never_used_and_the_next_install_removes_them() {
    let fixture = Fixture::with(&["1.9.8"]).await;
    let slot = fixture.slot("1.9.8");
    fs::create_dir_all(&slot).unwrap();
    for leftover in [".unfinished-a", ".unfinished-b"] {
        write_executable(&slot.join(leftover), &script("1.9.8")[..10]);
    }
    // An empty file, or one that is not executable, does not count as installed.
    fs::write(slot.join("terraform"), "").unwrap();
    let found = fixture.resolve("1.9.8").await.unwrap();
    assert_eq!(found.origin, Origin::Download);
    assert_eq!(names(&slot), [".lock", "terraform", "terraform.sha256"]);
    assert_eq!(fs::read_to_string(found.path).unwrap(), script("1.9.8"));
}

#[tokio::test]
async fn a_dropped_resolve_leaves_neither_files_nor_a_lock() {
    let fixture = Fixture::new().await;
    let release = fixture.release("1.9.8").serve(&fixture.server);
    let path = release.archive_path();
    fixture
        .server
        .set(&path, Reply::Stalled(Arc::new(release.archive.clone())));
    fixture.index(std::slice::from_ref(&release));
    tokio::select! {
        _ = fixture.resolve("1.9.8") => panic!("the download cannot end"),
        () = fixture.server.stalled.notified() => {}
    }
    assert_eq!(names(&fixture.slot("1.9.8")), [".lock"]);
    fixture.server.set(&path, Reply::body(release.archive));
    assert_eq!(
        fixture.resolve("1.9.8").await.unwrap().origin,
        Origin::Download
    );
}

fn assert_says(error: &StepError, problem: &str) {
    assert!(error.to_string().contains(problem), "{error}");
}

/// Resolves 1.9.8 after `spoil` has changed it, and checks that nothing was installed.
async fn refusal(fixture: &Fixture, spoil: impl FnOnce(&mut Publication)) -> StepError {
    let mut release = fixture.release("1.9.8");
    spoil(&mut release);
    let release = release.serve(&fixture.server);
    fixture.index(&[release]);
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_eq!(names(&fixture.slot("1.9.8")), [".lock"], "{error}");
    assert!(error.hint().is_some(), "{error}");
    assert_eq!(error.exit(), Exit::Infrastructure, "{error}");
    error
}

#[tokio::test]
async fn an_archive_with_another_checksum_is_refused() {
    let fixture = Fixture::new().await;
    let error = refusal(&fixture, |release| release.archive[40] ^= 1).await;
    assert_says(&error, "has SHA-256");
}

#[tokio::test]
async fn an_unlisted_archive_is_not_even_downloaded() {
    let mut fixture = Fixture::new().await;
    fixture.config.signatures = SignaturePolicy::Offered;
    let error = refusal(&fixture, |release| {
        release.sums = format!("{}  other.zip\n", "0".repeat(64)).into_bytes();
        release.signature = None;
    })
    .await;
    assert_says(&error, "do not list");
    assert_eq!(fixture.server.requests(".zip"), 0);
}

#[tokio::test]
async fn missing_checksums_are_refused() {
    let fixture = Fixture::new().await;
    let release = fixture.release("1.9.8").serve(&fixture.server);
    fixture.server.set(
        &release.path("terraform_1.9.8_SHA256SUMS"),
        Reply::Status(404),
    );
    fixture.index(&[release]);
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_says(&error, "no checksums are published");
}

#[rstest]
#[case(SignaturePolicy::Offered)]
#[case(SignaturePolicy::Required)]
#[tokio::test]
async fn a_bad_signature_is_refused_under_every_policy(#[case] policy: SignaturePolicy) {
    let mut fixture = Fixture::new().await;
    fixture.config.signatures = policy;
    let other = fixture.signer.sign(b"another document");
    let error = refusal(&fixture, |release| release.signature = Some(other)).await;
    assert_says(
        &error,
        "was not accepted: it does not match the signed file",
    );
    assert_eq!(fixture.server.requests(".zip"), 0);
}

#[tokio::test]
async fn a_signature_of_an_unknown_key_is_refused() {
    let mut fixture = Fixture::new().await;
    fixture.config.signatures = SignaturePolicy::Offered;
    let stranger = Signer::new();
    let error = refusal(&fixture, |release| {
        release.signature = Some(stranger.sign(&release.sums));
    })
    .await;
    assert_says(&error, "which is not trusted here");
}

#[tokio::test]
async fn an_unsigned_release_is_refused_only_if_signatures_are_required() {
    let mut fixture = Fixture::new().await;
    let error = refusal(&fixture, |release| release.signature = None).await;
    assert_says(&error, "no signature is published");
    fixture.config.signatures = SignaturePolicy::Offered;
    assert_eq!(
        fixture.resolve("1.9.8").await.unwrap().origin,
        Origin::Download
    );
}

#[tokio::test]
async fn signatures_that_cannot_be_fetched_do_not_count_as_absent() {
    let mut fixture = Fixture::new().await;
    fixture.config.signatures = SignaturePolicy::Offered;
    let release = fixture.release("1.9.8").serve(&fixture.server);
    fixture.server.set(
        &release.path("terraform_1.9.8_SHA256SUMS.72D7468F.sig"),
        Reply::Status(500),
    );
    fixture.index(&[release]);
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_says(&error, "answered 500");
}

#[tokio::test]
async fn unreadable_extra_keys_are_named() {
    let fixture = Fixture::with(&["1.9.8"]).await;
    fs::write(fixture.config.extra_keys.as_ref().unwrap(), "not a key").unwrap();
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_eq!(names(&fixture.slot("1.9.8")), [".lock"], "{error}");
    assert_eq!(error.exit(), Exit::BadConfiguration, "{error}");
    assert_says(&error, "keys.asc");
}

#[rstest]
#[case::absent(zip(&[("README", b"hello")]))]
#[case::in_a_folder(zip(&[("bin/terraform", b"x")]))]
#[case::outside(zip(&[("../terraform", b"x"), ("/terraform", b"x")]))]
#[case::folder(zip(&[("terraform/", b"")]))]
#[case::no_zip(b"<html>".to_vec())]
#[tokio::test]
async fn an_archive_without_the_binary_is_refused(#[case] archive: Vec<u8>) {
    let fixture = Fixture::new().await;
    let signed = Publication::new("terraform", "1.9.8", archive, Some(&fixture.signer));
    let error = refusal(&fixture, |release| *release = signed).await;
    assert_says(&error, "could not unpack");
}

#[tokio::test]
async fn a_link_in_place_of_the_binary_is_refused() {
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    zip.add_symlink(
        "terraform",
        "/bin/sh",
        zip::write::SimpleFileOptions::default(),
    )
    .unwrap();
    let archive = zip.finish().unwrap().into_inner();
    let fixture = Fixture::new().await;
    let signed = Publication::new("terraform", "1.9.8", archive, Some(&fixture.signer));
    let error = refusal(&fixture, |release| *release = signed).await;
    assert_says(&error, "could not unpack");
}

#[tokio::test]
async fn transient_failures_are_retried() {
    let mut fixture = Fixture::new().await;
    fixture.config.retry_for = LIMIT;
    let release = fixture.release("1.9.8").serve(&fixture.server);
    let archive = Arc::new(release.archive.clone());
    fixture.server.set_sequence(
        &release.archive_path(),
        vec![
            Reply::Truncated(Arc::clone(&archive)),
            Reply::Status(502),
            Reply::Redirect(fixture.server.url("/elsewhere")),
        ],
    );
    fixture.server.set("/elsewhere", Reply::Body(archive));
    fixture.index(&[release]);
    fixture.resolve("1.9.8").await.unwrap();
    assert_eq!(fixture.server.requests(".zip"), 3);
}

/// Each attempt fails at once, or at the latest when its connection takes too long.
#[tokio::test]
async fn an_index_that_refuses_connections_fails_in_time_and_is_a_wrong_setting() {
    let mut fixture = Fixture::new().await;
    fixture.config.retry_for = RETRY_FOR;
    let refuses = Port::take().unwrap();
    let index = format!("http://{}/index.json", refuses.address());
    fixture.config.terraform_index = index.parse().unwrap();
    tokio::time::pause();
    let began = Instant::now();
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    let took = began.elapsed();
    assert!(took >= RETRY_FOR, "given up after {took:?}");
    assert!(took < Duration::from_secs(30), "given up after {took:?}");
    assert_unreachable(&error, &index);
}

/// The kernel accepts the connection, and no process answers.
#[tokio::test]
async fn an_index_that_is_silent_fails_in_time_and_is_a_wrong_setting() {
    let mut fixture = Fixture::new().await;
    fixture.config.retry_for = RETRY_FOR;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let index = format!("http://{}/index.json", silent.local_addr().unwrap());
    fixture.config.terraform_index = index.parse().unwrap();
    tokio::time::pause();
    let held = hold_clock();
    let began = Instant::now();
    let is_asked = async {
        let (mut connection, _) = silent.accept().await.unwrap();
        connection.read_u8().await.unwrap();
        // Timers are as exact as a millisecond.
        tokio::time::advance(IDLE_TIMEOUT + Duration::from_millis(1)).await;
        connection
    };
    let (resolved, _connection) = tokio::join!(fixture.resolve("1.9.8"), is_asked);
    assert_eq!(began.elapsed().as_secs(), IDLE_TIMEOUT.as_secs());
    assert_unreachable(&resolved.unwrap_err(), &index);
    drop(held);
    tokio::time::resume();

    // If another source has the tool, the index gets no request.
    let binary = fixture.put_on_path(&script("1.9.8"));
    assert_eq!(fixture.resolve("1.9.8").await.unwrap().path, binary);
    let another = silent.accept().now_or_never();
    assert!(another.is_none(), "{another:?}");
}

fn assert_unreachable(error: &StepError, index: &str) {
    assert_eq!(error.exit(), Exit::BadConfiguration);
    assert_says(error, &format!("could not reach `{index}`"));
}

#[tokio::test]
async fn an_unreachable_download_server_is_a_wrong_setting() {
    let mut fixture = Fixture::with(&["1.9.8"]).await;
    fixture.config.mirror = Some("http://127.0.0.1:1".parse().unwrap());
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_eq!(error.exit(), Exit::BadConfiguration);
}

#[tokio::test]
async fn a_download_that_is_always_interrupted_is_an_error() {
    let fixture = Fixture::new().await;
    let release = fixture.release("1.9.8").serve(&fixture.server);
    fixture.server.set(
        &release.archive_path(),
        Reply::Truncated(Arc::new(release.archive.clone())),
    );
    fixture.index(&[release]);
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_says(&error, "was interrupted");
    assert_eq!(error.exit(), Exit::Infrastructure);
    assert_eq!(names(&fixture.slot("1.9.8")), [".lock"]);
}

#[tokio::test]
async fn each_failed_search_names_its_cause_and_the_next_step() {
    let mut fixture = Fixture::with(&["1.9.8", "1.11.0-rc1"]).await;
    let cases = [
        ("abc", "`abc` is not a version range"),
        ("^2", "no Terraform release satisfies `^2`"),
    ];
    for (range, message) in cases {
        let error = fixture.resolve(range).await.unwrap_err();
        assert_eq!(error.exit(), Exit::BadJobData);
        assert!(error.to_string().starts_with(message), "{error}");
    }
    let hint = fixture.resolve("^2").await.unwrap_err().hint().unwrap();
    assert!(hint.ends_with("is 1.9.8"), "{hint}");

    let mut entry = fixture.release("3.0.0").terraform_entry("http://x.test");
    entry["builds"].as_array_mut().unwrap().truncate(1);
    let index = serde_json::json!({"versions": {"3.0.0": entry}});
    fixture
        .server
        .set(TERRAFORM_INDEX, Reply::body(index.to_string()));
    let error = fixture.resolve("3.0.0").await.unwrap_err();
    assert_says(&error, "3.0.0 is not published for");

    fixture.server.set(TERRAFORM_INDEX, Reply::body("<html>"));
    let error = fixture.resolve("3.0.0").await.unwrap_err();
    assert_says(&error, "is not in the format expected");

    fixture.config.terraform_index = "http://127.0.0.1:1/index.json".parse().unwrap();
    let error = fixture.resolve("3.0.0").await.unwrap_err();
    let hint = error.hint().unwrap();
    assert!(hint.contains("executor's image"), "{hint}");
    assert_says(&error, "could not reach");
}

#[tokio::test]
async fn a_mirror_replaces_the_addresses_of_the_index_and_its_password_stays_secret() {
    let mut fixture = Fixture::new().await;
    let release = fixture.release("1.9.8").serve(&fixture.server);
    let archive = release.archive_path();
    fixture.index_at("https://releases.invalid", &[release]);
    let mut mirror: Url = fixture.server.url("/").parse().unwrap();
    mirror.set_username("bob").unwrap();
    mirror.set_password(Some("hunter2")).unwrap();
    fixture.config.mirror = Some(mirror);
    let found = fixture.resolve("1.9.8").await.unwrap();
    assert_eq!(found.origin, Origin::Download);

    fs::remove_file(found.path).unwrap();
    fixture.server.set(&archive, Reply::Status(403));
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    let everything = format!(
        "{error} {:?} {:?} {}",
        error.hint(),
        fixture.config,
        fixture.messages()
    );
    assert!(everything.contains("***@"), "{everything}");
    assert!(!everything.contains("hunter2"), "{everything}");
    assert!(!everything.contains("bob"), "{everything}");
}

#[tokio::test]
async fn a_cache_that_cannot_be_written_is_named() {
    let mut fixture = Fixture::with(&["1.9.8"]).await;
    let file = fixture.directory.path().join("file");
    fs::write(&file, "").unwrap();
    fixture.config.cache_dir = file;
    let error = fixture.resolve("1.9.8").await.unwrap_err();
    assert_says(&error, "could not use the tool cache at `");
    assert_says(&error, "/file");
}

#[test]
fn failures_of_the_cache_have_errors_of_their_own() {
    let of = |kind: io::ErrorKind| cache_error(Path::new("/cache"), &kind.into());
    for (kind, message) in [
        (io::ErrorKind::StorageFull, "the tool cache is full"),
        (
            io::ErrorKind::ReadOnlyFilesystem,
            "the tool cache is not writable",
        ),
        (
            io::ErrorKind::PermissionDenied,
            "the tool cache is not writable",
        ),
        (io::ErrorKind::Other, "could not use the tool cache"),
    ] {
        assert!(of(kind).to_string().starts_with(message), "{}", of(kind));
        assert!(of(kind).hint().is_some());
    }
}
