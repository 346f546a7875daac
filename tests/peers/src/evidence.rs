//! What a failed test shows beside its message: the last lines of each process and rig that it started. It knows no rig: each
//! names itself and says what it knows.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, Once, TryLockError};
use std::time::Duration;
use std::{fs, panic, thread};

/// How much of a text is shown.
const LINES: usize = 200;
const BYTES: usize = 64 * 1024;

type Text = Box<dyn Fn() -> Option<String>>;

thread_local! {
    /// Those of the test that runs on this thread. Each test has a thread of its own.
    static SOURCES: RefCell<Vec<(String, Text)>> = const { RefCell::new(Vec::new()) };
}

/// Shows the end of this text if the test of this thread panics. The test may hold any lock then, so `text` must not wait for one:
/// it says `None` instead.
pub fn keep(name: impl Into<String>, text: impl Fn() -> Option<String> + 'static) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            usual(panic);
            show();
        }));
    });
    SOURCES.with_borrow_mut(|sources| sources.push((name.into(), Box::new(text))));
}

/// Locks a mutex, unless the test that panics has it: others have it for a moment only.
pub fn lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..100 {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
        }
    }
    None
}

/// Shows the end of each file in a folder, at any depth, whose path ends like one of these.
pub fn keep_files(folder: impl Into<PathBuf>, ends: &'static [&'static str]) {
    let folder = folder.into();
    keep(folder.display().to_string(), move || {
        let mut shown = String::new();
        let mut folders = vec![folder.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                    continue;
                }
                let name = path.to_string_lossy();
                if path.is_file() && ends.iter().any(|end| name.ends_with(end)) {
                    let text = fs::read(&path).unwrap_or_default();
                    let text = String::from_utf8_lossy(&text);
                    shown.extend(["\n", &*name, ":\n", end_of(&text)]);
                }
            }
        }
        Some(shown)
    });
}

/// Forgets each, so that a second panic of the test does not show it again.
#[expect(
    clippy::print_stderr,
    reason = "so it is part of the output of the test"
)]
fn show() {
    let taken =
        SOURCES.try_with(|sources| sources.try_borrow_mut().map(|mut all| all.split_off(0)));
    let Ok(Ok(sources)) = taken else { return };
    for (name, text) in sources {
        match text() {
            Some(text) => eprintln!("--- {name}\n{}", end_of(&text)),
            None => eprintln!("--- {name}: not known, because the test was at it"),
        }
    }
}

/// The last lines of a text.
fn end_of(text: &str) -> &str {
    let text = text.trim_end();
    let start = text.rmatch_indices('\n').nth(LINES - 1);
    let start = start.map_or(0, |(at, _)| at + 1);
    let start = start.max(text.len().saturating_sub(BYTES));
    &text[text.ceil_char_boundary(start)..]
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_end_of_a_text_is_bounded_in_lines_and_bytes() {
        assert_eq!(end_of(""), "");
        assert_eq!(end_of("a\nb\n"), "a\nb");
        let many: String = (1..=LINES + 1)
            .flat_map(|number| [number.to_string(), "\n".to_owned()])
            .collect();
        assert!(end_of(&many).starts_with("2\n"));
        let long = "ä".repeat(BYTES);
        assert_eq!(end_of(&long).len(), BYTES);
    }

    /// It fails in a process of its own.
    #[test]
    fn a_test_that_fails_shows_what_its_processes_said() {
        const INNER: &str = "MAYFLY_TEST_THAT_FAILS";
        if std::env::var_os(INNER).is_some() {
            let said = "echo to-stdout; echo to-stderr >&2";
            crate::process::Running::start(Command::new("sh").args(["-c", said])).wait();
            keep("a rig", || Some("what it knows".to_owned()));
            keep("a busy rig", || None);
            panic!("the message");
        }
        let this = "evidence::tests::a_test_that_fails_shows_what_its_processes_said";
        let mut again = Command::new(std::env::current_exe().unwrap());
        let output = again.args(["--exact", this]).env(INNER, "1").output();
        let shown = String::from_utf8(output.unwrap().stdout).unwrap();
        for words in [
            "the message",
            "stdout\nto-stdout\n",
            "stderr\nto-stderr\n",
            "--- a rig\nwhat it knows\n",
            "--- a busy rig: not known",
        ] {
            assert!(shown.contains(words), "{words:?}\n{shown}");
        }
    }
}
