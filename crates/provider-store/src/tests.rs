use std::os::unix::fs::symlink;

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

fn package(version: &str) -> Package {
    Package::new("registry.example.test/acme/null", version, "linux_amd64").unwrap()
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
        (listed.len(), &listed[0].package, &listed[0].sha256),
        (1, &one, &sha256)
    );
    assert!(fixture.store.verify(&listed[0]).unwrap());
    let left = fs::read_dir(fixture.store.root().join(TMP)).unwrap();
    assert_eq!(left.count(), 0);
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
        let versions = removed.map(|entry| entry.package.version.clone());
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
    let pruned = fixture.store.prune(u64::MAX, Some(HOUR / 4)).unwrap();
    assert_eq!(versions(&pruned), ["3.0.0"]);
}

#[test]
fn what_killed_runs_have_left_is_removed_after_a_day() {
    let fixture = Fixture::new();
    fixture.publish(&package("1.0.0"), "zip");
    let tmp = fixture.store.root().join(TMP);
    for (name, ago) in [("old", 25 * HOUR), ("new", HOUR)] {
        let file = File::create(tmp.join(name)).unwrap();
        file.set_modified(SystemTime::now() - ago).unwrap();
    }
    fixture.store.prune(u64::MAX, None).unwrap();
    assert!(!tmp.join("old").exists() && tmp.join("new").exists());
}
