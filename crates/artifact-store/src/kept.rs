//! The list of the states that are kept for a workspace and not stored. Runs look at it before they plan.

use bytes::Bytes;
use job_contract::chain;
use job_contract::kept_state::KeptStates;
use job_contract::keys::ObjectKey;
use serde::de::Error as _;

use crate::error::StoreError;
use crate::served::ServedStore;
use crate::transfer::{Condition, Upload};

/// The name of a list that cannot be read, where names of kept states are wanted. It holds runs back as those do.
pub const UNREADABLE_LIST: &str = "unreadable-list";
/// The largest list that is read.
const LARGEST: u64 = 1024 * 1024;
/// The largest one that is put aside, by a person and through memory.
const LARGEST_ASIDE: u64 = 512 * 1024 * 1024;
/// The longest name in it, in bytes.
const LONGEST_NAME: usize = 255;
/// How many names runs learn. One holds them back, and a hub sends the names in a document of limited size.
const NAMES: usize = 64;
/// How often a list is changed again that somebody else has changed meanwhile.
const ATTEMPTS: usize = 5;

impl ServedStore {
    /// The states that are kept for a workspace and not stored. [`StoreError::Refused`] says that this is not known: services answer
    /// so for an object that does not exist, if the credentials may not list objects.
    pub async fn kept_states(
        &self,
        organization: &str,
        workspace: &str,
    ) -> Result<KeptStates, StoreError> {
        let key = ObjectKey::kept_states(organization, workspace);
        self.list_at(&key).await.map(|(list, _)| list)
    }

    /// The first names of these states, for the runs of a hub. If the store refuses to say whether there are any, there are none:
    /// otherwise no run could begin at a hub with such credentials.
    pub async fn names_of_kept_states(
        &self,
        organization: &str,
        workspace: &str,
    ) -> Result<Vec<String>, StoreError> {
        match self.kept_states(organization, workspace).await {
            Err(error) if error.may_be_missing() => {
                tracing::warn!(
                    error = chain(&error),
                    hint = error.hint(),
                    workspace_id = workspace,
                    "whether a state of the workspace is kept is not known"
                );
                Ok(Vec::new())
            }
            kept => Ok(kept?.states.into_keys().take(NAMES).collect()),
        }
    }

    /// Changes the list of these states. The change is made again if somebody else has changed the list meanwhile. A list that cannot
    /// be read is never replaced.
    pub async fn change_kept_states(
        &self,
        organization: &str,
        workspace: &str,
        change: impl Fn(&mut KeptStates) + Send + Sync,
    ) -> Result<(), StoreError> {
        let key = ObjectKey::kept_states(organization, workspace);
        let mut earlier = None;
        for attempt in 1..=ATTEMPTS {
            let (before, condition, refusal) = match self.list_at(&key).await {
                // It may not exist. If it does, it stays.
                Err(refusal @ StoreError::Refused { .. }) => {
                    (KeptStates::default(), Condition::Absent, Some(refusal))
                }
                found => found.map(|(list, condition)| (list, condition, None))?,
            };
            let mut list = before.clone();
            change(&mut list);
            if list == before {
                return Ok(());
            }
            let text = serde_json::to_vec(&list).expect("names and digests are a document");
            let upload = Upload::of(text.into());
            // If nobody has changed it since the last attempt, the service compares in a way of its own.
            let is_same = attempt == ATTEMPTS && earlier.as_ref() == Some(&condition);
            let asked = if is_same { &Condition::Any } else { &condition };
            match self.put(&key, upload, asked).await {
                Err(StoreError::Changed { .. }) => {
                    if let Some(refusal) = refusal {
                        return Err(refusal);
                    }
                    earlier = Some(condition);
                }
                stored => return stored,
            }
        }
        let object = key.in_bucket();
        Err(StoreError::Changed { object })
    }

    /// Replaces a list that cannot be read by an empty one, and keeps it beside, with its digest in its name. `false` if it can
    /// be read, or if there is none.
    pub async fn drop_unreadable_list(
        &self,
        organization: &str,
        workspace: &str,
    ) -> Result<bool, StoreError> {
        let key = ObjectKey::kept_states(organization, workspace);
        let found = self.read(&key).await?;
        let condition = Condition::unchanged(found.as_ref());
        let Some(content) = found else {
            return Ok(false);
        };
        let is_too_large = content.size_bytes > LARGEST;
        let text = content.collect(&key.in_bucket(), LARGEST_ASIDE).await?;
        if !is_too_large && parse(&text).is_ok() {
            return Ok(false);
        }
        let aside = Upload::of(text);
        let name = format!("{UNREADABLE_LIST}-{}", aside.digest.sha256);
        let beside = ObjectKey::state_raw(organization, workspace, &name);
        self.put(&beside, aside, &Condition::Any).await?;
        let empty = Upload::of(Bytes::from_static(b"{}"));
        self.put(&key, empty, &condition).await.map(|()| true)
    }

    async fn list_at(&self, key: &ObjectKey) -> Result<(KeptStates, Condition), StoreError> {
        let found = self.read(key).await?;
        let condition = Condition::unchanged(found.as_ref());
        let Some(content) = found else {
            return Ok((KeptStates::default(), condition));
        };
        let unreadable = |source| StoreError::Unreadable {
            object: self.reference(key),
            source,
        };
        if content.size_bytes > LARGEST {
            return Err(unreadable(serde_json::Error::custom("it is too large")));
        }
        let text = content.collect(&key.in_bucket(), LARGEST).await?;
        let list = parse(&text).map_err(unreadable)?;
        Ok((list, condition))
    }
}

/// Reads a list. Names become parts of keys, paths and messages, so one that no run has is an error.
fn parse(text: &[u8]) -> serde_json::Result<KeptStates> {
    let list: KeptStates = serde_json::from_slice(text)?;
    let is_name = |name: &String| {
        let is_odd = |char: char| char == '/' || char.is_control();
        (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(is_odd)
    };
    if list.states.keys().all(is_name) {
        Ok(list)
    } else {
        Err(serde_json::Error::custom("it has a name that no state has"))
    }
}

#[cfg(test)]
mod tests {
    use job_contract::kept_state::KeptState;

    use super::*;
    use crate::Store;

    #[tokio::test]
    async fn concurrent_changes_of_a_list_are_all_made() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::local(folder.path());
        let served = store.served().unwrap();
        let add = |name: &'static str| {
            served.change_kept_states("o", "w", move |list| {
                list.states.insert(name.to_owned(), KeptState::default());
            })
        };
        let (one, two) = tokio::join!(add("errored-1-s"), add("errored-2-s"));
        one.and(two).unwrap();
        let names = store.kept_states("o", "w").await.unwrap();
        assert_eq!(names, ["errored-1-s", "errored-2-s"]);
        assert!(store.kept_states("o", "other").await.unwrap().is_empty());
        let removed = served.change_kept_states("o", "w", |list| list.states.clear());
        removed.await.unwrap();
        assert!(store.kept_states("o", "w").await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_list_that_is_too_large_is_named_and_replaced_too() {
        let folder = tempfile::tempdir().unwrap();
        let served = Store::local(folder.path()).served().unwrap().clone();
        let key = ObjectKey::kept_states("o", "w");
        let padding = usize::try_from(LARGEST).unwrap();
        let large = Upload::of(format!("{{}}{}", " ".repeat(padding)).into());
        served.put(&key, large, &Condition::Any).await.unwrap();
        let error = served.kept_states("o", "w").await.unwrap_err();
        assert!(matches!(error, StoreError::Unreadable { .. }), "{error}");
        assert!(served.drop_unreadable_list("o", "w").await.unwrap());
        let list = served.kept_states("o", "w").await.unwrap();
        assert_eq!(list, KeptStates::default());
    }

    /// Anybody who can write into the store may have written it.
    #[tokio::test]
    async fn a_list_with_odd_names_cannot_be_read_and_one_with_many_holds_runs_back() {
        let folder = tempfile::tempdir().unwrap();
        let served = Store::local(folder.path()).served().unwrap().clone();
        let write = async |names: &[String]| {
            let states = names
                .iter()
                .map(|name| (name.clone(), KeptState::default()));
            let list = KeptStates {
                states: states.collect(),
            };
            let text = serde_json::to_vec(&list).unwrap();
            let key = ObjectKey::kept_states("o", "w");
            let written = served.put(&key, Upload::of(text.into()), &Condition::Any);
            written.await.unwrap();
            served.names_of_kept_states("o", "w").await
        };
        for odd in ["", "../../../x", "a\nb", &"x".repeat(LONGEST_NAME + 1)] {
            let error = write(&[odd.to_owned()]).await.unwrap_err();
            assert!(matches!(error, StoreError::Unreadable { .. }), "{error}");
        }
        let many: Vec<_> = (0..5000).map(|job| format!("errored-{job}-s")).collect();
        let names = write(&many).await.unwrap();
        assert_eq!(names.len(), NAMES);
        assert!(names.iter().all(|name| many.contains(name)));
    }

    #[tokio::test]
    async fn a_list_that_cannot_be_read_is_named_and_replaced_only_on_purpose() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::local(folder.path());
        let served = store.served().unwrap();
        let key = ObjectKey::kept_states("o", "w");
        let broken = Upload::of(Bytes::from_static(b"{"));
        let sha256 = broken.digest.sha256.clone();
        served.put(&key, broken, &Condition::Any).await.unwrap();
        let refused = [
            store.kept_states("o", "w").await.unwrap_err(),
            served
                .change_kept_states("o", "w", |list| list.states.clear())
                .await
                .unwrap_err(),
        ];
        for error in refused {
            assert!(
                error.to_string().contains(&served.reference(&key)),
                "{error}"
            );
            assert!(error.hint().unwrap().contains("mend"), "{error}");
        }
        assert!(served.drop_unreadable_list("o", "w").await.unwrap());
        assert!(store.kept_states("o", "w").await.unwrap().is_empty());
        assert!(!served.drop_unreadable_list("o", "w").await.unwrap());
        let aside = ObjectKey::state_raw("o", "w", &format!("{UNREADABLE_LIST}-{sha256}"));
        assert_eq!(store.read(&aside).await.unwrap().unwrap(), "{");
    }
}
