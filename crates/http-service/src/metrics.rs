//! The metrics of a process in the Prometheus text format. Their names start with `mayfly_`.

use std::sync::{Arc, Mutex};

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::{Metric, Registry};

/// Media type of [`MetricsRegistry::render`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of all parts of a process. Clones share them.
#[derive(Clone, Debug)]
pub struct MetricsRegistry(Arc<Mutex<Registry>>);

impl Default for MetricsRegistry {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Registry::with_prefix("mayfly"))))
    }
}

impl MetricsRegistry {
    /// Adds the metrics of a part.
    pub fn extend(&self, register: impl FnOnce(&mut Registry)) {
        register(&mut runtime::lock(&self.0));
    }

    /// Adds one metric, and returns it.
    pub fn add<M: Metric + Clone>(&self, name: &str, help: &str, metric: M) -> M {
        self.extend(|registry| registry.register(name, help, metric.clone()));
        metric
    }

    /// Returns all metrics as text.
    pub fn render(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &runtime::lock(&self.0)).expect("writing to a string does not fail");
        text
    }
}
