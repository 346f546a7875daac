//! Git repositories made for one test: Terraform configurations that need no provider download.

#![expect(clippy::unwrap_used, reason = "a harness fails a test by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// Root module of [`Repository::fixture`]: three variables, one resource, two outputs.
pub const ROOT_MODULE: &str = r#"
variable "greeting" {
  type    = string
  default = "hello"
}

variable "replicas" {
  type    = number
  default = 1
}

variable "tags" {
  type    = map(string)
  default = {}
}

resource "terraform_data" "greeting" {
  count = var.replicas
  input = "${var.greeting} ${count.index}"
}

output "greeting" {
  value = var.greeting
}

output "tags" {
  value = var.tags
}
"#;

/// A module of three resources in a row, the second of which has this provisioner.
pub fn chain(provisioner: &str) -> String {
    format!(
        r#"
resource "terraform_data" "first" {{
  input = "made"
}}
resource "terraform_data" "second" {{
  depends_on = [terraform_data.first]
  provisioner "local-exec" {{
    {provisioner}
  }}
}}
resource "terraform_data" "third" {{
  depends_on = [terraform_data.second]
}}
"#
    )
}

/// A repository on this machine, with the branch `main` and the tag `v1.2.0` on its first commit.
#[derive(Debug)]
pub struct Repository {
    folder: TempDir,
}

impl Repository {
    /// The contract's fixture: a root module and the same module in `/stacks/app`.
    pub fn fixture() -> Self {
        Self::with(&[
            ("main.tf", ROOT_MODULE),
            ("stacks/app/main.tf", ROOT_MODULE),
        ])
    }

    /// A repository whose root module is this one file.
    pub fn module(text: &str) -> Self {
        Self::with(&[("main.tf", text)])
    }

    /// A repository of these files.
    pub fn with(files: &[(&str, &str)]) -> Self {
        let repository = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        repository.write(files);
        init(repository.path());
        repository.git(&["tag", "v1.2.0"]);
        repository
    }

    /// Adds or replaces files and commits them.
    pub fn commit(&self, files: &[(&str, &str)]) -> String {
        self.write(files);
        commit_all(self.path())
    }

    fn write(&self, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = self.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    /// Id of the newest commit on `main`.
    pub fn head(&self) -> String {
        self.git(&["rev-parse", "HEAD"])
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The repository as a `source`.
    pub fn url(&self) -> String {
        format!("file://{}", self.path().display())
    }

    fn git(&self, args: &[&str]) -> String {
        git(self.path(), args)
    }
}

/// Makes a repository of all files in a folder.
pub fn init(folder: &Path) {
    git(folder, &["init", "--quiet", "--initial-branch=main"]);
    commit_all(folder);
}

/// Commits all files in the folder of a repository, and returns the id.
pub fn commit_all(folder: &Path) -> String {
    git(folder, &["add", "--all"]);
    git(
        folder,
        &["commit", "--quiet", "--allow-empty", "--message=fixture"],
    );
    git(folder, &["rev-parse", "HEAD"])
}

/// Runs git in a folder, without the settings of this machine, and returns what it prints.
pub fn git(folder: &Path, args: &[&str]) -> String {
    let output = Command::new("git")
        .current_dir(folder)
        .args([
            "-c",
            "user.name=Fixture",
            "-c",
            "user.email=fixture@example.test",
        ])
        .args(["-c", "protocol.file.allow=always"])
        .args(args)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "git {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
