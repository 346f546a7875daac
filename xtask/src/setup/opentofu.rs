//! Provides OpenTofu, the providers that journeys use, and OPA for the example of a hook, from the user's cache. The cache is filled by a download, or else by a
//! build from Go modules. Links below the target directory lead `test-peers` to them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::program::{GoBuild, ReleaseArchive, Source, architecture, cache, version_in};
use super::servers::peers;

/// The address of OpenTofu's releases and their digests.
const RELEASES: &str = "https://github.com/opentofu/opentofu/releases/download";
/// All modules of a build of OpenTofu and of the providers.
const OPENTOFU: &str = include_str!("../../../tests/tools/opentofu/go.mod");
const PROVIDERS: &str = include_str!("../../../tests/tools/providers/go.mod");
const OPA: &str = include_str!("../../../tests/tools/opa/go.mod");
const OPA_MODULE: &str = "github.com/open-policy-agent/opa";
const OPENTOFU_MODULE: &str = "github.com/opentofu/opentofu";
/// The modules of providers that work without a network.
const PROVIDER_MODULES: [&str; 5] = [
    "github.com/hashicorp/terraform-provider-time",
    "github.com/hashicorp/terraform-provider-tls",
    "github.com/terraform-providers/terraform-provider-local",
    "github.com/terraform-providers/terraform-provider-null",
    "github.com/terraform-providers/terraform-provider-random",
];

/// Provides all of them.
pub(crate) fn ensure() -> Result<()> {
    let mut programs = vec![opentofu()?, built(OPA, "tests/tools/opa", OPA_MODULE)?];
    for module in PROVIDER_MODULES {
        programs.push(built(PROVIDERS, "tests/tools/providers", module)?);
    }
    let folder = peers().join("tools");
    fs::create_dir_all(&folder)
        .with_context(|| format!("could not create `{}`", folder.display()))?;
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
        download: Some(&|program: &Path| download(version, program)),
        build: build_opentofu(),
        elsewhere: "",
    }
    .ensure(&cache(&format!("tofu-{version}"))?)
}

fn build_opentofu() -> GoBuild<'static> {
    GoBuild {
        modules: "tests/tools/opentofu",
        package: format!("{OPENTOFU_MODULE}/cmd/tofu"),
        // Otherwise the program reports a development version.
        stamps: vec![(format!("{OPENTOFU_MODULE}/version.dev"), "no".to_owned())],
    }
}

/// Builds a module. No registry has all of these providers in these versions.
fn built(modules: &'static str, folder: &'static str, module: &str) -> Result<PathBuf> {
    let (_, name) = module.rsplit_once('/').context("a module has a path")?;
    Source {
        name,
        download: None,
        build: GoBuild {
            modules: folder,
            package: module.to_owned(),
            stamps: Vec::new(),
        },
        elsewhere: "",
    }
    .ensure(&cache(&format!("{name}-{}", version_in(modules, module)))?)
}

fn download(version: &str, program: &Path) -> Result<()> {
    ReleaseArchive {
        address: &format!("{RELEASES}/v{version}"),
        archive: &format!("tofu_{version}_linux_{}.tar.gz", architecture()?),
        digests: &format!("tofu_{version}_SHA256SUMS"),
        member: "tofu",
    }
    .download(program)
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
}
