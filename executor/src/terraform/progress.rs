//! The progress of an operation: which changes were planned, begun, made and failed, and since when the tool must have
//! had the lock on its state. The sources are the tool's JSON events, or the lines of a tool without JSON. The
//! progress contains only addresses, never values.

use std::collections::HashMap;
use std::time::SystemTime;

use job_contract::report::{ApplyProgress, ChangeCounts};
use serde_json::Value;

/// The progress of one operation's changes.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// In the order of their first event.
    changes: Vec<Change>,
    by_address: HashMap<String, usize>,
    /// Whether changes were announced before they began. Only then is their number known.
    announced: bool,
    /// A time at which the tool had the lock: it plans, and begins changes, only under the lock.
    locked_at: Option<SystemTime>,
    /// The counts of a plain plan.
    planned: Option<ChangeCounts>,
    /// The last plain diagnostic was an error, so a following address names the failed resource.
    in_error: bool,
}

#[derive(Clone, Debug)]
struct Change {
    address: String,
    state: ChangeState,
    /// A replacement is two operations on one address.
    operations_left: u8,
    exists_after: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeState {
    Planned,
    Begun,
    Made,
    Failed,
}

/// The tool's lines at the beginning and the end of an operation, and whether the object exists then.
const BEGINNINGS: [(&str, bool); 3] = [
    (": Creating...", true),
    (": Modifying...", true),
    (": Destroying...", false),
];
const ENDS: [(&str, bool); 3] = [
    (": Creation complete after", true),
    (": Modifications complete after", true),
    (": Destruction complete after", false),
];
/// The words of a plain plan for a change, and the number of its operations.
const ANNOUNCEMENTS: [(&str, u8); 6] = [
    (" is tainted, so must be replaced", 2),
    (" must be replaced", 2),
    (" will be replaced", 2),
    (" will be created", 1),
    (" will be updated in-place", 1),
    (" will be destroyed", 1),
];

impl Progress {
    /// Processes one event of the JSON stream.
    pub fn event(&mut self, event: &Value) {
        match event["type"].as_str().unwrap_or_default() {
            "planned_change" => {
                self.record_lock();
                let change = &event["change"];
                let operations = match change["action"].as_str() {
                    Some("create" | "update" | "delete") => 1,
                    Some("replace") => 2,
                    _ => return,
                };
                if let Some(address) = change["resource"]["addr"].as_str() {
                    self.planned(address, operations);
                }
            }
            kind @ ("apply_start" | "apply_complete" | "apply_errored") => {
                self.record_lock();
                let hook = &event["hook"];
                let exists_after = match hook["action"].as_str() {
                    Some("create" | "update") => true,
                    Some("delete") => false,
                    // Reading data changes nothing.
                    _ => return,
                };
                let Some(address) = hook["resource"]["addr"].as_str() else {
                    return;
                };
                match kind {
                    "apply_start" => self.begun(address),
                    "apply_complete" => self.made(address, exists_after),
                    _ => self.failed(address),
                }
            }
            "refresh_start" | "change_summary" => self.record_lock(),
            _ => {}
        }
    }

    /// Processes one line of the plain output, without colours.
    pub fn line(&mut self, line: &str) {
        // A plan's announcements have less indentation than its values. Lines about an apply have none.
        let announced = line.strip_prefix("  # ");
        let is_indented = line.starts_with(char::is_whitespace);
        let line = line.trim_matches(|c: char| c.is_whitespace() || "│╷╵".contains(c));
        if let Some(announced) = announced {
            let found = ANNOUNCEMENTS
                .iter()
                .find_map(|(words, operations)| Some((announced.rfind(words)?, *operations)));
            if let Some((end, operations)) = found {
                self.record_lock();
                self.planned(&announced[..end], operations);
            }
        } else if !is_indented && let Some((address, _)) = find_address(line, &BEGINNINGS) {
            self.record_lock();
            self.begun(address);
        } else if !is_indented && let Some((address, exists_after)) = find_address(line, &ENDS) {
            self.made(address, exists_after);
        } else if line.starts_with("Error: ") {
            self.in_error = true;
        } else if line.starts_with("Warning: ") {
            self.in_error = false;
        } else if let Some(address) = line
            .strip_prefix("with ")
            .and_then(|rest| rest.strip_suffix(','))
            && self.in_error
            && self.state_of(address) == Some(ChangeState::Begun)
        {
            self.failed(address);
        } else if !is_indented && let Some(counts) = line.strip_prefix("Plan: ") {
            self.record_lock();
            self.planned = Some(plan_counts(counts));
        } else if !is_indented && line.ends_with(": Refreshing state...") {
            self.record_lock();
        }
    }

    /// When the tool first certainly had the lock on the state, if it ever did.
    pub const fn locked_at(&self) -> Option<SystemTime> {
        self.locked_at
    }

    /// The counts of a plain plan; `None` if the plan changes no resource.
    pub const fn planned_counts(&self) -> Option<ChangeCounts> {
        self.planned
    }

    /// Whether something may have been changed.
    pub fn has_begun(&self) -> bool {
        let begun = |change: &Change| change.state != ChangeState::Planned;
        self.changes.iter().any(begun)
    }

    /// Whether the object of this address may have been changed.
    pub fn has_changed(&self, address: &str) -> bool {
        let state = self.state_of(address);
        state.is_some_and(|state| state != ChangeState::Planned)
    }

    /// The progress for the final report.
    pub fn report(&self) -> ApplyProgress {
        let planned = self.count(ChangeState::Planned);
        ApplyProgress {
            applied: self.count(ChangeState::Made),
            failed: self.addresses(ChangeState::Failed),
            unfinished: self.addresses(ChangeState::Begun),
            not_begun: self.announced.then_some(planned),
        }
    }

    /// The progress as a part of a sentence.
    pub fn sentence(&self) -> String {
        if !self.has_begun() {
            return match self.count(ChangeState::Planned) {
                0 => "no change was begun".to_owned(),
                planned => format!("none of {planned} changes was begun"),
            };
        }
        let made = self.count(ChangeState::Made);
        let of_all = if self.announced {
            format!(" of {} changes", self.changes.len())
        } else {
            format!(" change{}", if made == 1 { "" } else { "s" })
        };
        let mut parts = vec![format!("{made}{of_all} {} made", were(made))];
        for (state, verb) in [
            (ChangeState::Failed, "failed"),
            (ChangeState::Begun, "in progress"),
        ] {
            let count = self.count(state);
            if count > 0 {
                let verb = if state == ChangeState::Failed {
                    verb.to_owned()
                } else {
                    format!("{} {verb}", were(count))
                };
                let mut named = self.addresses(state).join(", ");
                if count > ApplyProgress::MAX_ADDRESSES as u64 {
                    named.push_str(", \u{2026}");
                }
                parts.push(format!("{count} {verb} ({named})"));
            }
        }
        let planned = self.count(ChangeState::Planned);
        if planned > 0 {
            parts.push(format!("{planned} {} not begun", were(planned)));
        }
        parts.join(", ")
    }

    /// Addresses of created objects for which `known` is false.
    pub fn missing_from(&self, exists: impl Fn(&str) -> bool) -> Vec<String> {
        self.changes
            .iter()
            .filter(|change| change.state == ChangeState::Made && change.exists_after)
            .filter(|change| !exists(&change.address))
            .map(|change| change.address.clone())
            .collect()
    }

    fn record_lock(&mut self) {
        self.locked_at.get_or_insert_with(SystemTime::now);
    }

    fn planned(&mut self, address: &str, operations: u8) {
        self.announced = true;
        let change = self.change(address);
        if change.state == ChangeState::Planned {
            change.operations_left = operations;
        }
    }

    fn begun(&mut self, address: &str) {
        self.change(address).state = ChangeState::Begun;
    }

    fn made(&mut self, address: &str, exists_after: bool) {
        let change = self.change(address);
        change.operations_left = change.operations_left.saturating_sub(1);
        change.exists_after |= exists_after;
        if change.operations_left == 0 {
            change.state = ChangeState::Made;
        }
    }

    fn failed(&mut self, address: &str) {
        self.change(address).state = ChangeState::Failed;
    }

    fn change(&mut self, address: &str) -> &mut Change {
        let index = *self
            .by_address
            .entry(address.to_owned())
            .or_insert_with(|| {
                self.changes.push(Change {
                    address: address.to_owned(),
                    state: ChangeState::Planned,
                    operations_left: 1,
                    exists_after: false,
                });
                self.changes.len() - 1
            });
        &mut self.changes[index]
    }

    fn state_of(&self, address: &str) -> Option<ChangeState> {
        let index = *self.by_address.get(address)?;
        Some(self.changes[index].state)
    }

    fn count(&self, state: ChangeState) -> u64 {
        let changes = self.changes.iter();
        changes.filter(|change| change.state == state).count() as u64
    }

    fn addresses(&self, state: ChangeState) -> Vec<String> {
        self.changes
            .iter()
            .filter(|change| change.state == state)
            .take(ApplyProgress::MAX_ADDRESSES)
            .map(|change| change.address.clone())
            .collect()
    }
}

const fn were(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}

/// The counts in the last line of a plain plan, such as `1 to import, 2 to add, 0 to change, 0 to destroy.` Terraform 1.14
/// counts actions in a second sentence.
fn plan_counts(line: &str) -> ChangeCounts {
    let mut counts = ChangeCounts::default();
    let line = line
        .split_once('.')
        .map_or(line, |(resources, _)| resources);
    for part in line.split(", ") {
        let Some((number, change)) = part.split_once(" to ") else {
            continue;
        };
        let count = match change {
            "add" => &mut counts.add,
            "change" => &mut counts.change,
            "destroy" => &mut counts.remove,
            "import" => &mut counts.import,
            "forget" => &mut counts.forget,
            _ => continue,
        };
        *count = number.parse().unwrap_or_default();
    }
    counts
}

/// The address before one of these phrases. The output of a provisioner has its resource's address and its own name in
/// parentheses before the phrase, so it does not match. Neither does a deposed object.
fn find_address<'l>(line: &'l str, phrases: &[(&str, bool)]) -> Option<(&'l str, bool)> {
    phrases.iter().find_map(|(phrase, exists_after)| {
        let address = &line[..line.find(phrase)?];
        let plain = address.split('[').next().unwrap_or_default();
        (!plain.is_empty() && !plain.contains(' ')).then_some((address, *exists_after))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn progress_after(events: &[Value]) -> Progress {
        let mut progress = Progress::default();
        for event in events {
            progress.event(event);
        }
        progress
    }

    fn planned(address: &str, action: &str) -> Value {
        json!({"type": "planned_change", "change": {"action": action, "resource": {"addr": address}}})
    }

    fn hook(kind: &str, address: &str, action: &str) -> Value {
        json!({"type": kind, "hook": {"action": action, "resource": {"addr": address}}})
    }

    #[test]
    fn every_change_has_one_of_four_states() {
        let progress = progress_after(&[
            planned("a.made", "create"),
            planned("a.failed", "update"),
            planned("a.late", "delete"),
            planned("a.later", "create"),
            planned("a.nothing", "noop"),
            hook("apply_start", "data.x", "read"),
            hook("apply_complete", "data.x", "read"),
            hook("apply_start", "a.made", "create"),
            hook("apply_start", "a.failed", "update"),
            hook("apply_complete", "a.made", "create"),
            hook("apply_errored", "a.failed", "update"),
            hook("apply_start", "a.late", "delete"),
        ]);
        assert_eq!(
            progress.report(),
            ApplyProgress {
                applied: 1,
                failed: vec!["a.failed".into()],
                unfinished: vec!["a.late".into()],
                not_begun: Some(1),
            }
        );
        assert_eq!(
            progress.sentence(),
            "1 of 4 changes was made, 1 failed (a.failed), 1 was in progress (a.late), 1 was not begun"
        );
        assert!(progress.locked_at().is_some());
        assert_eq!(progress.missing_from(|_| false), ["a.made"]);
        assert!(
            progress
                .missing_from(|address| address == "a.made")
                .is_empty()
        );
    }

    #[test]
    fn a_replacement_is_made_after_both_its_operations() {
        let mut progress = progress_after(&[
            planned("a.x", "replace"),
            hook("apply_start", "a.x", "delete"),
            hook("apply_complete", "a.x", "delete"),
        ]);
        assert_eq!(progress.report().unfinished, ["a.x"]);
        progress.event(&hook("apply_start", "a.x", "create"));
        progress.event(&hook("apply_complete", "a.x", "create"));
        assert_eq!(progress.report().applied, 1);
    }

    #[test]
    fn without_a_begun_change_nothing_has_changed() {
        assert_eq!(Progress::default().sentence(), "no change was begun");
        assert!(Progress::default().locked_at().is_none());
        let planned = progress_after(&[planned("a.x", "create"), planned("a.y", "create")]);
        assert_eq!(planned.sentence(), "none of 2 changes was begun");
        assert!(!planned.has_begun());
    }

    #[test]
    fn changes_without_a_plan_have_no_total() {
        let progress = progress_after(&[
            hook("apply_start", "a.x", "create"),
            hook("apply_complete", "a.x", "create"),
            hook("apply_start", "a.y", "create"),
        ]);
        assert_eq!(progress.report().not_begun, None);
        assert_eq!(
            progress.sentence(),
            "1 change was made, 1 was in progress (a.y)"
        );
    }

    #[test]
    fn a_value_in_a_plain_plan_is_no_change() {
        let mut progress = Progress::default();
        for line in [
            "  # a.x will be created",
            "  + resource \"a\" \"x\" {",
            "      + input = <<-EOT",
            "            # a.forged will be created",
            "            a.forged: Creating...",
            "            a.forged: Creation complete after 0s [id=x]",
            "        EOT",
            "    }",
        ] {
            progress.line(line);
        }
        assert!(!progress.has_begun());
        assert_eq!(progress.report().not_begun, Some(1));
    }

    #[test]
    fn a_plain_plan_has_the_counts_of_its_last_line() {
        let mut progress = Progress::default();
        for line in [
            "      + input = <<-EOT",
            "            Plan: 9 to add, 9 to change, 9 to destroy.",
            "        EOT",
        ] {
            progress.line(line);
        }
        assert_eq!(progress.planned_counts(), None);
        progress.line("Plan: 5 to import, 1 to add, 2 to change, 3 to destroy, 4 to forget.");
        let expected = ChangeCounts {
            add: 1,
            change: 2,
            remove: 3,
            import: 5,
            forget: 4,
        };
        assert_eq!(progress.planned_counts(), Some(expected));
        progress.line("Plan: 0 to add, 0 to change, 3 to destroy. Actions: 2 to invoke.");
        let expected = ChangeCounts {
            remove: 3,
            ..ChangeCounts::default()
        };
        assert_eq!(progress.planned_counts(), Some(expected));
    }

    #[test]
    fn text_lines_have_the_same_content() {
        let mut progress = Progress::default();
        for line in [
            "  # a.made will be created",
            "  # a.failed[\"x (y): z\"] will be updated in-place",
            "  # a.late must be replaced",
            "  # data.x will be read during apply",
            "  # a.later will be destroyed",
            "  # (because a.later is not in configuration)",
            "Plan: 2 to add, 1 to change, 2 to destroy.",
            "a.made: Creating...",
            "a.made (local-exec): a.forged: Creating...",
            "a.made: Creation complete after 0s [id=x]",
            "a.failed[\"x (y): z\"]: Modifying... [id=x]",
            "a.late: Destroying... [id=y]",
            "a.late (deposed object 12): Destroying... [id=y]",
            "│ Warning: Deprecated",
            "│   with a.late,",
            "│ Error: no",
            "│   with a.failed[\"x (y): z\"],",
        ] {
            progress.line(line);
        }
        assert_eq!(
            progress.report(),
            ApplyProgress {
                applied: 1,
                failed: vec!["a.failed[\"x (y): z\"]".into()],
                unfinished: vec!["a.late".into()],
                not_begun: Some(1),
            }
        );
    }
}
