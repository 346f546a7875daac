//! A `terraform` that does what a real one cannot be made to do: odd exit codes, deafness to signals, floods of
//! output. A shell script, so that each test states the behaviour it needs in a line.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use tempfile::TempDir;

/// Version a fake tool claims to be.
pub const VERSION: &str = "1.9.8";

/// `init` as the real tool does it: it notes the backend of the override file.
const INIT: &str = r#"
folder=${TF_DATA_DIR:-.terraform}
mkdir -p "$folder"
kind='^  backend "([a-z0-9]+)" [{]$'
setting='^    ([a-z_]+) = (".*"|true|[{] s3 = ".*" [}])$'
settings=
for file in *_override.tf; do
while IFS= read -r line; do
if [[ $line =~ $kind ]]; then backend=${BASH_REMATCH[1]}
elif [[ $line =~ $setting ]]; then
name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
settings+="${settings:+,}\"$name\":${value/s3 =/\"s3\":}"
fi
done < "$file"
done
echo "{\"version\":3,\"backend\":{\"type\":\"$backend\",\"config\":{$settings}}}" > "$folder/terraform.tfstate"
"#;

/// A folder to be put first on `PATH`.
#[derive(Debug)]
pub struct FakeTool {
    folder: TempDir,
    cases: String,
}

impl FakeTool {
    /// A tool whose subcommands all succeed: plans have no changes, the state is empty.
    pub fn new() -> Self {
        let tool = Self {
            folder: tempfile::tempdir().unwrap(),
            cases: String::new(),
        };
        tool.write();
        tool
    }

    /// What a subcommand does, in bash. `$out` is the plan file `plan` is asked for, `$tool` the tool's own folder.
    #[must_use]
    pub fn on(mut self, subcommand: &str, script: &str) -> Self {
        writeln!(self.cases, "{subcommand})\n{script}\n;;").unwrap();
        self.write();
        self
    }

    fn write(&self) {
        let path = self.folder.path().join("terraform");
        let text = format!(
            r#"#!/usr/bin/env bash
tool={folder}
echo "$*" >> "$tool/calls"
out=
for argument in "$@"; do case "$argument" in -out=*) out=${{argument#-out=}} ;; esac; done
case "$1" in
version) echo '{{"terraform_version":"{VERSION}","platform":"linux_amd64","provider_selections":{{}}}}' ;;
{cases}
init) {INIT} ;;
plan) echo plan > "$out" ;;
show) [[ " $* " == *" -json "* ]] && echo '{{"format_version":"1.2","terraform_version":"{VERSION}"}}' ;;
output) echo '{{}}' ;;
state) echo '{{"version":4,"terraform_version":"{VERSION}","serial":1,"lineage":"x","outputs":{{}},"resources":[]}}' ;;
esac
"#,
            folder = self.folder.path().display(),
            cases = self.cases,
        );
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Path of a file in the tool's own folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The argument lines the tool was called with, in order.
    pub fn calls(&self) -> Vec<String> {
        fs::read_to_string(self.file("calls"))
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// Whether a subcommand was called.
    pub fn was_called(&self, subcommand: &str) -> bool {
        self.calls()
            .iter()
            .any(|call| call.split(' ').next() == Some(subcommand))
    }

    /// `PATH` with this tool in front.
    pub fn path(&self) -> OsString {
        let mut path = self.folder.path().as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        path
    }
}

impl Default for FakeTool {
    fn default() -> Self {
        Self::new()
    }
}
