//! Basic services of all Mayfly processes: diagnostics on stderr, hardening, failed writes, limits, child processes and their secrets, settings,
//! deadlines, private files and the removal of folders. Knows neither runs nor platforms nor Kubernetes.

pub mod deadline;
pub mod failed_writes;
pub mod folder_users;
pub mod handover;
pub mod hardening;
mod lexical;
mod lock;
pub mod memory_file;
pub mod no_proxy;
pub mod open_files;
pub mod private_file;
pub mod process_table;
pub mod reaper;
pub mod regular_file;
mod secret_file;
pub mod setting;
mod setting_text;
pub mod telemetry;
#[cfg(test)]
mod test_process;
pub mod tree_removal;
pub mod unreadable_program;

pub use deadline::Deadline;
pub use lexical::lexical;
pub use lock::lock;
