//! The settings of target `process`.

use std::path::PathBuf;

use agent::{ProcessTarget, StopMode};
use clap::{Args, ValueHint};
use data_dir::{DataDir, DataDirArgs};
use hub::{Boundary, OwnPool, RunLogs};
use job_contract::env;
use pool_protocol::token::PoolToken;
use processes::environment::{self, Access};
use processes::executor::Program;
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, choice, unexpected};

const POOL: &str = "local";

/// The most executors at a time. The hub gives all executors of this machine about four thousand connections, unless the system
/// allows fewer open files, and each executor uses up to four.
const MAX_CONCURRENCY: u32 = 1000;

/// The options of target `process`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `process`")]
pub struct MachineArgs {
    /// How many executors run at a time; at most 1000, and the rest wait, oldest first
    /// [default: one per processor]
    #[arg(long, value_name = "N", env = env::CONCURRENCY)]
    pub concurrency: Option<Setting<Concurrency>>,

    /// What happens to running executors when the launcher stops: `interrupt` asks them to finish gracefully,
    /// `leave` keeps them running, and the next launcher finds them [default: interrupt]
    #[arg(long, value_name = "WHAT", env = env::RUNS_ON_STOP)]
    pub runs_on_stop: Option<Setting<RunsOnStop>>,

    /// Another executor binary than the built-in one
    #[arg(long, value_name = "PATH", env = env::EXECUTOR, value_hint = ValueHint::ExecutablePath)]
    pub executor: Option<PathBuf>,
}

/// How many executors run at a time.
#[derive(Clone, Copy, Debug)]
pub struct Concurrency(u32);

impl SettingValue for Concurrency {
    fn parse(text: &str) -> Result<Self, String> {
        let number = text.parse().ok();
        number
            .filter(|number| (1..=MAX_CONCURRENCY).contains(number))
            .map(Self)
            .ok_or_else(|| unexpected(text, &format!("a whole number from 1 to {MAX_CONCURRENCY}")))
    }
}

/// What happens to running executors when the launcher stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunsOnStop {
    /// The launcher asks them to stop gracefully and waits for them.
    Interrupt,
    /// They continue, and the next launcher finds them.
    Leave,
}

impl SettingValue for RunsOnStop {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [("interrupt", Self::Interrupt), ("leave", Self::Leave)];
        choice(text, &words)
    }
}

#[derive(Debug)]
pub(crate) struct MachineSettings {
    pub(crate) data: DataDir,
    pub(crate) program: Program,
    /// How many executors run at a time.
    pub(crate) slots: u32,
    pub(crate) on_stop: StopMode,
    /// The names of the variables that executors, tools and scripts get too.
    pub(crate) forwarded: Vec<String>,
    pub(crate) access: Access,
    pub(crate) pool: OwnPool,
}

impl MachineArgs {
    /// Returns the settings of the target, or `None` if one of them is invalid. `has_platform` says that runs are reported to
    /// Terrakube; otherwise the records in the data directory are the platform.
    pub(crate) fn resolve(
        &self,
        errors: &mut Vec<SettingError>,
        data: &DataDirArgs,
        has_platform: bool,
    ) -> Option<MachineSettings> {
        let concurrency = self.concurrency.read(errors);
        let on_stop = self.runs_on_stop.read(errors);
        let forwarded = environment::forwarded(|name| std::env::var_os(name))
            .map_err(|error| errors.push(error));
        let mut reject = |variable: &str, text: String| {
            errors.push(SettingError::new(variable, text));
        };
        let data = data
            .locate()
            .map_err(|error| reject(env::DATA_DIR, format!("is needed: {error}")));
        if let Some(path) = self
            .executor
            .as_deref()
            .filter(|path| which::which(path).is_err())
        {
            let path = path.display();
            reject(
                env::EXECUTOR,
                format!("is `{path}`, which is no program that can be started"),
            );
        }
        let program = Program::choose(self.executor.as_deref())
            .map_err(|error| reject(env::EXECUTOR, format!("is needed: {error}")));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let processors = u32::try_from(processors).unwrap_or(MAX_CONCURRENCY);
        let slots = concurrency.map_or(processors.min(MAX_CONCURRENCY), |Concurrency(slots)| slots);
        // Executors of this machine always had the platform's secret, and scripts and registries need it.
        let (access, boundary) = if has_platform {
            (Access::Terrakube, Boundary::Direct)
        } else {
            (Access::Records, Boundary::Relay)
        };
        let data = data.ok()?;
        Some(MachineSettings {
            data: data.clone(),
            program: program.ok()?,
            slots,
            on_stop: match on_stop.unwrap_or(RunsOnStop::Interrupt) {
                RunsOnStop::Interrupt => StopMode::Grace,
                RunsOnStop::Leave => StopMode::Detach,
            },
            forwarded: forwarded.ok()?,
            access,
            pool: OwnPool {
                boundary,
                token: PoolToken::new(POOL.parse().expect("a valid name")),
                logs: RunLogs {
                    data: data.path().to_owned(),
                    of_lease: ProcessTarget::log_of,
                },
            },
        })
    }
}
