//! The lock in an error of the tool: the block `Lock Info:`, and the process that took that lock.

use std::time::SystemTime;

use job_contract::report::{LockStatus, StateLock};
use serde_json::Value;

/// Titles of the two errors that contain such a block.
const ACQUIRING: &str = "Error acquiring the state lock";
const RELEASING: &str = "Error releasing the state lock";

/// Finds locks in the tool's output.
#[derive(Clone, Debug, Default)]
pub struct LockWatch {
    title: Option<LockErrorKind>,
    position: Position,
    block: Option<Block>,
    blocking: Option<StateLock>,
    unreleased: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockErrorKind {
    Acquiring,
    Releasing,
}

impl LockErrorKind {
    fn from_title(title: &str) -> Option<Self> {
        match title {
            ACQUIRING => Some(Self::Acquiring),
            RELEASING => Some(Self::Releasing),
            _ => None,
        }
    }
}

/// The position of the next line in the plain output. Only the first line of a diagnostic is its title. Later lines may
/// quote a diagnostic of another tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Position {
    /// At the beginning, or after an empty line. A diagnostic without a box may begin.
    #[default]
    Beginning,
    /// After the upper edge of a box.
    BoxOpened,
    Inside,
}

#[derive(Clone, Debug, Default)]
struct Block {
    id: String,
    path: String,
    operation: String,
    who: String,
    created: String,
}

impl LockWatch {
    /// Processes one event of the JSON stream. Only the tool's own diagnostics count.
    pub fn event(&mut self, event: &Value) {
        let diagnostic = &event["diagnostic"];
        let (Some("error"), Some(summary)) = (
            diagnostic["severity"].as_str(),
            diagnostic["summary"].as_str(),
        ) else {
            return;
        };
        self.begin(summary);
        for line in diagnostic["detail"].as_str().unwrap_or_default().lines() {
            self.detail(line.trim());
        }
        self.end();
    }

    /// Processes one line of a plain error, without colours.
    pub fn line(&mut self, line: &str) {
        let in_box = line.strip_prefix('│');
        let text = in_box.unwrap_or(line).trim_end_matches('╵').trim();
        let begins = match self.position {
            Position::BoxOpened => in_box.is_some(),
            Position::Beginning => line.starts_with("Error: "),
            Position::Inside => false,
        };
        self.position = match line.trim_end() {
            "╷" => Position::BoxOpened,
            "" | "╵" => Position::Beginning,
            _ => Position::Inside,
        };
        if self.position == Position::BoxOpened {
            self.end();
        } else if begins {
            self.begin(text.strip_prefix("Error: ").unwrap_or_default());
        } else {
            self.detail(text);
        }
    }

    fn begin(&mut self, title: &str) {
        self.end();
        self.title = LockErrorKind::from_title(title);
        self.unreleased |= self.title == Some(LockErrorKind::Releasing);
    }

    fn end(&mut self) {
        self.end_of_block();
        self.title = None;
    }

    fn detail(&mut self, line: &str) {
        if line == "Lock Info:" && self.title.is_some() {
            self.block = Some(Block::default());
        } else if let (Some(block), Some((key, value))) = (&mut self.block, line.split_once(':')) {
            let value = value.trim();
            let field = match key {
                "ID" => &mut block.id,
                "Path" => &mut block.path,
                "Operation" => &mut block.operation,
                "Who" => &mut block.who,
                "Created" => &mut block.created,
                _ => return,
            };
            value.clone_into(field);
        } else {
            self.end_of_block();
        }
    }

    fn end_of_block(&mut self) {
        let Some(block) = self.block.take().filter(|block| !block.id.is_empty()) else {
            return;
        };
        if self.title == Some(LockErrorKind::Acquiring) {
            self.blocking = Some(StateLock {
                id: block.id,
                who: block.who,
                operation: block.operation,
                created: block.created,
                path: block.path,
                status: LockStatus::InTheWay,
            });
        }
    }

    /// The lock that blocked the tool.
    pub fn blocking(mut self) -> Option<StateLock> {
        self.end_of_block();
        self.blocking
    }

    /// Whether the tool reported that it could not release its own lock.
    pub const fn is_unreleased(&self) -> bool {
        self.unreleased
    }
}

/// The lock in a plain error.
pub fn find_lock(text: &[u8]) -> Option<StateLock> {
    let mut watch = LockWatch::default();
    for line in String::from_utf8_lossy(text).lines() {
        watch.line(&without_colours(line));
    }
    watch.blocking()
}

/// Removes the escape sequences for colours from a line.
pub fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        plain.push_str(before);
        rest = after
            .find(|c: char| c.is_ascii_alphabetic())
            .map_or("", |end| &after[end + 1..]);
    }
    plain.push_str(rest);
    plain
}

/// A process of the tool that has ended: the facts that show whether a lock was its own.
#[derive(Clone, Debug)]
pub struct EndedTool {
    /// The tool's name for its operation.
    pub operation: &'static str,
    pub host: String,
    /// Whether no other host can have that name, as with a pod.
    pub host_is_unique: bool,
    /// A time before the process began.
    pub started: SystemTime,
    /// A time at which it certainly had the lock.
    pub locked_at: Option<SystemTime>,
}

impl EndedTool {
    /// Whether that process certainly took this lock. A state has one lock at a time. So the lock is its own if it was
    /// created after the process began, and not after the process had a lock. If no other host has the name, it is
    /// enough that the lock was created there after the process began.
    pub fn certainly_took(&self, lock: &StateLock) -> bool {
        let Some(created) = instant(&lock.created) else {
            return false;
        };
        lock.host() == Some(&self.host)
            && lock.operation == self.operation
            && created >= self.started
            && (self.host_is_unique || self.locked_at.is_some_and(|locked_at| created <= locked_at))
    }

    /// Whether that process may have taken this lock.
    pub fn may_have_taken(&self, lock: &StateLock) -> bool {
        lock.host() == Some(&self.host)
            && instant(&lock.created).is_none_or(|created| created >= self.started)
    }
}

/// `2026-11-21 17:57:55.44851567 +0000 UTC`, as Go writes it, or RFC 3339.
fn instant(text: &str) -> Option<SystemTime> {
    let plain = text.strip_suffix(" +0000 UTC").unwrap_or(text);
    humantime::parse_rfc3339_weak(plain).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    const DETAIL: &str = "Error message: resource temporarily unavailable\nLock Info:\n  ID:        \
        a3269c67-80db-5afc-f139-8fa6b2425ef6\n  Path:      states/o/w/terraform.tfstate\n  Operation: \
        OperationTypeApply\n  Who:       root@pod-1\n  Version:   1.11.4\n  Created:   2026-11-21 \
        17:57:55.44851567 +0000 UTC\n  Info:      \n\n\nTerraform acquires a state lock to protect the state";

    fn lock() -> StateLock {
        StateLock {
            id: "a3269c67-80db-5afc-f139-8fa6b2425ef6".into(),
            who: "root@pod-1".into(),
            operation: "OperationTypeApply".into(),
            created: "2026-11-21 17:57:55.44851567 +0000 UTC".into(),
            path: "states/o/w/terraform.tfstate".into(),
            status: LockStatus::InTheWay,
        }
    }

    fn event(summary: &str) -> Value {
        json!({"type": "diagnostic", "diagnostic":
            {"severity": "error", "summary": summary, "detail": DETAIL}})
    }

    #[test]
    fn a_lock_is_read_from_both_renderings() {
        let mut watch = LockWatch::default();
        watch.event(&event("Error acquiring the state lock"));
        assert_eq!(watch.blocking(), Some(lock()));

        let boxed: Vec<String> = DETAIL
            .lines()
            .map(|line| format!("\u{1b}[31m│\u{1b}[0m {line}"))
            .collect();
        let boxed = boxed.join("\n");
        let text = format!(
            "╷\n\u{1b}[31m│ \u{1b}[1mError: \u{1b}[0mError acquiring the state lock\n{boxed}╵\n"
        );
        assert_eq!(find_lock(text.as_bytes()), Some(lock()));
        assert_eq!(
            find_lock(format!("Error: Error acquiring the state lock\n\n{DETAIL}").as_bytes()),
            Some(lock())
        );
    }

    #[test]
    fn only_the_tools_own_errors_about_locks_count() {
        let mut watch = LockWatch::default();
        watch.event(&event("Check block assertion failed"));
        watch.event(
            &json!({"type": "provision_progress", "@message": DETAIL, "hook": {"output": DETAIL}}),
        );
        assert!(!watch.is_unreleased());
        assert_eq!(watch.blocking(), None);
        let mut watch = LockWatch::default();
        watch.event(&event("Error releasing the state lock"));
        assert!(watch.is_unreleased());
        assert_eq!(watch.blocking(), None);
        assert_eq!(find_lock(DETAIL.as_bytes()), None);
    }

    /// For example, a data source or a provisioner that runs the tool on another state.
    #[test]
    fn a_lock_in_a_quoted_error_does_not_count() {
        for title in [ACQUIRING, RELEASING] {
            let quoted = format!("It said:\nError: {title}\n\n{DETAIL}");
            let mut watch = LockWatch::default();
            watch.event(
                &json!({"type": "diagnostic", "diagnostic": {"severity": "error",
                    "summary": "External Program Execution Failed",
                    "detail": quoted}}),
            );
            assert!(!watch.is_unreleased(), "{title}");
            assert_eq!(watch.blocking(), None);

            let boxed: Vec<String> = quoted.lines().map(|line| format!("│ {line}")).collect();
            let boxed = boxed.join("\n");
            let text = format!("╷\n│ Error: External Program Execution Failed\n│\n{boxed}\n╵\n");
            let plain = format!("\nError: External Program Execution Failed\n\n{quoted}\n");
            for text in [text, plain] {
                let mut watch = LockWatch::default();
                for line in text.lines() {
                    watch.line(line);
                }
                assert!(!watch.is_unreleased(), "{text}");
                assert_eq!(watch.blocking(), None, "{text}");
            }
        }
    }

    #[test]
    fn a_lock_is_read_from_a_second_error() {
        let first = "Error: no\n\nIt did not work.\n";
        let plain = format!("\n{first}\nError: {ACQUIRING}\n\n{DETAIL}\n");
        let boxed = DETAIL.replace('\n', "\n│ ");
        let boxed = format!("╷\n│ Error: no\n│ \n╵\n╷\n│ Error: {ACQUIRING}\n│ \n│ {boxed}\n╵\n");
        for text in [plain, boxed] {
            assert_eq!(find_lock(text.as_bytes()), Some(lock()), "{text}");
        }
    }

    #[test]
    fn only_the_lock_a_process_certainly_took_is_its_own() {
        let created = instant(&lock().created).unwrap();
        let second = Duration::from_secs(1);
        let tool = EndedTool {
            operation: "OperationTypeApply",
            host: "pod-1".into(),
            host_is_unique: false,
            started: created - second,
            locked_at: Some(created + second),
        };
        assert!(tool.certainly_took(&lock()));
        let other = |change: fn(&mut EndedTool)| {
            let mut other = tool.clone();
            change(&mut other);
            other
        };
        let doubts: [fn(&mut EndedTool); 5] = [
            |it| it.host = "pod-2".into(),
            |it| it.operation = "OperationTypePlan",
            |it| it.started += Duration::from_secs(2),
            |it| it.locked_at = None,
            // Another process took it after this tool's lock had been released.
            |it| it.locked_at = Some(it.started),
        ];
        for doubt in doubts {
            assert!(!other(doubt).certainly_took(&lock()));
        }
        assert!(
            other(|it| (it.locked_at, it.host_is_unique) = (None, true)).certainly_took(&lock())
        );
        let undated = StateLock {
            created: "yesterday".into(),
            ..lock()
        };
        assert!(!tool.certainly_took(&undated));
        assert!(
            tool.may_have_taken(&undated)
                && !other(|it| it.host = "x".into()).may_have_taken(&lock())
        );
    }
}
