//! Keeps a process alive if one of its writes fails. The standard library ignores SIGPIPE already.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::SIGXFSZ;
use signal_hook::flag;

/// From now on, a write beyond the limit on the size of files is an error, as on a full disk. Without a handler, its signal ends
/// the process. Children start without the handler.
pub fn survive() {
    // Without the handler, only this limit can end the process.
    let _ = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}
