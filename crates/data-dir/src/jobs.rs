//! Job ids: increasing integers, never handed out twice, whatever crashes in between.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use super::{DataError, create_private, lock};

/// The last id handed out is on disk before it is used. A record of that number that came from a job document
/// is stepped over.
pub(super) fn allocate(folder: &Path, records: &Path) -> Result<i32, DataError> {
    let _lock = lock::wait(&folder.join("job-id.lock"))?;
    let path = folder.join("job-id");
    let last = match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().unwrap_or_else(|_| highest(records)),
        Err(_) => highest(records),
    };
    let mut next: i32 = last;
    loop {
        next = next.checked_add(1).ok_or_else(|| DataError::NoJobIdLeft {
            path: folder.to_owned(),
        })?;
        if !records.join(format!("{next}.json")).exists() {
            break;
        }
    }
    store(&path, next)?;
    Ok(next)
}

/// Where to continue if the counter is missing or unreadable.
fn highest(records: &Path) -> i32 {
    let names = fs::read_dir(records).into_iter().flatten().flatten();
    names
        .filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_suffix(".json")?.parse().ok()
        })
        .fold(0, i32::max)
}

fn store(path: &Path, id: i32) -> Result<(), DataError> {
    let folder = path.parent().expect("the counter lies in a folder");
    create_private(folder)?;
    let write = || {
        let mut draft = tempfile::NamedTempFile::new_in(folder)?;
        write!(draft, "{id}")?;
        draft.as_file().sync_all()?;
        draft.persist(path)?;
        Ok(())
    };
    write().map_err(DataError::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::thread;

    #[test]
    fn concurrent_launchers_get_different_ids() {
        let temp = tempfile::tempdir().unwrap();
        let (folder, records) = (temp.path().join("l"), temp.path().join("r"));
        let ids: BTreeSet<i32> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..10)
                            .map(|_| allocate(&folder, &records).unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(ids, (1..=40).collect());
    }

    #[test]
    fn ids_of_documents_and_lost_counters_are_stepped_over() {
        let temp = tempfile::tempdir().unwrap();
        let (folder, records) = (temp.path().join("l"), temp.path().join("r"));
        fs::create_dir(&records).unwrap();
        assert_eq!(allocate(&folder, &records).unwrap(), 1);
        fs::write(records.join("2.json"), "{}").unwrap();
        assert_eq!(allocate(&folder, &records).unwrap(), 3);
        fs::write(records.join("41.json"), "{}").unwrap();
        fs::write(folder.join("job-id"), "torn").unwrap();
        assert_eq!(allocate(&folder, &records).unwrap(), 42);
    }

    #[test]
    fn the_last_id_is_not_followed_by_a_negative_one() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("l");
        store(&folder.join("job-id"), i32::MAX).unwrap();
        assert!(matches!(
            allocate(&folder, temp.path()),
            Err(DataError::NoJobIdLeft { .. })
        ));
    }
}
