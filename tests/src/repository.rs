//! Git repositories made for one test: Terraform configurations that need no provider download.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::machine::give_away;

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
        repository.git(&["init", "--quiet", "--initial-branch=main"]);
        repository.commit(files);
        repository.git(&["tag", "v1.2.0"]);
        repository
    }

    /// Adds or replaces files and commits them.
    pub fn commit(&self, files: &[(&str, &str)]) -> String {
        for (name, text) in files {
            let path = self.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--allow-empty", "--message=fixture"]);
        self.head()
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

    /// Hands the repository to another user, whom git would otherwise not let read it.
    pub fn give_to(&self, user: u32) {
        give_away(self.path(), user);
    }

    fn git(&self, args: &[&str]) -> String {
        let output = Command::new("git")
            .current_dir(self.path())
            .args([
                "-c",
                "user.name=Fixture",
                "-c",
                "user.email=fixture@example.test",
            ])
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
}
