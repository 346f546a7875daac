//! The definitions of the Prometheus operator's kinds, of which the chart renders some: files of its Go module, linked below the
//! target directory, where `test-chart` looks for them.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::servers::peers;
use super::{opentofu::relink, program::modules};

const MODULES: &str = "tests/chart/operator";
const MODULE: &str = "github.com/prometheus-operator/prometheus-operator";
/// A folder of the module.
const DEFINITIONS: &str = "example/prometheus-operator-crd";

/// Downloads the definitions and links them.
pub(crate) fn ensure() -> Result<()> {
    ensure!(
        which::which("go").is_ok(),
        "the tests need the definitions of the Prometheus operator's kinds: put `go` on PATH to download them"
    );
    let output = modules(MODULES)
        .args(["mod", "download", "-json", MODULE])
        .output()
        .context("could not start go")?;
    let module: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let folder = module["Dir"]
        .as_str()
        .with_context(|| format!("{MODULE} was not downloaded: {}", module["Error"]))?;
    let link = peers().join("prometheus-operator");
    relink(&Path::new(folder).join(DEFINITIONS), &link)
        .with_context(|| format!("could not link `{}`", link.display()))
}
