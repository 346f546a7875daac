//! The user of a page, and what it may see.

use pool_protocol::id::PoolName;

/// The user of a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Viewer {
    /// A holder of a token of this pool.
    Pool(PoolName),
    /// A holder of an operator token.
    Operator,
    /// An operator whom the trusted proxy names.
    Named(String),
    /// A client on this machine, if the launcher requires no authentication.
    Open,
}

impl Viewer {
    pub(super) fn sees(&self, pool: &PoolName) -> bool {
        match self {
            Self::Pool(own) => own == pool,
            Self::Operator | Self::Named(_) | Self::Open => true,
        }
    }

    /// Returns whether the viewer sees all pools.
    pub(super) const fn is_operator(&self) -> bool {
        !matches!(self, Self::Pool(_))
    }

    /// Returns whether the viewer has a session that can be ended.
    pub(super) const fn can_log_out(&self) -> bool {
        matches!(self, Self::Pool(_) | Self::Operator)
    }
}
