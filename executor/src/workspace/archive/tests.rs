use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use rstest::rstest;
use tar::Header;
use tempfile::TempDir;

use super::*;

/// One entry. It is written byte by byte, so that no library refuses it.
#[derive(Clone, Debug)]
struct Raw {
    kind: EntryType,
    name: Vec<u8>,
    link: Vec<u8>,
    content: Vec<u8>,
    mode: u32,
}

fn raw(kind: EntryType, name: &str, link: &str) -> Raw {
    Raw {
        kind,
        name: name.into(),
        link: link.into(),
        content: Vec::new(),
        mode: 0o644,
    }
}

fn file(name: &str, content: &str) -> Raw {
    Raw {
        content: content.into(),
        ..raw(EntryType::Regular, name, "")
    }
}

fn tar(entries: &[Raw]) -> Vec<u8> {
    let mut archive = Vec::new();
    for entry in entries {
        let mut header = Header::new_gnu();
        for (field, text) in [(0, &entry.name), (157, &entry.link)] {
            let text = &text[..text.len().min(100)];
            header.as_mut_bytes()[field..field + text.len()].copy_from_slice(text);
        }
        header.set_entry_type(entry.kind);
        header.set_mode(entry.mode);
        header.set_size(entry.content.len() as u64);
        header.set_cksum();
        archive.extend_from_slice(header.as_bytes());
        archive.extend_from_slice(&entry.content);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A target with a neighbour that must stay unchanged.
struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("target")).unwrap();
        fs::create_dir_all(folder.path().join("outside/deep")).unwrap();
        fs::write(folder.path().join("outside/sentinel"), "untouched").unwrap();
        Self { folder }
    }

    fn target(&self) -> PathBuf {
        self.folder.path().join("target")
    }

    fn unpack_with(&self, archive: &[u8], limits: ArchiveLimits) -> Result<Unpacked, StepError> {
        unpack(archive, &self.target(), limits, &AtomicBool::new(false))
    }

    fn unpack(&self, archive: &[u8]) -> Result<Unpacked, StepError> {
        self.unpack_with(archive, ArchiveLimits::default())
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.target().join(name)).unwrap()
    }

    /// Everything except the target: names, kinds, modes and contents.
    fn surroundings(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                let meta = entry.metadata().unwrap();
                let content = if meta.is_file() {
                    fs::read(entry.path()).unwrap()
                } else {
                    Vec::new()
                };
                if entry.path() != self.target() {
                    found.insert(entry.path(), (meta.mode(), content));
                    if meta.is_dir() {
                        folders.push(entry.path());
                    }
                }
            }
        }
        found
    }

    /// Checks that every link below the target, if it has a target, leads into the target folder.
    fn links_stay_inside(&self) -> bool {
        let root = fs::canonicalize(self.target()).unwrap();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let entry = entry.unwrap();
                let kind = entry.file_type().unwrap();
                if kind.is_dir() {
                    folders.push(entry.path());
                }
                if kind.is_symlink()
                    && fs::canonicalize(entry.path()).is_ok_and(|end| !end.starts_with(&root))
                {
                    return false;
                }
            }
        }
        true
    }
}

fn assert_refused(result: Result<Unpacked, StepError>, reason: Refusal) {
    assert_fails(result, &format!("is not accepted: {reason}"));
}

fn assert_fails(result: Result<Unpacked, StepError>, problem: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(problem), "{error}");
}

#[test]
fn files_folders_modes_and_links_arrive() {
    let sandbox = Sandbox::new();
    let script = Raw {
        mode: 0o4755,
        ..file("bin/run.sh", "#!/bin/sh")
    };
    let entries = [
        raw(EntryType::XGlobalHeader, "pax_global_header", ""),
        raw(EntryType::Directory, "./", ""),
        raw(EntryType::Directory, "empty/", ""),
        file("./main.tf", "# main"),
        script,
        raw(EntryType::Symlink, "bin/main", "../main.tf"),
        raw(EntryType::Link, "copy.tf", "main.tf"),
        raw(EntryType::Regular, "old-style/", ""),
    ];
    let unpacked = sandbox.unpack(&gzip(&tar(&entries))).unwrap();
    assert_eq!(
        unpacked,
        Unpacked {
            entries: 8,
            bytes: 15
        }
    );
    let mode = |name: &str| {
        sandbox
            .target()
            .join(name)
            .metadata()
            .unwrap()
            .permissions()
            .mode()
    };
    assert_eq!(mode("bin/run.sh") & 0o7100, 0o100);
    assert_eq!(mode("main.tf") & 0o7111, 0);
    assert_eq!(sandbox.read("bin/main"), "# main");
    assert_eq!(sandbox.read("copy.tf"), "# main");
    assert!(sandbox.target().join("empty").is_dir());
    assert!(sandbox.target().join("old-style").is_dir());
}

#[rstest]
#[case(file("/etc/passwd", ""), Refusal::Absolute)]
#[case(file("../outside/x", ""), Refusal::Parent)]
#[case(file("a/../../outside/x", ""), Refusal::Parent)]
#[case(file(".", ""), Refusal::NoName)]
#[case(raw(EntryType::Symlink, "l", "/etc"), Refusal::OutwardLink)]
#[case(raw(EntryType::Symlink, "l", ".."), Refusal::OutwardLink)]
#[case(raw(EntryType::Symlink, "a/l", "../../outside"), Refusal::OutwardLink)]
#[case(
    raw(EntryType::Symlink, "a/l", "x/../../../outside"),
    Refusal::OutwardLink
)]
#[case(raw(EntryType::Symlink, "l", ""), Refusal::NoName)]
#[case(raw(EntryType::Link, "l", "../outside/sentinel"), Refusal::OutwardLink)]
#[case(raw(EntryType::Link, "l", "/etc/passwd"), Refusal::OutwardLink)]
#[case(raw(EntryType::Link, "l", "missing"), Refusal::DanglingHardLink)]
#[case(raw(EntryType::Fifo, "pipe", ""), Refusal::Kind)]
#[case(raw(EntryType::Char, "null", ""), Refusal::Kind)]
#[case(raw(EntryType::Block, "disk", ""), Refusal::Kind)]
fn hostile_entries_are_refused(#[case] entry: Raw, #[case] expected: Refusal) {
    let sandbox = Sandbox::new();
    let before = sandbox.surroundings();
    assert_refused(sandbox.unpack(&gzip(&tar(&[entry]))), expected);
    assert_eq!(sandbox.surroundings(), before);
}

#[test]
fn nothing_is_written_through_a_link() {
    for (entry, reason) in [
        (file("up/x", ""), Refusal::NotAFolder),
        (raw(EntryType::Link, "h", "up/f"), Refusal::DanglingHardLink),
    ] {
        let sandbox = Sandbox::new();
        let entries = [
            file("real/f", "kept"),
            raw(EntryType::Symlink, "up", "real"),
            entry,
        ];
        assert_refused(sandbox.unpack(&gzip(&tar(&entries))), reason);
        assert_eq!(sandbox.read("real/f"), "kept");
    }
}

// As text, the last link stays inside. Followed through links, it would not.
#[test]
fn a_chain_of_links_does_not_lead_out_of_the_folder() {
    let sandbox = Sandbox::new();
    let entries = [
        raw(EntryType::Directory, "a/b", ""),
        raw(EntryType::Symlink, "a/b/up", "../.."),
        raw(EntryType::Symlink, "out", "a/b/up/../outside/sentinel"),
    ];
    sandbox.unpack(&gzip(&tar(&entries))).unwrap();
    assert!(sandbox.links_stay_inside());
    let kept = fs::read_link(sandbox.target().join("out")).unwrap();
    assert_eq!(kept, Path::new("a/b/outside/sentinel"));
}

#[test]
fn the_last_entry_of_a_name_counts() {
    let sandbox = Sandbox::new();
    let entries = [
        file("f", "first"),
        raw(EntryType::Link, "hard", "f"),
        raw(EntryType::Symlink, "s", "f"),
        file("f", "second"),
        file("s", "own"),
    ];
    sandbox.unpack(&gzip(&tar(&entries))).unwrap();
    assert_eq!(sandbox.read("f"), "second");
    assert_eq!(sandbox.read("hard"), "first");
    assert_eq!(sandbox.read("s"), "own");
    let entries = [raw(EntryType::Directory, "d", ""), file("d", "")];
    let refused = Sandbox::new().unpack(&gzip(&tar(&entries)));
    assert_refused(refused, Refusal::ReplacesFolder);
}

#[test]
fn over_a_folder_an_entry_takes_the_place_of_what_is_there_but_not_of_what_the_archive_has() {
    let sandbox = Sandbox::new();
    let before = [
        file("vendor/a", "old"),
        file("shared/b", "kept"),
        file("f", "old"),
        raw(EntryType::Symlink, "link", "shared"),
    ];
    sandbox.unpack(&gzip(&tar(&before))).unwrap();
    let over = |entries: &[Raw]| {
        let (limits, stop) = (ArchiveLimits::default(), AtomicBool::new(false));
        let target = sandbox.folder.path().join("target");
        unpack_over(&*gzip(&tar(entries)), &target, limits, &stop)
    };
    over(&[
        raw(EntryType::Symlink, "vendor", "shared"),
        file("f/inner", "new"),
        file("link/b", "new"),
    ])
    .unwrap();
    assert_eq!(sandbox.read("vendor/b"), "kept");
    assert_eq!(sandbox.read("f/inner"), "new");
    assert_eq!(sandbox.read("link/b"), "new");
    assert_eq!(sandbox.read("shared/b"), "kept");
    assert_refused(
        over(&[file("d/x", ""), file("d", "")]),
        Refusal::ReplacesFolder,
    );
}

#[test]
fn long_names_of_gnu_and_pax_work() {
    let long = "folder/".repeat(30) + "name.tf";
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_size(3);
    header.set_mode(0o644);
    builder
        .append_data(&mut header, &long, &b"gnu"[..])
        .unwrap();
    let pax = format!("pax/{long}");
    builder
        .append_pax_extensions([("path", pax.as_bytes())])
        .unwrap();
    header.set_cksum();
    builder.append(&header, &b"pax"[..]).unwrap();
    let sandbox = Sandbox::new();
    sandbox
        .unpack(&gzip(&builder.into_inner().unwrap()))
        .unwrap();
    assert_eq!(sandbox.read(&long), "gnu");
    assert_eq!(sandbox.read(&pax), "pax");
}

#[test]
fn names_too_long_for_a_file_system_are_refused() {
    for name in ["x".repeat(256), "x/".repeat(2000) + "x"] {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_size(0);
        builder
            .append_data(&mut header, &name, io::empty())
            .unwrap();
        let archive = gzip(&builder.into_inner().unwrap());
        assert_refused(Sandbox::new().unpack(&archive), Refusal::TooLong);
    }
}

#[test]
fn names_that_are_not_utf8_are_kept() {
    let sandbox = Sandbox::new();
    let entry = Raw {
        name: b"caf\xe9".to_vec(),
        ..file("", "x")
    };
    sandbox.unpack(&gzip(&tar(&[entry]))).unwrap();
    assert!(
        sandbox
            .target()
            .join(OsStr::from_bytes(b"caf\xe9"))
            .exists()
    );
}

#[test]
fn limits_apply_to_small_archives_with_large_content() {
    let limits = ArchiveLimits {
        max_bytes: 1000,
        max_entries: 3,
    };
    let big = file("big", &"x".repeat(2000));
    let result = Sandbox::new().unpack_with(&gzip(&tar(&[big])), limits);
    assert_fails(result, "more than 1000 bytes");
    let parts = [file("a", &"x".repeat(600)), file("b", &"x".repeat(600))];
    let result = Sandbox::new().unpack_with(&gzip(&tar(&parts)), limits);
    assert_fails(result, "more than 1000 bytes");
    let many = vec![raw(EntryType::Directory, "d", ""); 4];
    let result = Sandbox::new().unpack_with(&gzip(&tar(&many)), limits);
    assert_fails(result, "more than 3 entries");
    let deep = [file("a/b/c/d", "")];
    let result = Sandbox::new().unpack_with(&gzip(&tar(&deep)), limits);
    assert_fails(result, "more than 3 entries");
    let with_folders = [
        raw(EntryType::Directory, "a", ""),
        raw(EntryType::Directory, "a/b", ""),
        file("a/b/c", ""),
    ];
    let result = Sandbox::new().unpack_with(&gzip(&tar(&with_folders)), limits);
    assert_eq!(result.unwrap().entries, 3);
}

#[test]
fn endless_metadata_is_not_loaded_into_memory() {
    for kind in [EntryType::GNULongName, EntryType::XHeader] {
        let endless = Raw {
            kind,
            content: vec![b'x'; 3 * 1024 * 1024],
            ..raw(kind, "long", "")
        };
        let result = Sandbox::new().unpack(&gzip(&tar(&[endless, file("f", "")])));
        assert_fails(result, "the archive is damaged");
    }
}

#[test]
fn members_and_trailing_garbage_are_read_as_gzip_reads_them() {
    let archive = tar(&[file("a", "1"), file("b", "2")]);
    let (first, second) = archive.split_at(700);
    let mut members = gzip(first);
    members.extend(gzip(second));
    members.extend_from_slice(b"garbage after the end");
    let sandbox = Sandbox::new();
    sandbox.unpack(&members).unwrap();
    assert_eq!(sandbox.read("b"), "2");
}

#[test]
fn an_archive_is_reported_as_truncated_at_every_position() {
    let noise: String = (0..20_000_u32)
        .map(|i| char::from(b'a' + u8::try_from(i.wrapping_mul(2_654_435_761) >> 28).unwrap()))
        .collect();
    let archive = tar(&[file("a", &noise)]);
    let whole = gzip(&archive);
    for length in [2, 15, whole.len() / 2, whole.len() - 9, whole.len() - 1] {
        let result = Sandbox::new().unpack(&whole[..length]);
        assert_fails(result, "the archive is truncated");
    }
    let result = Sandbox::new().unpack(&gzip(&archive[..1024]));
    assert_fails(result, "the archive is truncated");
}

#[test]
fn damage_and_other_formats_are_named() {
    for other in [&b""[..], b"<html>sign in</html>", b"PK\x03\x04"] {
        assert_fails(Sandbox::new().unpack(other), "is not a gzip");
    }
    let mut damaged = gzip(&tar(&[file("a", "text")]));
    let checksum = damaged.len() - 6;
    damaged[checksum] ^= 0xff;
    assert_fails(Sandbox::new().unpack(&damaged), "the archive is damaged");
}

#[test]
fn unpacking_stops_on_a_stop_order() {
    let sandbox = Sandbox::new();
    let stopped = unpack(
        &gzip(&tar(&[file("a", "x")]))[..],
        &sandbox.target(),
        ArchiveLimits::default(),
        &AtomicBool::new(true),
    );
    assert_fails(stopped, "unpacking was stopped");
}

fn hostile_path() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "a", "b", "c", "up", "..", ".", "", "outside", "sentinel", "target",
    ]);
    (prop::bool::weighted(0.1), prop::collection::vec(part, 1..6)).prop_map(|(absolute, parts)| {
        let path = parts.join("/");
        if absolute { format!("/{path}") } else { path }
    })
}

fn hostile_entry() -> impl Strategy<Value = Raw> {
    let kind = prop::sample::select(vec![
        EntryType::Regular,
        EntryType::Regular,
        EntryType::Directory,
        EntryType::Symlink,
        EntryType::Symlink,
        EntryType::Link,
        EntryType::Fifo,
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
    ]);
    (kind, hostile_path(), hostile_path(), any::<u16>()).prop_map(|(kind, name, link, mode)| {
        let content = match kind {
            EntryType::GNULongName | EntryType::GNULongLink => link.clone(),
            EntryType::XHeader => {
                let record = |length: usize| format!("{length} path={link}\n");
                record(record(10).len())
            }
            EntryType::Regular => "owned".to_owned(),
            _ => String::new(),
        };
        Raw {
            mode: u32::from(mode),
            content: content.into(),
            ..raw(kind, &name, &link)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_archive_reaches_outside_the_target(
        entries in prop::collection::vec(hostile_entry(), 1..12),
    ) {
        let sandbox = Sandbox::new();
        let before = sandbox.surroundings();
        let _ = sandbox.unpack(&gzip(&tar(&entries)));
        prop_assert!(sandbox.links_stay_inside());
        prop_assert_eq!(sandbox.surroundings(), before);
    }

    #[test]
    fn benign_archives_with_links_arrive_whole(
        depths in prop::collection::vec(0_usize..4, 1..6),
    ) {
        let sandbox = Sandbox::new();
        let mut entries = vec![file("root.tf", "root")];
        for (index, depth) in depths.iter().enumerate() {
            let folder = "d/".repeat(*depth);
            entries.push(file(&format!("{folder}f{index}"), "x"));
            let link = "../".repeat(*depth) + "root.tf";
            entries.push(raw(EntryType::Symlink, &format!("{folder}l{index}"), &link));
        }
        sandbox.unpack(&gzip(&tar(&entries))).unwrap();
        for (index, depth) in depths.iter().enumerate() {
            let link = format!("{}l{index}", "d/".repeat(*depth));
            prop_assert_eq!(sandbox.read(&link), "root");
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        let _ = Sandbox::new().unpack(&bytes);
        let _ = Sandbox::new().unpack(&gzip(&bytes));
    }
}
