//! What users of workspaces and odd stores do to see a secret, or to exhaust the executor.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use integration_tests::{Repository, job};
use job_contract::env;
use serde_json::{Value, json};
use test_peers::http::Response;

use super::Journey;
use super::failures::{environment, secret, vault};

const MODULE: &str = "variable \"pw\" {}\nvariable \"list\" {\n  type = list(string)\n}\n\
                      output \"shown\" {\n  value = \"shown ${var.pw} ${var.list[0]}\"\n}\n\
                      resource \"terraform_data\" \"kept\" {\n  provisioner \"local-exec\" {\n    command = \"echo said $PW\"\n    \
                      environment = {\n      PW = split(\"-\", var.pw)[1]\n    }\n  }\n}\n";

/// The apply reads no inputs, because the plan has them, or reads those that the store has by then. But the tool may print what the plan
/// has.
#[test]
fn secrets_in_a_stored_plan_are_masked_in_its_apply() {
    for has_scripts in [false, true] {
        let is_rotated = Arc::new(AtomicBool::new(false));
        let rotated = Arc::clone(&is_rotated);
        let server = vault(move |path| match path {
            _ if rotated.load(Ordering::SeqCst) => secret(&json!({ "k": "another-value" })),
            "/v1/kv/a" => secret(&json!({ "k": "canaryone1" })),
            _ => secret(&json!({ "k": "canary-two-2" })),
        });
        let mut journey = Journey::new(environment(&server));
        journey.repository = Repository::module(MODULE);
        let mut plan = job::plan(&journey.repository);
        for (name, text) in [
            ("pw", "x-${vault:kv/a.k}"),
            ("list", "[\"${vault:kv/b.k}\", \"b\"]"),
        ] {
            plan.variables.insert(name.into(), text.into());
        }
        let mut apply = job::apply_after(&plan);
        if has_scripts {
            apply.command_list = vec![job::after(job::bash(1, "echo \"script $pw\""))];
        }
        journey.machine.queue(&[&plan, &apply]);
        journey.executor(&plan).run().expect_code(0);
        let reads = server.requests().len();
        is_rotated.store(true, Ordering::SeqCst);
        let outcome = journey.executor(&apply).run().expect_code(0);
        assert_eq!(server.requests().len() > reads, has_scripts);
        for shown in ["shown ***", "said ***"] {
            assert!(outcome.log().contains(shown), "{shown}\n{outcome}");
        }
        assert_eq!(
            outcome.log().contains("script x-***"),
            has_scripts,
            "{outcome}"
        );
        let context = Value::from(journey.machine.context(&apply)).to_string();
        for place in [
            outcome.to_string(),
            journey.machine.step_output(&apply),
            context,
        ] {
            assert!(
                !place.contains("canary") && !place.contains("another"),
                "{place}"
            );
        }
    }
}

/// No plan has them. The other inputs are in the plan.
#[test]
fn an_apply_reads_its_ephemeral_inputs_again() {
    let server = vault(|path| match path {
        "/v1/kv/token" => secret(&json!({ "k": "canary-token" })),
        _ => secret(&json!({ "k": "canary-kept" })),
    });
    let mut journey = Journey::new(environment(&server));
    let module = "variable \"token\" {\n  ephemeral = true\n}\nvariable \"kept\" {}\n\
                  resource \"terraform_data\" \"a\" {\n  input = sha256(var.kept)\n  provisioner \"local-exec\" {\n    \
                  command = \"printf %s $TOKEN > LOOK/given\"\n    environment = {\n      TOKEN = var.token\n    }\n  }\n}\n";
    let look = journey.look.path().to_str().unwrap().to_owned();
    journey.repository = Repository::module(&module.replace("LOOK", &look));
    let mut plan = job::plan(&journey.repository);
    for (name, text) in [
        ("token", "${vault:kv/token.k}"),
        ("kept", "${vault:kv/kept.k}"),
    ] {
        plan.variables.insert(name.into(), text.into());
    }
    let apply = job::apply_after(&plan);
    journey.machine.queue(&[&plan, &apply]);
    journey.executor(&plan).run().expect_code(0);
    let outcome = journey.executor(&apply).run().expect_code(0);
    let summary = "Resolving 1 secret reference (vault 1).";
    assert!(outcome.log().contains(summary), "{outcome}");
    let given = journey.seen("given");
    assert_eq!(given.as_deref(), Some("canary-token"), "{outcome}");
    assert!(!outcome.to_string().contains("canary"), "{outcome}");
}

#[test]
fn an_error_before_the_claim_names_no_secret() {
    let journey = Journey::new(Vec::new());
    let mut job = journey.script(&[("API_TOKEN", "canary-0123456789")]);
    job.branch = "canary-0123456789".to_owned();
    let outcome = journey.executor(&job).run();
    assert_ne!(outcome.code(), 0, "{outcome}");
    assert!(outcome.error().contains("***"), "{outcome}");
    assert!(!outcome.error().contains("canary"), "{outcome}");
}

#[test]
fn a_store_that_wants_to_be_asked_in_ages_is_unavailable() {
    let server =
        vault(|_| Response::new(503, "").with_header("Retry-After", "18446744073709551615"));
    let journey = Journey::new(environment(&server));
    let error = journey.expect_failure(75, &[("A", "${vault:kv/a.k}")]);
    assert!(
        error.contains("the store is unavailable in Vault"),
        "{error}"
    );
}

/// A namespace may be at the front of a path. What is below `auth/token` there shows the token of the operator.
#[test]
fn no_path_leads_to_the_login() {
    let server = vault(|_| secret(&json!({ "id": "canary", "k": "canary" })));
    let journey = Journey::new(environment(&server));
    let error = journey.expect_failure(
        1,
        &[
            ("A", "${vault:team/auth/token/lookup-self.id}"),
            ("B", "${vault:team/sys/raw.k}"),
        ],
    );
    for name in ["A", "B"] {
        let at = error.find(&format!("variable {name}: ")).unwrap();
        assert!(
            error[at..].contains("a path with `sys` or `auth`"),
            "{error}"
        );
    }
    let paths = server.requests().into_iter().map(|request| request.path);
    let asked: Vec<_> = paths
        .filter(|path| !path.starts_with("/v1/sys/internal/ui/mounts/"))
        .collect();
    assert_eq!(asked, Vec::<String>::new());
}

#[test]
fn what_is_lent_for_ages_is_a_secret_like_others() {
    let answer = r#"{"lease_id": "x", "lease_duration": 18446744073709551615, "renewable": true, "data": {"k": "lent-value"}}"#;
    let server = vault(move |path| match path {
        "/v1/db/creds" => Response::new(200, answer),
        _ => Response::new(204, ""),
    });
    Journey::new(environment(&server)).expect(&[("A", "${vault:db/creds.k}", "lent-value")]);
    let last = server.requests().pop().unwrap();
    assert_eq!(last.path, "/v1/sys/leases/revoke");
}

#[test]
fn references_beyond_the_limit_are_not_compared_with_rules() {
    let server = vault(|_| Response::new(404, ""));
    let mut environment = environment(&server);
    environment.push((env::SECRET_REFERENCES_ALLOW, "vault:kv/other/**".to_owned()));
    let many = "${vault:kv/a.k}".repeat(5000);
    let error = Journey::new(environment).expect_failure(1, &[("A", &many)]);
    assert!(error.contains("and 181 more"), "{error}");
    assert!(server.requests().is_empty());
}
