//! What runs share of the repositories of modules: git's own objects. A clone of `init` takes what the store has from a private
//! repository, and asks its server for the rest. So the server still decides what a name means, and whether the run may read it.
//!
//! Nothing in the store is trusted, because other runs may have written it. git computes the id of each object, and looks for
//! everything that a commit needs, before a clone sees any of it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use git_address::{Address, Transport};
use provider_store::{Bundle, LARGEST_BUNDLE, ProviderStore};
use tempfile::TempDir;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::process;
use super::program::write_program;
use crate::volume::Volume;
use crate::workspace::ssh::shell_quote;

/// The first field of a question about a clone.
pub(super) const CLONE: &str = "clone";

const PROGRAM: &str = "git";
/// How long git may take for the objects of one repository.
const PATIENCE: Duration = Duration::from_mins(2);
/// So many bundles of a repository are used. Others may have put more there.
const MOST_BUNDLES: usize = 4;
/// A repository gets another bundle if the store lacks more than one in so many bytes of it.
const WORTH_KEEPING: u64 = 4;
const REFERENCES: &str = "refs/have";

/// The store of modules that runs share.
#[derive(Clone, Debug)]
pub(crate) struct ModuleStore {
    pub(crate) store: ProviderStore,
    pub(crate) volume: Volume,
}

/// What an `init` has cloned, and what the store has of that.
#[derive(Debug)]
pub(super) struct ModuleObjects {
    shared: ModuleStore,
    folder: TempDir,
    /// For git's own programs.
    path: OsString,
    repositories: Mutex<BTreeMap<String, Repository>>,
}

/// A repository of modules.
#[derive(Debug)]
struct Repository {
    /// A bare one with what the store has.
    git_dir: PathBuf,
    bundles: Vec<Bundle>,
    /// Where it was cloned to.
    clones: Vec<PathBuf>,
}

/// How often the store was of use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    /// Repositories of which it had something.
    pub(crate) stored: usize,
    /// Repositories of which it now has more.
    pub(crate) kept: usize,
}

impl ModuleObjects {
    /// Begins in a new folder below `private`.
    pub(super) fn new(shared: ModuleStore, private: &Path, path: &OsStr) -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("modules-")
            .tempdir_in(private)?;
        Ok(Self {
            shared,
            folder,
            path: path.to_owned(),
            repositories: Mutex::default(),
        })
    }

    /// Writes a program `git` that asks here before it clones, and returns its folder.
    pub(super) fn write_program(&self, socket: &Path) -> io::Result<PathBuf> {
        let real = which::which_in(PROGRAM, Some(&self.path), "/").map_err(io::Error::other)?;
        let real = shell_quote(&real.to_string_lossy());
        let socket = shell_quote(&socket.to_string_lossy());
        // The address and the folder are the last arguments.
        let text = format!(
            "#!/bin/sh\ntest \"$1\" = clone || exec {real} \"$@\"\nshift\naddress= target=\n\
             for argument; do address=$target target=$argument; done\n\
             known=$(printf '{CLONE}\\0%s\\0%s\\0%s\\0' \"$address\" \"$PWD\" \"$target\" | \
             {real} credential-cache --socket {socket} get)\n\
             test -n \"$known\" || exec {real} clone \"$@\"\n\
             exec {real} clone --reference-if-able \"$known\" --dissociate \"$@\"\n"
        );
        let folder = self.folder.path().join("bin");
        fs::create_dir(&folder)?;
        write_program(&folder.join(PROGRAM), &text)?;
        Ok(folder)
    }

    /// The answer to a question about a clone: a repository with objects that the clone can take, or nothing.
    pub(super) async fn answer(&self, question: &str) -> String {
        let mut fields = question.split('\0');
        let (Some(address), Some(current), Some(target)) =
            (fields.next(), fields.next(), fields.next())
        else {
            return String::new();
        };
        let address = Address::parse(address).ok();
        let Some(address) = address.filter(|one| one.transport() != Transport::File) else {
            return String::new();
        };
        let clone = Path::new(current).join(target);
        let known = self.known(&address.to_string(), clone).await;
        known
            .inspect_err(|error| debug!(%error, %address, "a module is cloned without the store"))
            .ok()
            .flatten()
            .map_or_else(String::new, |path| path.to_string_lossy().into_owned())
    }

    async fn known(&self, repository: &str, clone: PathBuf) -> io::Result<Option<PathBuf>> {
        let mut repositories = self.repositories.lock().await;
        if !repositories.contains_key(repository) {
            let git_dir = self
                .folder
                .path()
                .join(format!("{}.git", repositories.len()));
            let opened = self.open(repository, git_dir).await?;
            repositories.insert(repository.to_owned(), opened);
        }
        let found = repositories.get_mut(repository);
        Ok(found.and_then(|found| {
            found.clones.push(clone);
            (!found.bundles.is_empty()).then(|| found.git_dir.clone())
        }))
    }

    async fn open(&self, repository: &str, git_dir: PathBuf) -> io::Result<Repository> {
        let init = ["init", "--quiet", "--bare", "--template="];
        let mut command = self.git(&git_dir, None, &init);
        command.arg(&git_dir);
        succeed(command).await?;
        let mut found = Repository {
            git_dir,
            bundles: Vec::new(),
            clones: Vec::new(),
        };
        let name = repository.to_owned();
        let bundles = self.in_time(move |store| store.bundles(&name)).await;
        let bundles = bundles.inspect_err(|error| warn!(%error, "no modules from the store"));
        for bundle in bundles.unwrap_or_default().into_iter().take(MOST_BUNDLES) {
            match self.take(repository, &found.git_dir, &bundle.commit).await {
                Ok(true) => found.bundles.push(bundle),
                Ok(false) => {}
                Err(error) => warn!(%error, repository, "no module from the store"),
            }
        }
        Ok(found)
    }

    /// Takes a bundle into a private repository, after git has checked it. One that is not what its name says is removed.
    async fn take(&self, repository: &str, git_dir: &Path, commit: &str) -> io::Result<bool> {
        let bundle = self.folder.path().join("bundle");
        let (name, id, target) = (repository.to_owned(), commit.to_owned(), bundle.clone());
        let copying = self.in_time(move |store| store.copy_bundle(&name, &id, &target));
        if !copying.await? {
            return Ok(false);
        }
        let reference = format!("{REFERENCES}/{commit}");
        let refspec = format!("{reference}:{reference}");
        let fetch = ["fetch", "--quiet", "--no-tags", "--no-write-fetch-head"];
        let mut command = self.git(git_dir, None, &fetch);
        command.arg(&bundle).arg(refspec);
        let checking = async {
            succeed(command).await?;
            let read = self.git(git_dir, None, &["rev-parse", "--verify", &reference]);
            if succeed(read).await?.trim() == commit {
                Ok(())
            } else {
                Err(io::Error::other("it is not what its name says"))
            }
        };
        let checked = checking.await;
        fs::remove_file(&bundle)?;
        let Err(error) = checked else {
            return Ok(true);
        };
        // What it has fetched must not count as known.
        let forget = self.git(git_dir, None, &["update-ref", "-d", &reference]);
        succeed(forget).await?;
        let (name, id) = (repository.to_owned(), commit.to_owned());
        self.in_time(move |store| store.remove_bundle(&name, &id))
            .await?;
        Err(error)
    }

    /// Keeps for later runs what the clones have fetched and the store lacks.
    pub(super) async fn keep(&self) -> Shared {
        let mut shared = Shared::default();
        let mut repositories = self.repositories.lock().await;
        for (address, repository) in repositories.iter_mut() {
            shared.stored += usize::from(!repository.bundles.is_empty());
            let mut is_kept = false;
            for clone in std::mem::take(&mut repository.clones) {
                match self.keep_clone(address, repository, &clone).await {
                    Ok(kept) => is_kept |= kept,
                    Err(error) => debug!(%error, repository = address, "a clone is not kept"),
                }
            }
            shared.kept += usize::from(is_kept);
        }
        shared
    }

    async fn keep_clone(
        &self,
        address: &str,
        repository: &mut Repository,
        clone: &Path,
    ) -> io::Result<bool> {
        let own = clone.join(".git");
        // Its history would not be complete.
        if own.join("shallow").exists() {
            return Ok(false);
        }
        let (commit, objects) = (head(&own)?, own.join("objects"));
        let git = |args: &[&str]| self.git(&repository.git_dir, Some(&objects), args);
        let known = format!("--glob={REFERENCES}/*");
        let count = ["rev-list", "--disk-usage", "--objects", &commit];
        let lacking = succeed(git(&[&count[..], &["--not", &known]].concat())).await?;
        let lacking: u64 = lacking.trim().parse().map_err(io::Error::other)?;
        let stored: u64 = repository.bundles.iter().map(|one| one.size_bytes).sum();
        if lacking <= stored / WORTH_KEEPING {
            return Ok(false);
        }
        let reference = format!("{REFERENCES}/{commit}");
        succeed(git(&["update-ref", &reference, &commit])).await?;
        let bundle = self.folder.path().join("bundle");
        let mut command = git(&["bundle", "create", "--quiet"]);
        command.arg(&bundle).arg(&reference);
        succeed(command).await?;
        let size_bytes = fs::metadata(&bundle)?.len();
        if size_bytes > LARGEST_BUNDLE {
            fs::remove_file(&bundle)?;
            return Ok(false);
        }
        let (name, id, source) = (address.to_owned(), commit.clone(), bundle.clone());
        let publishing = self.in_time(move |store| store.publish_bundle(&name, &id, &source));
        publishing.await?;
        fs::remove_file(&bundle)?;
        // It takes the place of those that it contains.
        let mut others = Vec::new();
        for old in &repository.bundles {
            let within = git(&["merge-base", "--is-ancestor", &old.commit, &commit]);
            if succeed(within).await.is_err() {
                others.push(old.clone());
                continue;
            }
            let (name, id) = (address.to_owned(), old.commit.clone());
            self.in_time(move |store| store.remove_bundle(&name, &id))
                .await?;
        }
        others.push(Bundle { commit, size_bytes });
        repository.bundles = others;
        Ok(true)
    }

    async fn in_time<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ProviderStore) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let store = self.shared.store.clone();
        let progress = store.progress().clone();
        let volume = &self.shared.volume;
        volume.in_time(&progress, move || work(&store)).await
    }

    /// git for a private repository, which also sees `objects`. It reads no configuration but that of this repository.
    fn git(&self, git_dir: &Path, objects: Option<&Path>, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            // Nothing of it may outlive the run.
            .args(["-c", "gc.auto=0", "-c", "maintenance.auto=false"])
            .args(args)
            .env_clear()
            .env("PATH", &self.path)
            .env("HOME", self.folder.path())
            .env("LC_ALL", "C")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_DIR", git_dir)
            .current_dir(self.folder.path());
        if let Some(objects) = objects {
            command.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", objects);
        }
        command
    }
}

/// What git prints.
async fn succeed(command: Command) -> io::Result<String> {
    let finished = timeout(PATIENCE, process::run(command)).await??;
    if finished.success {
        Ok(finished.stdout)
    } else {
        Err(io::Error::other(finished.stderr.trim().to_owned()))
    }
}

/// The commit that a new clone has checked out.
fn head(git_dir: &Path) -> io::Result<String> {
    let read = |name: &str| {
        let file = runtime::regular_file::open_unlinked(&git_dir.join(name))?;
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, 1024), &mut text)?;
        Ok::<_, io::Error>(text.trim().to_owned())
    };
    let head = read("HEAD")?;
    let commit = match head.strip_prefix("ref: ") {
        Some(reference) if !reference.contains("..") => read(reference)?,
        _ => head,
    };
    if commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        Ok(commit)
    } else {
        Err(io::Error::other("no commit is checked out"))
    }
}
