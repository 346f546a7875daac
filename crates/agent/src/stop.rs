//! Stop modes and stop signals of the agent.

use std::io;

use runtime::setting::{SettingValue, choice};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// What happens to the runs of an agent that stops. A second signal leads to the next mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// The runs continue, and the next agent finds them.
    Detach,
    /// The agent waits for them.
    Drain,
    /// The agent interrupts them. Executors then save the state.
    Grace,
    /// The agent kills them.
    Force,
}

impl StopMode {
    /// Returns the mode that follows after the timeout or the next signal.
    pub const fn next(self) -> Option<Self> {
        match self {
            Self::Drain => Some(Self::Grace),
            Self::Grace => Some(Self::Force),
            // A detached run must not be ended.
            Self::Detach | Self::Force => None,
        }
    }
}

impl SettingValue for StopMode {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [
            ("detach", Self::Detach),
            ("drain", Self::Drain),
            ("grace", Self::Grace),
            ("force", Self::Force),
            // The values of Scalr.
            ("grace-shutdown", Self::Grace),
            ("force-shutdown", Self::Force),
        ];
        choice(text, &words)
    }
}

/// The signals that stop the agent.
#[derive(Debug)]
pub struct StopSignals {
    mode: StopMode,
    received: mpsc::UnboundedReceiver<()>,
}

impl StopSignals {
    /// Handles SIGTERM, SIGINT and SIGHUP from now on.
    pub fn listen(mode: StopMode) -> io::Result<Self> {
        let (sender, received) = mpsc::unbounded_channel();
        for kind in [
            SignalKind::terminate(),
            SignalKind::interrupt(),
            SignalKind::hangup(),
        ] {
            let mut signals = signal(kind)?;
            let sender = sender.clone();
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    // If there is no receiver, the agent has ended.
                    let _ = sender.send(());
                }
            });
        }
        Ok(Self { mode, received })
    }

    /// Takes the order of a process in which the agent is not alone. It is the only one.
    pub fn ordered(mode: StopMode, order: CancellationToken) -> Self {
        let (sender, received) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            order.cancelled().await;
            let _ = sender.send(());
        });
        Self { mode, received }
    }

    /// Waits for the next signal. Returns the stop mode of the settings.
    pub async fn next(&mut self) -> StopMode {
        match self.received.recv().await {
            Some(()) => self.mode,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("detach", Ok(StopMode::Detach), None)]
    #[case("Drain", Ok(StopMode::Drain), Some(StopMode::Grace))]
    #[case("grace", Ok(StopMode::Grace), Some(StopMode::Force))]
    #[case("grace-shutdown", Ok(StopMode::Grace), Some(StopMode::Force))]
    #[case("force-shutdown", Ok(StopMode::Force), None)]
    fn each_mode_has_a_name_and_a_next_mode(
        #[case] word: &str,
        #[case] mode: Result<StopMode, String>,
        #[case] next: Option<StopMode>,
    ) {
        assert_eq!(StopMode::parse(word), mode);
        assert_eq!(mode.unwrap().next(), next);
    }
}
