//! Rescues a state that the tool could not store itself. It compares the state with the stored one, pushes it, and keeps a copy in
//! the artifact store. If both fail, it keeps the state in the data directory.
//!
//! It knows nothing of other work with states.

mod push;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use artifact_store::BackendSettings;
use backon::{BackoffBuilder as _, ExponentialBuilder};
use bytes::Bytes;
use job_contract::kept_state::KeptState;
use job_contract::keys::ObjectKey;
use job_contract::report::{LockStatus, StateLock, StateStatus};
use runtime::Deadline;
use tokio::time::{Instant, sleep};
use tracing::warn;

use self::push::Push;
use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::{StepError, catch_panic};
use crate::kept_states::{
    Note, keep_on_disk, note_on_disk, path_on_disk, remove_from_disk, separate,
};
use crate::phases::find_kept_state::{list_state, remedy, unlist_state};
use crate::phases::release_lock;
use crate::phases::stored_state::{SUMMARY_TIMEOUT, Stored};
use crate::terraform::lock_error::EndedTool;
use crate::terraform::progress::Progress;
use crate::terraform::state_summary::StateSummary;
use crate::terraform::{ErroredState, Terraform};

/// The file that the tool writes if it cannot store the state.
const ERRORED_STATE: &str = "errored.tfstate";
/// How long the rescue retries if only the disk has a copy. A store may be unreachable for minutes. Without any copy, only a stop
/// order ends it.
const RESCUE_TIMEOUT: Duration = Duration::from_mins(10);
/// How long it retries once a copy is kept. Retries matter still: with the old state in the backend, the next run would
/// create the resources a second time.
const RESCUE_TIMEOUT_WITH_COPY: Duration = Duration::from_mins(2);
/// How long it goes on after a stop order if a person waits for its end, and the next run finds a copy.
const RESCUE_TIMEOUT_WITH_PERSON: Duration = Duration::from_secs(10);
/// The first pause between two attempts; each later one doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Where a state is, for the report and for people.
#[derive(Debug)]
pub(crate) struct StateOutcome {
    pub(crate) status: StateStatus,
    /// The status as a part of a sentence.
    pub(crate) sentence: String,
    pub(crate) hint: Option<String>,
}

/// When the tool wrote `errored.tfstate`, if the file exists.
pub(crate) fn errored_state_time(working_dir: &Path) -> Option<SystemTime> {
    let file = fs::metadata(working_dir.join(ERRORED_STATE)).ok()?;
    file.is_file().then(|| file.modified().ok())?
}

/// The state that the tool could not store. `before` is the time of an older file with this name, which may belong to
/// the content. A printed state wins, because it is complete, and the file may not be.
pub(crate) fn find_errored_state(
    working_dir: &Path,
    before: Option<SystemTime>,
    printed: Option<&Bytes>,
) -> Option<ErroredState> {
    if let Some(state) = printed {
        return Some(ErroredState::Printed(state.clone()));
    }
    let written = errored_state_time(working_dir)?;
    (before != Some(written)).then(|| ErroredState::File(working_dir.join(ERRORED_STATE)))
}

/// The rescue of one state.
#[derive(Debug)]
pub(crate) struct Rescue<'r, 'c> {
    pub(crate) run: &'r RunContext<'c>,
    pub(crate) terraform: &'r Terraform<'r>,
    pub(crate) env: &'r ChildEnv,
    /// The tool's process, if it may have left its lock.
    pub(crate) tool: Option<&'r EndedTool>,
    /// What the operation has done.
    pub(crate) changes: &'r Progress,
    /// What the store had before the operation.
    pub(crate) before: &'r Stored<StateSummary>,
    pub(crate) errored: ErroredState,
}

/// The progress of a rescue.
#[derive(Debug)]
struct RescueProgress {
    started: Instant,
    is_first: bool,
    /// What the state has; `None` if it is not a whole one.
    summary: Option<StateSummary>,
    /// Why the state may not be whole.
    doubt: Option<String>,
    /// The digest of the stored state that the run had read, or has stored since.
    follows: Option<String>,
    /// Where the artifact store keeps a copy, or why there is none.
    kept: Option<Result<String, StepError>>,
    /// A copy in the data directory, until the artifact store has one.
    on_disk: Option<PathBuf>,
    /// Why only a person can decide whether the state is stored.
    refused: Option<String>,
    lock: Option<StateLock>,
}

impl RescueProgress {
    fn new(follows: Option<String>) -> Self {
        Self {
            started: Instant::now(),
            is_first: true,
            summary: None,
            doubt: None,
            follows,
            kept: None,
            on_disk: None,
            refused: None,
            lock: None,
        }
    }

    fn is_kept(&self) -> bool {
        matches!(self.kept, Some(Ok(_)))
    }

    /// Whether the next run finds a copy. If the state is not on this machine, that run may be on another one.
    fn is_found(&self, is_local: bool) -> bool {
        self.is_kept() || (is_local && self.on_disk.is_some())
    }

    /// How long an attempt may read the stored state. Only the first one delays the copy, so later ones read a large state too.
    fn reading_time(&self) -> Duration {
        if self.is_first {
            return SUMMARY_TIMEOUT;
        }
        let passed = if self.is_kept() {
            self.started.elapsed()
        } else {
            Duration::ZERO
        };
        let left = RESCUE_TIMEOUT_WITH_COPY.saturating_sub(passed);
        left.max(SUMMARY_TIMEOUT)
    }

    /// What is noted about a copy.
    fn note(&self) -> KeptState {
        KeptState {
            follows: self.follows.clone(),
            is_whole: self.summary.is_some() && self.doubt.is_none(),
        }
    }

    /// The state is in a store.
    fn remove_from_disk(&mut self) {
        if let Some(path) = self.on_disk.take() {
            remove_from_disk(&path);
        }
    }
}

impl Rescue<'_, '_> {
    /// Pushes the state until it is stored or time is up. Pushing continues after a copy is kept, because a copy does
    /// not replace the state. Also returns the lock that blocked a push.
    pub(crate) async fn run(self) -> (StateOutcome, Option<StateLock>) {
        self.log(match self.errored {
            ErroredState::File(_) => {
                "The tool could not store the state and left it in errored.tfstate: storing it now."
            }
            ErroredState::Printed(_) => {
                "The tool could neither store the state nor write it to disk: storing what it printed, which is not in this log."
            }
        })
        .await;
        let follows = self.before.known().map(|before| before.sha256.clone());
        let mut progress = RescueProgress::new(follows);
        self.set_rescuing(true);
        let rescuing = async { Ok(self.push_until_stored(&mut progress).await) };
        let outcome = match catch_panic(rescuing).await {
            Ok(outcome) => outcome,
            Err(panicked) => self.give_up(&mut progress, Some(&panicked)),
        };
        self.set_rescuing(false);
        if outcome.status != StateStatus::Rescued {
            let texts = [Some(&outcome.sentence), outcome.hint.as_ref()];
            for text in texts.into_iter().flatten() {
                let text = format!("{}.", capitalised(text));
                self.run.log_failure(&text).await;
            }
        }
        (outcome, progress.lock)
    }

    fn set_rescuing(&self, is_rescuing: bool) {
        if let Some(server) = &self.run.state_server {
            server.set_rescuing(is_rescuing);
        }
    }

    async fn push_until_stored(&self, progress: &mut RescueProgress) -> StateOutcome {
        progress.summary = self.errored.summary();
        progress.doubt = self.doubt(progress.summary.as_ref());
        // A second name of the tool's file takes no room, and stays if the executor is killed.
        if matches!(self.errored, ErroredState::File(_)) {
            self.keep_on_disk(progress);
        }
        let mut pauses = ExponentialBuilder::default()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(LONGEST_PAUSE)
            .without_max_times()
            .build();
        loop {
            // A push would be refused by the lock that the tool, or an earlier push, left at the hub.
            release_lock::release_lock_at_hub(self.run).await;
            let deadline = self.deadline(progress, Duration::MAX);
            let pushed = tokio::select! {
                biased;
                pushed = self.push(progress) => pushed,
                () = deadline.over() => Push::Failed(None),
            };
            let (lock, refused) = match pushed {
                Push::Stored => {
                    progress.remove_from_disk();
                    self.unlist(progress).await;
                    self.log("The state is stored.").await;
                    return StateOutcome {
                        status: StateStatus::Rescued,
                        sentence: "the state was rescued and is stored".into(),
                        hint: None,
                    };
                }
                Push::Failed(lock) => (lock, None),
                Push::Refused(why) => (None, Some(why)),
            };
            progress.refused = refused;
            if !progress.is_kept() {
                self.keep_copy(progress).await;
            }
            if progress.is_kept() && progress.refused.is_some() {
                return self.give_up(progress, None);
            }
            progress.is_first = false;
            // The lock is released only after a copy is kept.
            if self.release_lock(lock, progress).await {
                continue;
            }
            let pause = pauses.next().unwrap_or(LONGEST_PAUSE);
            tokio::select! {
                biased;
                () = self.time_is_up(progress) => return self.give_up(progress, None),
                () = sleep(pause) => {}
            }
        }
    }

    async fn keep_copy(&self, progress: &mut RescueProgress) {
        if progress.on_disk.is_none() {
            self.keep_on_disk(progress);
        }
        let deadline = self.deadline(progress, RESCUE_TIMEOUT);
        let kept = tokio::select! {
            biased;
            kept = self.store_copy(progress) => Some(kept),
            () = deadline.over() => None,
        };
        progress.kept = kept.or(progress.kept.take());
        if let Some(Ok(kept)) = &progress.kept {
            let mut text = format!("The state is kept in {kept}.");
            if progress.refused.is_none() {
                text.push_str(" The executor tries again to store it.");
            }
            self.log(&text).await;
            progress.remove_from_disk();
        } else if progress.is_first {
            let place = match &progress.on_disk {
                Some(path) => format!("Until then, it is in {}.", path.display()),
                None => "Until then, only the executor has it, in its memory.".to_owned(),
            };
            let text = format!("The state could neither be stored nor kept: trying again. {place}");
            self.log(&text).await;
        }
    }

    /// Runs may plan again. An attempt to keep a copy may have listed it.
    async fn unlist(&self, progress: &RescueProgress) {
        if progress.is_first {
            return;
        }
        if let Err(error) = self.run.stored(unlist_state(self.run)).await {
            let remedy = remedy(self.run, false);
            let text = format!("The state may still be listed as kept ({error}): {remedy}.");
            self.run.log_failure(&text).await;
        }
    }

    /// The copy in the artifact store.
    fn key(&self) -> ObjectKey {
        let job = &self.run.job;
        ObjectKey::errored_state(
            &job.organization_id,
            &job.workspace_id,
            &job.job_id,
            &job.step_id,
        )
    }

    /// Lists the copy first. If the executor is killed in between, the list blocks runs all the same.
    async fn store_copy(&self, progress: &RescueProgress) -> Result<String, StepError> {
        let (key, store) = (self.key(), &self.run.store);
        let listed = list_state(self.run, progress.note()).await;
        let kept = match &self.errored {
            ErroredState::File(file) => store.put_file(&key, file).await?,
            ErroredState::Printed(state) => store.put(&key, state.clone()).await?,
        };
        match listed {
            Ok(()) => Ok(kept),
            Err(error) => {
                let text = format!("a copy is in {kept}, but it could not be listed");
                Err(StepError::infrastructure(text).because(&error))
            }
        }
    }

    /// Releases the first blocking lock if it was the tool's own. Returns whether it did.
    async fn release_lock(&self, lock: Option<StateLock>, progress: &mut RescueProgress) -> bool {
        let (Some(lock), None) = (lock, &progress.lock) else {
            return false;
        };
        let lock = match self.tool {
            Some(tool) => {
                release_lock::release_own_lock(self.run, self.terraform, self.env, tool, lock).await
            }
            None => lock,
        };
        let is_released = lock.status == LockStatus::Released;
        progress.lock = Some(lock);
        is_released
    }

    /// The deadline of a part of the rescue that may last `limit` without a stop order. With a copy, it ends earlier after an order, so
    /// that there is time to publish. Outside of pods and without a hub, a person waits.
    fn deadline(&self, progress: &RescueProgress, limit: Duration) -> Deadline {
        let run = self.run;
        let until = if progress.is_kept() {
            run.budget.push
        } else {
            run.budget.saving
        };
        let is_local = matches!(run.backend, BackendSettings::Local { .. });
        let is_found = progress.is_found(is_local);
        if !is_found || run.config.is_in_pod() || run.store.hub().is_some() {
            return run.stop.deadline(limit, until);
        }
        // The order may have come before the rescue.
        let started = run.stop.given().map_or(Duration::ZERO, |order| {
            progress.started.saturating_duration_since(order.at)
        });
        let with_person = started + RESCUE_TIMEOUT_WITH_PERSON;
        run.stop.deadline(limit, until.min(with_person))
    }

    async fn time_is_up(&self, progress: &RescueProgress) {
        let limit = if progress.is_kept() {
            RESCUE_TIMEOUT_WITH_COPY
        } else if progress.on_disk.is_some() {
            RESCUE_TIMEOUT
        } else {
            Duration::MAX
        };
        let limit = limit.saturating_sub(progress.started.elapsed());
        self.deadline(progress, limit).over().await;
    }

    /// Says where the state is. After a panic too, the work folder is removed.
    fn give_up(&self, progress: &mut RescueProgress, panicked: Option<&StepError>) -> StateOutcome {
        let kept = match progress.kept.take() {
            Some(Ok(kept)) => kept,
            Some(Err(error)) => return self.name_copy(progress, panicked.or(Some(&error))),
            None => return self.name_copy(progress, panicked),
        };
        let sentence = match &progress.refused {
            Some(why) => format!("the state is not stored, because {why}, and is kept in {kept}"),
            None => format!("the state could not be stored and is kept in {kept}"),
        };
        StateOutcome {
            status: StateStatus::Kept,
            sentence,
            hint: Some(remedy(self.run, false)),
        }
    }

    /// What is noted about a copy on disk. `state store` may have the settings of another store.
    fn note_on_disk(&self, progress: &RescueProgress) -> Note {
        let store = self.run.store.served();
        Note {
            state: progress.note(),
            reference: store.map(|store| store.reference(&self.key())),
        }
    }

    /// Keeps a copy in the data directory, because the launcher removes the work folder after the run.
    fn keep_on_disk(&self, progress: &mut RescueProgress) {
        let path = path_on_disk(&self.run.folders.data, &self.run.job);
        match keep_on_disk(&self.errored, &path) {
            Ok(()) => {
                note_on_disk(&path, &self.note_on_disk(progress));
                progress.on_disk = Some(path);
            }
            Err(error) => warn!(%error, "the disk has no copy of the state"),
        }
    }

    /// Names the copy on disk. If the data directory has none, it uses the work folder. In a pod both last as long as the pod.
    fn name_copy(&self, progress: &mut RescueProgress, error: Option<&StepError>) -> StateOutcome {
        match &progress.on_disk {
            // What is known has changed since.
            Some(path) => note_on_disk(path, &self.note_on_disk(progress)),
            None => self.keep_on_disk(progress),
        }
        let (location, hint) = if let Some(path) = &progress.on_disk {
            let hint = if self.is_lost_with_pod() {
                self.push_hint(path)
            } else {
                remedy(self.run, true)
            };
            (format!(" and is in {}", path.display()), Some(hint))
        } else {
            let path = path_on_disk(&self.run.folders.work, &self.run.job);
            match keep_on_disk(&self.errored, &path) {
                Ok(()) => {
                    let place = format!(" and is in {}", path.display());
                    (place, Some(self.push_hint(&path)))
                }
                Err(_) => (", and no copy of it is left".to_owned(), None),
            }
        };
        // The rescue is over, so nothing needs its file any more.
        separate(&self.errored);
        let reason = error.map(|error| format!(": {error}")).unwrap_or_default();
        StateOutcome {
            status: StateStatus::Unknown,
            sentence: format!("the state could neither be stored nor kept{location}{reason}"),
            hint: hint.or_else(|| error.and_then(StepError::hint)),
        }
    }

    /// Whether no other run finds the data directory.
    fn is_lost_with_pod(&self) -> bool {
        let is_local = matches!(self.run.backend, BackendSettings::Local { .. });
        self.run.config.is_in_pod() && !is_local
    }

    /// How a person can store a state that no other run finds.
    fn push_hint(&self, path: &Path) -> String {
        let (tool, path) = (self.run.job.tool().binary(), path.display());
        format!(
            "store the state that is in {path} before the next run: with `{tool} state push`, or in the place of the stored one if it \
             is encrypted"
        )
    }

    async fn log(&self, text: &str) {
        self.run.log.writer().line(text).await;
    }
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_uppercase().chain(chars).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_copy_on_disk_is_found_only_where_the_state_is_on_disk_too() {
        let mut progress = RescueProgress::new(None);
        assert!(!progress.is_found(true));
        progress.on_disk = Some(PathBuf::from("errored-1-s.tfstate"));
        assert!(progress.is_found(true) && !progress.is_found(false));
        progress.kept = Some(Ok("s3".to_owned()));
        assert!(progress.is_found(false));
    }

    #[tokio::test(start_paused = true)]
    async fn later_attempts_may_read_the_stored_state_as_long_as_the_rescue_lasts() {
        let mut progress = RescueProgress::new(None);
        assert_eq!(progress.reading_time(), SUMMARY_TIMEOUT);
        progress.is_first = false;
        assert_eq!(progress.reading_time(), RESCUE_TIMEOUT_WITH_COPY);
        progress.kept = Some(Ok("s3".to_owned()));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(progress.reading_time(), Duration::from_secs(100));
    }
}
