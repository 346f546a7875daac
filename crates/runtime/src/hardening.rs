//! Protects the environment and the memory of the process from other processes.

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use tracing::warn;

/// The errors of hardening. They are logged later, because hardening comes before the setup of diagnostics.
#[derive(Debug)]
#[must_use]
pub struct Hardened {
    was_exposed: bool,
    dumpable: Result<(), Errno>,
    core_files: Result<(), Errno>,
}

/// Makes the process non-dumpable and disables core files. So processes of the same user cannot read the job data from
/// `/proc/<pid>` or from a crash.
pub fn process() -> Hardened {
    Hardened {
        was_exposed: prctl::get_dumpable().unwrap_or(true),
        dumpable: prctl::set_dumpable(false),
        core_files: setrlimit(Resource::RLIMIT_CORE, 0, 0),
    }
}

impl Hardened {
    /// Whether processes of the same user could look into this process before it was hardened, or can for ever because the
    /// user is root. That is so unless the user may execute the program and not read it.
    pub const fn was_exposed(&self) -> bool {
        self.was_exposed
    }

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
