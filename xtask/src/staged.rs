//! Selects the tests of the stages of `cargo xtask ci`: a stage runs the tests that have its word in their names. A test with
//! several words belongs to the first stage, so that each test runs once.

use anyhow::Result;

use crate::cluster::{self, ControlPlane};
use crate::node;
use crate::setup::kubernetes::Release;
use crate::setup::operator;
use crate::skips::unless_skipped;
use crate::suite::{self, Selection, run_tests};
use crate::times::{self, Part};

/// A stage. Its word is a part of the names of its tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Staged {
    Images,
    Node,
    Cluster,
    Chart,
    Tools,
    Chaos,
    Pools,
    Terrakube,
}

impl Staged {
    /// The stages in the order in which they select tests.
    const ALL: [Self; 8] = [
        Self::Images,
        Self::Node,
        Self::Cluster,
        Self::Chart,
        Self::Tools,
        Self::Chaos,
        Self::Pools,
        Self::Terrakube,
    ];

    const fn word(self) -> &'static str {
        match self {
            Self::Images => "images::",
            Self::Node => node::TESTS,
            Self::Cluster => "in_cluster::",
            Self::Chart => "chart::",
            Self::Tools => "tools::",
            Self::Chaos => "in_chaos",
            Self::Pools => "in_pools::",
            Self::Terrakube => "with_terrakube::",
        }
    }

    /// The words of the stages that select tests before this one.
    fn before(self) -> Vec<&'static str> {
        let before = Self::ALL.into_iter().take_while(|other| *other != self);
        before.map(Self::word).collect()
    }

    /// Whether its tests need a control plane.
    const fn has_cluster(self) -> bool {
        matches!(self, Self::Images | Self::Cluster | Self::Chaos)
    }

    /// Runs the tests of the stage, or only the `named` ones. Tests that need a control plane are skipped if its programs are
    /// missing.
    pub(crate) fn run(self, named: &[&str]) -> Result<()> {
        self.run_on(Release::NEWEST, named)
    }

    /// The same on a release of Kubernetes.
    pub(crate) fn run_on(self, release: Release, named: &[&str]) -> Result<()> {
        if self == Self::Node {
            return node::run(named);
        }
        if self == Self::Cluster {
            times::spent(Part::SetUp, || {
                unless_skipped("monitors of the chart", operator::ensure())
            })?;
        }
        let plane = if self.has_cluster() {
            suite::build()?;
            times::spent(Part::SetUp, || {
                ControlPlane::start(self.word(), release, || Ok(()))
            })?
        } else {
            None
        };
        let kubeconfig = plane.as_ref().map(|plane| plane.kubeconfig.as_str());
        let outcome = self.run_in(kubeconfig, named);
        plane.map_or(Ok(()), ControlPlane::end).and(outcome)
    }

    /// Runs the tests of the stage, or only the `named` ones, in the cluster of a kubeconfig.
    pub(crate) fn run_in(self, kubeconfig: Option<&str>, named: &[&str]) -> Result<()> {
        let own = [self.word()];
        let only = if named.is_empty() { &own } else { named };
        let environment = kubeconfig.map(cluster::environment);
        // These tests mostly wait.
        let waits = matches!(
            self,
            Self::Cluster | Self::Tools | Self::Pools | Self::Terrakube
        );
        run_tests(&Selection {
            only,
            but: &self.before(),
            environment: environment.as_slice().as_flattened(),
            wait: waits,
            under: None,
        })
    }
}

/// The words of all stages.
pub(crate) fn words() -> [&'static str; 8] {
    Staged::ALL.map(Staged::word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exactly one stage, or the suite, runs each test.
    #[test]
    fn each_test_is_run_once() {
        for some in 0..1 << Staged::ALL.len() {
            let chosen = Staged::ALL.iter().enumerate();
            let chosen = chosen.filter(|(at, _)| some & (1 << at) != 0);
            let name: String = chosen.map(|(_, staged)| staged.word()).collect();
            let has = |word: &&str| name.contains(word);
            let stages = Staged::ALL
                .into_iter()
                .filter(|staged| has(&staged.word()) && !staged.before().iter().any(&has));
            let by_suite = !words().iter().any(has);
            assert_eq!(stages.count() + usize::from(by_suite), 1, "{name}");
        }
    }
}
