//! What a health check answers.

/// Whether a service could do its work now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// The target accepts dispatches, but their runs fail for this reason, or are watched less closely. Or a hub has no space for
    /// new runs, and the others go on.
    Impaired(String),
    NotReady(String),
}

impl Readiness {
    /// The worse of two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ready, other) => other,
            (Self::Impaired(_), other @ Self::NotReady(_)) => other,
            (worse, _) => worse,
        }
    }
}
