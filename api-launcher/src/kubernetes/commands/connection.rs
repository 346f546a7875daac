//! The cluster and the namespace of a command.

use std::path::PathBuf;

use clap::Args;
use cluster::{Access, Cluster};
use job_contract::env;
use manifest::check;
use manifest::deployment::DEFAULT_NAMESPACE;
use platform::report_key;
use runtime::handover;
use runtime::setting::{SettingError, present};

use crate::failure::Failure;

/// How the cluster is reached.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Cluster")]
pub struct AccessArgs {
    /// Context of the kubeconfig
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// Kubeconfig to use instead of KUBECONFIG and ~/.kube/config
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

impl AccessArgs {
    pub(super) async fn connect(&self, namespace: &str) -> Result<Cluster, Failure> {
        let access = Access {
            namespace: Some(namespace.to_owned()),
            context: self.context.clone(),
            kubeconfig: self.kubeconfig.clone(),
        };
        let key = report_key::from_lookup(handover::var);
        let key = key.map_err(|error| vec![error])?;
        Ok(Cluster::connect_with(access).await?.with_report_key(key))
    }
}

/// The cluster and the namespace of the runs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Namespace of the runs
    #[arg(short, long, env = env::NAMESPACE, value_name = "NAME", default_value = DEFAULT_NAMESPACE)]
    pub namespace: String,
    #[command(flatten)]
    pub access: AccessArgs,
}

impl ClusterArgs {
    pub(super) async fn connect(&self) -> Result<Cluster, Failure> {
        self.access.connect(self.namespace()?).await
    }

    /// A blank variable is not set, as for `launch`.
    fn namespace(&self) -> Result<&str, Failure> {
        let namespace = present(Some(&self.namespace)).unwrap_or(DEFAULT_NAMESPACE);
        check::dns_label(namespace)
            .map_err(|rule| vec![SettingError::new(env::NAMESPACE, rule)])?;
        Ok(namespace)
    }
}
