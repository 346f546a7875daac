//! Repositories of modules that runs share: what a second clone asks its server for, and what others have put into the store.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use provider_store::ProviderStore;
use tempfile::TempDir;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::{Request, Server};

use super::super::git::ModuleStore;
use super::super::*;
use super::rules::{allow, child_env, run};
use super::support::*;
use crate::volume::Volume;

/// Enough that what a small commit adds is not worth another bundle.
const LARGE_BYTES: u64 = 64 * 1024;

/// What the tool does for a module at `$0`.
const CLONE: &str = "git clone --quiet -- \"$0\" module";

/// A repository behind a server, and the store.
struct Modules {
    repository: Repository,
    server: Server,
    options: Arc<Mutex<GitHttpOptions>>,
    /// Bytes of answers.
    sent: Arc<AtomicU64>,
    store: ProviderStore,
    _folder: TempDir,
}

/// Serves repositories, and counts bytes.
fn serve(
    repository: &Repository,
    options: &Arc<Mutex<GitHttpOptions>>,
    sent: &Arc<AtomicU64>,
) -> Server {
    let folder = repository.served().to_path_buf();
    let (options, sent) = (Arc::clone(options), Arc::clone(sent));
    Server::start(move |request: &Request| {
        let options = options.lock().unwrap().clone();
        let response = git_http::answer(&folder, &options, request);
        sent.fetch_add(response.body.len() as u64, Ordering::Relaxed);
        response
    })
    .unwrap()
}

/// What a clone of `init` did.
struct Cloned {
    fixture: Fixture,
    text: String,
    is_done: bool,
    stored: usize,
    kept: usize,
}

impl Modules {
    fn new() -> Self {
        let repository = Repository::new();
        let folder = tempfile::tempdir().unwrap();
        let (options, sent) = (Arc::default(), Arc::default());
        let modules = Self {
            server: serve(&repository, &options, &sent),
            options,
            sent,
            store: ProviderStore::new(folder.path().join("store")),
            repository,
            _folder: folder,
        };
        modules.commit_large("large");
        modules
    }

    fn url(&self) -> String {
        format!("{}/repo.git", self.server.url())
    }

    /// Commits what cannot be compressed.
    fn commit_large(&self, name: &str) -> String {
        let mut file = File::create(self.repository.tree().join(name)).unwrap();
        let random = File::open("/dev/urandom").unwrap();
        std::io::copy(&mut random.take(LARGE_BYTES), &mut file).unwrap();
        let commit = commit_all(&self.repository.tree());
        self.repository.publish();
        commit
    }

    async fn clone(&self) -> Cloned {
        self.clone_in(Fixture::new(), CLONE).await
    }

    /// Clones as the tool does, and keeps what was fetched.
    async fn clone_in(&self, fixture: Fixture, script: &str) -> Cloned {
        let access = git::ModuleAccess {
            allowed: fixture.config.allowed.clone(),
            ssh_command: "ssh".to_owned(),
            store: Some(ModuleStore {
                store: self.store.clone(),
                volume: Volume::new(Duration::from_mins(1)),
            }),
            ..git::ModuleAccess::default()
        };
        let mut env = child_env(&fixture, &[]);
        let (private, path) = (fixture.layout.private(), fixture.config.path.clone());
        let opening = access.open(private, &path, fixture.layout.checkout(), &mut env);
        let open = opening.await.unwrap().unwrap();
        let mut command = tokio::process::Command::new("sh");
        // The shell looks for `git` as the tool does.
        command
            .args(["-c", script, &self.url()])
            .current_dir(fixture.work.path())
            .env_clear()
            .envs(env.iter());
        let (is_done, text) = run(command).await;
        let shared = open.keep_objects().await;
        drop(open);
        assert!(fs::read_dir(private).unwrap().next().is_none());
        Cloned {
            fixture,
            text,
            is_done,
            stored: shared.stored,
            kept: shared.kept,
        }
    }

    /// Whether less was sent since the last look than the large file has.
    fn sent_little(&self) -> bool {
        self.sent.swap(0, Ordering::Relaxed) < LARGE_BYTES / 4
    }

    fn stored(&self) -> Vec<String> {
        let bundles = self.store.bundles(&self.url()).unwrap().into_iter();
        bundles.map(|bundle| bundle.commit).collect()
    }
}

impl Cloned {
    fn shared(&self) -> (usize, usize) {
        assert!(self.is_done, "{}", self.text);
        (self.stored, self.kept)
    }

    /// Checks that the clone needs nothing but itself. Returns its commit.
    fn commit(&self) -> String {
        let clone = self.fixture.work.path().join("module");
        git(&clone, &["fsck", "--strict"]);
        assert!(!clone.join(".git/objects/info/alternates").exists());
        assert!(clone.join("main.tf").exists());
        git(&clone, &["rev-parse", "HEAD"])
    }
}

#[tokio::test]
async fn a_clone_asks_its_server_only_for_what_the_store_lacks() {
    let modules = Modules::new();
    let first = git(&modules.repository.bare(), &["rev-parse", "main"]);
    assert_eq!(modules.clone().await.shared(), (0, 1));
    assert_eq!(modules.stored(), [first.as_str()]);
    assert!(!modules.sent_little());

    let second = modules.clone().await;
    assert_eq!((second.shared(), second.commit()), ((1, 0), first.clone()));
    assert!(modules.sent_little());

    // A little more is asked for, and is not worth another bundle.
    let small = commit_file(&modules.repository.tree(), "main.tf", "# small");
    modules.repository.publish();
    let third = modules.clone().await;
    assert_eq!((third.shared(), third.commit()), ((1, 0), small));
    assert!(modules.sent_little());
    assert_eq!(modules.stored(), [first.as_str()]);

    // Much more takes the place of what it contains.
    let large = modules.commit_large("more");
    let fourth = modules.clone().await;
    assert_eq!((fourth.shared(), fourth.commit()), ((1, 1), large.clone()));
    assert_eq!(modules.stored(), [large]);
}

#[tokio::test]
async fn one_bundle_is_kept_of_two_versions_of_a_module() {
    let modules = Modules::new();
    let both = format!("git clone --quiet --branch v1 -- \"$0\" old && {CLONE}");
    let cloned = modules.clone_in(Fixture::new(), &both).await;
    assert_eq!(cloned.shared(), (0, 1));
    assert_eq!(modules.stored(), [cloned.commit()]);

    // What becomes of one clone does not matter to the other.
    modules
        .store
        .remove_bundle(&modules.url(), &cloned.commit())
        .unwrap();
    let both = format!("{both} && rm -rf old");
    let cloned = modules.clone_in(Fixture::new(), &both).await;
    assert_eq!(cloned.shared(), (0, 1));
    assert_eq!(modules.stored(), [cloned.commit()]);
}

#[tokio::test]
async fn a_rule_holds_and_the_server_decides_who_may_read() {
    let modules = Modules::new();
    let mut fixture = Fixture::new();
    allow(&mut fixture, &modules.url());
    assert_eq!(modules.clone_in(fixture, CLONE).await.shared(), (0, 1));
    let mut fixture = Fixture::new();
    allow(&mut fixture, "https://elsewhere.example.test/.*");
    let refused = modules.clone_in(fixture, CLONE).await;
    assert!(!refused.is_done && refused.text.contains("is not allowed by"));

    // The same repository, for which the run now has no credential.
    modules.options.lock().unwrap().credentials = Some("nobody:knows".to_owned());
    let refused = modules.clone().await;
    assert!(!refused.is_done && !refused.fixture.work.path().join("module").exists());
}

/// The objects of `what`, as a bundle that names the reference of `name` and says it is `commit`.
fn forged(tree: &Path, name: &str, commit: &str, what: &str) -> Vec<u8> {
    let mut packing = Command::new("git");
    packing
        .args(["pack-objects", "--stdout", "--revs", "-q"])
        .current_dir(tree)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut packing = packing.spawn().unwrap();
    let mut stdin = packing.stdin.take().unwrap();
    stdin.write_all(what.as_bytes()).unwrap();
    drop(stdin);
    let pack = packing.wait_with_output().unwrap().stdout;
    let mut bundle = format!("# v2 git bundle\n{commit} refs/have/{name}\n\n").into_bytes();
    bundle.extend(pack);
    bundle
}

#[tokio::test]
async fn what_others_have_planted_is_not_used_and_goes() {
    let modules = Modules::new();
    let tree = modules.repository.tree();
    let last = git(&tree, &["rev-parse", "HEAD"]);
    let first = modules.repository.first.clone();
    assert_eq!(modules.clone().await.shared(), (0, 1));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bundle");
    assert!(
        modules
            .store
            .copy_bundle(&modules.url(), &last, &file)
            .unwrap()
    );
    let genuine = fs::read(&file).unwrap();
    let mut altered = genuine.clone();
    let middle = altered.len() / 2;
    altered[middle] ^= 1;
    let incomplete = forged(&tree, &last, &last, &format!("{last}\n^{first}\n"));
    let of_another = forged(&tree, &last, &first, &first);
    assert!(!modules.sent_little());
    for planted in [altered, incomplete, of_another, b"no bundle".to_vec()] {
        modules.store.remove_bundle(&modules.url(), &last).unwrap();
        fs::write(&file, planted).unwrap();
        let store = &modules.store;
        store.publish_bundle(&modules.url(), &last, &file).unwrap();
        let clone = modules.clone().await;
        assert_eq!((clone.shared(), clone.commit()), ((0, 1), last.clone()));
        assert!(!modules.sent_little());
        // The genuine one is in its place.
        assert_eq!(modules.clone().await.shared(), (1, 0));
        assert!(modules.sent_little());
    }
}
