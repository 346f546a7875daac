//! Protects the environment and the memory of the process from other processes.

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use tracing::warn;

/// The errors of hardening. They are logged later, because hardening comes before the setup of diagnostics.
#[derive(Debug)]
#[must_use]
pub struct Hardened {
    dumpable: Result<(), Errno>,
    core_files: Result<(), Errno>,
}

/// Makes the process non-dumpable and disables core files. So processes of the same user cannot read the job data from
/// `/proc/<pid>` or from a crash.
pub fn process() -> Hardened {
    Hardened {
        dumpable: prctl::set_dumpable(false),
        core_files: setrlimit(Resource::RLIMIT_CORE, 0, 0),
    }
}

impl Hardened {
    /// Logs the errors.
    pub fn report(self) {
        if let Err(error) = self.dumpable {
            warn!(%error, "could not make the process non-dumpable");
        }
        if let Err(error) = self.core_files {
            warn!(%error, "could not disable core files");
        }
    }
}
