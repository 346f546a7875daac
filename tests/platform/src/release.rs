//! Whose rules the platform has.

/// Releases of Terrakube that differ for executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Release {
    /// The recorded ones: internal tokens may do everything, a row is locked while its dispatch is open, and the log stream is
    /// deleted before the new status is visible.
    Old,
    /// The newest sources: tokens are classified, a missing context is pending, agent URLs are checked, nothing is locked, and
    /// the log stream is deleted last.
    #[default]
    Newest,
}

impl Release {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Old, Self::Newest];
}
