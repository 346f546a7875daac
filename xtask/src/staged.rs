//! Which tests are left to a stage of `cargo xtask ci`: those with its word in their names. A test whose name has several words
//! belongs to the first of them, so that each test is run once.

use anyhow::Result;

use crate::cluster::{self, ControlPlane, unless_skipped};
use crate::node;
use crate::setup::kubernetes::Release;
use crate::setup::operator;
use crate::suite::{self, run_tests};

/// What the names of a stage's tests contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Staged {
    Images,
    Node,
    Cluster,
    Chart,
    Tools,
    Chaos,
}

impl Staged {
    /// In the order in which they claim tests.
    const ALL: [Self; 6] = [
        Self::Images,
        Self::Node,
        Self::Cluster,
        Self::Chart,
        Self::Tools,
        Self::Chaos,
    ];

    const fn word(self) -> &'static str {
        match self {
            Self::Images => "images::",
            Self::Node => node::TESTS,
            Self::Cluster => "in_cluster::",
            Self::Chart => "chart::",
            Self::Tools => "tools::",
            Self::Chaos => "in_chaos",
        }
    }

    /// The words of those who claim tests before.
    fn before(self) -> Vec<&'static str> {
        let before = Self::ALL.into_iter().take_while(|other| *other != self);
        before.map(Self::word).collect()
    }

    /// Whether its tests are beside a control plane.
    const fn has_cluster(self) -> bool {
        matches!(self, Self::Images | Self::Cluster | Self::Chaos)
    }

    /// Runs its tests, or those of them that are named. Without programs for a control plane those that need it are skipped.
    pub(crate) fn run(self, named: &[&str]) -> Result<()> {
        self.run_on(Release::NEWEST, named)
    }

    /// The same on a release of Kubernetes.
    pub(crate) fn run_on(self, release: Release, named: &[&str]) -> Result<()> {
        if self == Self::Node {
            return node::run(named);
        }
        if self == Self::Cluster {
            unless_skipped("monitors of the chart", operator::ensure())?;
        }
        let plane = if self.has_cluster() {
            ControlPlane::start(self.word(), release, || suite::build("control plane"))?
        } else {
            None
        };
        self.run_in(plane.as_ref().map(|plane| plane.kubeconfig.as_str()), named)
    }

    /// Runs its tests, or those of them that are named, in the cluster of a kubeconfig.
    pub(crate) fn run_in(self, kubeconfig: Option<&str>, named: &[&str]) -> Result<()> {
        let own = [self.word()];
        let only = if named.is_empty() { &own } else { named };
        let environment = kubeconfig.map(cluster::environment);
        // Those in a cluster and those of the tools wait far more than they compute.
        let waits = matches!(self, Self::Cluster | Self::Tools);
        run_tests(
            only,
            &self.before(),
            environment.as_slice().as_flattened(),
            waits,
        )
    }
}

/// The words of all tests that are left to a stage.
pub(crate) fn words() -> [&'static str; 6] {
    Staged::ALL.map(Staged::word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever words a name has, one stage or the suite runs the test, and no second one.
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
