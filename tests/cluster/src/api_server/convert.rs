//! Events have two faces, `v1` and `events.k8s.io/v1`; they are kept as `v1`.

use std::borrow::Cow;

use serde_json::Value;

use super::resource::ResourceType;

/// Names in `v1` and in `events.k8s.io/v1`.
const FIELDS: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

fn is_new_event(resource: &ResourceType) -> bool {
    resource.group == "events.k8s.io"
}

fn rename(object: &mut Value, names: impl Iterator<Item = (&'static str, &'static str)>) {
    let Some(fields) = object.as_object_mut() else {
        return;
    };
    for (from, to) in names {
        if let Some(value) = fields.remove(from) {
            fields.insert(to.to_owned(), value);
        }
    }
}

/// From the face of `resource` to the kept form.
pub(crate) fn stored(resource: &ResourceType, mut object: Value) -> Value {
    if is_new_event(resource) {
        rename(&mut object, FIELDS.iter().map(|(old, new)| (*new, *old)));
        object["apiVersion"] = "v1".into();
    }
    object
}

/// From the kept form to the face of `resource`.
pub(crate) fn out<'a>(resource: &ResourceType, object: &'a Value) -> Cow<'a, Value> {
    if !is_new_event(resource) {
        return Cow::Borrowed(object);
    }
    let mut object = object.clone();
    rename(&mut object, FIELDS.iter().copied());
    object["apiVersion"] = "events.k8s.io/v1".into();
    Cow::Owned(object)
}
