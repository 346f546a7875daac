//! A container of an image, run by runc with what Kubernetes gives a pod that keeps to the `restricted` standard: the
//! image's user and entry point, a read-only root, no capability, no way to gain one. The network is the test's.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{Finished, Running};

/// A container about to be started.
#[derive(Debug)]
pub struct Container {
    bundle: TempDir,
    root: PathBuf,
    user: (u32, u32),
    words: Vec<String>,
    environment: Vec<String>,
    working_dir: String,
    mounts: Vec<Value>,
}

impl Container {
    /// Of a file system and what its image says of it.
    pub fn of(root: &Path, image: &Value) -> Self {
        let list = |name: &str| -> Vec<String> {
            let words = image[name].as_array().into_iter().flatten();
            words
                .map(|word| word.as_str().unwrap().to_owned())
                .collect()
        };
        let user = image["User"].as_str().unwrap();
        let (user, group) = user.split_once(':').expect("user and group, as numbers");
        Self {
            bundle: tempfile::tempdir().unwrap(),
            root: root.to_owned(),
            user: (user.parse().unwrap(), group.parse().unwrap()),
            words: [list("Entrypoint"), list("Cmd")].concat(),
            environment: list("Env"),
            working_dir: image["WorkingDir"].as_str().unwrap().to_owned(),
            mounts: system_mounts(),
        }
    }

    /// Runs these words in place of the entry point.
    #[must_use]
    pub fn instead(mut self, words: &[&str]) -> Self {
        self.words = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Sets a variable. The last value counts.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        let prefix = format!("{name}=");
        self.environment.retain(|known| !known.starts_with(&prefix));
        self.environment.push(prefix + value);
        self
    }

    /// Shows a file or folder of this machine in the container.
    #[must_use]
    pub fn bind(mut self, from: &Path, to: &str, options: &[&str]) -> Self {
        let options = [&["rbind"], options].concat();
        self.mounts.push(json!(
            {"destination": to, "type": "bind", "source": from, "options": options}
        ));
        self
    }

    /// An empty volume, which the kubelet gives to the pod's group.
    #[must_use]
    pub fn empty_dir(self, to: &str) -> Self {
        let folder = self.bundle.path().join(to.replace('/', "-"));
        fs::create_dir(&folder).unwrap();
        chown(&folder, None, Some(self.user.1)).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o2777)).unwrap();
        self.bind(&folder, to, &["rw"])
    }

    pub fn start(self) -> RunningContainer {
        let namespaces = ["pid", "ipc", "uts", "mount"].map(|kind| json!({"type": kind}));
        let specification = json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": self.user.0, "gid": self.user.1},
                "args": self.words,
                "env": self.environment,
                "cwd": self.working_dir,
                "capabilities": {},
                "noNewPrivileges": true,
            },
            "root": {"path": self.root, "readonly": true},
            "mounts": self.mounts,
            "linux": {
                "namespaces": namespaces,
                "maskedPaths": ["/proc/kcore", "/proc/keys"],
                "readonlyPaths": ["/proc/sys"],
            },
        });
        let path = self.bundle.path().join("config.json");
        fs::write(path, specification.to_string()).unwrap();
        let name = self.bundle.path().file_name().unwrap().to_string_lossy();
        // Dots at its beginning are not for names.
        let name = name.trim_start_matches('.').to_owned();
        let mut command = runc(&self.bundle);
        command
            .arg("run")
            .arg("--bundle")
            .arg(self.bundle.path())
            .arg(&name);
        RunningContainer {
            running: Some(Running::start(&mut command)),
            bundle: self.bundle,
            name,
        }
    }

    /// Runs it to its end.
    pub fn run(self) -> Finished {
        self.start().wait()
    }
}

/// A container at work, which ends with this value. Signals reach its first process.
#[derive(Debug)]
pub struct RunningContainer {
    running: Option<Running>,
    bundle: TempDir,
    name: String,
}

impl RunningContainer {
    pub fn running(&self) -> &Running {
        self.running.as_ref().expect("not waited for yet")
    }

    pub fn wait(mut self) -> Finished {
        self.running.take().expect("not waited for yet").wait()
    }
}

impl Drop for RunningContainer {
    fn drop(&mut self) {
        let mut command = runc(&self.bundle);
        // It is gone already when it was waited for.
        drop(command.args(["delete", "--force", &self.name]).output());
    }
}

fn runc(bundle: &TempDir) -> Command {
    let mut command = Command::new("runc");
    command.arg("--root").arg(bundle.path().join("state"));
    command
}

fn system_mounts() -> Vec<Value> {
    let mount = |to: &str, kind: &str, options: &[&str]| json!({"destination": to, "type": kind, "source": kind, "options": options});
    vec![
        mount("/proc", "proc", &[]),
        mount("/dev", "tmpfs", &["nosuid", "mode=755", "size=65536k"]),
        mount(
            "/dev/shm",
            "tmpfs",
            &["nosuid", "noexec", "nodev", "mode=1777"],
        ),
        json!({"destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"]}),
    ]
}
