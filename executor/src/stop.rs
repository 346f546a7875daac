//! The stop order. It is given once, whatever the cause, and everything that waits receives it.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use job_contract::report::StopReason;
use job_contract::{Exit, StepType};
use runtime::Deadline;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// What the owner of a run can do about too little memory.
pub(crate) const MEMORY_HINT: &str = "raise the memory limit of the run (EPHEMERAL_MEMORY_LIMIT of the workspace), or lower the \
                                      tool's parallelism";

/// A stop order. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    token: CancellationToken,
    order: Arc<OnceLock<Order>>,
    /// The order after which the process soon ends. It may follow one that leaves the time to save results.
    hurry: CancellationToken,
    hurried: Arc<OnceLock<Order>>,
}

/// The cause and the time of a stop order.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub cause: Cause,
    pub at: Instant,
}

/// Why a run is stopped early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The pod ends: a node is drained, or the Job is deleted or past its deadline.
    Signal(u8),
    Cancelled,
    /// The run reached its own time limit.
    Deadline(Duration),
    /// The log received no line for this long.
    Silence(Duration),
    /// Memory is about to run out. Values are in bytes.
    Memory {
        used: u64,
        limit: u64,
    },
    /// The hub of the run has not answered for this long. It may give the workspace to another run.
    CutOff(Duration),
}

impl Cause {
    /// Whether the process must end soon. Otherwise what the run has made may be saved as long as after a run without an order.
    const fn hurries(self) -> bool {
        !matches!(self, Self::CutOff(_))
    }

    /// The exit code of a step that failed for this cause.
    pub const fn exit(self) -> Exit {
        match self {
            Self::Signal(signal) => Exit::Signal(signal),
            _ => Exit::StepFailed,
        }
    }

    /// The name in the final report.
    pub const fn reason(self) -> StopReason {
        match self {
            Self::Signal(_) => StopReason::Signal,
            Self::Cancelled => StopReason::Cancelled,
            Self::Deadline(_) => StopReason::Deadline,
            Self::Silence(_) => StopReason::Silence,
            Self::Memory { .. } => StopReason::Memory,
            Self::CutOff(_) => StopReason::CutOff,
        }
    }

    /// The hint for the owner of the run.
    pub const fn hint(self) -> Option<&'static str> {
        match self {
            Self::Signal(_) | Self::Cancelled => None,
            Self::Deadline(_) => Some("raise the deadline of runs, or split the workspace"),
            Self::Silence(_) => {
                Some("find out what the tool waits for, or raise the limit on silence")
            }
            Self::Memory { .. } => Some(MEMORY_HINT),
            Self::CutOff(_) => Some(
                "check the network between the executor and its hub, or raise MAYFLY_POOL_LOST_SECONDS of the hub",
            ),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u64 = 1024 * 1024;
        match self {
            Self::Signal(signal) => write!(f, "stopped by signal {signal} before it was done"),
            Self::Cancelled => f.write_str("stopped because the job is cancelled"),
            Self::Deadline(limit) => write!(
                f,
                "stopped because it did not end within {}",
                humantime::format_duration(*limit)
            ),
            Self::Silence(limit) => write!(
                f,
                "stopped because its log had no new line for {}",
                humantime::format_duration(*limit)
            ),
            Self::Memory { used, limit } => write!(
                f,
                "stopped because {} of {} MiB of memory were in use",
                used / MIB,
                limit / MIB
            ),
            Self::CutOff(silence) => write!(
                f,
                "stopped because its hub has not answered for {}, and may soon give the workspace to another run",
                humantime::format_duration(*silence)
            ),
        }
    }
}

impl Stop {
    /// Gives the order. A second order only shortens the time for saving, if the first has left it.
    pub fn order(&self, cause: Cause) {
        let order = Order {
            cause,
            at: Instant::now(),
        };
        let _ = self.order.set(order);
        if cause.hurries() {
            let _ = self.hurried.set(order);
            self.hurry.cancel();
        }
        self.token.cancel();
    }

    /// A token that is cancelled when the order is given.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    /// The order, if there is one.
    pub fn given(&self) -> Option<Order> {
        self.order.get().copied()
    }

    /// The deadline of work that may last `limit`, or after an order that ends the process soon until `until` after the order.
    pub fn deadline(&self, limit: Duration, until: Duration) -> Deadline {
        match self.hurried.get() {
            Some(order) => Deadline::after(limit.min(until.saturating_sub(order.at.elapsed()))),
            None => Deadline::after(limit).hurried_by(self.hurry.clone(), until),
        }
    }

    /// Blocks a thread until an order is given after which the process soon ends, and returns it.
    pub(crate) fn wait(&self) -> Order {
        *self.hurried.wait()
    }

    /// Waits for such an order, and returns it.
    pub(crate) async fn hurried(&self) -> Order {
        self.hurry.cancelled().await;
        let order = self.hurried.get().copied();
        order.expect("the order is recorded before it is announced")
    }

    /// Waits for the order, and returns it.
    pub async fn ordered(&self) -> Order {
        self.token.cancelled().await;
        self.given()
            .expect("the order is recorded before it is announced")
    }
}

/// How the time between the first SIGTERM and the SIGKILL is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// An interrupted tool or script is killed this long after the order.
    pub tool: Duration,
    /// Until then, the push of a state is retried if a copy of the state is kept.
    pub push: Duration,
    /// A process that saves results is killed this long after the order.
    pub saving: Duration,
    /// Until then, sinks may receive the rest of the log.
    pub flush: Duration,
    /// Until then, the store may receive the log.
    pub log: Duration,
    /// Until then the platform may record the published state.
    pub history: Duration,
    /// Until then, the platform may receive the outcome.
    pub report: Duration,
    /// Until then, the hub may receive the end of the task. The remaining time is for the final report.
    pub end: Duration,
}

impl Budget {
    /// Splits a grace period: the last 35 s, or half of a short one, are reserved for storing and reporting.
    pub fn of(grace_period: Duration) -> Self {
        const RESERVE: u32 = 35;
        let reserve = Duration::from_secs(RESERVE.into()).min(grace_period / 2);
        let before_the_end = |parts: u32| grace_period.saturating_sub(reserve * parts / RESERVE);
        Self {
            tool: before_the_end(RESERVE),
            push: before_the_end(25),
            saving: before_the_end(15),
            flush: before_the_end(12),
            log: before_the_end(8),
            history: before_the_end(5),
            report: before_the_end(2),
            end: before_the_end(1),
        }
    }

    /// The default grace period of a step of this type.
    pub const fn default_grace(step: StepType) -> Duration {
        Duration::from_secs(if step.changes_infrastructure() {
            300
        } else {
            60
        })
    }
}

/// Gives the order on SIGTERM, SIGINT or SIGHUP. It listens on a thread of its own, so that blocked threads cannot
/// delay the order. The executor is PID 1 of its container, where these signals have no effect without a handler.
pub fn listen(stop: &Stop) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let stop = stop.clone();
    let listener = move || {
        for number in signals.forever() {
            let signal = u8::try_from(number).expect("signal numbers are small");
            let is_first = stop.given().is_none();
            // The order comes before the log line, because the reader of diagnostics may be blocking this process.
            stop.order(Cause::Signal(signal));
            if is_first {
                warn!(
                    signal,
                    "stop order received: interrupting tool and scripts, then storing results"
                );
            } else {
                warn!(signal, "already stopping");
            }
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(listener)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_the_end_has_time_of_its_own() {
        let moments = |grace| {
            let Budget {
                tool,
                push,
                saving,
                flush,
                log,
                history,
                report,
                end,
            } = Budget::of(grace);
            [tool, push, saving, flush, log, history, report, end, grace]
        };
        for seconds in [1, 10, 30, 60, 300, 3600] {
            let moments = moments(Duration::from_secs(seconds));
            assert!(moments.is_sorted_by(|one, next| one < next), "{moments:?}");
        }
        assert_eq!(
            moments(Duration::from_mins(5)).map(|moment| moment.as_secs()),
            [265, 275, 285, 288, 292, 295, 298, 299, 300]
        );
    }

    #[tokio::test]
    async fn only_the_first_order_counts() {
        let stop = Stop::default();
        assert!(stop.given().is_none());
        stop.order(Cause::Signal(15));
        stop.order(Cause::Cancelled);
        assert_eq!(stop.ordered().await.cause, Cause::Signal(15));
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_that_is_cut_off_has_time_to_save_until_a_signal_comes() {
        let (stop, start) = (Stop::default(), Instant::now());
        let [limit, until] = [600, 30].map(Duration::from_secs);
        let cut_off = Cause::CutOff(Duration::from_secs(335));
        stop.order(cut_off);
        assert_eq!(stop.ordered().await.cause, cut_off);
        stop.deadline(limit, until).over().await;
        assert_eq!(start.elapsed().as_secs(), 600);

        let deadline = stop.deadline(limit, until);
        stop.order(Cause::Signal(15));
        assert_eq!(stop.hurried().await.cause, Cause::Signal(15));
        deadline.over().await;
        stop.deadline(limit, until).over().await;
        assert_eq!(start.elapsed().as_secs(), 630);
        assert_eq!(stop.given().unwrap().cause, cut_off);
    }
}
