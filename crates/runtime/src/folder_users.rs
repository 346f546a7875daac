//! Finds the processes that use a folder: what a killed process has started may still work in its folders.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// The processes that work in `folder` or have a file of it open, as far as this user may look. None without `/proc`.
pub fn using(folder: &Path) -> Vec<u32> {
    processes(|process| uses(process, folder))
}

/// The processes that use `folder`, or were started with a path of it, which they may open later.
pub fn knowing(folder: &Path) -> Vec<u32> {
    let told = ["cmdline", "environ"];
    processes(|process| {
        let mut told = told.iter().map(|file| process.join(file));
        uses(process, folder) || told.any(|file| names(&file, folder))
    })
}

fn processes(is_one: impl Fn(&Path) -> bool) -> Vec<u32> {
    let own = std::process::id();
    let mut found: Vec<u32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.parse().ok()?;
            (id != own && is_one(&entry.path())).then_some(id)
        })
        .collect();
    found.sort_unstable();
    found
}

/// Whether a process works in the folder, or has a file of it open. The tool and its providers do.
fn uses(process: &Path, folder: &Path) -> bool {
    let open = fs::read_dir(process.join("fd")).into_iter().flatten();
    let open = open.flatten().map(|entry| entry.path());
    let links = [process.join("cwd"), process.join("exe")];
    let mut links = links.into_iter().chain(open);
    links.any(|link| is_in(&link, folder))
}

/// Whether the link leads to something in the folder that is still there.
fn is_in(link: &Path, folder: &Path) -> bool {
    fs::read_link(link).is_ok_and(|target: PathBuf| target.starts_with(folder) && target.exists())
}

/// Whether the file contains a path below the folder.
fn names(file: &Path, folder: &Path) -> bool {
    let path = folder.join(OsStr::new(""));
    let path = path.as_os_str().as_bytes();
    fs::read(file).is_ok_and(|text| text.windows(path.len()).any(|part| part == path))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that waits for the end of its input.
    fn waiting(change: fn(&mut Command, &Path), folder: &Path) -> Child {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        change(&mut command, folder);
        command.spawn().unwrap()
    }

    fn end(mut process: Child) {
        drop(process.stdin.take());
        process.wait().unwrap();
    }

    #[test]
    fn a_process_that_uses_a_folder_is_found() {
        let ways: [fn(&mut Command, &Path); 4] = [
            |command, folder| {
                command.current_dir(folder);
            },
            |command, folder| {
                command.stderr(fs::File::create(folder.join("file")).unwrap());
            },
            |command, folder| {
                command.env("PLACE", folder.join("file"));
            },
            |command, folder| {
                command.arg("-").arg(folder.join("file"));
            },
        ];
        let parent = tempfile::tempdir().unwrap();
        let parent = fs::canonicalize(parent.path()).unwrap();
        let (folder, other) = (parent.join("o_w"), parent.join("o_w2"));
        for folder in [&folder, &other] {
            fs::create_dir(folder).unwrap();
        }
        for (way, change) in ways.into_iter().enumerate() {
            let (inside, outside) = (waiting(change, &folder), waiting(change, &other));
            let (using_it, knowing_it) = (using(&folder), knowing(&folder));
            assert_eq!(using_it.contains(&inside.id()), way < 2, "{way}");
            assert!(knowing_it.contains(&inside.id()), "{way}");
            assert!(!knowing_it.contains(&outside.id()), "{way}");
            let ended = inside.id();
            end(inside);
            assert!(!knowing(&folder).contains(&ended), "{way}");
            end(outside);
        }
    }
}
