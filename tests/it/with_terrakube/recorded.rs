//! The requests of Mayfly's executor, compared with those of a stock executor for the same jobs (`tests/recorded`). This
//! file lists all differences.

use std::collections::BTreeSet;
use std::fs;

use integration_tests::Repository;
use serde::Deserialize;
use serde_json::{Value, json};
use test_platform::{Flow, Job, NewJob, Platform, Release, Status, Variable, Workspace};

use super::Stage;

/// A change that was asked of the platform.
#[derive(Clone, Debug, Deserialize)]
struct Call {
    method: String,
    /// With names in place of ids.
    path: String,
    body: Value,
}

impl Call {
    fn recorded(scenario: &str) -> Vec<Self> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/recorded/terrakube-2.32/calls");
        let text = fs::read_to_string(format!("{folder}/{scenario}.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// Those of a job of ours.
    fn made(platform: &Platform, workspace: &str, job: &Job) -> Vec<Self> {
        let requests = platform.ledger().requests;
        let changes = requests
            .into_iter()
            .filter(|request| request.issuer.is_some() && request.method != "GET");
        let of_job = format!("job/{}", job.id);
        let reference = json!(job.id.to_string());
        let mut names = vec![
            (platform.organization(), "{organization}".to_owned()),
            (workspace.to_owned(), "{workspace}".to_owned()),
        ];
        let steps = job.steps.iter().zip(1..);
        names.extend(steps.map(|(step, number)| (step.id.clone(), format!("{{step{number}}}"))));
        let without_ids = |text: String| {
            let text = names
                .iter()
                .fold(text, |text, (id, name)| text.replace(id, name));
            text.replace(&of_job, "job/{job}")
                .replace(&format!("v1/{}", job.id), "v1/{job}")
        };
        changes
            .filter(|request| {
                request.job == Some(job.id)
                    || request.body["data"]["attributes"]["jobReference"] == reference
            })
            .map(|request| Self {
                method: request.method,
                path: without_ids(request.path),
                body: serde_json::from_str(&without_ids(request.body.to_string())).unwrap(),
            })
            .collect()
    }

    fn is_context(&self) -> bool {
        self.path.starts_with("/context/")
    }

    fn attributes(&self) -> BTreeSet<&str> {
        let attributes = self.body["data"]["attributes"].as_object();
        attributes
            .into_iter()
            .flatten()
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// What it is about, and the status it sets.
    fn outline(&self) -> (&str, &str, Option<&str>) {
        let status = self.body["data"]["attributes"]["status"].as_str();
        (&self.method, &self.path, status)
    }
}

/// The context at last, with what differs from run to run made alike.
fn context(calls: &[Call]) -> Value {
    let mut contexts = calls.iter().filter(|call| call.is_context());
    let mut context = contexts.next_back().expect("a context").body.clone();
    for key in ["planStructuredOutput", "applyStructuredOutput"] {
        let steps = context[key].as_object_mut().into_iter().flatten();
        for changes in steps.map(|(_, changes)| changes.as_array_mut().unwrap()) {
            for change in &mut *changes {
                if change["after"]["id"].is_string() {
                    change["after"]["id"] = json!("ID");
                }
                if change["elapsedSeconds"].is_u64() {
                    change["elapsedSeconds"] = json!(0);
                }
            }
            changes.sort_by_key(|change| change["address"].to_string());
        }
    }
    // Ours: the record of the plan, which an apply compares, and what only newer platforms read.
    for key in ["mayflyPlan", "structuredOutputStatus"] {
        context.as_object_mut().unwrap().remove(key);
    }
    context
}

/// The calls of a job are those of the record, in their order, but for the context.
fn assert_same_changes(made: &[Call], recorded: &[Call]) {
    let outline = |calls: &'_ [Call]| -> Vec<_> {
        let others = calls.iter().filter(|call| !call.is_context());
        others.map(|call| format!("{:?}", call.outline())).collect()
    };
    assert_eq!(outline(made), outline(recorded));
    for call in made.iter().filter(|call| !call.is_context()) {
        let same = recorded
            .iter()
            .find(|known| known.outline() == call.outline());
        // The stock executor sends everything back that it has read. Ours sends what it changes.
        let known = same.unwrap().attributes();
        let ours = call.attributes();
        assert!(ours.is_subset(&known), "{ours:?} {known:?}");
    }
}

/// The same, and the context.
fn assert_alike(made: &[Call], recorded: &[Call]) {
    assert_same_changes(made, recorded);
    assert_eq!(context(made), context(recorded));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_platform_gets_the_reports_of_a_stock_executor() {
    for release in Release::ALL {
        compare_reports(release).await;
    }
}

async fn compare_reports(release: Release) {
    let stage = Stage::under(release).await;
    let _launcher = stage.serve();
    let platform = &stage.platform;
    let hello = include_str!("../../../examples/hello/main.tf");
    let repository = Repository::module(hello);
    let workspace = || Workspace::new(&repository.url());
    let run = async |workspace: &str, template| {
        let job = platform.start_job(NewJob::new(workspace, template));
        let job = platform.until_job(job, Status::Completed).await;
        Call::made(platform, workspace, &job)
    };

    let languages = "{ english = \"Hi\", spanish = \"Hola\" }";
    let with_variables = platform.workspace(
        workspace()
            .with(Variable::terraform("languages", languages))
            .with(Variable::terraform("name", "Ann"))
            .with(Variable::terraform("passphrase", "s3cret phrase")),
    );
    let made = run(&with_variables, Flow::plan_apply()).await;
    assert_alike(&made, &Call::recorded("apply-vars"));
    let made = run(&with_variables, Flow::only("terraformDestroy")).await;
    let recorded = Call::recorded("destroy-vars");
    // The stock executor lists some of what it destroys, as unchanged. Ours lists all of it.
    assert_same_changes(&made, &recorded);
    let destroyed = context(&made)["applyStructuredOutput"]["{step1}"].clone();
    let destroyed = destroyed.as_array().unwrap();
    assert_eq!(destroyed.len(), 3);
    assert!(destroyed.iter().all(|change| change["action"] == "delete"));

    let plain = platform.workspace(workspace());
    run(&plain, Flow::plan_apply()).await;
    let made = run(&plain, Flow::only("terraformPlan")).await;
    assert_alike(&made, &Call::recorded("nochange"));
    platform.assert_kept().await;
}
