//! Protects the environment and the memory of the process from other processes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::geteuid;
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
        was_exposed: is_exposed(),
        dumpable: prctl::set_dumpable(false),
        core_files: setrlimit(Resource::RLIMIT_CORE, 0, 0),
    }
}

/// The kernel tells `nix` only whether the process is dumpable. With `fs.suid_dumpable=2`, a program that its user may not read is
/// dumpable for root alone. Then the files of the process in `/proc` are root's.
fn is_exposed() -> bool {
    let owner = fs::metadata("/proc/self/environ").map(|found| found.uid());
    prctl::get_dumpable().unwrap_or(true) && owner.map_or(true, |owner| owner == geteuid().as_raw())
}

impl Hardened {
    /// Whether processes of the same user could look into this process before it was hardened, or can for ever because the
    /// user is root. That is so unless the user may execute the program and not read it.
    pub const fn was_exposed(&self) -> bool {
        self.was_exposed
    }

    /// Logs the errors.
    pub fn report(&self) {
        if let Err(error) = &self.dumpable {
            warn!(%error, "could not make the process non-dumpable");
        }
        if let Err(error) = &self.core_files {
            warn!(%error, "could not disable core files");
        }
    }
}
