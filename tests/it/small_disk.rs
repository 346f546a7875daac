//! A small disk for processes of a test. Only root can make one.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration_tests::Running;
use integration_tests::process::Stream;
use test_peers::skips::needed;

/// A small disk, which is there as long as this process.
pub(crate) struct SmallDisk(Running);

impl SmallDisk {
    /// Mounts a disk of this size on a folder, with what is in the folder; `None` if that is not possible here.
    #[track_caller]
    pub(crate) fn mount(folder: &OsStr, bytes: usize) -> Option<Self> {
        needed(may_mount())?;
        let script = format!(
            "copy=$(mktemp -d) && cp -a \"$0/.\" \"$copy\" && mount -t tmpfs -o size={bytes} tmpfs \"$0\" && \
             cp -a \"$copy/.\" \"$0\" && rm -r \"$copy\" && echo mounted && exec cat"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).arg(folder);
        let disk = Self(Running::start_interactive(&mut command));
        disk.0.wait_for(Stream::Stdout, "mounted");
        Some(disk)
    }

    /// The words that start a program for which the disk is mounted.
    pub(crate) fn words(&self) -> [String; 3] {
        let space = format!("--mount=/proc/{}/ns/mnt", self.0.pid());
        ["nsenter".to_owned(), space, "--".to_owned()]
    }

    /// Returns a command with its arguments, for which the disk is mounted.
    pub(crate) fn with(&self, command: &Command) -> Command {
        let [program, words @ ..] = self.words();
        let mut on_disk = Command::new(program);
        on_disk
            .args(words)
            .arg(command.get_program())
            .args(command.get_args());
        on_disk
    }

    /// Returns the same with the variables that the command sets, and no others.
    pub(crate) fn with_variables_of(&self, command: &Command) -> Command {
        let variables = command.get_envs();
        let mut on_disk = self.with(command);
        on_disk
            .env_clear()
            .envs(variables.filter_map(|(name, value)| Some((name, value?))));
        on_disk
    }

    /// The path on the disk, for this process.
    pub(crate) fn path(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.0.pid()));
        root.join(path.strip_prefix("/").unwrap())
    }

    /// Fills the disk with a file.
    pub(crate) fn fill(&self, file: &Path) {
        let mut file = File::create(self.path(file)).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    pub(crate) fn grow(&self, folder: &OsStr, bytes: usize) {
        let size = format!("remount,size={bytes}");
        let mut remount = Command::new("mount");
        remount.args(["-o", &size]).arg(folder);
        assert!(self.with(&remount).status().unwrap().success());
    }
}

fn may_mount() -> Result<(), String> {
    let output = Command::new("unshare")
        .args(["--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
