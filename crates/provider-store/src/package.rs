//! The coordinates of a package: which provider, in which version, for which platform.

use std::path::PathBuf;

use job_contract::provider_cache::is_package;

/// A provider in one version for one platform.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    pub host: String,
    pub namespace: String,
    pub name: String,
    pub version: String,
    /// `linux_amd64`, say.
    pub platform: String,
}

impl Package {
    /// Returns the package of an address, such as `registry.terraform.io/hashicorp/aws`. `None` if no registry can have it.
    pub fn new(address: &str, version: &str, platform: &str) -> Option<Self> {
        let mut parts = address.split('/');
        let address = (parts.next()?, parts.next()?, parts.next()?, parts.next());
        let (host, namespace, name, None) = address else {
            return None;
        };
        is_package(host, namespace, name, version, platform).then(|| Self {
            host: host.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            version: version.to_owned(),
            platform: platform.to_owned(),
        })
    }

    /// The address of the provider.
    pub fn address(&self) -> String {
        format!("{}/{}/{}", self.host, self.namespace, self.name)
    }

    /// The folder of the package in the layout of a mirror in a file system.
    pub fn folder(&self) -> PathBuf {
        let parts = [
            &self.host,
            &self.namespace,
            &self.name,
            &self.version,
            &self.platform,
        ];
        parts.iter().collect()
    }
}

impl std::fmt::Display for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} ({})", self.address(), self.version, self.platform)
    }
}
