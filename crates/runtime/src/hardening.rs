//! What the process does to keep its environment and memory to itself.

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use tracing::warn;

/// What hardening could not do. Kept until it can be logged: hardening comes before everything, also before diagnostics.
#[derive(Debug)]
#[must_use]
pub struct Hardened {
    dumpable: Result<(), Errno>,
    core_files: Result<(), Errno>,
}

/// Makes the process non-dumpable and without core files, so that neither `/proc/<pid>` nor a crash gives the
/// job data away to what runs beside it under the same user (design: nothing of ours in the user's process).
pub fn process() -> Hardened {
    Hardened {
        dumpable: prctl::set_dumpable(false),
        core_files: setrlimit(Resource::RLIMIT_CORE, 0, 0),
    }
}

impl Hardened {
    /// Says what could not be done.
    pub fn report(self) {
        if let Err(error) = self.dumpable {
            warn!(%error, "could not make the process non-dumpable");
        }
        if let Err(error) = self.core_files {
            warn!(%error, "could not turn core files off");
        }
    }
}
