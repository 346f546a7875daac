//! The names of states, reasons and times for people.

use std::time::{Duration, SystemTime};

use maud::{Markup, html};
use pool_protocol::task::TaskState;
use pool_store::state::EndReason;
use pool_store::{Condition, TaskView, Wait};

/// The appearance of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Good,
    Bad,
    Warning,
    Active,
    Quiet,
}

impl Tone {
    /// Returns the class in the style sheet.
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
            Self::Warning => "warning",
            Self::Active => "active",
            Self::Quiet => "quiet",
        }
    }
}

/// Returns a state as word, sign and color.
pub(super) fn badge(tone: Tone, word: &str) -> Markup {
    let sign = match tone {
        Tone::Good => "✓",
        Tone::Bad => "✕",
        Tone::Warning => "!",
        Tone::Active => "▸",
        Tone::Quiet => "•",
    };
    html! {
        span class={ "badge " (tone.class()) } {
            span.sign aria-hidden="true" { (sign) }
            (word)
        }
    }
}

pub(super) fn run_badge(task: &TaskView) -> Markup {
    let (tone, word) = match task.state {
        TaskState::Available => (Tone::Quiet, "Waiting"),
        TaskState::Leased => (Tone::Active, "Starting"),
        TaskState::Running if task.cancel_requested => (Tone::Warning, "Stopping"),
        TaskState::Running => (Tone::Active, "Running"),
        TaskState::Orphaned => (Tone::Warning, "Silent"),
        TaskState::Completed => (Tone::Good, "Completed"),
        TaskState::Failed => (Tone::Bad, "Failed"),
        TaskState::Cancelled => (Tone::Quiet, "Cancelled"),
    };
    badge(tone, word)
}

pub(super) fn condition_badge(condition: Condition) -> Markup {
    let (tone, word) = match condition {
        Condition::Online => (Tone::Good, "Online"),
        Condition::Draining => (Tone::Warning, "Draining"),
        Condition::Degraded => (Tone::Bad, "Degraded"),
        Condition::Offline => (Tone::Quiet, "Offline"),
    };
    badge(tone, word)
}

pub(super) fn wait_reason(wait: Wait, attempts: u32) -> String {
    match wait {
        Wait::Unconfirmed => "The platform has not confirmed the run yet".to_owned(),
        Wait::Pause(pause) => format!("Pause of {} after attempt {attempts}", span(pause)),
        Wait::Workspace(_) => "Another step of its workspace is in progress".to_owned(),
        Wait::NoInstance => "No agent is online".to_owned(),
        Wait::NoCapacity => "No agent has a free slot".to_owned(),
        Wait::Turn => "An agent has a free slot and takes it soon".to_owned(),
    }
}

pub(super) const fn wait_advice(wait: Wait) -> Option<&'static str> {
    match wait {
        Wait::NoInstance => Some("Start an agent with a token of this pool, or look at its log."),
        Wait::NoCapacity => {
            Some("Wait until other runs end, give an agent more slots, or add an agent.")
        }
        Wait::Unconfirmed | Wait::Pause(_) | Wait::Workspace(_) | Wait::Turn => None,
    }
}

/// Returns why a run is over, for runs without a diagnostic of the executor.
pub(super) const fn end_sentence(reason: EndReason) -> Option<&'static str> {
    match reason {
        EndReason::Finished => None,
        EndReason::Revoked => {
            Some("The token of the agent was removed while the run was in progress.")
        }
        EndReason::Lost => Some("The executor that had accepted the run fell silent."),
        EndReason::Expired => Some("No executor accepted the run in time."),
        EndReason::Poison => Some("Every attempt to start the run failed."),
        EndReason::Cancelled => Some("The run was cancelled before an executor accepted it."),
        EndReason::Superseded => Some("The platform no longer wanted the run."),
        EndReason::Refused => Some("The pool does not take the run."),
    }
}

pub(super) const fn end_advice(reason: EndReason) -> Option<&'static str> {
    match reason {
        EndReason::Lost => Some(
            "Check the network and the cluster of the agent. Compare the state with the infrastructure and look for a lock of the state before you start the run again.",
        ),
        EndReason::Revoked => Some(
            "Stop the agent if it is not yours. Compare the state with the infrastructure and look for a lock of the state before you start the run again.",
        ),
        EndReason::Expired => {
            Some("Start an agent of this pool or raise its capacity, and start the run again.")
        }
        EndReason::Poison => {
            Some("Read the reasons of the attempts, correct the cause, and start the run again.")
        }
        EndReason::Refused => Some("Correct what is named above, and start the run again."),
        EndReason::Finished | EndReason::Cancelled | EndReason::Superseded => None,
    }
}

/// Returns a duration with its two largest units.
pub(super) fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match seconds {
        0 => "under 1 s".to_owned(),
        1..60 => format!("{seconds} s"),
        60..3600 => format!("{minutes} min {} s", seconds % 60),
        3600..86400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", hours / 24, hours % 24),
    }
}

/// Returns a duration as time since now.
pub(super) fn ago(time: Duration) -> String {
    match time.as_secs() {
        0 => "just now".to_owned(),
        _ => format!("{} ago", span(time)),
    }
}

/// Returns a time in UTC.
pub(super) fn moment(time: SystemTime) -> Markup {
    let exact = humantime::format_rfc3339_seconds(time).to_string();
    let shown = exact.replace('T', " ").replace('Z', " UTC");
    html! { time datetime=(exact) { (shown) } }
}

/// Returns a number with its noun.
pub(crate) fn count(number: u32, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        _ => format!("{number} {one}s"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0, "under 1 s")]
    #[case(59, "59 s")]
    #[case(61, "1 min 1 s")]
    #[case(3_600, "1 h 0 min")]
    #[case(90_000, "1 d 1 h")]
    fn times_have_two_units(#[case] seconds: u64, #[case] expected: &str) {
        assert_eq!(span(Duration::from_secs(seconds)), expected);
    }

    #[test]
    fn a_time_shows_its_zone() {
        let markup = moment(SystemTime::UNIX_EPOCH).into_string();
        assert_eq!(
            markup,
            r#"<time datetime="1970-01-01T00:00:00Z">1970-01-01 00:00:00 UTC</time>"#
        );
    }
}
