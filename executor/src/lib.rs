//! Runs one Terraform or OpenTofu step. It decodes the job data from the environment, prepares the workspace, and runs
//! the tool and the step's scripts. It streams the log, stores plan, state and outputs, reports, and exits.
//!
//! The library knows nothing of Kubernetes. `pipeline` shows the whole run on one page.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use futures_util::FutureExt as _;
use job_contract::report::FinalReport;
use job_contract::{Exit, JobData, env};
use nix::sys::prctl;
use tracing::{error, info, warn};

pub mod banner;
pub mod cgroup;
mod check_secret_stores;
pub mod child_env;
pub mod config;
mod connections;
mod context;
mod deploy_role;
pub mod error;
mod fill;
mod final_report;
mod hooks;
mod identity;
pub mod job;
mod jvm_settings;
pub mod kept_states;
pub mod last_deadline;
mod limit_watch;
mod loopback;
mod metered;
mod operation;
mod phase_timer;
mod phases;
mod pipeline;
mod plan_files;
mod platform_server;
pub mod process;
mod providers;
mod references;
mod resolver;
mod role_server;
mod running_report;
pub mod scripts;
mod state_server;
mod step_result;
pub mod stop;
mod store_watch;
pub mod stored_plan;
mod telemetry;
pub mod terraform;
pub mod tool;
mod volume;
pub mod workspace;

use config::Config;
use final_report::{FinishedRun, ReportWriter, identify};
use job::JobError;
use last_deadline::LastDeadline;
pub use providers::lock_file::locked_digests;
pub use providers::package::{digest_of_archive, h1_of_archive};
use runtime::hardening::{self, Hardened};
use runtime::{failed_writes, handover, reaper};
use stop::Stop;

/// Runs the executor as a process, configured by its environment alone. A program that contains the executor calls it.
pub fn main_from_env() -> ExitCode {
    main_from_args([OsString::from("executor")])
}

/// Runs the executor as a process. The command line overrides the environment.
pub fn main_from_args(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<_> = args.into_iter().collect();
    if args.get(1).is_some_and(|command| command == fill::COMMAND) {
        return fill::main(args);
    }
    failed_writes::survive();
    // This comes before the job data are read, and before any other code that could read them runs.
    let hardened = hardening::process();
    // A launcher starts a copy of the program that has no name.
    let _ = prctl::set_name(c"executor");
    runtime::telemetry::name_panics("the executor");
    let variables = match jvm_settings::variables(|name| std::env::var_os(name)) {
        Ok(variables) => variables,
        Err(wrong) => return wrong_environment(wrong),
    };
    if let Err(error) = resolver::restart_if_needed(&variables) {
        let _ = writeln!(
            io::stderr(),
            "error: could not restart with the right environment: {error}"
        );
        job::discard();
        return ExitCode::from(Exit::Infrastructure.code());
    }
    if let Err(error) = handover::receive() {
        let _ = writeln!(io::stderr(), "error: {error}");
        return ExitCode::from(Exit::Infrastructure.code());
    }
    let args: Vec<OsString> = args.into_iter().collect();
    if args
        .get(1)
        .is_some_and(|word| word == check_secret_stores::COMMAND)
    {
        return ExitCode::from(check_secret_stores::run());
    }
    let secret = handover::receive_file(env::INTERNAL_SECRET, env::INTERNAL_SECRET_FILE);
    match Config::parse_over_environment(args) {
        Ok(config) => match secret {
            Err(error) if config.platform.checks_tokens() => wrong_environment(error.to_string()),
            _ => ExitCode::from(run_process(&config, &hardened)),
        },
        Err(usage) => usage_exit(&usage),
    }
}

/// Ends with a setting that cannot be used, which no option has.
fn wrong_environment(error: String) -> ExitCode {
    let _ = writeln!(io::stderr(), "error: {error}");
    job::discard();
    let report_writer =
        ReportWriter::from_environment().unwrap_or_else(|_| ReportWriter::unsigned());
    let code = Exit::BadConfiguration.code();
    report_writer.write(&final_report::default_path(), unusable(error, None), code);
    ExitCode::from(code)
}

/// Help and version end with 0. Everything else is a setting that cannot be used, which is printed on stderr and
/// written into the termination message.
fn usage_exit(usage: &clap::Error) -> ExitCode {
    // A write error means that the reader has closed the pipe. That is no failure.
    let _ = usage.print();
    if !usage.use_stderr() {
        return ExitCode::from(Exit::Done.code());
    }
    job::discard();
    let hint = config::variable_of(usage)
        .map(|name| format!("in a pod this is the environment variable `{name}`"));
    if let Some(hint) = &hint {
        let _ = writeln!(io::stderr(), "hint: {hint}");
    }
    let error = in_one_line(usage);
    let report_writer =
        ReportWriter::from_environment().unwrap_or_else(|_| ReportWriter::unsigned());
    let code = Exit::BadConfiguration.code();
    report_writer.write(&final_report::default_path(), unusable(error, hint), code);
    ExitCode::from(code)
}

/// The error with the values that are possible, which clap writes into a line of their own.
fn in_one_line(usage: &clap::Error) -> String {
    let text = usage.to_string();
    let first = text.lines().next().unwrap_or_default();
    let error = first.trim_start_matches("error: ").to_owned();
    match usage.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) if !values.is_empty() => {
            format!("{error}: it is one of {}", values.join(", "))
        }
        _ => error,
    }
}

/// The report of an executor that could not read its settings.
fn unusable(error: String, hint: Option<String>) -> FinalReport {
    FinalReport {
        outcome: Exit::BadConfiguration.code(),
        unreported: true,
        error: Some(error),
        hint,
        ..FinalReport::default()
    }
}

fn run_process(config: &Config, hardened: &Hardened) -> u8 {
    // These come before any output, because writes block if the reader is gone.
    let (stop, deadline) = (Stop::default(), LastDeadline::default());
    if let Some(seconds) = config.run.grace_period_seconds {
        deadline.set_grace_period(Duration::from_secs(seconds));
    }
    let listening = stop::listen(&stop).and_then(|()| deadline.enforce(&stop));
    let telemetry = telemetry::install(&config.telemetry);
    // The job data are read even if the settings turn out to be unusable: reading removes their file.
    let job = job::decode(&config.job);
    let termination_log = &config.run.termination_log;
    let bad_configuration = Exit::BadConfiguration.code();
    let report_writer = match ReportWriter::from_environment() {
        Ok(report_writer) => report_writer,
        Err(error) => {
            let error = error.to_string();
            let _ = writeln!(io::stderr(), "error: {error}");
            let report = unusable(error, None);
            ReportWriter::unsigned().write(termination_log, report, bad_configuration);
            return bad_configuration;
        }
    };
    if let Err(error) = telemetry {
        let variable = env::LOG_FILTER;
        let error = format!("`{variable}` is not a log filter: {error}");
        let _ = writeln!(io::stderr(), "error: {error}");
        let hint = format!("`{variable}` takes directives such as `info` or `executor=debug`");
        let report = unusable(error, Some(hint));
        report_writer.write(termination_log, report, bad_configuration);
        return bad_configuration;
    }
    hardened.report();
    if let Err(error) = handover::remove_file() {
        warn!(%error, "scripts and tools can read the platform's secret");
    }
    reaper::adopt_orphans();
    // A second installation, as in a test, fails, and the first stays in force.
    let _ = rustls::crypto::ring::default_provider().install_default();
    info!(version = env!("CARGO_PKG_VERSION"), "executor");
    // One worker is for the run, the other for tasks that must never wait for it.
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            error!(%error, "could not start");
            return Exit::Infrastructure.code();
        }
    };
    let identity = job
        .as_ref()
        .map_or_else(|failure| identify(&failure.identity), identify);
    let run = Box::pin(run_step(config, job, listening, stop, &deadline));
    let finished = runtime.block_on(AssertUnwindSafe(run).catch_unwind());
    // The launcher or the hub reports it.
    let finished = finished.unwrap_or_else(|_| FinishedRun::panicked(identity));
    let code = finished.exit_code(config);
    deadline.set_exit_code(code);
    // Tasks that still block a worker thread have no more effect on the result.
    runtime.shutdown_background();
    report_writer.write(termination_log, finished.report, code);
    code
}

async fn run_step(
    config: &Config,
    job: Result<JobData, JobError>,
    listening: io::Result<()>,
    stop: Stop,
    deadline: &LastDeadline,
) -> FinishedRun {
    if let Err(failure) = listening {
        error!(error = %failure, "cannot listen for signals: a request to stop would be lost");
        let report = FinalReport {
            outcome: Exit::Infrastructure.code(),
            unreported: true,
            error: Some(failure.to_string()),
            ..FinalReport::default()
        };
        return FinishedRun {
            report,
            reported: false,
        };
    }
    match job {
        Ok(job) => {
            if let Ok(step_type) = job.step_type() {
                deadline.set_grace_period(config.run.grace_period(step_type));
            }
            Box::pin(pipeline::run(config, job, stop, deadline)).await
        }
        Err(failure) => pipeline::reject(config, failure, &stop).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_none_of_a_few_is_reported_with_them() {
        let error = Config::parse_over_environment(
            ["executor", "--tool-selection", "newst"].map(OsString::from),
        );
        let text = in_one_line(&error.unwrap_err());
        assert!(
            text.starts_with("invalid value 'newst' for '--tool-selection"),
            "{text}"
        );
        assert!(text.ends_with(": it is one of installed, newest"), "{text}");
    }
}
