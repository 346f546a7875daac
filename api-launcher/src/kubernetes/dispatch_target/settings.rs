//! The settings of target `kubernetes`.

use std::path::{Path, PathBuf};

use cluster::settings::{ClusterSettings, KubernetesArgs};
use data_dir::DataDirArgs;
use manifest::Deployment;
use reporter::settings::{PlatformArgs, PlatformSettings};
use runtime::setting::SettingError;

#[derive(Debug)]
pub(crate) struct KubernetesSettings {
    pub(crate) deployment: Deployment,
    pub(crate) cluster: ClusterSettings,
    pub(crate) platform: Option<PlatformSettings>,
    /// The records of a local platform, which replace `platform`.
    pub(crate) data_dir: Option<PathBuf>,
}

impl KubernetesSettings {
    /// Returns the settings of the target, or `None` if one of them is invalid.
    pub(crate) fn resolve(
        args: &KubernetesArgs,
        errors: &mut Vec<SettingError>,
        data: &DataDirArgs,
        platform: &PlatformArgs,
    ) -> Option<Self> {
        let mut cluster = args.resolve_cluster(errors);
        let api_url = platform.terrakube.api_url();
        let platform = platform.resolve(errors, data.given());
        let deployment = args
            .deployment
            .resolve(api_url)
            .map_err(|wrong| errors.extend(wrong))
            .ok()?;
        cluster.fill_for(&deployment, errors)?;
        Some(Self {
            deployment,
            cluster,
            platform,
            data_dir: data.given().map(Path::to_owned),
        })
    }
}
