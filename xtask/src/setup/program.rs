//! Provides a program of another project from the user's cache. The cache is filled by a download, or else by a build from Go
//! modules. Knows no single program.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::terminal::{complain, run_stage, say};
use crate::workspace_root;

/// The options of curl: the timeout of a connection, and the slowest accepted download.
const CURL: [&str; 11] = [
    "--fail",
    "--silent",
    "--show-error",
    "--location",
    "--connect-timeout",
    "10",
    "--speed-limit",
    "10000",
    "--speed-time",
    "30",
    "--output",
];

/// Writes a program to a path.
type Make<'s> = dyn Fn(&Path) -> Result<()> + 's;

/// How to get a program that is not in the cache.
pub(super) struct Source<'s> {
    pub(super) name: &'s str,
    /// Downloads the program and checks its digest. `None` if the project publishes no program.
    pub(super) download: Option<&'s Make<'s>>,
    pub(super) build: GoBuild<'s>,
    /// What else a person can do to get the program.
    pub(super) elsewhere: &'s str,
}

/// A build of a Go program.
pub(super) struct GoBuild<'s> {
    /// The folder of a `go.mod`, below the workspace root.
    pub(super) modules: &'s str,
    pub(super) package: String,
    /// Variables of the program and their values, such as its version.
    pub(super) stamps: Vec<(String, String)>,
}

/// An archive of a release, which holds a program.
pub(super) struct ReleaseArchive<'s> {
    /// Where its files are published.
    pub(super) address: &'s str,
    pub(super) archive: &'s str,
    /// The file with the SHA-256 digests of all archives.
    pub(super) digests: &'s str,
    /// The program's name in the archive.
    pub(super) member: &'s str,
}

/// A folder of the user's cache.
pub(super) fn cache(folder: &str) -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    let caches = set("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
    let caches = caches.context("no cache folder: set `XDG_CACHE_HOME` or `HOME`")?;
    Ok(caches.join("mayfly").join(folder))
}

/// The version of a module that a `go.mod` names.
pub(super) fn version_in(modules: &'static str, module: &str) -> &'static str {
    let lines = modules.lines().map(str::trim);
    let lines = lines.map(|line| line.strip_prefix("require ").unwrap_or(line));
    let mut versions = lines.filter_map(|line| line.strip_prefix(module)?.strip_prefix(" v"));
    let version = versions.next().and_then(|rest| rest.split(' ').next());
    version.expect("go.mod names the module and its version")
}

impl Source<'_> {
    /// The path of the program. It is downloaded or built if it is not in the cache. If another process does that, this one waits
    /// for it.
    pub(super) fn ensure(&self, cache: &Path) -> Result<PathBuf> {
        let kept = cache.join(self.name);
        if !kept.is_file() {
            let _turn = turn(cache)?;
            if !kept.is_file() {
                keep(&kept, |program| self.make(program))?;
            }
        }
        Ok(kept)
    }

    fn make(&self, program: &Path) -> Result<()> {
        let name = self.name;
        if let Some(download) = self.download {
            match download(program) {
                Ok(()) => return Ok(()),
                Err(error) => complain(&format!(
                    "could not download {name}, so it is built: {error:#}"
                )),
            }
        }
        ensure!(
            which::which("go").is_ok(),
            "the tests need {name}: {}put `go` on PATH to build it",
            self.elsewhere
        );
        say(&format!(
            "\n==> {name}: built once, which takes minutes and 2 GB of memory"
        ));
        run_stage(name, &mut self.build.command(program))
    }
}

/// Waits until no other process fills this cache. Others wait while the file exists here.
pub(super) fn turn(cache: &Path) -> Result<fs::File> {
    fs::create_dir_all(cache).with_context(|| format!("could not create `{}`", cache.display()))?;
    let file = fs::File::create(cache.join("lock"))?;
    file.lock()?;
    Ok(file)
}

/// Writes a program to a path. The rename to its name is the last step, so that an incomplete program is never used.
pub(super) fn keep(kept: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let cache = kept.parent().context("a program is in a folder")?;
    fs::create_dir_all(cache).with_context(|| format!("could not create `{}`", cache.display()))?;
    let new = tempfile::tempdir_in(cache)?;
    let program = new
        .path()
        .join(kept.file_name().context("a program has a name")?);
    make(&program)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    fs::rename(program, kept).with_context(|| format!("could not write `{}`", kept.display()))
}

impl ReleaseArchive<'_> {
    /// Unpacks the program from the archive, whose digest must be the published one.
    pub(super) fn download(&self, program: &Path) -> Result<()> {
        let folder = program.parent().context("a program is in a folder")?;
        let (archive, digests) = (folder.join(self.archive), folder.join(self.digests));
        fetch(&format!("{}/{}", self.address, self.digests), &digests)?;
        fetch(&format!("{}/{}", self.address, self.archive), &archive)?;
        let digests = fs::read_to_string(digests)?;
        let mut lines = digests.lines();
        let line = lines.find(|line| line.ends_with(self.archive));
        check::<Sha256>(&archive, line.unwrap_or_default())?;
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(&archive).arg("-C").arg(folder);
        run_stage("unpacking", tar.arg(self.member))?;
        Ok(fs::rename(folder.join(self.member), program)?)
    }
}

impl GoBuild<'_> {
    pub(super) fn command(&self, program: &Path) -> Command {
        let stamps = self.stamps.iter();
        let stamps = stamps.map(|(name, value)| format!("-X {name}={value}"));
        let flags: Vec<_> = ["-s -w".to_owned()].into_iter().chain(stamps).collect();
        let mut command = modules(self.modules);
        command
            .args([
                "build",
                "-mod=readonly",
                "-trimpath",
                "-ldflags",
                &flags.join(" "),
                "-o",
            ])
            .arg(program)
            .arg(&self.package)
            .env("CGO_ENABLED", "0");
        command
    }
}

/// `go`, in the folder of a `go.mod` below the workspace root.
pub(super) fn modules(folder: &str) -> Command {
    let mut command = Command::new("go");
    command
        .current_dir(workspace_root().join(folder))
        .env("GOWORK", "off");
    command
}

/// The architecture in the names of releases for Linux.
pub(super) fn architecture() -> Result<&'static str> {
    ensure!(
        cfg!(target_os = "linux"),
        "there are releases only for Linux"
    );
    match env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("there is no release for {other}"),
    }
}

pub(super) fn fetch(address: &str, file: &Path) -> Result<()> {
    run_stage(
        "download",
        Command::new("curl").args(CURL).arg(file).arg(address),
    )
}

/// Fails if the digest of a file is not the published one.
pub(super) fn check<D: Digest>(file: &Path, published: &str) -> Result<()> {
    let mut digest = String::new();
    for byte in D::digest(fs::read(file)?) {
        write!(digest, "{byte:02x}")?;
    }
    let published = published.split_whitespace().next().unwrap_or_default();
    ensure!(
        digest == published,
        "the digest of `{}` is {digest}, but the published one is {published:?}",
        file.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use sha2::Sha512;

    use super::*;

    #[test]
    fn what_is_not_what_was_published_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program");
        let digest = "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f";
        fs::write(&file, b"abc").unwrap();
        check::<Sha512>(&file, &format!("{digest}\n")).unwrap();
        assert!(check::<Sha512>(&file, "<html>").is_err());
        fs::write(&file, b"abd").unwrap();
        let error = check::<Sha512>(&file, digest).unwrap_err().to_string();
        assert!(error.contains(digest), "{error}");
    }

    #[test]
    fn a_release_is_unpacked_only_with_its_published_digest() {
        let published = tempfile::tempdir().unwrap();
        let bash = |script: &str| {
            let mut command = Command::new("bash");
            command.args(["-ec", script]).current_dir(&published);
            assert!(command.status().unwrap().success());
        };
        bash(
            "echo program > member; tar -czf archive.tgz member; mkdir _dist; cp archive.tgz _dist",
        );
        // Projects publish digests of text files and of binary ones in a folder.
        for digests in ["sha256sum archive.tgz", "sha256sum -b _dist/*"] {
            bash(&format!("{digests} > digests"));
            let folder = tempfile::tempdir().unwrap();
            let program = folder.path().join("program");
            let release = ReleaseArchive {
                address: &format!("file://{}", published.path().display()),
                archive: "archive.tgz",
                digests: "digests",
                member: "member",
            };
            release.download(&program).unwrap();
            assert_eq!(fs::read_to_string(&program).unwrap(), "program\n");
            bash("echo '0  archive.tgz' > digests");
            let error = release.download(&program).unwrap_err();
            assert!(
                error.to_string().contains("the published one is"),
                "{error}"
            );
        }
    }

    #[test]
    fn one_process_at_a_time_fills_a_cache() {
        let folder = tempfile::tempdir().unwrap();
        let first = turn(folder.path()).unwrap();
        let second = fs::File::open(folder.path().join("lock")).unwrap();
        assert!(second.try_lock().is_err());
        drop(first);
        // A child that another test starts at this moment holds what is open here until it runs its program.
        second.lock().unwrap();
    }

    #[test]
    fn half_a_program_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("cache/program");
        let half = |program: &Path| {
            fs::write(program, "half")?;
            bail!("no more of it")
        };
        assert!(keep(&kept, half).is_err());
        assert!(!kept.exists());
        keep(&kept, |program| Ok(fs::write(program, "whole")?)).unwrap();
        assert_eq!(fs::read_to_string(&kept).unwrap(), "whole");
    }

    #[test]
    fn a_version_is_that_of_the_module_and_not_of_one_with_a_longer_name() {
        let modules =
            "require example.org/tool/v2 v2.0.1\nrequire (\n\texample.org/tool v1.2.3 // why\n)\n";
        assert_eq!(version_in(modules, "example.org/tool"), "1.2.3");
        assert_eq!(version_in(modules, "example.org/tool/v2"), "2.0.1");
    }
}
