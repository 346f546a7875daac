use super::*;

/// The tool announces these again before an apply, but reports nothing more about them.
#[test]
fn moved_imported_and_forgotten_resources_are_applied_too() {
    let announced = |address: &str, action: &str| json!({"type": "planned_change", "change": {"resource": {"addr": address}, "action": action}});
    let events = [
        announced("a.moved", "move"),
        announced("a.imported", "import"),
        announced("a.forgotten", "remove"),
        announced("a.gone", "create"),
    ];
    let state = json!({"values": {"root_module": {"resources": [
        {"address": "a.moved"}, {"address": "a.imported"},
    ]}}});
    for (all, expected) in [
        (true, ["applied", "applied", "applied", "planned"]),
        (false, ["planned"; 4]),
    ] {
        let mut structured = after(&events);
        structured.complete_from_state(&state, all);
        let changes = structured.changes();
        let statuses: Vec<_> = (0..4).map(|at| changes[at]["status"].clone()).collect();
        assert_eq!(statuses, expected, "{changes}");
        assert_eq!(changes[2]["action"], "unknown", "{changes}");
        assert_eq!(changes[2]["actions"], json!(["forget"]), "{changes}");
    }
}

/// Recorded from OpenTofu 1.12.6.
#[test]
fn forgotten_resources_are_counted() {
    let planned = r#"{"@level":"info","@message":"terraform_data.a: Plan to remove","@module":"tofu.ui","@timestamp":"2026-11-23T09:13:19.202770Z","change":{"resource":{"addr":"terraform_data.a","module":"","resource":"terraform_data.a","implied_provider":"terraform","resource_type":"terraform_data","resource_name":"a","resource_key":null},"action":"remove","reason":"delete_because_no_resource_config"},"type":"planned_change"}"#;
    let summary = r#"{"@level":"info","@message":"Plan: 0 to add, 0 to change, 0 to destroy, 1 to forget.","@module":"tofu.ui","@timestamp":"2026-11-23T09:13:19.208086Z","changes":{"add":0,"change":0,"import":0,"remove":0,"forget":1,"operation":"plan"},"type":"change_summary"}"#;
    let events = [planned, summary].map(|line| serde_json::from_str(line).unwrap());
    let structured = after(&events);
    let forgotten = ChangeCounts {
        forget: 1,
        ..ChangeCounts::default()
    };
    assert_eq!(structured.counts(), Some(forgotten));
    assert_eq!(structured.counted(), forgotten);
    let shown = json!({"add": 0, "change": 0, "destroy": 0, "import": 0, "forget": 1});
    assert_eq!(json!(forgotten), shown);
    let none = json!(ChangeCounts::default());
    assert!(none.get("forget").is_none(), "{none}");
}

fn after(events: &[Value]) -> Structured {
    let mut structured = Structured::default();
    for event in events {
        structured.event(event);
    }
    structured
}

fn hook(kind: &str, extra: &Value) -> Value {
    let mut hook = json!({"resource": {"addr": "a.b"}});
    hook.as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    json!({"type": kind, "hook": hook})
}

#[test]
fn events_follow_appendix_b() {
    let none = json!({});
    let steps = [
        (
            json!({"type": "planned_change", "change": {"resource": {"addr": "a.b"}, "action": "update"}}),
            "planned",
        ),
        (hook("refresh_start", &none), "refreshing"),
        (hook("refresh_complete", &none), "planned"),
        (hook("apply_start", &none), "applying"),
        (
            hook("apply_progress", &json!({"elapsed_seconds": 10})),
            "applying",
        ),
        (
            hook("provision_start", &json!({"provisioner": "local-exec"})),
            "applying",
        ),
        (
            hook("provision_progress", &json!({"output": "hi"})),
            "applying",
        ),
        (hook("provision_complete", &none), "applying"),
        (
            hook("apply_complete", &json!({"elapsed_seconds": 12})),
            "applied",
        ),
    ];
    let mut structured = Structured::default();
    for (event, status) in &steps {
        structured.event(event);
        assert_eq!(structured.changes()[0]["status"], *status, "{event}");
    }
    assert_eq!(
        structured.changes(),
        json!([{"address": "a.b", "action": "update", "actions": ["update"], "status": "applied",
                "elapsedSeconds": 12, "provisionerOutput": ["hi"]}])
    );
}

#[test]
fn ephemeral_operations_are_recognised_for_both_tools() {
    let cases = [
        (
            "ephemeral_op_start",
            json!({"action": "open"}),
            "ephemeral-opening",
        ),
        (
            "ephemeral_op_start",
            json!({"action": "close"}),
            "ephemeral-closing",
        ),
        (
            "ephemeral_action_started",
            json!({"Msg": "Closing..."}),
            "ephemeral-closing",
        ),
        (
            "ephemeral_op_complete",
            json!({"action": "renew"}),
            "ephemeral-renewed",
        ),
        (
            "ephemeral_action_complete",
            json!({"Msg": "Renewed"}),
            "ephemeral-renewed",
        ),
        (
            "ephemeral_op_complete",
            json!({"action": "open"}),
            "applied",
        ),
        ("ephemeral_op_errored", json!({}), "ephemeral-errored"),
    ];
    for (kind, extra, status) in cases {
        assert_eq!(
            after(&[hook(kind, &extra)]).changes()[0]["status"],
            status,
            "{kind} {extra}"
        );
    }
}

#[test]
fn diagnostics_belong_to_their_resource_or_to_the_job() {
    let diagnostic = |address: Value| {
        json!({"type": "diagnostic", "diagnostic": {"severity": "error", "summary": "no", "detail": "d",
               "address": address, "range": {"filename": "main.tf", "start": {"line": 3}}}})
    };
    let structured = after(&[diagnostic(json!("a.b")), diagnostic(Value::Null)]);
    let kept =
        json!([{"severity": "error", "summary": "no", "detail": "d", "location": "main.tf:3"}]);
    assert_eq!(structured.diagnostics(), kept);
    assert_eq!(structured.changes()[0]["diagnostics"], kept);
    assert_eq!(structured.changes()[0]["status"], "errored");
}

#[test]
fn a_plan_replaces_event_data_and_hides_sensitive_values() {
    let mut structured = after(&[
        json!({"type": "planned_change", "change": {"resource": {"addr": "terraform_data.x"}, "action": "create"}}),
        json!({"type": "refresh_start", "hook": {"resource": {"addr": "terraform_data.same"}}}),
        json!({"type": "change_summary", "changes": {"add": 2, "change": 0, "remove": 1, "import": 0}}),
    ]);
    structured.complete_from_plan(&json!({"resource_changes": [
        {"address": "terraform_data.x", "type": "terraform_data", "name": "x", "change": {
            "actions": ["delete", "create"],
            "before": {"input": "old-secret", "output": "old-secret", "id": "1"}, "before_sensitive": {"input": true},
            "after": {"input": "new-secret", "keep": {"a": 1}}, "after_sensitive": {"input": true},
            "after_unknown": {"id": true, "output": true}}},
        {"address": "terraform_data.same", "type": "terraform_data", "name": "same",
         "change": {"actions": ["no-op"], "before": {}, "after": {}}},
        {"address": "terraform_data.in", "type": "terraform_data", "name": "in",
         "change": {"actions": ["no-op"], "importing": {"id": "i"}, "before": {}, "after": {}}},
    ]}));
    let changes = structured.changes();
    assert!(!changes.to_string().contains("secret"), "{changes}");
    assert_eq!(changes[0]["action"], "replace");
    assert_eq!(changes[0]["status"], "planned");
    assert_eq!(changes[0]["after"]["keep"]["a"], 1);
    assert_eq!(changes[0]["changedSensitive"], json!({"input": true}));
    assert_eq!(
        changes[1],
        json!({"address": "terraform_data.same", "action": "no-op", "status": "refreshing"})
    );
    assert_eq!(changes[2]["action"], "import");
    assert_eq!(changes.as_array().unwrap().len(), 3);
    let counts = ChangeCounts {
        add: 2,
        change: 0,
        remove: 1,
        ..ChangeCounts::default()
    };
    assert_eq!(structured.counts(), Some(counts));
    assert_eq!(
        structured.counted(),
        ChangeCounts {
            add: 1,
            change: 0,
            remove: 1,
            import: 1,
            forget: 0,
        }
    );
}

/// The context of a stock executor after the same plans, applies and destroys of `examples/hello`.
mod as_the_stock_executor_does {
    use super::*;

    fn resource(kind: &str, address: &str) -> Value {
        json!({"type": kind, "hook": {"resource": {"addr": address}}})
    }

    #[test]
    fn unchanged_resources_keep_the_data_of_their_events() {
        let address = "terraform_data.greeting[\"french\"]";
        let mut structured = after(&[
            resource("refresh_start", address),
            resource("refresh_complete", address),
        ]);
        structured.complete_from_plan(&json!({"resource_changes": [
            {"address": address, "type": "terraform_data", "name": "greeting", "index": "french",
             "change": {"actions": ["no-op"], "before": {"input": "Bonjour, world!"},
                        "after": {"input": "Bonjour, world!"}, "after_unknown": {},
                        "before_sensitive": {}, "after_sensitive": {}}},
            {"address": "terraform_data.unheard", "type": "terraform_data", "name": "unheard",
             "change": {"actions": ["no-op"], "before": {}, "after": {}}}]}));
        assert_eq!(
            structured.changes(),
            json!([{"address": address, "action": "no-op", "status": "pending"}])
        );
        assert_eq!(structured.counted(), ChangeCounts::default());
    }

    #[test]
    fn values_that_an_apply_determined_are_known() {
        let address = "terraform_data.fingerprint";
        let mut planned = after(&[]);
        planned.complete_from_plan(&json!({"resource_changes": [
            {"address": address, "mode": "managed", "type": "terraform_data", "name": "fingerprint",
             "change": {"actions": ["create"], "before": null,
                        "after": {"input": null, "output": null, "triggers_replace": [null, null]},
                        "after_unknown": {"id": true, "triggers_replace": [true, true]},
                        "before_sensitive": false,
                        "after_sensitive": {"triggers_replace": [false, false]}}}]}));
        let mut entry = json!(
            {"afterSensitive": {"triggers_replace": [false, false]}, "address": address,
             "moduleAddress": null, "afterUnknown": {"id": true, "triggers_replace": [true, true]},
             "before": null, "action": "create", "resourceName": "fingerprint",
             "after": {"output": null, "input": null, "triggers_replace": [null, null]},
             "beforeSensitive": false, "actions": ["create"], "resourceType": "terraform_data"});
        assert_eq!(planned.changes(), json!([entry]));

        let mut applied = Structured::seeded(&planned.changes());
        applied.event(&resource("apply_start", address));
        applied.event(
            &json!({"type": "apply_complete", "hook": {"resource": {"addr": address}, "elapsed_seconds": 0}}),
        );
        applied.complete_from_state(
            &json!({"values": {"root_module": {"resources": [
                {"address": address, "sensitive_values": {"triggers_replace": [false, false]},
                 "values": {"id": "f00f55a0-ea6e-31b2-e241-1584ea76a5e2", "input": null, "output": null,
                            "triggers_replace": ["Hi, Ann!", "Hola, Ann!"]}}]}}}),
            true,
        );
        entry["afterUnknown"] = json!({"id": false, "triggers_replace": [false, false]});
        entry["after"] = json!({"output": null, "input": null, "triggers_replace": ["Hi, Ann!", "Hola, Ann!"],
                                "id": "f00f55a0-ea6e-31b2-e241-1584ea76a5e2"});
        entry["elapsedSeconds"] = json!(0);
        entry["status"] = json!("applied");
        assert_eq!(applied.changes(), json!([entry]));
    }
}

/// The stock executor shows nothing for a destroy without a plan. Its destroy plans have these properties.
#[test]
fn a_destroy_without_a_plan_is_shown_from_its_events() {
    let address = "terraform_data.greeting[\"german\"]";
    let structured = after(&[
        json!({"type": "planned_change", "change": {"action": "delete", "resource": {
            "addr": address, "module": "", "resource": "terraform_data.greeting[\"german\"]",
            "implied_provider": "terraform", "resource_type": "terraform_data",
            "resource_name": "greeting", "resource_key": "german"}}}),
        json!({"type": "apply_complete", "hook": {"resource": {"addr": address}, "elapsed_seconds": 0}}),
    ]);
    assert_eq!(
        structured.changes(),
        json!([{"address": address, "moduleAddress": null, "resourceType": "terraform_data",
                "resourceName": "greeting", "action": "delete", "actions": ["delete"],
                "elapsedSeconds": 0, "status": "applied"}])
    );
}

#[test]
fn an_apply_starts_from_the_plan_and_ends_with_the_state() {
    let plan = json!([
        {"address": "a.x", "action": "create", "status": "planned", "after": {"n": 1},
         "afterUnknown": {"id": true, "token": true, "deep": {"a": true}}, "afterSensitive": {"token": true}},
        {"address": "a.gone", "action": "delete", "status": "planned"},
        {"address": "a.eph", "action": "ephemeral", "status": "applied"},
    ]);
    let mut structured = Structured::seeded(&plan);
    assert_eq!(structured.changes()[0]["status"], "pending");
    assert_eq!(structured.changes()[2]["status"], "applied");
    structured.complete_from_state(&json!({"values": {"root_module": {"child_modules": [{"resources": [
        {"address": "a.x", "values": {"n": 1, "id": "i-1", "token": "hunter2", "deep": {"a": "hunter3"}},
         "sensitive_values": {"deep": {"a": true}}}]}]}}}), true);
    let changes = structured.changes();
    assert_eq!(changes[0]["status"], "applied");
    assert_eq!(
        changes[0]["after"],
        json!({"n": 1, "id": "i-1", "token": null, "deep": {"a": null}})
    );
    assert_eq!(changes[1]["status"], "pending");
}
