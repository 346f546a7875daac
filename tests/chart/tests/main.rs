//! The chart, held against Helm, its schema, a security scan and what it says of itself.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

// Named for the stage `cargo xtask ci chart`, which runs all tests with `chart::` in their names.
mod chart {
    mod agreement;
    mod alerts;
    mod helm;
    mod kustomize;
    mod schema;
    mod security;
}

use test_chart::{Document, Release, values_files};

/// What optional kinds a cluster may have.
const OPTIONAL: [&str; 3] = [
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
];

/// The chart with each of its values, in a cluster that has all optional kinds.
fn releases() -> Vec<(String, Release)> {
    let release = |(name, file): (String, std::path::PathBuf)| {
        let mut release = Release::new().with(&file);
        release.api_versions = OPTIONAL.map(str::to_owned).to_vec();
        (name, release)
    };
    values_files().into_iter().map(release).collect()
}

/// All documents of all of them.
fn documents() -> Vec<(String, Vec<Document>)> {
    let rendered = |(name, release): (String, Release)| (name, release.documents());
    releases().into_iter().map(rendered).collect()
}
