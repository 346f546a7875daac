//! Create, get, list, update, patch and delete: what each does to an object beyond storing it.

use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::request::ApiRequest;
use super::resource::ResourceType;
use super::selector::Selector;
use super::status::{self, ApiError};
use super::storage::{Key, State, Store};
use super::validation::{self, items};
use super::view::View;
use super::{apply, convert, decode, defaulting, patch};

/// The finalizer of an object whose dependents go first.
pub(crate) const FOREGROUND: &str = "foregroundDeletion";
/// The finalizer of an object whose dependents stay.
pub(crate) const ORPHAN: &str = "orphan";

const SUFFIX: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

pub(crate) type Answer = Result<(u16, Value), ApiError>;

/// The time as objects carry it.
pub(crate) fn now() -> String {
    at(k8s_openapi::jiff::Timestamp::now())
}

/// With the fractions a `MicroTime` has.
pub(crate) fn micro_now() -> String {
    let now = k8s_openapi::jiff::Timestamp::now();
    now.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

fn at(time: k8s_openapi::jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn key(request: &ApiRequest, name: &str) -> Key {
    Key {
        bucket: request.resource.bucket(),
        namespace: request.namespace.clone(),
        name: name.to_owned(),
    }
}

fn generated(prefix: &str) -> String {
    let random = uuid::Uuid::new_v4();
    let suffix: String = random.as_bytes()[..5]
        .iter()
        .map(|byte| char::from(SUFFIX[usize::from(*byte) % SUFFIX.len()]))
        .collect();
    let mut end = prefix.len().min(58);
    while !prefix.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{suffix}", &prefix[..end])
}

/// A place to put things in: an existing namespace that does not end.
fn namespace_ready(state: &State, request: &ApiRequest, name: &str) -> Result<(), ApiError> {
    if !request.resource.namespaced {
        return Ok(());
    }
    let namespace = &request.namespace;
    let place = Key {
        bucket: ("", "namespaces"),
        namespace: String::new(),
        name: namespace.clone(),
    };
    let Some(found) = state.get(&place) else {
        return Err(ApiError::new(
            404,
            "NotFound",
            format!("namespaces \"{namespace}\" not found"),
        )
        .detailed(json!({"name": namespace, "kind": "namespaces"})));
    };
    if found["status"]["phase"] == "Terminating" {
        let why = format!(
            "unable to create new content in namespace {namespace} because it is being terminated"
        );
        return Err(ApiError::refused(
            request.resource.group,
            request.resource.plural,
            name,
            &why,
        ));
    }
    Ok(())
}

/// What the account admission of a real API server does to a new pod.
fn admit_pod(state: &State, request: &ApiRequest, pod: &mut Value) -> Result<(), ApiError> {
    let spec = &mut pod["spec"];
    if spec["serviceAccountName"].as_str().unwrap_or("").is_empty() {
        spec["serviceAccountName"] = "default".into();
        spec["serviceAccount"] = "default".into();
    }
    let account = spec["serviceAccountName"].as_str().unwrap_or("").to_owned();
    let place = Key {
        bucket: ("", "serviceaccounts"),
        namespace: request.namespace.clone(),
        name: account.clone(),
    };
    if state.get(&place).is_none() {
        let why = format!(
            "error looking up service account {}/{account}: serviceaccount \"{account}\" not found",
            request.namespace
        );
        return Err(ApiError::refused(
            request.resource.group,
            request.resource.plural,
            pod["metadata"]["name"].as_str().unwrap_or(""),
            &why,
        ));
    }
    let seconds = 300;
    let tolerations = pod["spec"]["tolerations"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let mut all = tolerations.clone();
    for taint in [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ] {
        if !tolerations
            .iter()
            .any(|toleration| toleration["key"] == taint || toleration["key"].is_null())
        {
            all.push(json!({"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}));
        }
    }
    pod["spec"]["tolerations"] = all.into();
    if pod["spec"]["priority"].is_null() {
        pod["spec"]["priority"] = 0.into();
        pod["spec"]["preemptionPolicy"] = "PreemptLowerPriority".into();
    }
    Ok(())
}

/// Gives a decoded object what only the server may give.
fn stamp(request: &ApiRequest, object: &mut Value) -> Result<(), ApiError> {
    let meta = &mut object["metadata"];
    if !meta["resourceVersion"].as_str().unwrap_or("").is_empty() {
        return Err(ApiError::new(
            500,
            "",
            "resourceVersion should not be set on objects to be created",
        ));
    }
    if request.resource.namespaced {
        let given = meta["namespace"].as_str().unwrap_or("");
        if !given.is_empty() && given != request.namespace {
            return Err(ApiError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        meta["namespace"] = request.namespace.clone().into();
    }
    let prefix = meta["generateName"].as_str().unwrap_or("");
    if meta["name"].as_str().unwrap_or("").is_empty() && !prefix.is_empty() {
        meta["name"] = generated(prefix).into();
    }
    meta["uid"] = uuid::Uuid::new_v4().to_string().into();
    meta["creationTimestamp"] = now().into();
    if let Some(meta) = meta.as_object_mut() {
        for field in [
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "selfLink",
            "managedFields",
        ] {
            meta.shift_remove(field);
        }
    }
    if request.resource.has_generation() {
        meta["generation"] = 1.into();
    }
    if request.resource.has_status() {
        object["status"] = match request.resource.kind {
            "Pod" => {
                json!({"phase": "Pending", "qosClass": defaulting::qos_class(&object["spec"])})
            }
            "PersistentVolumeClaim" => json!({"phase": "Bound"}),
            "Namespace" => json!({"phase": "Active"}),
            _ => json!({}),
        };
    }
    Ok(())
}

fn checked(
    resource: &ResourceType,
    new: &Value,
    old: Option<&Value>,
    status_only: bool,
) -> Result<(), ApiError> {
    let errors = validation::validate(resource, new, old, status_only);
    if errors.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid(
        resource,
        new["metadata"]["name"].as_str().unwrap_or(""),
        &errors,
    ))
}

fn insert(state: &mut State, request: &ApiRequest, object: Value) -> Result<Arc<Value>, ApiError> {
    let resource = request.resource;
    let mut object = convert::stored(resource, object);
    defaulting::apply(resource.kind, &mut object);
    stamp(request, &mut object)?;
    let name = object["metadata"]["name"].as_str().unwrap_or("").to_owned();
    namespace_ready(state, request, &name)?;
    match resource.kind {
        "Job" => defaulting::job_identity(&mut object),
        "Pod" => admit_pod(state, request, &mut object)?,
        _ => {}
    }
    without_nulls(&mut object["spec"]);
    checked(resource, &object, None, false)?;
    let place = key(request, &name);
    if state.get(&place).is_some() {
        return Err(ApiError::already_exists(resource, &name));
    }
    if request.query.get("dryRun") == "All" {
        return Ok(Arc::new(object));
    }
    let created = state.put(place, object);
    if resource.kind == "Namespace" {
        let meta = json!({"name": "default", "namespace": name, "uid": uuid::Uuid::new_v4().to_string(), "creationTimestamp": now()});
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta});
        state.put(
            Key {
                bucket: ("", "serviceaccounts"),
                namespace: name,
                name: "default".into(),
            },
            account,
        );
    }
    Ok(created)
}

pub(crate) fn create(store: &Store, request: &ApiRequest, body: Value) -> Answer {
    match request.subresource.as_str() {
        "binding" => return bind(store, request, &body),
        "eviction" => return evict(store, request, &body),
        _ => {}
    }
    let object = decode::object(request.resource, body)?;
    let created = store.transaction(|state| insert(state, request, object))?;
    Ok((201, convert::out(request.resource, &created).into_owned()))
}

fn found(state: &State, request: &ApiRequest) -> Result<Arc<Value>, ApiError> {
    let object = state.get(&key(request, &request.name)).map(Arc::clone);
    object.ok_or_else(|| ApiError::not_found(request.resource, &request.name))
}

pub(crate) fn get(store: &Store, request: &ApiRequest) -> Result<Arc<Value>, ApiError> {
    store.transaction(|state| found(state, request))
}

/// Sets `nodeName`, as a scheduler asks for it.
fn bind(store: &Store, request: &ApiRequest, body: &Value) -> Answer {
    store.transaction(|state| {
        let mut pod = (*found(state, request)?).clone();
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            return Err(ApiError::conflict(request.resource, &request.name, "pod is being deleted, cannot be assigned to a host"));
        }
        if let Some(node) = pod["spec"]["nodeName"].as_str().filter(|node| !node.is_empty()) {
            let why = format!("pod {} is already assigned to node \"{node}\"", request.name);
            return Err(ApiError::conflict(request.resource, &request.name, &why));
        }
        pod["spec"]["nodeName"] = body["target"]["name"].clone();
        let condition = json!({
            "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now(),
        });
        set_condition(&mut pod, condition);
        state.put(key(request, &request.name), pod);
        Ok((201, json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})))
    })
}

fn set_condition(object: &mut Value, condition: Value) {
    let mut all = object["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    all.retain(|other| other["type"] != condition["type"]);
    all.push(condition);
    object["status"]["conditions"] = all.into();
}

fn evict(store: &Store, request: &ApiRequest, body: &Value) -> Answer {
    store.transaction(|state| {
        let mut pod = (*found(state, request)?).clone();
        let condition = json!({
            "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting", "lastTransitionTime": now(),
        });
        set_condition(&mut pod, condition);
        state.put(key(request, &request.name), pod);
        remove(state, request, &request.name, &body["deleteOptions"])?;
        Ok((201, json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})))
    })
}

/// Stores `new` in place of `old`, or removes it when it was only waiting for its finalizers.
fn replace(
    state: &mut State,
    request: &ApiRequest,
    old: &Value,
    mut new: Value,
) -> Result<Value, ApiError> {
    let resource = request.resource;
    let name = request.name.as_str();
    let status_only = request.subresource == "status";
    if status_only {
        let status = new["status"].clone();
        let (finalizers, owners) = (
            old["metadata"]["finalizers"].clone(),
            old["metadata"]["ownerReferences"].clone(),
        );
        let mut kept = old.clone();
        kept["status"] = status;
        kept["metadata"]["resourceVersion"] = new["metadata"]["resourceVersion"].clone();
        kept["metadata"]["labels"] = new["metadata"]["labels"].clone();
        kept["metadata"]["annotations"] = new["metadata"]["annotations"].clone();
        kept["metadata"]["finalizers"] = finalizers;
        kept["metadata"]["ownerReferences"] = owners;
        prune(&mut kept);
        new = kept;
    } else {
        defaulting::apply(resource.kind, &mut new);
        if resource.has_status() {
            new["status"] = old["status"].clone();
        }
    }
    let asked = new["metadata"]["resourceVersion"].as_str().unwrap_or("");
    if !asked.is_empty() && new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
    {
        return Err(ApiError::modified(resource, name));
    }
    let uid = &new["metadata"]["uid"];
    if !uid.is_null() && *uid != old["metadata"]["uid"] {
        let why = format!(
            "Precondition failed: UID in precondition: {}, UID in object meta: {}",
            uid.as_str().unwrap_or(""),
            old["metadata"]["uid"].as_str().unwrap_or("")
        );
        return Err(ApiError::conflict(resource, name, &why));
    }
    for field in [
        "uid",
        "creationTimestamp",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "namespace",
    ] {
        new["metadata"][field] = old["metadata"][field].clone();
    }
    prune(&mut new);
    checked(resource, &new, Some(old), status_only)?;
    if resource.has_generation() && new["spec"] != old["spec"] {
        new["metadata"]["generation"] =
            (old["metadata"]["generation"].as_i64().unwrap_or(0) + 1).into();
    }
    new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
    if new == *old || request.query.get("dryRun") == "All" {
        return Ok(new);
    }
    if may_go(resource, &new) {
        return Ok((*state.remove(&key(request, name), new)).clone());
    }
    Ok((*state.put(key(request, name), new)).clone())
}

/// Takes the nulls away that indexing leaves.
fn without_nulls(value: &mut Value) {
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, inner| !inner.is_null());
        fields.values_mut().for_each(without_nulls);
    }
    for item in value.as_array_mut().into_iter().flatten() {
        without_nulls(item);
    }
}

/// Empty places left by indexing.
fn prune(object: &mut Value) {
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.retain(|_, value| {
            !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty())
        });
    }
}

fn may_go(resource: &ResourceType, object: &Value) -> bool {
    let meta = &object["metadata"];
    let graceful =
        resource.kind == "Pod" && meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) > 0;
    !meta["deletionTimestamp"].is_null() && items(&meta["finalizers"]).is_empty() && !graceful
}

pub(crate) fn update(store: &Store, request: &ApiRequest, body: Value) -> Answer {
    let object = decode::object(request.resource, body)?;
    let given = object["metadata"]["name"].as_str().unwrap_or("");
    if given != request.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({given}) does not match the name on the URL ({})",
            request.name
        )));
    }
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("");
    if !namespace.is_empty() && namespace != request.namespace {
        return Err(ApiError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    store.transaction(|state| {
        let key = key(request, &request.name);
        let new = convert::stored(request.resource, object);
        match state.get(&key).map(Arc::clone) {
            Some(old) => {
                if new["metadata"]["resourceVersion"].is_null() && request.resource.kind == "Lease"
                {
                    let mut errors = validation::Errors::default();
                    errors.invalid(
                        "metadata.resourceVersion",
                        &json!(0),
                        "must be specified for an update",
                    );
                    return Err(ApiError::invalid(request.resource, &request.name, &errors));
                }
                let replaced = replace(state, request, &old, new)?;
                Ok((200, convert::out(request.resource, &replaced).into_owned()))
            }
            // The one built-in kind of ours that a PUT may create.
            None if request.resource.kind == "Lease" && request.subresource.is_empty() => {
                let created = insert(state, request, new)?;
                Ok((201, (*created).clone()))
            }
            None => Err(ApiError::not_found(request.resource, &request.name)),
        }
    })
}

/// The patch languages by content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatchType {
    Json,
    Merge,
    Strategic,
    Apply,
}

impl PatchType {
    pub(crate) fn from_content_type(content_type: &str) -> Result<Self, ApiError> {
        match content_type {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            _ => Err(ApiError::unsupported_media_type(&[
                "application/json-patch+json",
                "application/merge-patch+json",
                "application/apply-patch+yaml",
                "application/strategic-merge-patch+json",
            ])),
        }
    }
}

pub(crate) fn patch(store: &Store, request: &ApiRequest, kind: PatchType, body: &Value) -> Answer {
    let resource = request.resource;
    if kind == PatchType::Apply {
        return server_side_apply(store, request, body);
    }
    store.transaction(|state| {
        let old = found(state, request)?;
        let mut new = convert::out(resource, &old).into_owned();
        match kind {
            PatchType::Json => patch::json_patch(&mut new, body)?,
            PatchType::Strategic => patch::strategic(&mut new, body)?,
            _ => patch::merge(&mut new, body),
        }
        let new = convert::stored(resource, decode::object(resource, new)?);
        if new["metadata"]["name"] != old["metadata"]["name"] {
            return Err(ApiError::bad_request(
                "the name of the object does not match the name on the URL",
            ));
        }
        let replaced = replace(state, request, &old, new)?;
        Ok((200, convert::out(resource, &replaced).into_owned()))
    })
}

fn server_side_apply(store: &Store, request: &ApiRequest, body: &Value) -> Answer {
    let resource = request.resource;
    let manager = request.query.get("fieldManager");
    if manager.is_empty() {
        let mut errors = validation::Errors::default();
        errors.required("fieldManager", "is required for apply patch");
        let mut error = ApiError::new(
            422,
            "Invalid",
            format!(
                "PatchOptions.meta.k8s.io \"\" is invalid: {}",
                errors.sentence()
            ),
        );
        error.set_details(
            json!({"group": "meta.k8s.io", "kind": "PatchOptions", "causes": errors.causes()}),
        );
        return Err(error);
    }
    if body["apiVersion"].is_null() || body["kind"].is_null() {
        return Err(ApiError::bad_request(
            "Object 'Kind' is missing in apply patch",
        ));
    }
    if !body["metadata"]["managedFields"].is_null() {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    let given = body["metadata"]["name"].as_str().unwrap_or(&request.name);
    if given != request.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({given}) does not match the name on the URL ({})",
            request.name
        )));
    }
    let config = decode::object(resource, body.clone())?;
    store.transaction(|state| {
        let old = state.get(&key(request, &request.name)).map(Arc::clone);
        let mut live = old.as_deref().cloned().unwrap_or_else(|| {
            json!({"apiVersion": resource.api_version(), "kind": resource.kind, "metadata": {"name": request.name}})
        });
        let asked = &body["metadata"]["resourceVersion"];
        if let Some(old) = &old
            && !asked.is_null()
            && *asked != old["metadata"]["resourceVersion"]
        {
            return Err(ApiError::modified(resource, &request.name));
        }
        apply::apply(&mut live, &config, manager, request.query.flag("force"), &now())?;
        match old {
            Some(old) => Ok((200, replace(state, request, &old, live)?)),
            None if request.subresource.is_empty() => {
                let owners = live["metadata"]["managedFields"].clone();
                let created = insert(state, request, live)?;
                let mut created = (*created).clone();
                created["metadata"]["managedFields"] = owners;
                Ok((201, (*state.put(key(request, &request.name), created)).clone()))
            }
            None => Err(ApiError::not_found(resource, &request.name)),
        }
    })
}

/// Options of a delete: from the body, else from the query.
pub(crate) fn delete_options(request: &ApiRequest, body: Value) -> Result<Value, ApiError> {
    let mut options = if body.is_object() { body } else { json!({}) };
    let policy = request.query.get("propagationPolicy");
    if !policy.is_empty() {
        options["propagationPolicy"] = policy.into();
    }
    if let Some(seconds) = request.query.number("gracePeriodSeconds")? {
        options["gracePeriodSeconds"] = seconds.into();
    }
    let policy = &options["propagationPolicy"];
    if !matches!(
        policy.as_str(),
        None | Some("Foreground" | "Background" | "Orphan")
    ) {
        let mut errors = validation::Errors::default();
        errors.unsupported(
            "propagationPolicy",
            policy,
            &["Foreground", "Background", "Orphan", "nil"],
        );
        let mut error = ApiError::new(
            422,
            "Invalid",
            format!(
                "DeleteOptions.meta.k8s.io \"\" is invalid: {}",
                errors.sentence()
            ),
        );
        error.set_details(
            json!({"group": "meta.k8s.io", "kind": "DeleteOptions", "causes": errors.causes()}),
        );
        return Err(error);
    }
    Ok(options)
}

fn remove(state: &mut State, request: &ApiRequest, name: &str, options: &Value) -> Answer {
    let resource = request.resource;
    let place = key(request, name);
    let old = state
        .get(&place)
        .map(Arc::clone)
        .ok_or_else(|| ApiError::not_found(resource, name))?;
    for (field, shown) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        let wanted = &options["preconditions"][field];
        let is = &old["metadata"][field];
        if !wanted.is_null() && wanted != is {
            let why = format!(
                "Precondition failed: {shown} in precondition: {}, {shown} in object meta: {}",
                wanted.as_str().unwrap_or(""),
                is.as_str().unwrap_or("")
            );
            return Err(ApiError::conflict(resource, name, &why));
        }
    }
    let mut object = (*old).clone();
    let grace = grace(resource, &object, options);
    let first = object["metadata"]["deletionTimestamp"].is_null();
    let shorter = grace
        < object["metadata"]["deletionGracePeriodSeconds"]
            .as_i64()
            .unwrap_or(i64::MAX);
    if first || shorter {
        let until = k8s_openapi::jiff::Timestamp::now()
            + k8s_openapi::jiff::SignedDuration::from_secs(grace);
        object["metadata"]["deletionTimestamp"] = at(until).into();
        object["metadata"]["deletionGracePeriodSeconds"] = grace.into();
    }
    if first {
        if resource.has_generation() {
            let generation = object["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
            object["metadata"]["generation"] = generation.into();
        }
        let mut finalizers = items(&object["metadata"]["finalizers"]).to_vec();
        match options["propagationPolicy"].as_str() {
            Some("Foreground") => finalizers.push(FOREGROUND.into()),
            Some("Orphan") => finalizers.push(ORPHAN.into()),
            _ => {}
        }
        object["metadata"]["finalizers"] = finalizers.into();
        prune(&mut object);
    }
    if may_go(resource, &object) {
        let last = state.remove(&place, object);
        let uid = last["metadata"]["uid"].as_str().unwrap_or("");
        if resource.kind == "Pod" {
            return Ok((200, (*last).clone()));
        }
        return Ok((200, status::deleted(resource, name, uid)));
    }
    if object == *old {
        return Ok((200, object));
    }
    Ok((200, (*state.put(place, object)).clone()))
}

/// How long a pod may take; other kinds are gone at once.
fn grace(resource: &ResourceType, object: &Value, options: &Value) -> i64 {
    if resource.kind != "Pod" {
        return 0;
    }
    let unscheduled = object["spec"]["nodeName"].as_str().unwrap_or("").is_empty();
    let over = matches!(
        object["status"]["phase"].as_str(),
        Some("Succeeded" | "Failed")
    );
    if unscheduled || over {
        return 0;
    }
    options["gracePeriodSeconds"]
        .as_i64()
        .or_else(|| object["spec"]["terminationGracePeriodSeconds"].as_i64())
        .unwrap_or(30)
}

pub(crate) fn delete(store: &Store, request: &ApiRequest, options: &Value) -> Answer {
    store.transaction(|state| {
        let (code, object) = remove(state, request, &request.name, options)?;
        if request.resource.kind == "Namespace" {
            empty_namespace(state, &request.name);
        }
        Ok((code, convert::out(request.resource, &object).into_owned()))
    })
}

/// What the namespace controller does, at once.
fn empty_namespace(state: &mut State, namespace: &str) {
    for resource in super::resource::RESOURCES
        .iter()
        .filter(|resource| resource.namespaced)
    {
        let inside: Vec<(Key, Value)> = state
            .range(resource.bucket(), namespace)
            .map(|(key, object)| (key.clone(), (**object).clone()))
            .collect();
        for (key, object) in inside {
            state.remove(&key, object);
        }
    }
}

pub(crate) fn delete_collection(
    store: &Store,
    request: &ApiRequest,
    selector: &Selector,
    options: &Value,
) -> Answer {
    store.transaction(|state| {
        let names: Vec<String> = state
            .range(request.resource.bucket(), &request.namespace)
            .filter(|(_, object)| selector.matches(&convert::out(request.resource, object)))
            .map(|(key, _)| key.name.clone())
            .collect();
        let mut gone = Vec::new();
        for name in names {
            gone.push(remove(state, request, &name, options)?.1);
        }
        Ok((
            200,
            list_of(request.resource, View::Whole, state.version(), &gone),
        ))
    })
}

fn list_of(resource: &ResourceType, view: View, version: u64, objects: &[Value]) -> Value {
    let (kind, api_version) = match view {
        View::Whole => (format!("{}List", resource.kind), resource.api_version()),
        View::Metadata => (
            "PartialObjectMetadataList".to_owned(),
            "meta.k8s.io/v1".to_owned(),
        ),
    };
    json!({
        "kind": kind, "apiVersion": api_version,
        "metadata": {"resourceVersion": version.to_string()}, "items": objects,
    })
}

/// Where a list goes on: the version it shows and the last name given.
struct Continue {
    version: u64,
    after: (String, String),
}

impl Continue {
    fn parse(token: &str) -> Result<Option<Self>, ApiError> {
        if token.is_empty() {
            return Ok(None);
        }
        let wrong = || ApiError::bad_request("continue key is not valid: illegal base64 data");
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(token).map_err(|_| wrong())?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|_| wrong())?;
        let text = |field: &str| value[field].as_str().map(str::to_owned).ok_or_else(wrong);
        let version = value["rv"].as_u64().ok_or_else(wrong)?;
        Ok(Some(Self {
            version,
            after: (text("namespace")?, text("name")?),
        }))
    }

    fn token(version: u64, last: &Key) -> String {
        BASE64_URL_SAFE_NO_PAD
            .encode(json!({"v": "meta.k8s.io/v1", "rv": version, "namespace": last.namespace, "name": last.name}).to_string())
    }
}

pub(crate) fn list(store: &Store, request: &ApiRequest, selector: &Selector, view: View) -> Answer {
    let query = &request.query;
    let limit = query
        .number("limit")?
        .filter(|limit| *limit > 0)
        .and_then(|limit| usize::try_from(limit).ok());
    let asked = query.number("resourceVersion")?;
    let from = Continue::parse(query.get("continue"))?;
    if from.is_some() && asked.is_some_and(|version| version > 0) {
        return Err(ApiError::bad_request(
            "specifying resource version is not allowed when using continue",
        ));
    }
    let exact = (query.get("resourceVersionMatch") == "Exact")
        .then_some(asked)
        .flatten();
    store.transaction(|state| {
        if let Some(version) = asked.filter(|version| *version > state.version()) {
            return Err(ApiError::version_from_the_future(version, state.version()));
        }
        let bucket = request.resource.bucket();
        let version = from.as_ref().map(|from| from.version).or(exact).unwrap_or(state.version());
        let objects = state.at(version, bucket, &request.namespace).map_err(|_| {
            ApiError::expired(
                "The provided continue parameter is too old to display a consistent list result. You can start a new \
                 list without the continue parameter.",
            )
        })?;
        let mut chosen = objects.iter().filter(|(key, object)| {
            from.as_ref().is_none_or(|from| (&key.namespace, &key.name) > (&from.after.0, &from.after.1))
                && selector.matches(&convert::out(request.resource, object))
        });
        let page: Vec<(&Key, &Arc<Value>)> = chosen.by_ref().take(limit.unwrap_or(usize::MAX)).collect();
        let left = chosen.count();
        let shown: Vec<Value> = page.iter().map(|(_, object)| view.item(&convert::out(request.resource, object))).collect();
        let mut list = list_of(request.resource, view, version, &shown);
        if let (true, Some((last, _))) = (left > 0, page.last()) {
            list["metadata"]["continue"] = Continue::token(version, last).into();
            if selector.is_empty() {
                list["metadata"]["remainingItemCount"] = left.into();
            }
        }
        Ok((200, list))
    })
}
