//! The phases of a step, one file each.
//!
//! A phase knows the run and the operation. It does not know the order of the phases. The pipeline above it knows the
//! order.

pub(crate) mod apply_changes;
pub(crate) mod ask_permission;
pub(crate) mod assume_role;
pub(crate) mod check_backend;
pub(crate) mod check_step;
pub(crate) mod claim_step;
pub(crate) mod conclude;
pub(crate) mod fetch_plan;
pub(crate) mod find_kept_state;
pub(crate) mod give_identity;
pub(crate) mod hand_over_files;
pub(crate) mod init;
pub(crate) mod judge_plan;
pub(crate) mod live_view;
pub(crate) mod mask_inputs;
pub(crate) mod plan_changes;
pub(crate) mod prepare_workspace;
pub(crate) mod provide_providers;
pub(crate) mod release_lock;
pub(crate) mod report_rejection;
pub(crate) mod rescue_state;
pub(crate) mod resolve_references;
pub(crate) mod resolve_tool;
pub(crate) mod run_hook;
pub(crate) mod run_scripts;
pub(crate) mod save_state;
pub(crate) mod stored_state;
