//! What users of workspaces and odd stores do to see a secret, or to exhaust the executor.

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

/// The apply does not read inputs, because the plan has them. But the tool may print what the plan has.
#[test]
fn secrets_in_a_stored_plan_are_masked_in_its_apply() {
    let server = vault(|path| match path {
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
    let apply = job::apply_after(&plan);
    journey.machine.queue(&[&plan, &apply]);
    journey.executor(&plan).run().expect_code(0);
    let reads = server.requests().len();
    let outcome = journey.executor(&apply).run().expect_code(0);
    assert_eq!(server.requests().len(), reads);
    for shown in ["shown ***", "said ***"] {
        assert!(outcome.log().contains(shown), "{shown}\n{outcome}");
    }
    let context = Value::from(journey.machine.context(&apply)).to_string();
    for place in [
        outcome.to_string(),
        journey.machine.step_output(&apply),
        context,
    ] {
        assert!(!place.contains("canary"), "{place}");
    }
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
