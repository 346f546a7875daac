//! The settings of target `process`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use job_contract::env;
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, choice};

use crate::data::{DataDir, DataDirArgs};
use crate::local::executor::Program;
use crate::reporter::settings::{PlatformArgs, PlatformSettings};

/// The options of target `process`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `process`")]
pub struct ProcessArgs {
    /// How many executors run at a time; the rest wait, oldest first [default: one per processor]
    #[arg(long, value_name = "N", env = env::CONCURRENCY)]
    pub concurrency: Option<Setting<NonZeroUsize>>,

    /// What happens to running executors when the launcher stops: `interrupt` asks them to finish gracefully,
    /// `leave` keeps them running, and the next launcher finds them [default: interrupt]
    #[arg(long, value_name = "WHAT", env = env::RUNS_ON_STOP)]
    pub runs_on_stop: Option<Setting<RunsOnStop>>,

    /// Another executor binary than the built-in one
    #[arg(long, value_name = "PATH", env = env::EXECUTOR, value_hint = ValueHint::ExecutablePath)]
    pub executor: Option<PathBuf>,
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

/// The settings of target `process`.
#[derive(Debug)]
pub(crate) struct ProcessSettings {
    pub(crate) data: DataDir,
    pub(crate) program: Program,
    pub(crate) concurrency: usize,
    pub(crate) on_stop: RunsOnStop,
    /// If it is `None`, the records in the data directory are the platform.
    pub(crate) platform: Option<Box<PlatformSettings>>,
}

impl ProcessArgs {
    /// Returns the settings of the target, or `None` if one of them is invalid.
    pub(crate) fn resolve(
        &self,
        errors: &mut Vec<SettingError>,
        data: &DataDirArgs,
        platform: &PlatformArgs,
    ) -> Option<ProcessSettings> {
        let concurrency = self.concurrency.read(errors);
        let on_stop = self.runs_on_stop.read(errors);
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
        let data = data.ok().zip(program.ok());
        let platform = platform.resolve(errors, data.as_ref().map(|(data, _)| data.path()));
        let (data, program) = data?;
        Some(ProcessSettings {
            data,
            program,
            concurrency: concurrency
                .or_else(|| std::thread::available_parallelism().ok())
                .map_or(1, NonZeroUsize::get),
            on_stop: on_stop.unwrap_or(RunsOnStop::Interrupt),
            platform: platform.map(Box::new),
        })
    }
}
