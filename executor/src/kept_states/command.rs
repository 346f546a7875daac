//! What `api-launcher state` does: it shows, stores or drops the kept states of a workspace.
//!
//! It needs no tool. It takes the lock that the tool's own backend takes, if the store has one.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use artifact_store::{
    Condition, RequestTiming, ServedStore, StoreError, StoreSettings, UNREADABLE_LIST, Upload,
    WorkspaceState,
};
use bytes::Bytes;
use job_contract::Exit;
use job_contract::encoding::hex;
use job_contract::kept_state::KeptState;
use job_contract::keys::ObjectKey;
use runtime::regular_file;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::{Note, note_of, states_on_disk};
use crate::error::StepError;
use crate::terraform::raw_state::MAX_DOCUMENT_BYTES;
use crate::terraform::state_summary::{StateSummary, with_serial};

/// The largest state.
const LARGEST: u64 = MAX_DOCUMENT_BYTES as u64;
/// How much of a digest tells states apart in names.
const DIGEST_BYTES: usize = 8;
/// The extension of a copy on disk that somebody has dropped.
const DROPPED: &str = "dropped";
/// The extension of a copy on disk that is stored.
const STORED: &str = "stored";

/// A workspace, and where its states are.
#[derive(Clone, Copy, Debug)]
pub struct Workspace<'w> {
    pub organization: &'w str,
    pub workspace: &'w str,
    pub data_dir: &'w Path,
    pub store: &'w StoreSettings,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    List,
    Store {
        /// Also over a state that the run has not read, or one that has more.
        force: bool,
    },
    /// Lets runs plan again without it.
    Drop,
}

/// Does it with the kept state of this name, or the only one. Returns the text that says so.
pub fn run(
    workspace: Workspace<'_>,
    name: Option<&str>,
    action: Action,
) -> Result<String, StepError> {
    // A second installation fails, and the first stays in force.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| StepError::infrastructure("could not start").because(&error))?;
    runtime.block_on(async {
        let store = ServedStore::open(workspace.store, &RequestTiming::default())?;
        let keeper = Keeper {
            of: workspace,
            store,
        };
        match action {
            Action::List => keeper.list().await,
            Action::Store { force } => keeper.store(name, force).await,
            Action::Drop => keeper.discard(name).await,
        }
    })
}

/// A kept state.
struct Kept {
    name: String,
    note: Note,
    /// `None`: it is in the artifact store.
    file: Option<PathBuf>,
    /// Whether the artifact store lists it. If it has no object, its run was killed before it had stored one.
    is_listed: bool,
}

impl Kept {
    fn in_store(name: String, state: KeptState, is_listed: bool) -> Self {
        let reference = None;
        Self {
            name,
            note: Note { state, reference },
            file: None,
            is_listed,
        }
    }
}

struct Keeper<'w> {
    of: Workspace<'w>,
    store: ServedStore,
}

impl Keeper<'_> {
    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::state_raw(self.of.organization, self.of.workspace, name)
    }

    fn place(&self, kept: &Kept) -> String {
        match &kept.file {
            Some(path) => path.display().to_string(),
            None => self.store.reference(&self.key(&kept.name)),
        }
    }

    async fn find(&self) -> Result<Vec<Kept>, StepError> {
        let (organization, workspace) = (self.of.organization, self.of.workspace);
        let listed = self.store.kept_states(organization, workspace).await?;
        let listed = listed.states.into_iter();
        let mut found: Vec<_> = listed
            .map(|(name, state)| Kept::in_store(name, state, true))
            .collect();
        for path in states_on_disk(self.of.data_dir, organization, workspace)? {
            let name = path.file_stem().unwrap_or_default();
            let name = name.to_string_lossy().into_owned();
            match found.iter_mut().find(|kept| kept.name == name) {
                Some(kept) => kept.file = Some(path),
                None => found.push(Kept {
                    name,
                    note: note_of(&path),
                    file: Some(path),
                    is_listed: false,
                }),
            }
        }
        Ok(found)
    }

    async fn list(&self) -> Result<String, StepError> {
        let line = |kept: &Kept| format!("{}  {}\n", kept.name, self.place(kept));
        Ok(self.find().await?.iter().map(line).collect())
    }

    /// The kept state of this name, or the only one.
    async fn choose(&self, name: Option<&str>) -> Result<Kept, StepError> {
        let mut found = self.find().await?;
        found.retain(|kept| name.is_none_or(|name| kept.name == name));
        if found.len() > 1 && name.is_none() {
            let text = "several states are kept: choose one of `state list` with `--name`";
            return Err(unusable(text));
        }
        if let Some(first) = found.into_iter().next() {
            return Ok(first);
        }
        // The store may have refused to list what it has.
        if let Some(name) = name.filter(|name| !name.contains('/'))
            && self.store.read(&self.key(name)).await?.is_some()
        {
            return Ok(Kept::in_store(name.to_owned(), KeptState::default(), false));
        }
        Err(unusable("no such state of this workspace is kept"))
    }

    async fn content(&self, kept: &Kept) -> Result<Bytes, StepError> {
        let place = self.place(kept);
        if let Some(path) = &kept.file {
            let read = regular_file::read_unlinked(path, LARGEST).map(Bytes::from);
            let text = format!("could not read `{place}`");
            return read.map_err(|error| unusable(text).because(&error));
        }
        let found = self.store.read(&self.key(&kept.name)).await?;
        let found = found.ok_or_else(|| {
            unusable(format!("`{place}` does not exist")).with_hint(
                "its run ended before it had stored the copy, and may have left one in its data directory: give that with `--data-dir`",
            )
        })?;
        Ok(found.collect(&place, LARGEST).await?)
    }

    async fn store(&self, name: Option<&str>, force: bool) -> Result<String, StepError> {
        let kept = self.choose(name).await?;
        let content = self.content(&kept).await?;
        let state = self.store.state(self.of.organization, self.of.workspace);
        let id = Uuid::new_v4().to_string();
        let lock = lock_info(&id, &kept.name);
        // A service that ignores conditions would replace the lock of somebody else.
        let is_held = state.lock_info().await?.is_some();
        if is_held || !state.lock(lock.clone()).await? {
            let holder = state.lock_info().await?;
            // The answer to the first request may have been lost.
            if holder.as_ref() != Some(&lock) {
                return Err(locked(holder.as_deref()));
            }
        }
        let replaced = self
            .replace(&state, &kept, content.clone(), &id, force)
            .await;
        let unlocked = if state.unlocks_on_condition() {
            state.unlock(&lock).await
        } else {
            state.unlock_once(&lock, SystemTime::now()).await
        };
        let unlocked = unlocked.map_err(|error| left_lock(&id, &error));
        let serial = match (replaced, &unlocked) {
            (Err(error), Err(left)) => return Err(error.because(left)),
            (replaced, _) => replaced?,
        };
        let settled = self.settle_stored(&kept, &content).await;
        unlocked.and(settled)?;
        Ok(format!(
            "The kept state is stored with serial {serial}. Runs plan and apply again. Its copy stays.\n"
        ))
    }

    /// Puts a kept state in the place of the stored one, under its lock. Returns its serial.
    async fn replace(
        &self,
        state: &WorkspaceState,
        kept: &Kept,
        content: Bytes,
        lock: &str,
        force: bool,
    ) -> Result<u64, StepError> {
        let no_state = || unusable(format!("`{}` is not a whole state", self.place(kept)));
        let own = StateSummary::read(&content[..]).ok_or_else(no_state)?;
        let found = state.open().await?;
        let condition = Condition::unchanged(found.as_ref());
        let before = match found.filter(|found| found.size_bytes > 0) {
            Some(found) => Some(found.collect("the stored state", LARGEST).await?),
            None => None,
        };
        let stored = before
            .as_ref()
            .and_then(|text| StateSummary::read(&text[..]));
        // An earlier attempt may have stored it, and was killed before it took it from the list.
        if let (Some(before), Some(stored)) = (&before, &stored) {
            let counted = with_serial(&content, stored.serial);
            if *before == content || counted.is_some_and(|counted| counted[..] == before[..]) {
                return Ok(stored.serial);
            }
        }
        let decided = match (&before, &stored) {
            (Some(_), None) => Err("the stored state is not a whole state".to_owned()),
            (None, _) if self.may_be_elsewhere(kept) => {
                Err("nothing is stored here, and its run may have had another store: check the settings of the store".to_owned())
            }
            _ => decide(&own, stored.as_ref(), &kept.note.state),
        };
        let serial = match (decided, &stored) {
            (Ok(serial), _) => serial,
            (Err(why), _) if !force => return Err(needs_force(&why)),
            (Err(_), Some(stored)) if !own.is_encrypted => own.serial.max(stored.serial + 1),
            (Err(_), _) => own.serial,
        };
        let content = if serial == own.serial {
            content
        } else {
            with_serial(&content, serial).ok_or_else(no_state)?.into()
        };
        if let Some(before) = before.filter(|_| force) {
            self.put_aside(kept, before).await?;
        }
        state
            .put(Upload::of(content), Some(lock), &condition)
            .await?;
        Ok(serial)
    }

    /// Keeps what a kept state replaces. Its name has its digest, so what was put aside earlier stays.
    async fn put_aside(&self, kept: &Kept, before: Bytes) -> Result<(), StepError> {
        let digest = hex(&Sha256::digest(&before)[..DIGEST_BYTES]);
        let key = self.key(&format!("replaced-by-{}-{digest}", kept.name));
        let aside = Upload::of(before);
        match self.store.put(&key, aside, &Condition::Absent).await {
            // The same content is there.
            Err(StoreError::Changed { .. }) => Ok(()),
            put => Ok(put?),
        }
    }

    /// Whether a copy on disk may be of a run with another store. A full disk may have taken no note of its store.
    fn may_be_elsewhere(&self, kept: &Kept) -> bool {
        let here = self.store.reference(&self.key(&kept.name));
        let is_only_on_disk = kept.file.is_some() && !kept.is_listed;
        is_only_on_disk && kept.note.reference.as_ref() != Some(&here)
    }

    async fn discard(&self, name: Option<&str>) -> Result<String, StepError> {
        let (organization, workspace) = (self.of.organization, self.of.workspace);
        let is_list = name.is_none_or(|name| name == UNREADABLE_LIST);
        // Without a list, nothing else can be found.
        if is_list
            && self
                .store
                .drop_unreadable_list(organization, workspace)
                .await?
        {
            return Ok(
                "The list of kept states could not be read, and is replaced by an empty one. The old one is kept beside it.\n"
                    .to_owned(),
            );
        }
        let kept = self.choose(name).await?;
        self.settle(&kept, false).await?;
        Ok("The kept state is dropped. Runs plan and apply again. Its copy stays.\n".to_owned())
    }

    /// Lets runs plan again, unless its run still rescues its state, and has kept a later one under the same name meanwhile.
    async fn settle_stored(&self, kept: &Kept, stored: &Bytes) -> Result<(), StepError> {
        if self.content(kept).await? == *stored {
            return self.settle(kept, true).await;
        }
        let text = "its run has kept a later state meanwhile, which is not stored";
        Err(unusable(text).with_hint("wait until the run has ended, and store that one too"))
    }

    /// Lets runs plan again.
    async fn settle(&self, kept: &Kept, is_stored: bool) -> Result<(), StepError> {
        // Without its file, another attempt would not find a state that only the list has.
        if kept.is_listed {
            let (organization, workspace) = (self.of.organization, self.of.workspace);
            let settling = self
                .store
                .change_kept_states(organization, workspace, |list| {
                    list.states.remove(&kept.name);
                });
            settling.await?;
        }
        if let Some(path) = &kept.file {
            let extension = if is_stored { STORED } else { DROPPED };
            fs::rename(path, path.with_extension(extension))
                .map_err(|error| StepError::work_folder("could not rename", path, &error))?;
        }
        Ok(())
    }
}

/// The serial with which a kept state may be stored. The error says why only a person can decide that.
fn decide(
    own: &StateSummary,
    stored: Option<&StateSummary>,
    kept: &KeptState,
) -> Result<u64, String> {
    if stored.is_none() && kept.follows.is_some() {
        return Err(
            "the state that its run had read is not in this store: check the settings of the store"
                .to_owned(),
        );
    }
    if let Some(stored) = stored.filter(|_| !kept.is_whole && !own.is_encrypted) {
        let lacking = own.forgotten(stored, |_| false);
        if !lacking.is_empty() {
            let lacking = lacking.join(", ");
            return Err(format!(
                "it lacks resources of the stored state, which its run may not have destroyed: {lacking}"
            ));
        }
    }
    let decided = own.follow(stored, kept.follows.as_deref(), |_| false);
    decided.map_err(str::to_owned)
}

/// The error of a state that somebody has locked. `info` is the description of the lock.
fn locked(info: Option<&[u8]>) -> StepError {
    let info: Value = info
        .and_then(|info| serde_json::from_slice(info).ok())
        .unwrap_or_default();
    let field = |name: &str| info[name].as_str().map(|text| text.escape_debug());
    let (lock, release) = match (field("ID"), field("Who"), field("Operation")) {
        (Some(id), Some(who), Some(operation)) => (
            format!(" by {who} (`{operation}`) with the lock `{id}`"),
            format!("force-unlock {id}"),
        ),
        _ => (String::new(), "force-unlock".to_owned()),
    };
    let text = format!("the state is locked{lock}, so a run of the workspace may be in progress");
    unusable(text).with_hint(format!(
        "wait until the run has ended; if it has left its lock, release it with `{release}` of the tool"
    ))
}

fn left_lock(id: &str, error: &StoreError) -> StepError {
    let text = format!("the lock `{id}` of this command may have stayed on the state");
    let release = format!("release it with `force-unlock {id}` of the tool");
    let hint = match error {
        // By then, no service does a late request any more: it would remove the lock of a run that has begun meanwhile.
        StoreError::Uncertain { .. } => {
            format!(
                "wait 20 minutes, because the store may still remove it; if it is there then, {release}"
            )
        }
        _ => release,
    };
    StepError::infrastructure(text)
        .because(error)
        .with_hint(hint)
}

/// What the tool writes into its locks.
fn lock_info(id: &str, name: &str) -> Bytes {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let created = humantime::format_rfc3339_nanos(SystemTime::now());
    let info = json!({
        "ID": id,
        "Operation": "state store",
        "Info": format!("stores the kept state {name}"),
        "Who": format!("mayfly@{}", host.to_string_lossy()),
        "Version": env!("CARGO_PKG_VERSION"),
        "Created": created.to_string(),
        "Path": "",
    });
    Bytes::from(info.to_string())
}

fn unusable(text: impl Into<String>) -> StepError {
    StepError::new(Exit::BadConfiguration, text)
}

fn needs_force(why: &str) -> StepError {
    unusable(format!("the kept state is not stored: {why}")).with_hint(
        "compare the two; `--force` keeps the stored state beside it, and puts the kept one in its place",
    )
}

#[cfg(test)]
mod tests {
    use job_contract::keys::{errored_file, local_backend_state};
    use rstest::rstest;

    use super::super::{NOTE, keep_on_disk, note_on_disk};
    use super::*;
    use crate::terraform::ErroredState;

    /// A workspace whose run had read serial 7, and has left a state with the same serial on disk.
    struct Fixture {
        folder: tempfile::TempDir,
        settings: StoreSettings,
    }

    fn state(serial: u64, names: &[&str]) -> String {
        let resources: Vec<Value> = names
            .iter()
            .map(|name| {
                json!({"mode": "managed", "type": "t", "name": name, "instances": [{"attributes": {"id": name}}]})
            })
            .collect();
        json!({"version": 4, "serial": serial, "lineage": "l", "resources": resources}).to_string()
    }

    impl Fixture {
        fn new(kept: &[&str], is_whole: bool) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let data_dir = folder.path().to_owned();
            let read = state(7, &["a"]);
            let note = Note {
                state: KeptState {
                    follows: StateSummary::read(read.as_bytes()).map(|read| read.sha256),
                    is_whole,
                },
                reference: None,
            };
            let copy = data_dir.join(errored_file("o", "w", "1", "s"));
            let errored = ErroredState::Printed(state(7, kept).into());
            keep_on_disk(&errored, &copy).unwrap();
            note_on_disk(&copy, &note);
            let settings = StoreSettings::Local { data_dir };
            let fixture = Self { folder, settings };
            fixture.write(&read);
            fixture
        }

        fn run(&self, action: Action) -> Result<String, StepError> {
            self.run_with(None, action)
        }

        fn run_with(&self, name: Option<&str>, action: Action) -> Result<String, StepError> {
            run(self.workspace(), name, action)
        }

        fn workspace(&self) -> Workspace<'_> {
            Workspace {
                organization: "o",
                workspace: "w",
                data_dir: self.folder.path(),
                store: &self.settings,
            }
        }

        fn keeper(&self) -> Keeper<'_> {
            Keeper {
                of: self.workspace(),
                store: ServedStore::open(&self.settings, &RequestTiming::default()).unwrap(),
            }
        }

        fn write(&self, state: &str) {
            let path = self.folder.path().join(local_backend_state("o", "w"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, state).unwrap();
        }

        fn read(&self, path: impl AsRef<Path>) -> Value {
            let text = fs::read(self.folder.path().join(path)).unwrap();
            serde_json::from_slice(&text).unwrap()
        }

        fn stored(&self) -> Value {
            self.read(local_backend_state("o", "w"))
        }

        /// What was replaced.
        fn aside(&self) -> Vec<String> {
            let folder = ObjectKey::state_raw("o", "w", "x").path;
            let folder = self.folder.path().join("local/state").join(folder);
            let files = fs::read_dir(folder.parent().unwrap()).unwrap();
            let paths = files.map(|file| file.unwrap().path());
            paths
                .map(|path| fs::read_to_string(path).unwrap())
                .collect()
        }

        fn kept(&self) -> usize {
            self.run(Action::List).unwrap().lines().count()
        }
    }

    const STORE: Action = Action::Store { force: false };
    const FORCE: Action = Action::Store { force: true };

    #[test]
    fn a_kept_state_follows_the_one_that_its_run_had_read() {
        let fixture = Fixture::new(&["a", "b"], true);
        fixture.run(STORE).unwrap();
        assert_eq!(fixture.stored()["serial"], 8);
        assert_eq!(fixture.stored()["resources"][1]["name"], "b");
        assert_eq!(fixture.kept(), 0);
        let copy = fixture.read("errored/o/w/errored-1-s.stored");
        assert_eq!(copy["serial"], 7);
        let error = fixture.run(STORE).unwrap_err();
        assert_eq!(error.to_string(), "no such state of this workspace is kept");
    }

    #[test]
    fn a_list_that_cannot_be_read_is_dropped_before_a_state() {
        let fixture = Fixture::new(&["a"], true);
        let list = ObjectKey::kept_states("o", "w").path;
        let list = fixture.folder.path().join("local/state").join(list);
        fs::create_dir_all(list.parent().unwrap()).unwrap();
        fs::write(&list, "{").unwrap();
        let error = fixture.run(Action::List).unwrap_err();
        assert!(error.hint().unwrap().contains("`state drop`"), "{error}");
        let said = fixture.run(Action::Drop).unwrap();
        assert!(said.contains("replaced by an empty one"), "{said}");
        assert_eq!((fixture.kept(), fixture.aside()), (1, vec!["{".to_owned()]));
        fixture.run(Action::Drop).unwrap();
        assert_eq!(fixture.kept(), 0);
    }

    /// Its run had another store, so these settings are not those of the run.
    #[rstest]
    #[case::with_what_the_run_had_read(true)]
    #[case::with_nothing(false)]
    fn a_state_of_another_store_is_not_stored_where_nothing_is(#[case] had_read: bool) {
        let fixture = Fixture::new(&["a", "b"], true);
        fs::remove_file(fixture.folder.path().join(local_backend_state("o", "w"))).unwrap();
        if !had_read {
            let copy = fixture.folder.path().join(errored_file("o", "w", "1", "s"));
            let note = Note {
                state: KeptState {
                    follows: None,
                    is_whole: true,
                },
                reference: Some("https://bucket.example.com/tfstate/o/w".to_owned()),
            };
            note_on_disk(&copy, &note);
        }
        let error = fixture.run(STORE).unwrap_err().to_string();
        assert!(error.contains("check the settings of the store"), "{error}");
        assert_eq!(fixture.kept(), 1);
    }

    /// The disk was full, so it may have taken the copy alone.
    #[test]
    fn a_copy_without_a_note_is_not_stored_where_nothing_is() {
        let fixture = Fixture::new(&["a", "b"], true);
        let copy = fixture.folder.path().join(errored_file("o", "w", "1", "s"));
        fs::remove_file(copy.with_extension(NOTE)).unwrap();
        fs::remove_file(fixture.folder.path().join(local_backend_state("o", "w"))).unwrap();
        let error = fixture.run(STORE).unwrap_err().to_string();
        assert!(error.contains("check the settings of the store"), "{error}");
        assert_eq!(fixture.kept(), 1);
        fixture.run(FORCE).unwrap();
        assert_eq!(
            (fixture.stored()["serial"].as_u64(), fixture.kept()),
            (Some(7), 0)
        );
    }

    #[rstest]
    #[case::over_another_one(true, Some(state(9, &["a", "c"])), 10)]
    #[case::that_may_be_a_part(false, None, 8)]
    #[case::over_a_part(true, Some("{".to_owned()), 7)]
    fn only_a_person_stores_a_state(
        #[case] is_whole: bool,
        #[case] stored: Option<String>,
        #[case] serial: u64,
    ) {
        let fixture = Fixture::new(&["b"], is_whole);
        let before = stored.unwrap_or_else(|| state(7, &["a"]));
        fixture.write(&before);
        let error = fixture.run(STORE).unwrap_err();
        assert!(error.hint().unwrap().contains("--force"), "{error}");
        assert_eq!(fixture.kept(), 1);
        fixture.run(FORCE).unwrap();
        assert_eq!(fixture.stored()["serial"], serial);
        assert_eq!((fixture.aside(), fixture.kept()), (vec![before], 0));
    }

    /// The first attempt may have been killed before it took the state from the list.
    #[test]
    fn what_was_replaced_stays_after_another_attempt() {
        let fixture = Fixture::new(&["b"], true);
        let copy = fixture.folder.path().join(errored_file("o", "w", "1", "s"));
        let before = state(7, &["a", "c"]);
        fixture.write(&before);
        for _ in 0..2 {
            fixture.run(FORCE).unwrap();
            fs::rename(copy.with_extension(STORED), &copy).unwrap();
        }
        let aside = fixture.aside();
        assert!(aside.contains(&before), "{aside:?}");
    }

    /// Otherwise a person would force it, also over what runs have stored since.
    #[test]
    fn a_state_that_an_earlier_attempt_has_stored_needs_no_force() {
        let fixture = Fixture::new(&["a", "b"], true);
        let copy = fixture.folder.path().join(errored_file("o", "w", "1", "s"));
        fixture.run(STORE).unwrap();
        fs::rename(copy.with_extension(STORED), &copy).unwrap();
        let said = fixture.run(STORE).unwrap();
        assert!(said.contains("with serial 8"), "{said}");
        assert_eq!(
            (fixture.stored()["serial"].as_u64(), fixture.kept()),
            (Some(8), 0)
        );
    }

    /// Its run was killed before it had stored the copy that it had listed.
    #[tokio::test]
    async fn a_listed_state_without_an_object_is_taken_from_the_disk() {
        let fixture = Fixture::new(&["a", "b"], true);
        let copy = fixture.folder.path().join(errored_file("o", "w", "1", "s"));
        let state = note_of(&copy).state;
        let store = ServedStore::open(&fixture.settings, &RequestTiming::default()).unwrap();
        let listing = store.change_kept_states("o", "w", |list| {
            list.states.insert("errored-1-s".to_owned(), state.clone());
        });
        listing.await.unwrap();
        let fixture = tokio::task::spawn_blocking(move || {
            assert_eq!(fixture.kept(), 1);
            fixture.run(STORE).unwrap();
            fixture
        });
        let fixture = fixture.await.unwrap();
        assert_eq!(fixture.stored()["resources"][1]["name"], "b");
        let left = store.kept_states("o", "w").await.unwrap();
        assert!(left.states.is_empty(), "{left:?}");
    }

    #[tokio::test]
    async fn a_later_state_under_the_same_name_stays_kept() {
        let fixture = Fixture::new(&["a", "b"], true);
        let keeper = fixture.keeper();
        let kept = keeper.choose(None).await.unwrap();
        let content = keeper.content(&kept).await.unwrap();
        let later = ErroredState::Printed(state(7, &["a", "b", "c"]).into());
        keep_on_disk(&later, kept.file.as_ref().unwrap()).unwrap();
        let error = keeper.settle_stored(&kept, &content).await.unwrap_err();
        assert!(error.to_string().contains("a later state"), "{error}");
        assert_eq!(keeper.find().await.unwrap().len(), 1);
        let content = keeper.content(&kept).await.unwrap();
        keeper.settle_stored(&kept, &content).await.unwrap();
        assert_eq!(keeper.find().await.unwrap().len(), 0);
    }

    /// The store fails when the state is taken from the list.
    #[tokio::test]
    async fn a_copy_keeps_its_name_while_it_is_listed() {
        let fixture = Fixture::new(&["a", "b"], true);
        let keeper = fixture.keeper();
        let mut kept = keeper.choose(None).await.unwrap();
        kept.is_listed = true;
        let broken = Upload::of(Bytes::from_static(b"{"));
        let list = ObjectKey::kept_states("o", "w");
        let breaking = keeper.store.put(&list, broken, &Condition::Any);
        breaking.await.unwrap();
        keeper.settle(&kept, true).await.unwrap_err();
        assert!(kept.file.unwrap().exists());
    }

    #[test]
    fn a_state_that_is_not_listed_is_stored_by_its_name() {
        let fixture = Fixture::new(&["a"], true);
        let key = ObjectKey::state_raw("o", "w", "errored-2-s").path;
        let path = fixture.folder.path().join("local/state").join(key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, state(7, &["a", "c"])).unwrap();
        fixture.run_with(Some("errored-2-s"), FORCE).unwrap();
        assert_eq!(fixture.stored()["resources"][1]["name"], "c");
        let error = fixture.run_with(Some("errored-3-s"), STORE).unwrap_err();
        assert_eq!(error.to_string(), "no such state of this workspace is kept");
    }

    #[test]
    fn a_lock_is_named_with_its_holder() {
        let error = locked(Some(&lock_info("id-1", "errored-1-s")));
        let text = error.to_string();
        assert!(text.contains("by mayfly@"), "{text}");
        assert!(
            text.contains("(`state store`) with the lock `id-1`"),
            "{text}"
        );
        assert!(error.hint().unwrap().contains("`force-unlock id-1`"));
        let text = locked(Some(b"?")).to_string();
        assert!(text.starts_with("the state is locked, so"), "{text}");
    }

    /// If it is released, the late request removes the lock of the next run.
    #[test]
    fn a_lock_that_may_be_removed_late_is_not_released_at_once() {
        let object = "b/o.tflock".to_owned();
        let hint = |error: &StoreError| left_lock("id-1", error).hint().unwrap();
        let uncertain = hint(&StoreError::Uncertain {
            object: object.clone(),
        });
        assert!(uncertain.starts_with("wait 20 minutes"), "{uncertain}");
        assert!(uncertain.contains("`force-unlock id-1`"), "{uncertain}");
        let certain = hint(&StoreError::Changed { object });
        assert!(certain.starts_with("release it"), "{certain}");
    }

    #[test]
    fn a_dropped_state_stays_beside() {
        let fixture = Fixture::new(&["a", "b"], true);
        fixture.run(Action::Drop).unwrap();
        assert_eq!(
            (fixture.stored()["serial"].as_u64(), fixture.kept()),
            (Some(7), 0)
        );
        let dropped = fixture.read("errored/o/w/errored-1-s.dropped");
        assert_eq!(dropped["resources"][1]["name"], "b");
    }
}
