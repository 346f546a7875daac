//! Reads the complete log of a run from its pod, across rotations and lost connections.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::Duration;

use futures_util::{
    AsyncBufReadExt as _, AsyncReadExt as _, FutureExt as _, Stream, StreamExt as _, stream,
};
use job_contract::labels;
use job_contract::progress::Diagnostic;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::LogParams;
use kube::runtime::{WatchStreamExt as _, watcher};
use serde::Serialize;
use tokio::fs::File;
use tokio::io::{AsyncWriteExt as _, BufWriter};
use tokio::sync::mpsc;
use verdict::{EXECUTOR, executor_state, newest, terminal};

use super::view::has_begun;
use super::{Cluster, ClusterError};

/// The buffer of lines for a reader that is slower than the cluster.
const AHEAD: usize = 256;

/// The largest saved part of a container's log. A node keeps less by default.
const SAVED_BYTES: i64 = 128 * 1024 * 1024;

/// How long a log may take to arrive. Other reports wait meanwhile, and an API server that disappears may never close a
/// connection.
const SAVE_TIMEOUT: Duration = Duration::from_mins(1);

/// A longer line cannot be one of the executor's own messages, and is not buffered completely.
const OWN_BYTES: u64 = 1024 * 1024;

/// Why the log of a container could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("could not keep the log of the run")]
    File(#[from] io::Error),
    #[error("the log of the run did not arrive within {} s", SAVE_TIMEOUT.as_secs())]
    Late,
}

impl SaveError {
    /// Whether a retry cannot help: the pod is gone, or its log may not be read.
    pub const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Cluster(
                ClusterError::NoSuchRun(_)
                    | ClusterError::Refused {
                        code: 400 | 403 | 404,
                        ..
                    }
            )
        )
    }
}

/// Whether a line of the container is the executor's own message, and not one of the run.
fn is_own_message(line: &[u8]) -> bool {
    line.first() == Some(&b'{')
        && std::str::from_utf8(line)
            .ok()
            .and_then(Diagnostic::parse)
            // The tool's own JSON has no target.
            .is_some_and(|own| !own.target.is_empty())
}

/// One line of a run's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogLine {
    /// When the node received the line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    pub text: String,
}

impl LogLine {
    fn parse(line: &str) -> Self {
        let stamped = line
            .split_once(' ')
            .and_then(|(at, text)| Some((at.parse().ok()?, text)))
            // An empty line has only a time.
            .or_else(|| Some((line.parse().ok()?, "")));
        match stamped {
            Some((at, text)) => Self {
                at: Some(at),
                text: text.to_owned(),
            },
            None => Self {
                at: None,
                text: line.to_owned(),
            },
        }
    }
}

/// The position in the log of one pod. It prevents that a line is shown twice when the log is read again.
#[derive(Clone, Debug, Default)]
struct LogPosition {
    last: Option<Timestamp>,
    /// Number of shown lines with exactly this time.
    at_last: usize,
    /// Number of shown lines without a time.
    plain: usize,
}

impl LogPosition {
    /// Whether the line is new. A new line counts as shown. `before` is the position before this pass over the log, less the lines
    /// of that time that came again.
    fn admits(&mut self, before: &mut Self, line: &LogLine) -> bool {
        let Some(at) = line.at else {
            if before.plain > 0 {
                before.plain -= 1;
                return false;
            }
            self.plain += 1;
            return true;
        };
        if let Some(from) = before.last {
            if at < from {
                return false;
            }
            if at == from && before.at_last > 0 {
                before.at_last -= 1;
                return false;
            }
        }
        if self.last == Some(at) {
            self.at_last += 1;
        } else {
            self.last = Some(at);
            self.at_last = 1;
        }
        true
    }
}

impl Cluster {
    /// Streams the log of the executor of this Job. With `follow`, it continues until the run is over, and with the
    /// replacement if a pod failed before the step was started.
    pub fn logs(
        &self,
        name: &str,
        follow: bool,
    ) -> impl Stream<Item = Result<LogLine, ClusterError>> + Send + use<> {
        let (lines, reader) = mpsc::channel(AHEAD);
        let (cluster, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            let end = tokio::select! {
                () = lines.closed() => return,
                end = cluster.pump(&name, follow, &lines) => end,
            };
            if let Err(error) = end {
                // The reader has closed its end.
                let _ = lines.send(Err(error)).await;
            }
        });
        stream::unfold(reader, |mut reader| async move {
            reader.recv().await.map(|line| (line, reader))
        })
    }

    async fn pump(
        &self,
        name: &str,
        follow: bool,
        lines: &mpsc::Sender<Result<LogLine, ClusterError>>,
    ) -> Result<(), ClusterError> {
        let uid = self.job(name).await?.metadata.uid;
        let mut changes = std::pin::pin!(self.changes_of(name));
        let mut shown: Option<(String, LogPosition)> = None;
        loop {
            // The order matters: a pod that is read after its Job was over has no later lines.
            let job = self.find_job(name).await?;
            let Some(job) = job.filter(|job| job.metadata.uid == uid) else {
                // The Job and its pods are gone.
                return Ok(());
            };
            let over = terminal(&job).is_some();
            let pods = self.pods_of(&job).await?;
            if let Some(pod) = newest(&pods).filter(|pod| has_begun(pod)) {
                let pod_name = pod.metadata.name.clone().unwrap_or_default();
                let mut position = match shown.take() {
                    Some((of, position)) if of == pod_name => position,
                    _ => LogPosition::default(),
                };
                let ended = has_ended(pod);
                self.read(&pod_name, follow && !ended, &mut position, lines)
                    .await?;
                shown = Some((pod_name, position));
            }
            if over || !follow {
                return Ok(());
            }
            changes.next().await;
            // One look handles all changes since the last one.
            while changes.next().now_or_never().flatten().is_some() {}
        }
    }

    /// Writes the rest of the run log from the executor's container in this pod into a file, and returns its size. The
    /// executor's own messages are left out. The size is 0 if no line is such a message: another make of executor may
    /// print text that is not in its run log, or that contains secrets.
    pub async fn save_log(&self, pod: &str, into: &Path) -> Result<u64, SaveError> {
        let saved = tokio::time::timeout(SAVE_TIMEOUT, self.receive_log(pod, into)).await;
        saved.unwrap_or(Err(SaveError::Late))
    }

    async fn receive_log(&self, pod: &str, into: &Path) -> Result<u64, SaveError> {
        let mut file = BufWriter::new(File::create(into).await?);
        let params = LogParams {
            container: Some(EXECUTOR.to_owned()),
            limit_bytes: Some(SAVED_BYTES),
            ..LogParams::default()
        };
        let pods = self.pods();
        let log = self
            .request_with_retries("read the log of the run", || pods.log_stream(pod, &params))
            .await?;
        let mut log = std::pin::pin!(log);
        let (mut line, mut size) = (Vec::new(), 0);
        let (mut at_start, mut is_ours) = (true, false);
        loop {
            line.clear();
            let mut piece = log.as_mut().take(OWN_BYTES);
            if piece.read_until(b'\n', &mut line).await? == 0 {
                break;
            }
            let own = at_start && is_own_message(&line);
            at_start = line.ends_with(b"\n");
            if own {
                is_ours = true;
            } else {
                file.write_all(&line).await?;
                size += line.len() as u64;
            }
        }
        file.flush().await?;
        Ok(if is_ours { size } else { 0 })
    }

    /// Sends a signal when the Job or one of its pods appears, changes or disappears. A broken watch is restarted with
    /// growing pauses. It sends a signal too, because the next look then shows the error.
    fn changes_of(&self, name: &str) -> impl Stream<Item = ()> + Send + use<> {
        let job = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let pods = watcher::Config::default().labels(&format!("{}={name}", labels::JOB_NAME));
        stream::select(
            touches(watcher(self.jobs(), job)),
            touches(watcher(self.pods(), pods)),
        )
    }

    async fn read(
        &self,
        pod: &str,
        follow: bool,
        position: &mut LogPosition,
        lines: &mpsc::Sender<Result<LogLine, ClusterError>>,
    ) -> Result<(), ClusterError> {
        let mut before = position.clone();
        let pods = self.pods();
        let params = LogParams {
            container: Some(EXECUTOR.to_owned()),
            follow,
            timestamps: true,
            since_time: position.last,
            ..LogParams::default()
        };
        let log = match self
            .request_with_retries("read the log of the run", || pods.log_stream(pod, &params))
            .await
        {
            Ok(log) => log,
            // The pod is gone or does not exist yet. Its Job shows what follows.
            Err(error) if error.is_not_found() => return Ok(()),
            Err(ClusterError::Refused { code: 400, .. }) if follow => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut log = std::pin::pin!(log.lines());
        // A broken connection ends this pass, like the end of the log. The next pass continues here.
        while let Some(Ok(line)) = log.next().await {
            let line = LogLine::parse(&line);
            if position.admits(&mut before, &line) && lines.send(Ok(line)).await.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

fn has_ended(pod: &Pod) -> bool {
    executor_state(pod).is_some_and(|state| state.terminated.is_some())
}

fn touches<K>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
) -> impl Stream<Item = ()> + Send
where
    K: Clone + fmt::Debug + Send + Sync,
{
    events.default_backoff().filter_map(|event| {
        let nothing = matches!(event, Ok(watcher::Event::Init | watcher::Event::InitDone));
        futures_util::future::ready((!nothing).then_some(()))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::Response;

    use super::*;
    use crate::fake_server::Server;

    fn show(position: &mut LogPosition, text: &str) -> Vec<String> {
        let mut before = position.clone();
        text.lines()
            .map(LogLine::parse)
            .filter(|line| position.admits(&mut before, line))
            .map(|line| line.text)
            .collect()
    }

    /// A cluster in which the container of the pod `run-a` has ended, and has printed this.
    fn cluster_with(log: Vec<u8>) -> Cluster {
        let log = Arc::new(log);
        Server::start().faulty(move |line, _| {
            assert!(line.ends_with("/pods/run-a/log"), "{line}");
            Some(Response::new(log.to_vec().into()))
        })
    }

    const OWN: &str =
        r#"{"timestamp":"t","level":"INFO","message":"executor","target":"executor"}"#;

    /// A piece of such a line is no message of the executor, whatever it looks like.
    #[tokio::test]
    async fn a_line_that_is_not_held_whole_is_saved_whole() {
        let folder = tempfile::tempdir().unwrap();
        let saved = folder.path().join("saved");
        let piece = usize::try_from(OWN_BYTES).unwrap();
        for first in ["{", "x"] {
            let mut long = first.repeat(2 * piece);
            long.push_str(OWN);
            let expected = format!("before\n{long}\nbehind\nhalf a line");
            let printed = format!("{OWN}\nbefore\n{long}\n{OWN}\nbehind\nhalf a line");
            let cluster = cluster_with(printed.into_bytes());
            let size = cluster.save_log("run-a", &saved).await.unwrap();
            assert!(std::fs::read_to_string(&saved).unwrap() == expected);
            assert_eq!(size, expected.len() as u64);
        }
        // Of an executor of another make it is not known what it printed.
        let cluster = cluster_with(b"before\nbehind\n".to_vec());
        assert_eq!(cluster.save_log("run-a", &saved).await.unwrap(), 0);
    }

    #[test]
    fn a_second_reading_shows_only_what_is_new() {
        let mut position = LogPosition::default();
        let first = "2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z two\n2026-01-01T00:00:02Z two";
        assert_eq!(show(&mut position, first), ["one", "two", "two"]);
        // The server rounds the time down, so that older lines come again.
        let second = "2026-01-01T00:00:01Z one\n2026-01-01T00:00:02Z two\n2026-01-01T00:00:02Z two\n\
                      2026-01-01T00:00:02Z two\n2026-01-01T00:00:03Z ";
        assert_eq!(show(&mut position, second), ["two", ""]);
        assert!(show(&mut position, "2026-01-01T00:00:03Z ").is_empty());
    }

    #[test]
    fn lines_without_a_time_are_counted() {
        let mut position = LogPosition::default();
        assert_eq!(show(&mut position, "a b\nc"), ["a b", "c"]);
        assert_eq!(show(&mut position, "a b\nc\nd"), ["d"]);
    }
}
