use std::cell::Cell;
use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;

const HOUR: Duration = Duration::from_hours(1);

struct Fixture {
    folder: TempDir,
    store: ProviderStore,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = ProviderStore::new(folder.path().join("store"));
        Self { folder, store }
    }

    fn tmp(&self) -> PathBuf {
        self.store.root().join(TMP)
    }

    /// Files of a package, unpacked.
    fn unpack(&self, package: &Package, sha256: &str) -> io::Result<()> {
        self.store.publish_unpacked(package, sha256, H1, unpack)
    }

    fn file(&self, content: &str) -> (PathBuf, String) {
        let path = self.folder.path().join("archive");
        fs::write(&path, content).unwrap();
        let digest = sha256_of(&path).unwrap();
        (path, digest)
    }

    fn publish(&self, package: &Package, content: &str) -> String {
        let (path, sha256) = self.file(content);
        self.store.publish(package, &path, &sha256).unwrap();
        sha256
    }

    fn copy(&self, package: &Package, sha256: &str) -> Option<String> {
        let target = self.folder.path().join("copy");
        let is_there = self.store.copy(package, sha256, &target).unwrap();
        assert_eq!(is_there, target.exists());
        let content = is_there.then(|| fs::read_to_string(&target).unwrap());
        let _ = fs::remove_file(target);
        content
    }
}

fn archive_of(package: &Package, sha256: &str) -> Item {
    Item::Archive {
        package: package.clone(),
        sha256: sha256.to_owned(),
    }
}

fn unpacked_of(package: &Package, sha256: &str) -> Item {
    Item::Unpacked {
        package: package.clone(),
        sha256: sha256.to_owned(),
    }
}

const H1: &str = "h1:cuAYBzn6IKPHKJs3M/HcpkzTtSYaT+z1m6UlPiPEYmI=";

/// What an archive of these tests unpacks to.
#[expect(
    clippy::unnecessary_wraps,
    reason = "it stands for a function that can fail"
)]
fn h1_of(_: Archive) -> io::Result<String> {
    Ok(H1.to_owned())
}

fn unpack(files: &Path) -> io::Result<()> {
    fs::create_dir(files)?;
    fs::write(files.join("terraform-provider-x_v1.0.0"), "binary\n")?;
    fs::write(files.join("LICENSE.txt"), "hello\n")
}

thread_local! {
    static RENAMES_SEEM_TO_FAIL: Cell<bool> = const { Cell::new(false) };
}

/// A network volume that reports an error of a rename that it has done.
pub(super) fn tests_rename(renamed: io::Result<()>) -> io::Result<()> {
    if RENAMES_SEEM_TO_FAIL.get() {
        return Err(io::Error::other("no answer"));
    }
    renamed
}

fn package(version: &str) -> Package {
    Package::new("registry.example.test/acme/null", version, "linux_amd64").unwrap()
}

#[test]
fn a_file_longer_than_any_archive_is_not_copied_but_removed() {
    let fixture = Fixture::new();
    let package = package("1.0.0");
    let sha256 = fixture.publish(&package, "one");
    let path = fixture.store.path(&package, &sha256);
    fs::remove_file(&path).unwrap();
    let planted = File::create(&path).unwrap();
    planted.set_len(LARGEST_ARCHIVE + 1).unwrap();
    assert_eq!(fixture.copy(&package, &sha256), None);
    assert!(!path.exists());
}

#[test]
fn what_is_published_comes_back() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    assert_eq!(fixture.copy(&one, &"0".repeat(64)), None);
    let sha256 = fixture.publish(&one, "zip");
    fixture.publish(&one, "zip");
    assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
    assert_eq!(fixture.copy(&package("1.0.1"), &sha256), None);
    assert_eq!(fixture.store.digests(&one), std::slice::from_ref(&sha256));
    let listed = fixture.store.list().unwrap();
    assert_eq!(
        (listed.len(), &listed[0].item),
        (1, &archive_of(&one, &sha256))
    );
    assert!(fixture.store.verify(&listed[0], h1_of).unwrap());
    assert_eq!(fs::read_dir(fixture.tmp()).unwrap().count(), 0);
}

#[test]
fn names_lead_nowhere_else() {
    for address in [
        "registry.example.test/acme",
        "registry.example.test/acme/null/x",
        "../acme/null",
        "registry.example.test/../null",
        "registry.example.test//null",
        "registry.example.test/ac me/null",
    ] {
        assert_eq!(
            Package::new(address, "1.0.0", "linux_amd64"),
            None,
            "{address}"
        );
    }
    assert_eq!(Package::new("a.test/b/c", "../1", "linux_amd64"), None);
    // It would be another host where the address of the registry is before it.
    for address in ["a.test/http:evil.example/c", "a.test/b/http:evil.example"] {
        assert_eq!(Package::new(address, "1.0.0", "linux_amd64"), None);
    }
    assert!(Package::new("localhost:8443/b/c", "1.0.0", "linux_amd64").is_some());
    let fixture = Fixture::new();
    for sha256 in ["", "../../x", &"A".repeat(64)] {
        assert_eq!(fixture.copy(&package("1.0.0"), sha256), None);
    }
}

#[test]
fn what_a_run_has_changed_counts_as_missing_and_is_replaced() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    let sha256 = fixture.publish(&one, "zip");
    let path = fixture.store.path(&one, &sha256);
    let secret = fixture.folder.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    let changes: [&dyn Fn(); 3] = [
        &|| fs::write(&path, "forged").unwrap(),
        &|| fs::write(&path, "ZIP").unwrap(),
        &|| fs::write(&path, "").unwrap(),
    ];
    for change in changes {
        fs::remove_file(&path).unwrap();
        change();
        assert_eq!(fixture.copy(&one, &sha256), None);
        assert_eq!(fixture.publish(&one, "zip"), sha256);
        assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
    }
    // A link is not followed.
    fs::remove_file(&path).unwrap();
    symlink(&secret, &path).unwrap();
    let target = fixture.folder.path().join("copy");
    assert!(fixture.store.copy(&one, &sha256, &target).is_err());
    assert!(!target.exists());
    assert_eq!(fixture.publish(&one, "zip"), sha256);
    assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
    assert_eq!(fs::read_to_string(secret).unwrap(), "secret");
}

#[test]
fn an_archive_that_is_not_what_its_publisher_says_is_not_published() {
    let fixture = Fixture::new();
    let (path, _) = fixture.file("zip");
    let published = fixture
        .store
        .publish(&package("1.0.0"), &path, &"0".repeat(64));
    assert!(published.is_err());
    assert_eq!(fixture.store.list().unwrap(), []);
}

#[test]
fn bundles_of_modules_are_listed_copied_and_removed_like_packages() {
    const REPOSITORY: &str = "https://git.example.test:8443/team/a%20b.git";
    let fixture = Fixture::new();
    let store = &fixture.store;
    let (old, new) = ("a".repeat(40), "b".repeat(40));
    for commit in [&old, &new] {
        let (path, _) = fixture.file(commit);
        store.publish_bundle(REPOSITORY, commit, &path).unwrap();
    }
    let folder = store.root().join(modules::MODULES);
    let names: Vec<_> = fs::read_dir(&folder).unwrap().flatten().collect();
    let folder = names[0].path();
    last_used(&folder.join(format!("{old}.bundle")), 2 * HOUR);
    // What cannot be a bundle of ours.
    let (longest, _) = fixture.file("");
    let with_holes = File::create(folder.join(format!("{}.bundle", "c".repeat(40)))).unwrap();
    with_holes.set_len(LARGEST_BUNDLE + 1).unwrap();
    fs::write(folder.join("notes.bundle"), "").unwrap();
    symlink(&longest, folder.join(format!("{}.bundle", "d".repeat(40)))).unwrap();
    let commits = |store: &ProviderStore| -> Vec<_> {
        let found = store.bundles(REPOSITORY).unwrap().into_iter();
        found.map(|bundle| bundle.commit).collect()
    };
    assert_eq!(commits(store), [new.clone(), old.clone()]);
    let copy = fixture.folder.path().join("copy");
    assert!(store.copy_bundle(REPOSITORY, &new, &copy).unwrap());
    assert_eq!(fs::read_to_string(&copy).unwrap(), new);
    let other = "https://git.example.test/team/other.git";
    assert!(!store.copy_bundle(other, &new, &copy).unwrap());
    for wrong in ["main", "../x", &"A".repeat(40)] {
        assert!(store.publish_bundle(REPOSITORY, wrong, &copy).is_err());
    }
    for wrong in ["", "..", &"x".repeat(300)] {
        assert!(store.publish_bundle(wrong, &new, &copy).is_err());
    }

    let module = |commit: &str| Item::Module {
        repository: REPOSITORY.to_owned(),
        commit: commit.to_owned(),
    };
    let listed = store.list().unwrap();
    assert!(listed.iter().any(|entry| entry.item == module(&old)));
    let pruned = store.prune(0, None).unwrap();
    assert_eq!(pruned.removed.len(), 1);
    assert_eq!(pruned.removed[0].item, module(&old));
    assert_eq!(commits(store), [new]);
}

#[test]
fn the_longest_unused_packages_go_first() {
    let fixture = Fixture::new();
    let used = |version: &str, content: &str, ago: Duration| {
        let sha256 = fixture.publish(&package(version), content);
        let file = File::open(fixture.store.path(&package(version), &sha256)).unwrap();
        file.set_modified(SystemTime::now() - ago).unwrap();
        sha256
    };
    used("1.0.0", "aaaaaaaaaa", 5 * HOUR);
    let two = used("2.0.0", "bbbbbbbbbb", 9 * HOUR);
    used("3.0.0", "cccccccccc", HOUR / 2);
    used("4.0.0", "dddddddddd", 2 * HOUR);
    // A use counts.
    assert!(fixture.copy(&package("2.0.0"), &two).is_some());
    let versions = |pruned: &Pruned| {
        let removed = pruned.removed.iter();
        let versions = removed.map(|entry| match &entry.item {
            Item::Archive { package, .. } => package.version.clone(),
            other => panic!("{other:?}"),
        });
        versions.collect::<Vec<_>>()
    };
    assert_eq!(
        versions(&fixture.store.prune(40, None).unwrap()),
        Vec::<String>::new()
    );
    let pruned = fixture.store.prune(39, None).unwrap();
    assert_eq!(
        (versions(&pruned), pruned.kept_bytes),
        (vec!["1.0.0".to_owned()], 30)
    );
    // The rest is too young, but for one.
    let pruned = fixture.store.prune(1, None).unwrap();
    assert_eq!(
        (versions(&pruned), pruned.kept_bytes),
        (vec!["4.0.0".to_owned()], 20)
    );
    used("5.0.0", "eeeeeeeeee", 2 * HOUR);
    let pruned = fixture.store.prune(u64::MAX, Some(HOUR / 4)).unwrap();
    assert_eq!(versions(&pruned), ["5.0.0"]);
}

#[test]
fn what_killed_runs_have_left_is_removed_after_a_day() {
    let fixture = Fixture::new();
    fixture.publish(&package("1.0.0"), "zip");
    let tmp = fixture.tmp();
    for (name, ago) in [("old", 25 * HOUR), ("new", HOUR)] {
        let file = File::create(tmp.join(name)).unwrap();
        file.set_modified(SystemTime::now() - ago).unwrap();
    }
    fixture.store.prune(u64::MAX, None).unwrap();
    assert!(!tmp.join("old").exists() && tmp.join("new").exists());
}

fn last_used(path: &Path, ago: Duration) {
    let file = File::open(path).unwrap();
    file.set_modified(SystemTime::now() - ago).unwrap();
}

/// Starts this test binary again, for one test, with what it must know.
fn part(test: &str, place: &Path, name: &str, value: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([&format!("tests::{test}"), "--exact", "--nocapture"])
        .env("MAYFLY_TEST_STORE", place)
        .env(name, value);
    command
}

fn part_store() -> Option<ProviderStore> {
    std::env::var_os("MAYFLY_TEST_STORE").map(ProviderStore::new)
}

/// Publishes in a process that is killed at its first step, at its second, and so on, until it ends by itself. Returns at how many.
fn killed_at_each_step(test: &str, after_each: impl Fn(&Fixture, ExitStatus)) -> u64 {
    for step in 1.. {
        let fixture = Fixture::new();
        let mut publisher = part(
            test,
            fixture.store.root(),
            "MAYFLY_TEST_KILL",
            &step.to_string(),
        );
        let ended = publisher.output().unwrap().status;
        after_each(&fixture, ended);
        if ended.success() {
            return step - 1;
        }
        assert_eq!(ended.signal(), Some(9), "{ended}");
    }
    unreachable!()
}

/// The process that is killed.
fn publish_until_killed(store: &ProviderStore, publish: impl Fn(&ProviderStore)) {
    let step = std::env::var("MAYFLY_TEST_KILL").unwrap().parse().unwrap();
    progress::killing::STEP.set(step).unwrap();
    publish(store);
}

#[test]
fn a_killed_publisher_leaves_nothing_half_and_the_next_one_makes_it_good() {
    let one = package("1.0.0");
    let publish = |store: &ProviderStore| {
        let folder = tempfile::tempdir().unwrap();
        let archive = folder.path().join("archive");
        fs::write(&archive, "zip").unwrap();
        store
            .publish(&package("1.0.0"), &archive, &sha256_of(&archive).unwrap())
            .unwrap();
    };
    if let Some(store) = part_store() {
        return publish_until_killed(&store, publish);
    }
    let test = "a_killed_publisher_leaves_nothing_half_and_the_next_one_makes_it_good";
    let kills = killed_at_each_step(test, |fixture, _| {
        for entry in fixture.store.list().unwrap() {
            assert!(fixture.store.verify(&entry, h1_of).unwrap());
        }
        publish(&fixture.store);
        let (_, sha256) = fixture.file("zip");
        assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
        assert_eq!(fixture.store.list().unwrap().len(), 1);
    });
    assert!(kills > 5, "{kills}");
}

#[test]
fn a_killed_fill_is_made_good_by_the_next_one() {
    let (one, sha256) = (package("1.0.0"), "a".repeat(64));
    let publish = |store: &ProviderStore| {
        let published = store.publish_unpacked(&one, &sha256, H1, unpack);
        published.unwrap();
    };
    if let Some(store) = part_store() {
        return publish_until_killed(&store, publish);
    }
    let kills = killed_at_each_step(
        "a_killed_fill_is_made_good_by_the_next_one",
        |fixture, _| {
            let has = || fixture.store.has_unpacked(&one, &sha256, H1).unwrap();
            assert_eq!(has(), !fixture.store.list().unwrap().is_empty());
            publish(&fixture.store);
            assert_eq!(fixture.store.list().unwrap().len(), 1);
            assert!(has());
            // What is left goes after a day.
            for left in fs::read_dir(fixture.tmp()).unwrap().flatten() {
                last_used(&left.path(), 25 * HOUR);
            }
            fixture.store.prune(u64::MAX, None).unwrap();
            assert_eq!(fs::read_dir(fixture.tmp()).unwrap().count(), 0);
        },
    );
    assert!(kills > 6, "{kills}");
}

#[test]
fn two_publishers_at_a_time_leave_one_package() {
    let fixture = Fixture::new();
    let (one, (path, sha256)) = (package("1.0.0"), fixture.file("zip"));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                fixture.store.publish(&one, &path, &sha256).unwrap();
                fixture.unpack(&one, &sha256).unwrap();
            });
        }
    });
    let listed = fixture.store.list().unwrap();
    assert_eq!(listed.len(), 2, "{listed:?}");
    for entry in &listed {
        assert!(fixture.store.verify(entry, h1_of).unwrap());
    }
    assert_eq!(fs::read_dir(fixture.tmp()).unwrap().count(), 0);
}

#[test]
fn a_rename_that_seems_to_have_failed_is_looked_at() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    RENAMES_SEEM_TO_FAIL.set(true);
    let sha256 = fixture.publish(&one, "zip");
    fixture.unpack(&one, &sha256).unwrap();
    // One that has really failed is an error.
    let failed = fixture.store.true_of(Ok(()), || Ok(false));
    RENAMES_SEEM_TO_FAIL.set(false);
    assert!(failed.is_err());
    assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
}

#[test]
fn a_digest_that_the_files_do_not_have_is_not_published() {
    let fixture = Fixture::new();
    let published =
        fixture
            .store
            .publish_unpacked(&package("1.0.0"), &"a".repeat(64), "h1:other=", unpack);
    assert!(published.is_err());
    assert_eq!(fixture.store.list().unwrap(), []);
}

#[test]
fn a_damaged_or_forged_unpacked_package_is_replaced() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    let sha256 = fixture.publish(&one, "zip");
    fixture.unpack(&one, &sha256).unwrap();
    let entry = fixture.store.path(&one, &sha256).with_extension("");
    let listed = fixture.store.list().unwrap();
    let unpacked = listed
        .iter()
        .find(|entry| entry.item == unpacked_of(&one, &sha256))
        .unwrap();
    let verified = || fixture.store.verify(unpacked, h1_of).unwrap();
    assert!(verified());
    fs::write(entry.join("files/LICENSE.txt"), "other").unwrap();
    assert!(!verified());
    fixture.unpack(&one, &sha256).unwrap();
    assert!(verified());

    // The digest beside them is that of what somebody has put there.
    fs::write(entry.join("files/terraform-provider-x_v1.0.0"), "evil").unwrap();
    let files = Folder::open(&entry.join("files")).unwrap();
    let forged = files_digest::of(&files, &Progress::default()).unwrap();
    fs::remove_file(entry.join("h1")).unwrap();
    fs::write(entry.join("h1"), forged).unwrap();
    assert!(!verified());
    fixture.unpack(&one, &sha256).unwrap();
    assert!(verified());

    // Without the right archive, nothing says what they must be.
    let archive = fixture.store.path(&one, &sha256);
    fs::remove_file(&archive).unwrap();
    fs::write(&archive, "altered").unwrap();
    assert!(!verified());
    fs::remove_file(archive).unwrap();
    assert!(!verified());
}

/// What eviction removes is in the store, whatever a run has put there.
#[test]
fn eviction_follows_no_link_out_of_the_store() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    let sha256 = fixture.publish(&one, "zip");
    let of_another = fixture.folder.path().join("another");
    let kept = of_another.join(format!("{sha256}.zip"));
    fs::create_dir_all(of_another.join(&sha256).join("files")).unwrap();
    for path in [&kept, &of_another.join(&sha256).join("files/file")] {
        fs::write(path, "kept").unwrap();
        last_used(path, 9 * HOUR);
    }
    let listed = fixture.store.list().unwrap();
    let platform = fixture.store.path(&one, &sha256);
    let platform = platform.parent().unwrap();
    // In the place of each folder on the way, after the list was made.
    for folder in platform.ancestors().take(6) {
        let aside = folder.with_extension("aside");
        fs::rename(folder, &aside).unwrap();
        let below = platform.strip_prefix(folder).unwrap();
        let trap = fixture.folder.path().join("trap");
        fs::create_dir_all(trap.join(below)).unwrap();
        if below == Path::new("") {
            symlink(&of_another, folder).unwrap();
        } else {
            fs::remove_dir(trap.join(below)).unwrap();
            symlink(&of_another, trap.join(below)).unwrap();
            symlink(&trap, folder).unwrap();
        }
        let unpacked = Entry {
            item: unpacked_of(&one, &sha256),
            ..listed[0].clone()
        };
        for entry in [&listed[0], &unpacked] {
            assert!(fixture.store.remove(entry).is_err(), "{folder:?}");
        }
        // It may also say what is wrong.
        let _ = fixture.store.prune(0, Some(HOUR));
        assert!(
            fixture
                .store
                .copy(&one, &sha256, &trap.join("copy"))
                .is_err()
        );
        // The link goes, and not what it leads to.
        assert_eq!(fixture.publish(&one, "zip"), sha256);
        assert_eq!(fs::read_to_string(&kept).unwrap(), "kept");
        fs::remove_dir_all(folder).unwrap();
        fs::rename(aside, folder).unwrap();
        fs::remove_dir_all(trap).unwrap();
    }
    assert!(kept.exists() && of_another.join(sha256).join("files/file").exists());
}

#[test]
fn tools_are_evicted_too_but_not_those_that_are_used_or_installed() {
    let fixture = Fixture::new();
    let root = fixture.store.root();
    let install = |folder: &str, program: &str| {
        let folder = root.join(folder);
        fs::create_dir_all(&folder).unwrap();
        for name in [program, "archive.zip", ".lock"] {
            fs::write(folder.join(name), "0123456789").unwrap();
            last_used(&folder.join(name), 3 * HOUR);
        }
        folder
    };
    let old = install("terraform/1.0.0", "terraform");
    let used = install("terraform/1.1.0", "terraform");
    let installed = install("tofu/v1.2.0", "tofu");
    let young = install("tofu/v1.3.0", "tofu");
    let of_pods = install(".tools/tofu/v1.4.0", "tofu");
    let unfinished = root.join(".tools").join(TMP).join("unfinished");
    fs::create_dir_all(unfinished.parent().unwrap()).unwrap();
    fs::write(&unfinished, "").unwrap();
    last_used(&unfinished, 25 * HOUR);
    last_used(&young.join("tofu"), Duration::ZERO);
    fs::write(root.join("terraform/file"), "").unwrap();
    let run = File::open(used.join("terraform")).unwrap();
    run.try_lock_shared().unwrap();
    let waiting = File::open(installed.join(".lock")).unwrap();
    waiting.try_lock().unwrap();
    let pruned = fixture.store.prune(0, None).unwrap();
    assert_eq!(pruned.kept_bytes, 60);
    let tool = |name: &str, version: &str, place| Item::Tool {
        name: name.to_owned(),
        version: version.to_owned(),
        place,
    };
    let mut removed: Vec<_> = pruned.removed.into_iter().map(|entry| entry.item).collect();
    removed.sort();
    let expected = [
        tool("terraform", "1.0.0", ""),
        tool("tofu", "v1.4.0", ".tools"),
    ];
    assert_eq!(removed, expected);
    assert!(!of_pods.join("tofu").exists() && !unfinished.exists());
    let names: Vec<_> = fs::read_dir(old).unwrap().flatten().collect();
    assert_eq!((names.len(), names[0].file_name()), (1, ".lock".into()));
    drop((run, waiting));
    assert_eq!(fixture.store.prune(0, None).unwrap().removed.len(), 2);
    assert!(young.join("tofu").exists());
}

#[test]
fn what_others_have_planted_does_not_keep_the_rest_from_being_removed() {
    let of = |version: &str, digit: &str| (package(version), digit.repeat(64));
    let (old, stuck, young) = (of("1.0.0", "a"), of("2.0.0", "b"), of("3.0.0", "c"));
    let (far, ahead, early) = (of("3.0.0", "d"), of("3.0.0", "e"), of("3.0.0", "f"));
    if let Some(store) = part_store() {
        let listed = store.list().unwrap();
        let unknown = listed.iter().filter(|it| it.used == SystemTime::UNIX_EPOCH);
        assert_eq!((listed.len(), unknown.count()), (7, 2));
        // Holes take no space.
        assert!(listed.iter().all(|it| it.size_bytes <= 4096));
        let pruned = store.prune(10, Some(24 * HOUR)).unwrap();
        let is_there = |(package, sha256): &(Package, String)| store.path(package, sha256).exists();
        assert!([&stuck, &young, &ahead].into_iter().all(is_there));
        assert!(![&old, &far, &early].into_iter().any(is_there));
        assert_eq!((pruned.removed.len(), pruned.kept_bytes), (4, 12));
        return;
    }
    let fixture = Fixture::new();
    let root = fixture.store.root();
    let plant = |(package, sha256): &(Package, String), modified: SystemTime| {
        let path = fixture.store.path(package, sha256);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "zip!").unwrap();
        let file = File::options().append(true).open(path).unwrap();
        file.set_modified(modified).unwrap();
        file
    };
    let (now, days) = (SystemTime::now(), 2 * 24 * HOUR);
    plant(&old, now - days);
    plant(&stuck, now - 2 * days);
    plant(&young, now);
    plant(&early, SystemTime::UNIX_EPOCH - HOUR);
    // The clock of another machine may be ahead, but not by a century.
    plant(&ahead, now + HOUR / 2);
    let with_holes = plant(&far, now);
    with_holes.set_len(1 << 40).unwrap();
    with_holes.set_modified(now + 876_000 * HOUR).unwrap();
    // A folder instead of a program, and a lock that leads elsewhere.
    let tool = root.join("tofu/v1.0.0");
    fs::create_dir_all(tool.join("tofu")).unwrap();
    fs::write(tool.join("archive.zip"), "zip!").unwrap();
    last_used(&tool.join("archive.zip"), days);
    symlink("/dev/null", tool.join(".lock")).unwrap();
    // What nobody but another user may read. Only root can make that.
    let evil = root.join(PROVIDERS).join("evil");
    fs::create_dir(&evil).unwrap();
    let _ = std::os::unix::fs::chown(&evil, Some(65534), None);
    fs::set_permissions(&evil, Permissions::from_mode(0o0)).unwrap();
    let platform = fixture.store.path(&stuck.0, &stuck.1);
    let platform = platform.parent().unwrap().to_str().unwrap();
    behind_a_mount(
        "what_others_have_planted_does_not_keep_the_rest_from_being_removed",
        root,
        &format!("mount --bind {platform} {platform} && mount -o remount,bind,ro {platform} &&"),
    );
    fs::set_permissions(&evil, Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn nothing_in_the_way_keeps_a_package_out() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    let (archive, sha256) = fixture.file("zip");
    let path = fixture.store.path(&one, &sha256);
    // A file in the place of each folder.
    for folder in path.ancestors().skip(1).take(7) {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder.parent().unwrap()).unwrap();
        fs::write(folder, "in the way").unwrap();
        fixture.store.publish(&one, &archive, &sha256).unwrap();
        assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
    }
    let tool_file = fixture.store.root().join("tofu/v1.0.0/archive.zip");
    for place in [&path, &tool_file] {
        let _ = fs::remove_file(place);
        fs::create_dir_all(place.join("x")).unwrap();
    }
    fixture.store.publish(&one, &archive, &sha256).unwrap();
    assert_eq!(fixture.copy(&one, &sha256).as_deref(), Some("zip"));
    let files = [("archive.zip", &*archive)];
    fixture
        .store
        .publish_tool_files("tofu", "v1.0.0", &files)
        .unwrap();
    assert_eq!(fs::read_to_string(tool_file).unwrap(), "zip");
    let aside: Vec<_> = fs::read_dir(fixture.tmp()).unwrap().flatten().collect();
    assert_eq!(aside.len(), 2);
    for one in aside {
        last_used(&one.path(), 25 * HOUR);
    }
    fixture.store.prune(u64::MAX, None).unwrap();
    assert_eq!(fs::read_dir(fixture.tmp()).unwrap().count(), 0);
}

/// Runs a test again behind a mount, which a process in a namespace of its own may make, unless the system forbids it.
fn behind_a_mount(test: &str, place: &Path, mount: &str) {
    let test = part(test, place, "MAYFLY_TEST_PART", "alone");
    let script = format!("{mount} exec \"$@\"");
    let done = Command::new("unshare")
        .args(["-rm", "sh", "-c", &script, "sh"])
        .arg(test.get_program())
        .args(test.get_args())
        .env("MAYFLY_TEST_STORE", place)
        .output()
        .unwrap();
    let (said, answered) = (
        String::from_utf8_lossy(&done.stderr),
        String::from_utf8_lossy(&done.stdout),
    );
    let is_forbidden = said.contains("unshare: ") && std::env::var_os("CI").is_none();
    assert!(
        is_forbidden || answered.contains("1 passed"),
        "{answered}{said}"
    );
}

#[test]
fn what_a_live_run_uses_is_not_removed() {
    let (one, sha256) = (package("1.0.0"), "a".repeat(64));
    if let Some(store) = part_store() {
        // The run: it cannot write what it uses.
        let held = store.hold(&one, &sha256, Access::Auto).unwrap().unwrap();
        assert_eq!(held.h1, H1);
        assert!(held.is_intact(store.progress()));
        let writable = ProviderStore::new(store.root().parent().unwrap().join("rw"));
        assert!(held.files.join("LICENSE.txt").exists());
        assert!(fs::write(held.files.join("new"), "").is_err());
        // The one who fills sees the same disk, and can write it.
        let entry = writable.list().unwrap().remove(0);
        assert!(!writable.remove(&entry).unwrap());
        assert_eq!(writable.prune(0, None).unwrap().removed, []);
        assert!(held.files.join("LICENSE.txt").exists());
        // Nor does a run hold what is about to be removed.
        let digest = held.files.parent().unwrap().join("h1");
        drop(held);
        let remover = File::open(digest).unwrap();
        remover.try_lock().unwrap();
        assert!(store.hold(&one, &sha256, Access::Auto).unwrap().is_none());
        drop(remover);
        assert!(writable.remove(&entry).unwrap());
        assert!(store.hold(&one, &sha256, Access::Auto).unwrap().is_none());
        // What a run can write is never used where it is.
        writable
            .publish_unpacked(&one, &sha256, H1, unpack)
            .unwrap();
        for access in [Access::Auto, Access::Link, Access::Copy] {
            assert!(writable.hold(&one, &sha256, access).unwrap().is_none());
        }
        assert!(store.hold(&one, &sha256, Access::Copy).unwrap().is_none());
        assert!(store.hold(&one, &sha256, Access::Link).unwrap().is_some());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("rw");
    ProviderStore::new(&place)
        .publish_unpacked(&one, &sha256, H1, unpack)
        .unwrap();
    let entry = ProviderStore::new(&place).path(&one, &sha256);
    last_used(&entry.with_extension("").join("h1"), 3 * HOUR);
    let read_only = folder.path().join("ro");
    fs::create_dir(&read_only).unwrap();
    let mut mount = String::new();
    write!(
        mount,
        "mount --bind '{0}' '{1}' && mount -o remount,bind,ro '{1}' &&",
        place.display(),
        read_only.display()
    )
    .unwrap();
    behind_a_mount("what_a_live_run_uses_is_not_removed", &read_only, &mount);
}

#[test]
fn a_full_disk_is_an_error_and_leaves_nothing_half() {
    if let Some(store) = part_store() {
        let folder = tempfile::tempdir().unwrap();
        let large = folder.path().join("large");
        fs::write(&large, vec![7; 600 * 1024]).unwrap();
        let sha256 = sha256_of(&large).unwrap();
        store.publish(&package("1.0.0"), &large, &sha256).unwrap();
        let full = store.publish(&package("2.0.0"), &large, &sha256);
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
        let full = store.publish_unpacked(&package("2.0.0"), &sha256, H1, |files| {
            fs::create_dir(files)?;
            fs::copy(&large, files.join("file")).map(drop)
        });
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
        let listed = store.list().unwrap();
        assert_eq!(listed.len(), 1);
        assert!(store.verify(&listed[0], h1_of).unwrap());
        assert_eq!(fs::read_dir(store.root().join(TMP)).unwrap().count(), 0);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mount = format!(
        "mount -t tmpfs -o size=1m none '{}' &&",
        folder.path().display()
    );
    let test = "a_full_disk_is_an_error_and_leaves_nothing_half";
    behind_a_mount(test, folder.path(), &mount);
}

/// The package of a run is found by its name, however many others there are.
#[test]
fn one_of_five_thousand_archives_is_there_at_once() {
    let fixture = Fixture::new();
    let one = package("1.0.0");
    let sha256 = fixture.publish(&one, "zip");
    let mut folder = fixture.store.path(&one, &sha256);
    for number in 0..5_000 {
        folder.pop();
        folder.pop();
        folder.push(format!("2.{number}.0"));
        folder.push("linux_amd64");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(archive_name(&sha256)), "").unwrap();
    }
    let alone = Fixture::new();
    alone.publish(&one, "zip");
    let attempt = |fixture: &Fixture| {
        let began = Instant::now();
        assert!(fixture.copy(&one, &sha256).is_some());
        let held = fixture.store.hold(&one, &sha256, Access::Auto);
        assert!(held.unwrap().is_none());
        began.elapsed()
    };
    // No other sign shows whether a folder was listed. In turns, the best attempts of both are about the same on a busy machine
    // too. A list of the others takes a hundred times as long.
    let attempts = (0..20).map(|_| (attempt(&alone), attempt(&fixture)));
    let (alone, among): (Vec<_>, Vec<_>) = attempts.unzip();
    let (alone, among) = (alone.iter().min().unwrap(), among.iter().min().unwrap());
    assert!(*among < *alone * 20, "{among:?} instead of {alone:?}");
}
