//! Checks `openapi.yaml`: its schemas must come from the types, and its paths from [`crate::path`].

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::{OPENAPI, artifact, exchange, instance, lease, path, problem, task, version};

/// The start of the schemas. People write the part above it.
const SCHEMAS: &str = "\ncomponents:\n";

fn add<T: JsonSchema>(generator: &mut schemars::SchemaGenerator) {
    generator.subschema_for::<T>();
}

fn schemas() -> Map<String, Value> {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    add::<version::Versions>(&mut generator);
    add::<problem::Problem>(&mut generator);
    add::<exchange::TokenExchange>(&mut generator);
    add::<exchange::IssuedToken>(&mut generator);
    add::<exchange::ExchangeError>(&mut generator);
    add::<instance::Registration>(&mut generator);
    add::<instance::Registered>(&mut generator);
    add::<instance::InstanceHeartbeat>(&mut generator);
    add::<instance::InstanceOrders>(&mut generator);
    add::<task::TaskRequest>(&mut generator);
    add::<task::LeasedTask>(&mut generator);
    add::<lease::Started>(&mut generator);
    add::<lease::Decline>(&mut generator);
    add::<lease::Acceptance>(&mut generator);
    add::<lease::Lease>(&mut generator);
    add::<lease::End>(&mut generator);
    add::<lease::Ended>(&mut generator);
    add::<artifact::Artifacts>(&mut generator);
    generator.take_definitions(true).into_iter().collect()
}

fn components() -> Value {
    let parameter = |name: &str, place: &str, schema: Value| json!({"name": name, "in": place, "required": true, "schema": schema});
    let id = json!({"type": "string", "format": "uuid"});
    let scheme = |text: &str| json!({"type": "http", "scheme": "bearer", "description": text});
    json!({"components": {
        "securitySchemes": {
            "poolToken": scheme("The token of a pool, which agents have, or the access token of an exchange"),
            "jobToken": scheme("The token of a lease, which comes with it"),
        },
        "parameters": {
            "protocol": parameter("X-Terrakube-Executor-Protocol", "header", json!({"type": "integer", "const": version::VERSION})),
            "idempotencyKey": parameter("Idempotency-Key", "header", id.clone()),
            "instance": parameter("instance", "path", id.clone()),
            "task": parameter("task", "path", id.clone()),
            "lease": parameter("lease", "path", id),
        },
        "responses": {"Problem": {
            "description": "Why the request failed",
            "content": {problem::MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }},
        "schemas": schemas(),
    }})
}

#[test]
fn the_document_has_the_schemas_of_the_types() {
    let (written, _) = OPENAPI.split_once(SCHEMAS).expect("it has components");
    let made = serde_saphyr::to_string(&components()).unwrap();
    let document = format!("{written}\n{made}");
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.yaml");
        fs::write(file, &document).unwrap();
    }
    assert!(
        OPENAPI == document,
        "a type has changed: run this test with UPDATE_OPENAPI=1, and look at what it changes"
    );
}

fn document() -> Value {
    serde_saphyr::from_str(OPENAPI).unwrap()
}

#[test]
fn the_document_has_every_path() {
    let document = document();
    let described: BTreeSet<&str> = document["paths"]
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    // The relay is not in the document, because it has the interface of the platform.
    let known = BTreeSet::from([
        path::PROTOCOL,
        path::TOKEN,
        path::REGISTER,
        path::INSTANCE,
        path::INSTANCE_HEARTBEAT,
        path::REQUEST_TASK,
        path::LEASE,
        path::ARTIFACTS,
        path::ARTIFACT,
        path::STATE,
        path::STATE_LOCK,
        path::STATE_UNLOCK,
    ]);
    assert_eq!(described, known);
    let calls = &document["paths"][path::LEASE]["post"]["parameters"][4]["schema"]["enum"];
    let calls: Vec<&str> = calls
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(calls, path::LeaseCall::ALL.map(path::LeaseCall::name));
}

#[test]
fn every_reference_has_a_target() {
    let document = document();
    let mut references = BTreeSet::new();
    collect(&document, &mut references);
    assert!(references.len() > 20);
    for reference in &references {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}

fn collect(value: &Value, references: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                references.insert(reference.clone());
            }
            fields.values().for_each(|field| collect(field, references));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, references)),
        _ => {}
    }
}
