//! OpenTofu and the providers that journeys use with it and with Terraform: from the user's cache, else downloaded into it, else
//! built there from Go modules. They are linked below the target directory, where `test-peers` looks for them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use sha2::Sha256;

use super::program::{GoBuild, Source, architecture, cache, check, fetch, version_in};
use super::servers::peers;
use crate::terminal::run_stage;

/// Where OpenTofu's releases are published, with their digests.
const RELEASES: &str = "https://github.com/opentofu/opentofu/releases/download";
/// What OpenTofu and the providers are built from, to the last module.
const OPENTOFU: &str = include_str!("../../../tests/tools/opentofu/go.mod");
const PROVIDERS: &str = include_str!("../../../tests/tools/providers/go.mod");
const OPENTOFU_MODULE: &str = "github.com/opentofu/opentofu";
/// Those that work without a network.
const PROVIDER_MODULES: [&str; 5] = [
    "github.com/hashicorp/terraform-provider-time",
    "github.com/hashicorp/terraform-provider-tls",
    "github.com/terraform-providers/terraform-provider-local",
    "github.com/terraform-providers/terraform-provider-null",
    "github.com/terraform-providers/terraform-provider-random",
];

/// Makes sure of all of them.
pub(crate) fn ensure() -> Result<()> {
    let mut programs = vec![opentofu()?];
    for module in PROVIDER_MODULES {
        programs.push(provider(module)?);
    }
    let folder = peers().join("tools");
    fs::create_dir_all(&folder)
        .with_context(|| format!("could not make `{}`", folder.display()))?;
    for program in programs {
        let link = folder.join(program.file_name().context("a program has a name")?);
        relink(&program, &link).with_context(|| format!("could not link `{}`", link.display()))?;
    }
    Ok(())
}

/// Links a path anew.
pub(super) fn relink(program: &Path, link: &Path) -> Result<()> {
    if link.is_symlink() {
        fs::remove_file(link)?;
    }
    Ok(symlink(program, link)?)
}

fn opentofu() -> Result<PathBuf> {
    let version = version_in(OPENTOFU, OPENTOFU_MODULE);
    Source {
        name: "tofu",
        download: Some(&|program: &Path| download(RELEASES, version, program)),
        build: build_opentofu(),
        elsewhere: "",
    }
    .ensure(&cache(&format!("tofu-{version}"))?)
}

fn build_opentofu() -> GoBuild<'static> {
    GoBuild {
        modules: "tests/tools/opentofu",
        package: format!("{OPENTOFU_MODULE}/cmd/tofu"),
        // It calls itself a development version otherwise.
        stamps: vec![(format!("{OPENTOFU_MODULE}/version.dev"), "no".to_owned())],
    }
}

/// Nothing publishes all of them in these versions.
fn provider(module: &str) -> Result<PathBuf> {
    let (_, name) = module.rsplit_once('/').context("a module has a path")?;
    Source {
        name,
        download: None,
        build: GoBuild {
            modules: "tests/tools/providers",
            package: module.to_owned(),
            stamps: Vec::new(),
        },
        elsewhere: "",
    }
    .ensure(&cache(&format!(
        "{name}-{}",
        version_in(PROVIDERS, module)
    ))?)
}

fn download(releases: &str, version: &str, program: &Path) -> Result<()> {
    let folder = program.parent().context("it is in a folder")?;
    let archive = format!("tofu_{version}_linux_{}.tar.gz", architecture()?);
    let sums = format!("tofu_{version}_SHA256SUMS");
    let (file, published) = (folder.join(&archive), folder.join(&sums));
    fetch(&format!("{releases}/v{version}/{sums}"), &published)?;
    fetch(&format!("{releases}/v{version}/{archive}"), &file)?;
    let published = fs::read_to_string(published)?;
    let mut lines = published.lines();
    let line = lines.find(|line| line.ends_with(&archive));
    check::<Sha256>(&file, line.unwrap_or_default())?;
    run_stage(
        "unpacking",
        Command::new("tar")
            .args(["-xzf"])
            .arg(&file)
            .arg("-C")
            .arg(folder)
            .arg("tofu"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::command_line;

    #[test]
    fn opentofu_is_built_as_a_release() {
        let line = command_line(&build_opentofu().command(Path::new("/new")));
        assert!(line.contains("opentofu/version.dev=no"), "{line}");
        assert!(line.ends_with("-o /new github.com/opentofu/opentofu/cmd/tofu"));
    }

    #[test]
    fn a_release_is_taken_from_its_archive_only_with_its_digest() {
        let releases = tempfile::tempdir().unwrap();
        let archive = format!("tofu_1.0.0_linux_{}.tar.gz", architecture().unwrap());
        let release = releases.path().join("v1.0.0");
        fs::create_dir(&release).unwrap();
        let script = format!(
            "echo program > tofu; tar -czf {archive} tofu; sha256sum {archive} > tofu_1.0.0_SHA256SUMS"
        );
        let bash = |script: &str| {
            let mut command = Command::new("bash");
            let status = command.args(["-ec", script]).current_dir(&release).status();
            assert!(status.unwrap().success());
        };
        bash(&script);
        let address = format!("file://{}", releases.path().display());
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tofu");
        download(&address, "1.0.0", &program).unwrap();
        assert_eq!(fs::read_to_string(&program).unwrap(), "program\n");
        bash(&format!("echo more >> {archive}"));
        let error = download(&address, "1.0.0", &program).unwrap_err();
        assert!(error.to_string().contains("was published"), "{error}");
    }
}
