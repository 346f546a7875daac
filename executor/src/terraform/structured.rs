//! Structured plan and apply output: the list of changes that a user interface shows. The tool's JSON events update it,
//! and the output of `show` completes it (contract 6.6 and Appendix B). It never contains sensitive values.

use std::collections::{HashMap, HashSet};

use job_contract::report::ChangeCounts;
use serde_json::{Map, Value, json};

/// Changes by address, in the order of their first event, and diagnostics without an address.
#[derive(Clone, Debug, Default)]
pub struct Structured {
    changes: Vec<Map<String, Value>>,
    by_address: HashMap<String, usize>,
    diagnostics: Vec<Value>,
    counts: Option<ChangeCounts>,
}

impl Structured {
    /// The initial list of an apply: the plan's changes, all still to be made.
    pub fn seeded(plan: &Value) -> Self {
        let mut seeded = Self::default();
        for change in plan
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_object)
        {
            let Some(address) = change.get("address").and_then(Value::as_str) else {
                continue;
            };
            let entry = seeded.entry(address);
            entry.extend(
                change
                    .iter()
                    .map(|(key, value)| (key.clone(), value.clone())),
            );
            if entry.get("action").and_then(Value::as_str) != Some("ephemeral") {
                entry.insert("status".into(), json!("pending"));
            }
        }
        seeded
    }

    /// The changes in the format of the job context.
    pub fn changes(&self) -> Value {
        let visible = |change: &Map<String, Value>| {
            let mut change = change.clone();
            change.remove("previousStatus");
            Value::Object(change)
        };
        self.changes.iter().map(visible).collect()
    }

    /// Diagnostics that belong to no resource.
    pub fn diagnostics(&self) -> Value {
        Value::Array(self.diagnostics.clone())
    }

    /// Counts of the last `change_summary`.
    pub const fn counts(&self) -> Option<ChangeCounts> {
        self.counts
    }

    /// Counts from the changes themselves, for a plan without a summary.
    pub fn counted(&self) -> ChangeCounts {
        let mut counts = ChangeCounts::default();
        for change in &self.changes {
            match change.get("action").and_then(Value::as_str) {
                Some("create") => counts.add += 1,
                Some("update") => counts.change += 1,
                Some("delete") => counts.remove += 1,
                Some("replace") => {
                    counts.add += 1;
                    counts.remove += 1;
                }
                Some("import") => counts.import += 1,
                Some("unknown") if change.get("actions") == Some(&json!(["forget"])) => {
                    counts.forget += 1;
                }
                _ => {}
            }
        }
        counts
    }

    /// Processes one event of the JSON stream.
    pub fn event(&mut self, event: &Value) {
        let kind = event["type"].as_str().unwrap_or_default();
        match kind {
            "planned_change" => self.planned_change(event),
            "resource_drift" => {
                self.on_change(event, |entry, change| {
                    set(entry, "driftAction", &change["action"]);
                });
            }
            "diagnostic" => self.diagnostic(&event["diagnostic"]),
            "change_summary" => {
                self.counts = serde_json::from_value(rename_remove(&event["changes"])).ok();
            }
            _ => self.hook(kind, &event["hook"]),
        }
    }

    fn planned_change(&mut self, event: &Value) {
        self.on_change(event, |entry, change| {
            let resource = &change["resource"];
            if let Some(module) = resource["module"].as_str() {
                let module = (!module.is_empty()).then_some(module);
                entry.insert("moduleAddress".into(), json!(module));
            }
            set(entry, "resourceType", &resource["resource_type"]);
            set(entry, "resourceName", &resource["resource_name"]);
            if let Some(actions) = change["action"].as_str().and_then(actions) {
                entry.insert("actions".into(), json!(actions));
            }
            // User interfaces do not know the event's word for a forgotten resource.
            if change["action"] == "remove" {
                entry.insert("action".into(), json!("unknown"));
            } else {
                set(entry, "action", &change["action"]);
            }
            entry.insert("status".into(), json!("planned"));
        });
    }

    fn on_change(&mut self, event: &Value, update: impl FnOnce(&mut Map<String, Value>, &Value)) {
        let change = &event["change"];
        if let Some(address) = change["resource"]["addr"].as_str() {
            update(self.entry(address), change);
        }
    }

    fn hook(&mut self, kind: &str, hook: &Value) {
        let Some(address) = hook["resource"]["addr"].as_str() else {
            return;
        };
        let update: fn(&mut Map<String, Value>, &str, &Value) = match kind {
            "refresh_start" | "refresh_complete" | "apply_start" | "apply_progress"
            | "apply_complete" | "apply_errored" | "provision_start" | "provision_progress"
            | "provision_complete" | "provision_errored" => operation_hook,
            "ephemeral_op_start"
            | "ephemeral_action_started"
            | "ephemeral_op_progress"
            | "ephemeral_op_complete"
            | "ephemeral_action_complete"
            | "ephemeral_op_errored" => ephemeral_hook,
            _ => return,
        };
        let entry = self.entry(address);
        update(entry, kind, hook);
        set(entry, "elapsedSeconds", &hook["elapsed_seconds"]);
    }

    fn diagnostic(&mut self, diagnostic: &Value) {
        let severity = diagnostic["severity"].as_str().unwrap_or_default();
        let Some(summary) = diagnostic["summary"].as_str() else {
            return;
        };
        if !matches!(severity, "error" | "warning") {
            return;
        }
        let mut kept = Map::new();
        kept.insert("severity".into(), json!(severity));
        kept.insert("summary".into(), json!(summary));
        if let Some(detail) = diagnostic["detail"]
            .as_str()
            .filter(|detail| !detail.is_empty())
        {
            kept.insert("detail".into(), json!(detail));
        }
        let range = &diagnostic["range"];
        if let (Some(file), Some(line)) =
            (range["filename"].as_str(), range["start"]["line"].as_u64())
        {
            kept.insert("location".into(), json!(format!("{file}:{line}")));
        }
        match diagnostic["address"]
            .as_str()
            .filter(|address| !address.is_empty())
        {
            None => self.diagnostics.push(Value::Object(kept)),
            Some(address) => {
                let entry = self.entry(address);
                if severity == "error" {
                    entry.entry("status").or_insert_with(|| json!("errored"));
                }
                if let Some(list) = entry
                    .entry("diagnostics")
                    .or_insert_with(|| json!([]))
                    .as_array_mut()
                {
                    list.push(Value::Object(kept));
                }
            }
        }
    }

    /// Completes the list from the plan's own JSON, which takes precedence. Properties that only events contain stay.
    /// The plan's entries without an action are skipped, so that such resources keep what the events contained.
    pub fn complete_from_plan(&mut self, plan: &Value) {
        for resource in plan["resource_changes"].as_array().into_iter().flatten() {
            let Some(address) = resource["address"].as_str() else {
                continue;
            };
            if normal_action(&resource["change"]) != "no-op" {
                self.entry(address).extend(planned_entry(resource));
            }
        }
    }

    /// Completes an apply from the new state. It fills in values that were unknown in the plan, unless the plan or the
    /// state marks them as sensitive. With `all`, the apply was complete, so open changes in the state, and forgotten
    /// resources, are set to applied. The tool reports no event for them, nor for resources that were only moved or
    /// imported.
    pub fn complete_from_state(&mut self, state: &Value, all: bool) {
        let mut resources = HashMap::new();
        collect_resources(&state["values"]["root_module"], &mut resources);
        for change in &mut self.changes {
            let is_open = ["pending", "planned"]
                .iter()
                .any(|status| change.get("status").is_some_and(|known| known == status));
            if all && is_open && change.get("actions") == Some(&json!(["forget"])) {
                change.insert("status".into(), json!("applied"));
            }
            let Some(resource) = change
                .get("address")
                .and_then(Value::as_str)
                .and_then(|address| resources.get(address))
            else {
                continue;
            };
            if all && is_open {
                change.insert("status".into(), json!("applied"));
            }
            fill_unknown(change, resource);
        }
    }

    fn entry(&mut self, address: &str) -> &mut Map<String, Value> {
        let index = *self
            .by_address
            .entry(address.to_owned())
            .or_insert_with(|| {
                let mut entry = Map::new();
                entry.insert("address".into(), json!(address));
                self.changes.push(entry);
                self.changes.len() - 1
            });
        &mut self.changes[index]
    }
}

/// Updates a change with a hook of a refresh, an apply or a provisioner.
fn operation_hook(entry: &mut Map<String, Value>, kind: &str, hook: &Value) {
    match kind {
        "refresh_start" => {
            entry.entry("action").or_insert_with(|| json!("no-op"));
            let before = entry
                .get("status")
                .cloned()
                .unwrap_or_else(|| json!("pending"));
            entry.insert("previousStatus".into(), before);
            entry.insert("status".into(), json!("refreshing"));
        }
        "refresh_complete" => {
            let before = entry
                .remove("previousStatus")
                .unwrap_or_else(|| json!("pending"));
            entry.insert("status".into(), before);
        }
        "apply_start" => {
            entry.insert("status".into(), json!("applying"));
        }
        "apply_complete" => {
            entry.insert("status".into(), json!("applied"));
        }
        "apply_errored" => {
            entry.insert("status".into(), json!("errored"));
        }
        "provision_start" => set(entry, "currentProvisioner", &hook["provisioner"]),
        "provision_progress" => {
            if let Some(lines) = entry
                .entry("provisionerOutput")
                .or_insert_with(|| json!([]))
                .as_array_mut()
            {
                lines.push(hook["output"].clone());
            }
        }
        "provision_complete" | "provision_errored" => {
            entry.remove("currentProvisioner");
        }
        _ => {}
    }
}

/// Updates a change with a hook of an ephemeral resource.
fn ephemeral_hook(entry: &mut Map<String, Value>, kind: &str, hook: &Value) {
    let (status, begins) = match (kind, ephemeral_phase(hook)) {
        ("ephemeral_op_start" | "ephemeral_action_started", "close") => ("ephemeral-closing", true),
        ("ephemeral_op_start" | "ephemeral_action_started", _) => ("ephemeral-opening", true),
        ("ephemeral_op_complete" | "ephemeral_action_complete", "renew") => {
            ("ephemeral-renewed", false)
        }
        ("ephemeral_op_complete" | "ephemeral_action_complete", _) => ("applied", false),
        ("ephemeral_op_errored", _) => ("ephemeral-errored", false),
        _ => return,
    };
    if begins {
        entry.entry("action").or_insert_with(|| json!("ephemeral"));
    }
    entry.insert("status".into(), json!(status));
}

/// Sets a key unless the value is null: an absent property stays absent.
fn set(entry: &mut Map<String, Value>, key: &str, value: &Value) {
    if !value.is_null() {
        entry.insert(key.to_owned(), value.clone());
    }
}

/// `change_summary` uses `remove`, but the counts use `destroy`.
fn rename_remove(changes: &Value) -> Value {
    json!({
        "add": changes["add"].as_u64().unwrap_or(0),
        "change": changes["change"].as_u64().unwrap_or(0),
        "destroy": changes["remove"].as_u64().unwrap_or(0),
        "import": changes["import"].as_u64().unwrap_or(0),
        "forget": changes["forget"].as_u64().unwrap_or(0),
    })
}

/// `open`, `renew` or `close`; OpenTofu writes a phrase instead.
fn ephemeral_phase(hook: &Value) -> &'static str {
    let phrase = hook["action"]
        .as_str()
        .or_else(|| hook["Msg"].as_str())
        .unwrap_or_default()
        .to_ascii_lowercase();
    if phrase.starts_with("clos") {
        "close"
    } else if phrase.starts_with("renew") {
        "renew"
    } else {
        "open"
    }
}

/// Converts one entry of `resource_changes` into a change.
fn planned_entry(resource: &Value) -> Map<String, Value> {
    let change = &resource["change"];
    let mut entry = Map::new();
    entry.insert("moduleAddress".into(), resource["module_address"].clone());
    set(&mut entry, "resourceType", &resource["type"]);
    set(&mut entry, "resourceName", &resource["name"]);
    set(&mut entry, "actions", &change["actions"]);
    entry.insert("action".into(), json!(normal_action(change)));
    set(&mut entry, "importing", &change["importing"]);
    let whole_input = resource["type"] == "terraform_data";
    for (key, marks_key, value, marks) in [
        (
            "before",
            "beforeSensitive",
            &change["before"],
            &change["before_sensitive"],
        ),
        (
            "after",
            "afterSensitive",
            &change["after"],
            &change["after_sensitive"],
        ),
    ] {
        let mut marks = marks.clone();
        // The output of `terraform_data` is its input, but has no mark of its own.
        if let (true, Some(marks)) = (whole_input, marks.as_object_mut())
            && let Some(input) = marks.get("input").cloned()
        {
            marks.entry("output").or_insert(input);
        }
        entry.insert(key.into(), without_sensitive(value, &marks));
        set(&mut entry, marks_key, &marks);
    }
    set(&mut entry, "afterUnknown", &change["after_unknown"]);
    let changed = changed_sensitive(change);
    if !changed.is_empty() {
        entry.insert("changedSensitive".into(), Value::Object(changed));
    }
    entry
}

/// The actions for the event's word, if their order is certain.
fn actions(word: &str) -> Option<Vec<&str>> {
    match word {
        "create" | "read" | "update" | "delete" => Some(vec![word]),
        "remove" => Some(vec!["forget"]),
        _ => None,
    }
}

fn normal_action(change: &Value) -> &'static str {
    let actions: Vec<&str> = change["actions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    match actions.as_slice() {
        ["create"] => "create",
        ["delete"] => "delete",
        ["update"] => "update",
        ["read"] => "read",
        ["no-op"] if !change["importing"].is_null() => "import",
        ["no-op"] => "no-op",
        ["delete", "create"] | ["create", "delete"] => "replace",
        _ => "unknown",
    }
}

/// `value`, with null for every part that `marks` calls sensitive.
fn without_sensitive(value: &Value, marks: &Value) -> Value {
    match (value, marks) {
        (_, Value::Bool(true)) => Value::Null,
        (Value::Object(object), Value::Object(marks)) => object
            .iter()
            .map(|(key, part)| {
                (
                    key.clone(),
                    without_sensitive(part, marks.get(key).unwrap_or(&Value::Null)),
                )
            })
            .collect::<Map<_, _>>()
            .into(),
        (Value::Array(list), Value::Array(marks)) => list
            .iter()
            .enumerate()
            .map(|(index, part)| without_sensitive(part, marks.get(index).unwrap_or(&Value::Null)))
            .collect(),
        _ => value.clone(),
    }
}

/// Which attributes with a sensitive value differ. The values themselves are left out.
fn changed_sensitive(change: &Value) -> Map<String, Value> {
    let marked = |side: &str, key: &str| match &change[side] {
        Value::Bool(all) => *all,
        marks => holds_true(&marks[key]),
    };
    let keys = [&change["before"], &change["after"]]
        .into_iter()
        .filter_map(Value::as_object)
        .flat_map(Map::keys);
    keys.filter(|key| marked("before_sensitive", key) || marked("after_sensitive", key))
        .filter(|key| change["before"][key.as_str()] != change["after"][key.as_str()])
        .map(|key| (key.clone(), json!(true)))
        .collect()
}

fn holds_true(marks: &Value) -> bool {
    match marks {
        Value::Bool(mark) => *mark,
        Value::Object(parts) => parts.values().any(holds_true),
        Value::Array(parts) => parts.iter().any(holds_true),
        _ => false,
    }
}

/// Addresses of all resources in a state as JSON.
pub fn addresses(state: &Value) -> HashSet<&str> {
    let mut resources = HashMap::new();
    collect_resources(&state["values"]["root_module"], &mut resources);
    resources.into_keys().collect()
}

fn collect_resources<'v>(module: &'v Value, resources: &mut HashMap<&'v str, &'v Value>) {
    for resource in module["resources"].as_array().into_iter().flatten() {
        if let Some(address) = resource["address"].as_str() {
            resources.insert(address, resource);
        }
    }
    for child in module["child_modules"].as_array().into_iter().flatten() {
        collect_resources(child, resources);
    }
}

fn fill_unknown(change: &mut Map<String, Value>, resource: &Value) {
    let unknown = match change.get("afterUnknown") {
        Some(unknown) if holds_true(unknown) => unknown.clone(),
        _ => return,
    };
    let planned_marks = change.get("afterSensitive").cloned().unwrap_or(Value::Null);
    let visible = without_sensitive(&resource["values"], &resource["sensitive_values"]);
    let visible = without_sensitive(&visible, &planned_marks);
    let (Value::Object(mut unknown), Some(visible)) = (unknown, visible.as_object()) else {
        return;
    };
    if let Some(after) = change
        .entry("after")
        .or_insert_with(|| json!({}))
        .as_object_mut()
    {
        for (key, parts) in unknown.iter_mut().filter(|(_, parts)| holds_true(parts)) {
            if let Some(value) = visible.get(key) {
                after.insert(key.clone(), value.clone());
                *parts = all_false(parts);
            }
        }
    }
    change.insert("afterUnknown".into(), Value::Object(unknown));
}

/// Marks of the same shape, all false.
fn all_false(marks: &Value) -> Value {
    match marks {
        Value::Object(parts) => parts
            .iter()
            .map(|(key, part)| (key.clone(), all_false(part)))
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(parts) => parts.iter().map(all_false).collect(),
        _ => Value::Bool(false),
    }
}

#[cfg(test)]
mod tests;
