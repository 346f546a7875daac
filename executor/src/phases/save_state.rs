//! Saves the state after an apply or a destroy, whatever became of it (contract 6.4): what the tool could not store is
//! rescued, a copy, its rendering and a history record are published, and a lock the tool died with is given back.
//! State never goes to the log.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use artifact_store::{BackendSettings, StoreError, hex};
use bytes::Bytes;
use job_contract::chain;
use job_contract::keys::ObjectKey;
use job_contract::report::{ApplyProgress, LockStanding, StateLock, StateStanding};
use md5::{Digest as _, Md5};
use platform::History;
use runtime::private_file::private_folder;
use runtime::regular_file;
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tracing::warn;
use uuid::Uuid;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::StepError;
use crate::phases::release_lock;
use crate::terraform::lock_error::Tenure;
use crate::terraform::progress::Progress;
use crate::terraform::raw_state::RawState;
use crate::terraform::structured::addresses;
use crate::terraform::{ErroredState, MAX_DOCUMENT_BYTES, Terraform};
use crate::workspace::write_private_file;

/// The tool's last resort when it could not store the state.
const ERRORED_STATE: &str = "errored.tfstate";
/// How long a place for such a state is looked for: a store that is away for minutes may come back.
const RESCUE: Duration = Duration::from_mins(10);
/// The same once a copy of it is kept: with the old state in its place, the next run makes things a second time.
const RESCUE_OF_KEPT: Duration = Duration::from_mins(2);
/// The first pause between two attempts; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What an apply or a destroy left.
#[derive(Debug)]
pub(crate) struct Left {
    pub(crate) success: bool,
    pub(crate) progress: Progress,
    /// Of a tool that may have left its lock.
    pub(crate) tenure: Option<Tenure>,
    /// When `errored.tfstate` was written, if there was one before: it may be part of the content.
    pub(crate) errored_before: Option<SystemTime>,
    /// The state the tool printed because it could not write that file.
    pub(crate) said: Option<Bytes>,
}

impl Left {
    /// The state the tool could not store. What it printed is all of it, which the file need not be then.
    fn errored(&self, working_dir: &Path) -> Option<ErroredState> {
        if let Some(state) = &self.said {
            return Some(ErroredState::Said(state.clone()));
        }
        let written = errored_at(working_dir)?;
        (self.errored_before != Some(written))
            .then(|| ErroredState::File(working_dir.join(ERRORED_STATE)))
    }
}

/// When the tool's last resort was written, if it is there.
pub(crate) fn errored_at(working_dir: &Path) -> Option<SystemTime> {
    let file = fs::metadata(working_dir.join(ERRORED_STATE)).ok()?;
    file.is_file().then(|| file.modified().ok())?
}

/// What became of the state.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) published: Option<Published>,
    /// Why the copy of a state that is stored is missing.
    pub(crate) missing: Option<StepError>,
    pub(crate) standing: Option<StateStanding>,
    pub(crate) lock: Option<StateLock>,
    /// The standing as part of a sentence, where there is one.
    pub(crate) words: Option<String>,
    pub(crate) hint: Option<String>,
}

/// A published state.
#[derive(Debug)]
pub(crate) struct Published {
    /// The raw state, as far as it is understood.
    pub(crate) raw: Option<RawState>,
    /// The state for machines.
    pub(crate) json: Option<Value>,
    /// What the platform is to record of it.
    pub(crate) history: Option<History>,
}

/// Why no copy of the state is published.
#[derive(Debug)]
enum PublishError {
    /// The state could not be read back, so that nothing is known of it.
    Unread(StepError),
    /// The state is there, and the artifact store did not take the copy.
    NotCopied(StepError),
}

/// Saves what state there is. The lock is given back last: until then nobody else writes what is being read.
pub(crate) async fn save(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    left: &Left,
) -> Saved {
    let rescued = rescue(run, terraform, env, left).await;
    let published = publish(run, terraform, env).await;
    let (rescued, lock) = match rescued {
        Some(rescued) => (Some(rescued.fate), rescued.lock),
        None => (None, None),
    };
    let lock = match (lock, &left.tenure) {
        (None, Some(tenure)) => release_lock::release(run, terraform, env, tenure).await,
        (lock, _) => lock,
    };
    let fate = rescued.or_else(|| fate(left, &published));
    let (published, missing) = match published {
        Ok(published) => (published, None),
        Err(PublishError::Unread(error) | PublishError::NotCopied(error)) => (None, Some(error)),
    };
    let (standing, words, hint) = match fate {
        Some(Fate {
            standing,
            words,
            hint,
        }) => (Some(standing), Some(words), hint),
        None => (None, None, None),
    };
    Saved {
        published,
        missing,
        standing,
        lock,
        words,
        hint,
    }
}

/// What became of a state, for report and reader.
#[derive(Debug)]
struct Fate {
    standing: StateStanding,
    words: String,
    hint: Option<String>,
}

/// The fate of a state the tool stored itself. `None` where there was nothing to store.
fn fate(left: &Left, published: &Result<Option<Published>, PublishError>) -> Option<Fate> {
    let of = |standing, words: String, hint| {
        Some(Fate {
            standing,
            words,
            hint,
        })
    };
    // A tool that is killed may not have stored its last changes yet.
    let lost = match published {
        Ok(Some(Published {
            json: Some(json), ..
        })) if left.tenure.is_some() && !left.success => {
            let known: HashSet<&str> = addresses(json);
            left.progress
                .missing_from(|address| known.contains(address))
        }
        Ok(None) if !left.success => left.progress.missing_from(|_| false),
        _ => Vec::new(),
    };
    if !lost.is_empty() {
        let mut named = lost[..lost.len().min(ApplyProgress::MAX_ADDRESSES)].join(", ");
        if lost.len() > ApplyProgress::MAX_ADDRESSES {
            named.push_str(", \u{2026}");
        }
        return of(
            StateStanding::Unknown,
            format!("the state does not hold what was made last: {named}"),
            Some("import what the state does not hold, or it is made a second time".into()),
        );
    }
    match published {
        Ok(Some(_)) => of(StateStanding::Stored, "the state is stored".into(), None),
        // It would not have succeeded otherwise.
        _ if left.success => of(StateStanding::Stored, "the state is stored".into(), None),
        Err(PublishError::NotCopied(error)) => of(
            StateStanding::Stored,
            format!(
                "the state is stored, but no copy of it is published: {}",
                error
            ),
            error.hint(),
        ),
        _ if !left.progress.has_begun() => None,
        Ok(None) => of(
            StateStanding::Unknown,
            "there is no state of it".into(),
            None,
        ),
        Err(PublishError::Unread(error)) => of(
            StateStanding::Unknown,
            format!("whether the state is stored is not known: {}", error),
            error.hint(),
        ),
    }
}

/// Publishes copies; `None` when there is no state.
async fn publish(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<Option<Published>, PublishError> {
    let (json, raw) = tokio::join!(
        terraform.show_state_json(env),
        raw_state(run, terraform, env)
    );
    let Some(raw) = raw.map_err(PublishError::Unread)? else {
        return Ok(None);
    };
    let (job, name) = (&run.job, Uuid::new_v4().to_string());
    let key = ObjectKey::state_raw(&job.organization_id, &job.workspace_id, &name);
    run.stored(run.store.put(&key, raw.clone()))
        .await
        .map_err(PublishError::NotCopied)?;
    let parsed = RawState::parse(&raw);
    let Some(text) = json.map_err(|error| PublishError::Unread(error.into()))? else {
        warn!("the tool could not render the state as JSON; only the raw state is stored");
        return Ok(Some(Published {
            raw: parsed,
            json: None,
            history: None,
        }));
    };
    let key = ObjectKey::state_json(&job.organization_id, &job.workspace_id, &name);
    let text = Bytes::from(text);
    let stored = run
        .stored(run.store.put(&key, text.clone()))
        .await
        .map_err(PublishError::NotCopied)?;
    let history = History {
        output: run
            .connections
            .platform
            .state_output(&run.step, &name, stored),
        job_reference: job.job_id.clone(),
        serial: parsed.as_ref().map_or(0, |state| state.serial),
        md5: hex(&Md5::digest(&raw)),
        lineage: parsed
            .as_ref()
            .map(|state| state.lineage.clone())
            .unwrap_or_default(),
    };
    Ok(Some(Published {
        raw: parsed,
        json: serde_json::from_slice(&text).ok(),
        history: Some(history),
    }))
}

/// The local backend's file is read as it is, which works even when the tool does not. Any other backend is asked
/// through the tool, and so is the local one for a CLI workspace other than the default, whose state is elsewhere.
async fn raw_state(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
) -> Result<Option<Bytes>, StepError> {
    let is_default = env
        .get("TF_WORKSPACE")
        .is_none_or(|workspace| workspace == "default");
    let backend = run
        .store
        .backend(&run.job.organization_id, &run.job.workspace_id);
    let state = match backend {
        BackendSettings::Local { path } if is_default => {
            match regular_file::read(&path, MAX_DOCUMENT_BYTES as u64) {
                Ok(state) => Some(state),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                Err(source) => {
                    return Err(StepError::working_dir(&path, source));
                }
            }
        }
        // What a failed `state pull` prints is no state (W-40).
        _ => {
            let state = terraform.state_pull(env).await?;
            Some(state.ok_or_else(|| {
                StepError::infrastructure(
                    "the state could not be read back from where the tool keeps it",
                )
            })?)
        }
    };
    Ok(state.filter(|state| !state.is_empty()).map(Bytes::from))
}

/// A state the tool could not store, and what became of it.
struct Rescued {
    fate: Fate,
    lock: Option<StateLock>,
}

/// Pushes a state the tool could not store, and keeps a copy in the store should that fail again. A copy is no state:
/// pushing is not given up as long as there is time. `None` when there is no such state.
async fn rescue(
    run: &RunContext<'_>,
    terraform: &Terraform<'_>,
    env: &ChildEnv,
    left: &Left,
) -> Option<Rescued> {
    let errored = left.errored(terraform.working_dir)?;
    let log = run.log.writer();
    log.line(match errored {
        ErroredState::File(_) => {
            "The tool could not store the state and left it in errored.tfstate: storing it now."
        }
        ErroredState::Said(_) => {
            "The tool could neither store the state nor write it to disk: storing it now."
        }
    })
    .await;
    let (begun, mut pause, mut first, mut lock) = (Instant::now(), FIRST_PAUSE, true, None);
    let mut kept: Option<Result<String, StoreError>> = None;
    let fate = loop {
        let met = match terraform.state_push(env, &errored).await {
            Ok(said) if said.ok => {
                log.line("The state is stored.").await;
                break Fate {
                    standing: StateStanding::Rescued,
                    words: "the state was rescued and is stored".into(),
                    hint: None,
                };
            }
            Ok(said) => {
                if first {
                    let mut log = run.log.writer();
                    log.write(&said.words).await;
                    log.close().await;
                }
                said.lock()
            }
            Err(error) => {
                warn!(error = chain(&error), "the state could not be pushed");
                None
            }
        };
        if !matches!(kept, Some(Ok(_))) {
            let deadline = run.while_saving(RESCUE.saturating_sub(begun.elapsed()));
            kept = tokio::select! {
                biased;
                done = keep(run, &errored) => Some(done),
                () = deadline.over() => kept,
            };
            if let Some(Ok(kept)) = &kept {
                let text = format!("The state is kept in {kept}. Trying on to store it.");
                log.line(&text).await;
            } else if first {
                log.line("The state could neither be stored nor kept: trying again.")
                    .await;
            }
        }
        first = false;
        // Only now that there are two of it.
        if let (Some(met), None) = (met, &lock) {
            let met = match &left.tenure {
                Some(tenure) => release_lock::settle(run, terraform, env, tenure, met).await,
                None => met,
            };
            let released = met.standing == LockStanding::Released;
            lock = Some(met);
            if released {
                continue;
            }
        }
        // What is kept leaves time to publish what there is.
        let (limit, until) = match &kept {
            Some(Ok(_)) => (RESCUE_OF_KEPT, run.budget.push),
            _ => (RESCUE, run.budget.saving),
        };
        let deadline = run
            .stop
            .deadline(limit.saturating_sub(begun.elapsed()), until);
        tokio::select! {
            biased;
            () = deadline.over() => break match kept {
                Some(Ok(kept)) => Fate {
                    standing: StateStanding::Kept,
                    words: format!("the state could not be stored and is kept in {kept}"),
                    hint: Some(push_advice(run, &kept)),
                },
                kept => lay_aside(run, &errored, kept),
            },
            () = sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
        }
    };
    if fate.standing != StateStanding::Rescued {
        let text = format!(
            "{}. Push it with `state push` before the next run.",
            capitalised(&fate.words)
        );
        log.line(&run.palette().failure(&text)).await;
    }
    Some(Rescued { fate, lock })
}

fn push_advice(run: &RunContext<'_>, from: &str) -> String {
    let tool = run.job.tool().binary();
    format!("store the state that is in {from} with `{tool} state push` before the next run")
}

async fn keep(run: &RunContext<'_>, errored: &ErroredState) -> Result<String, StoreError> {
    let job = &run.job;
    let name = format!("errored-{}-{}", job.job_id, job.step_id);
    let key = ObjectKey::state_raw(&job.organization_id, &job.workspace_id, &name);
    match errored {
        ErroredState::File(file) => run.store.put_file(&key, file).await,
        ErroredState::Said(state) => run.store.put(&key, state.clone()).await,
    }
}

/// The very last resort: with the data that lasts, since whoever started this process removes the work folder with it; there
/// if it must be. In a pod either lasts as long as the pod.
fn lay_aside(
    run: &RunContext<'_>,
    errored: &ErroredState,
    kept: Option<Result<String, StoreError>>,
) -> Fate {
    let job = &run.job;
    let name = format!("errored-{}-{}.tfstate", job.job_id, job.step_id);
    let lay = |folder: &Path| {
        private_folder(folder)?;
        let aside = folder.join(&name);
        match errored {
            ErroredState::File(file) => {
                let state = regular_file::read(file, MAX_DOCUMENT_BYTES as u64)?;
                write_private_file(&aside, &state)?;
            }
            ErroredState::Said(state) => write_private_file(&aside, state)?,
        }
        Ok::<_, io::Error>(aside)
    };
    let lasting = run.folders.data.join("errored");
    let (place, advice) = match lay(&lasting).or_else(|_| lay(&run.folders.work)) {
        Ok(aside) => {
            let aside = aside.display().to_string();
            (
                format!(" and lies in {aside}"),
                Some(push_advice(run, &aside)),
            )
        }
        Err(error) => {
            warn!(%error, "the state could not be laid aside");
            (String::new(), None)
        }
    };
    let error = kept.and_then(Result::err).map(StepError::from);
    let reason = error
        .as_ref()
        .map(|error| format!(": {}", error))
        .unwrap_or_default();
    Fate {
        standing: StateStanding::Unknown,
        words: format!("the state could neither be stored nor kept{place}{reason}"),
        hint: advice.or_else(|| error.and_then(|error| error.hint())),
    }
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_uppercase().chain(chars).collect())
        .unwrap_or_default()
}
