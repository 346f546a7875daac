//! Whether work on a volume goes on. A network volume that hangs blocks a thread in the kernel, where nothing can ask it. So whoever
//! waits for the thread looks at what it counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the steps of work on a volume. Its clones count together.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Something was done.
    pub fn step(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        #[cfg(test)]
        killing::at(self.steps());
    }

    pub fn steps(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Kills the process of a test at a step.
#[cfg(test)]
pub(crate) mod killing {
    use std::process::Command;
    use std::sync::OnceLock;

    pub(crate) static STEP: OnceLock<u64> = OnceLock::new();

    pub(super) fn at(step: u64) {
        if STEP.get() == Some(&step) {
            let pid = std::process::id().to_string();
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
        }
    }
}
