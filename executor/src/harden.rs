//! What the process does to keep its environment and memory to itself.

use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use tracing::warn;

/// Makes the process non-dumpable and without core files, so that neither `/proc/<pid>` nor a crash gives the
/// job data away to what runs beside it under the same user (design: nothing of ours in the user's process).
pub fn process() {
    if let Err(error) = prctl::set_dumpable(false) {
        warn!(%error, "could not make the process non-dumpable");
    }
    if let Err(error) = setrlimit(Resource::RLIMIT_CORE, 0, 0) {
        warn!(%error, "could not turn core files off");
    }
}
