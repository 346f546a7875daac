//! The chart's hook for Infracost, with programs that behave as the documents of both generations say.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use integration_tests::machine::Outcome;
use integration_tests::{FakeTool, Machine, Repository, job};
use job_contract::{JobData, env};

use super::{has_plan_as_json, result};
use crate::machine;

const KEY: &str = "ico-abcdefghijklmnop";

/// `breakdown` needs a file of a plan and the key; `scan` is unknown. It prints plan and key where it must not.
const OLD: &str = r#"[ "$1" = --version ] && { echo 'Infracost v0.10.43'; exit; }
[ "$1 $2 $3 $4 $5" = "breakdown --path plan.json --format json" ] && [ "$INFRACOST_API_KEY" = ico-abcdefghijklmnop ] || exit 1
cat plan.json >&2; echo "INFO key $INFRACOST_API_KEY" >&2
echo '{"version":"0.2","currency":"'"${INFRACOST_CURRENCY:-USD}"'","totalMonthlyCost":"742.64","pastTotalMonthlyCost":"700","diffTotalMonthlyCost":"42.64","projects":[],"summary":{}}'"#;
/// `scan` needs a folder and the token.
const NEW: &str = r#"[ "$1" = --version ] && { echo 'infracost v2.3.1'; exit; }
[ "$1 $3" = "scan --json" ] || exit 1
[ -d "$2" ] || { echo 'target is not a directory' >&2; exit 1; }
[ "$INFRACOST_CLI_AUTHENTICATION_TOKEN" = ico-abcdefghijklmnop ] || exit 1
echo '{"currency":"'"${INFRACOST_CLI_CURRENCY:-USD}"'","summary":{"projects":1,"resources":2,"costed_resources":1,"free_resources":1,"total_monthly_cost":"9.5"},"projects":[]}'"#;

fn files() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm/mayfly/files/infracost")
}

fn plan_with(
    infracost: Option<&str>,
    more: &[(&str, &str)],
    code: i32,
) -> (Machine, JobData, Outcome) {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let programs = machine.scratch("programs");
    fs::create_dir(&programs).unwrap();
    if let Some(script) = infracost {
        let program = programs.join("infracost");
        fs::write(&program, format!("#!/bin/bash\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let tool = FakeTool::new();
    let path = format!("{}:{}", programs.display(), tool.path().display());
    let mut run = machine
        .executor(&plan)
        .env("PATH", path)
        .env(env::HOOKS_DIR, files());
    for (name, value) in [("INFRACOST_API_KEY", KEY)].iter().chain(more) {
        run = run.env(format!("{}{name}", env::FOR_HOOKS_PREFIX), value);
    }
    let outcome = run.run().expect_code(code);
    assert!(!outcome.log().contains(KEY), "{outcome}");
    assert!(!has_plan_as_json(machine.folder()));
    (machine, plan, outcome)
}

/// The only line of the hook.
#[track_caller]
fn line(outcome: &Outcome) -> &str {
    let mut lines = outcome
        .log()
        .lines()
        .filter(|line| line.starts_with("post-plan: "));
    let line = lines.next().unwrap_or_else(|| panic!("no line\n{outcome}"));
    assert_eq!(lines.next(), None, "{outcome}");
    for printed in ["INFO key", "format_version"] {
        assert!(!outcome.log().contains(printed), "{outcome}");
    }
    line
}

#[test]
fn both_generations_leave_one_line_and_an_estimate_in_the_job_context() {
    let (machine, plan, outcome) = plan_with(Some(OLD), &[("INFRACOST_CURRENCY", "EUR")], 0);
    assert_eq!(
        line(&outcome),
        "post-plan: estimated costs: 742.64 EUR a month, +42.64 by this plan"
    );
    let estimate = &result(&machine, &plan, "post-plan")["result"]["data"]["costEstimate"];
    assert_eq!(estimate["totalMonthlyCost"], 742.64);
    assert_eq!(estimate["infracost"], "0.10.43");

    let (machine, plan, outcome) = plan_with(Some(NEW), &[("INFRACOST_CURRENCY", "EUR")], 0);
    assert_eq!(
        line(&outcome),
        "post-plan: estimated costs: 9.5 EUR a month (of the source; values of the plan are not used)"
    );
    let estimate = &result(&machine, &plan, "post-plan")["result"]["data"]["costEstimate"];
    assert_eq!(estimate["totalMonthlyCost"], 9.5);
}

#[test]
fn without_an_estimate_there_is_one_warning_and_nothing_else_changes() {
    let version = "[ \"$1\" = --version ] && { echo v0.10.1; exit; }; ";
    let hangs = format!("{version} trap '' TERM; sleep 600");
    let fails = format!("{version} exit 7");
    let babbles = format!("{version} echo no json");
    for (infracost, why) in [
        (None, "there is no program infracost"),
        (Some(hangs.as_str()), "infracost did not end in time"),
        (Some(fails.as_str()), "infracost ended with exit code 7"),
        (
            Some(babbles.as_str()),
            "infracost left no result that this hook can read",
        ),
        (
            Some("echo v1.5.0"),
            "this hook knows infracost 0.10 and 2, and found 1.5.0",
        ),
    ] {
        // The others end by themselves.
        let limit = (infracost == Some(&hangs)).then_some(("COST_ESTIMATION_SECONDS", "1"));
        let (machine, plan, outcome) = plan_with(infracost, limit.as_slice(), 0);
        assert_eq!(
            line(&outcome),
            format!("post-plan: warning: no estimate of costs: {why}")
        );
        assert_eq!(
            machine.statuses(&plan),
            ("completed".into(), "completed".into())
        );
        assert!(machine.record(&plan).terraform_plan.is_some());
    }
    let (_, _, outcome) = plan_with(Some(OLD), &[("INFRACOST_API_KEY", "")], 0);
    assert!(
        line(&outcome).ends_with("the operator has set no key"),
        "{outcome}"
    );
}
