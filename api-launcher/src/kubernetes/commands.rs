//! The commands about runs in a cluster: `render`, `launch`, `list`, `logs`, `explain`, `cancel`, `check`. They read
//! the arguments and print the results. `cluster` sends the requests.

mod cancel;
mod check;
mod connection;
mod error;
mod explain;
mod launch;
mod list;
mod logs;
mod output;
mod render;
mod select;
mod timeline;

use std::io;
use std::path::Path;

use cluster::job_settings::{Deployment, DeploymentArgs};
use job_contract::{Exit, chain};
use manifest::Manifest;

pub use self::cancel::CancelArgs;
pub use self::check::{CheckArgs, PeerArgs, show_agent};
pub use self::connection::{AccessArgs, ClusterArgs};
pub use self::explain::ExplainArgs;
pub use self::launch::LaunchArgs;
pub use self::list::ListArgs;
pub use self::logs::LogsArgs;
pub use self::output::ShowArgs;
pub use self::render::RenderArgs;

use self::output::Output;
use crate::document;
use crate::failure::Failure;

/// `api-launcher render`.
pub fn render(args: &RenderArgs) -> Exit {
    answer(&ShowArgs::default(), async |out| render::render(args, out))
}

/// `api-launcher launch`.
pub fn launch(args: &LaunchArgs) -> Exit {
    carry_out(&args.show, async |out| {
        // Large, because building a manifest and talking to the cluster are both in it.
        Box::pin(launch::launch(args, out)).await
    })
}

/// `api-launcher list`.
pub fn list(args: &ListArgs) -> Exit {
    answer(&args.show, async |out| {
        list::list(&args.cluster.connect().await?, out).await
    })
}

/// `api-launcher logs`.
pub fn logs(args: &LogsArgs) -> Exit {
    answer(&args.show, async |out| {
        logs::logs(args, &args.cluster.connect().await?, out).await
    })
}

/// `api-launcher explain`.
pub fn explain(args: &ExplainArgs) -> Exit {
    answer(&args.show, async |out| {
        explain::explain(&args.run, &args.cluster.connect().await?, out).await
    })
}

/// `api-launcher cancel`.
pub fn cancel(args: &CancelArgs) -> Exit {
    answer(&args.show, async |out| {
        cancel::cancel(args, &args.cluster.connect().await?, out).await
    })
}

/// `api-launcher check`.
pub fn check(args: &CheckArgs) -> Exit {
    answer(&args.show, async |out| check::check(args, out).await)
}

/// Runs a command whose purpose is its output. It fails if the output could not be printed.
fn answer(
    show: &ShowArgs,
    command: impl AsyncFnOnce(&mut Output) -> Result<Exit, Failure>,
) -> Exit {
    carry_out(show, async |out| {
        let exit = command(out).await?;
        out.written()?;
        Ok(exit)
    })
}

fn carry_out(
    show: &ShowArgs,
    command: impl AsyncFnOnce(&mut Output) -> Result<Exit, Failure>,
) -> Exit {
    // An already installed provider works as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut out = Output::new(show);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let end = match runtime {
        Ok(runtime) => runtime.block_on(command(&mut out)),
        Err(error) => Err(not_started(error)),
    };
    match end {
        Ok(exit) => {
            // A failure to print does not change the outcome of a run.
            if let Err(error) = out.written() {
                out.warn(&chain(&error));
            }
            exit
        }
        Err(error) => {
            out.fail(&error);
            error.exit
        }
    }
}

fn not_started(error: io::Error) -> Failure {
    Failure::new(Exit::Infrastructure, "could not start").because(error)
}

/// The settings of Jobs. What is odd about them is printed.
fn resolve(
    args: &DeploymentArgs,
    api_url: Option<&str>,
    out: &mut Output,
) -> Result<Deployment, Failure> {
    let deployment = args.resolve(api_url)?;
    for warning in &deployment.warnings {
        out.warn(warning);
    }
    Ok(deployment)
}

/// The objects that a job document would become.
fn build(
    file: &Path,
    args: &DeploymentArgs,
    api_url: Option<&str>,
    out: &mut Output,
) -> Result<(Deployment, Manifest), Failure> {
    let deployment = resolve(args, api_url, out)?;
    let job = document::read(file)?;
    let manifest = manifest::build(&job, &deployment)?;
    for note in &manifest.notes {
        out.warn(note);
    }
    Ok((deployment, manifest))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::{Request, Response};
    use job_contract::report::{Author, FinalReport, ReportKey};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::output::captured::output;
    use super::*;
    use cluster::{Cluster, RunRef};

    fn job(name: &str, step: &str) -> Value {
        json!({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": {
                "name": name, "namespace": "runs", "uid": name,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {
                    "app.kubernetes.io/managed-by": "mayfly", "mayfly.dev/job-id": "42",
                    "mayfly.dev/step-id": step, "mayfly.dev/step-type": "plan",
                },
            },
            "spec": {"suspend": false, "template": {"spec": {"containers": []}}},
            "status": {"startTime": "2026-01-01T00:00:01Z"},
        })
    }

    const LOG: &str = "2026-01-01T00:00:04Z Error: no such thing\n";

    fn ended_job() -> Value {
        let mut job = job("job-9-z", "z");
        job["status"]["conditions"] = json!([{
            "type": "Failed", "status": "True", "reason": "PodFailurePolicy",
            "lastTransitionTime": "2026-01-01T00:00:09Z",
        }]);
        job
    }

    fn report_key() -> ReportKey {
        ReportKey::parse(&"MDEy".repeat(12)).unwrap()
    }

    fn ended_pod() -> Value {
        let report = FinalReport {
            job_id: "9".into(),
            step_id: "z".into(),
            outcome: 1,
            error: Some("the plan failed".into()),
            author: Some(Author {
                run: "pod-9".into(),
                exit_code: 1,
            }),
            ..FinalReport::default()
        };
        json!({
            "metadata": {
                "name": "pod-9", "namespace": "runs", "uid": "pod-9",
                "labels": {
                    "batch.kubernetes.io/job-name": "job-9-z", "mayfly.dev/job-id": "9",
                    "mayfly.dev/step-id": "z",
                },
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": "job-9-z", "uid": "job-9-z"},
                ],
            },
            "spec": {"containers": [{"name": "executor"}]},
            "status": {"phase": "Failed", "containerStatuses": [{
                "name": "executor", "image": "i", "imageID": "i", "ready": false, "restartCount": 0,
                "state": {"terminated": {
                    "exitCode": 1, "startedAt": "2026-01-01T00:00:03Z", "finishedAt": "2026-01-01T00:00:08Z",
                    "message": report.to_termination_message(Some(&report_key())),
                }},
            }]},
        })
    }

    /// A namespace with two steps of a job, one of them running, and a failed run.
    fn answer(method: &str, path: &str) -> (u16, Value) {
        let list = |items: Value| json!({"metadata": {}, "items": items});
        let pod = json!({
            "metadata": {
                "name": "pod-1", "namespace": "runs",
                "labels": {"batch.kubernetes.io/job-name": "job-42-a"},
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": "job-42-a", "uid": "job-42-a"},
                ],
            },
            "spec": {"nodeName": "node-1", "containers": [{"name": "executor"}]},
            "status": {"phase": "Running", "containerStatuses": [{
                "name": "executor", "image": "i", "imageID": "i", "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:03Z"}},
            }]},
        });
        match (method, path) {
            ("GET", "/apis/batch/v1/namespaces/runs/jobs") => (
                200,
                list(json!([job("job-42-a", "a"), job("job-42-b", "b")])),
            ),
            ("GET", "/apis/batch/v1/namespaces/mute/jobs" | "/api/v1/namespaces/mute/pods") => {
                (200, list(json!([])))
            }
            ("GET", "/api/v1/namespaces/runs/pods") => (200, list(json!([pod, ended_pod()]))),
            ("GET", "/api/v1/namespaces/runs/events") => (200, list(json!([]))),
            ("GET", "/apis/batch/v1/namespaces/runs/jobs/job-9-z") => (200, ended_job()),
            (_, "/apis/batch/v1/namespaces/runs/jobs/job-42-a") => (200, job("job-42-a", "a")),
            _ => (
                403,
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                    "code": 403, "reason": "Forbidden", "message": format!("{method} {path} is forbidden")}),
            ),
        }
    }

    fn cluster(namespace: &str) -> Cluster {
        let service = service_fn(async |request: Request<Body>| {
            let (code, body) = answer(request.method().as_str(), request.uri().path());
            let body = match request.uri().path() {
                "/api/v1/namespaces/runs/pods/pod-9/log" => LOG.into(),
                _ => serde_json::to_vec(&body).unwrap(),
            };
            let code = if body == LOG.as_bytes() { 200 } else { code };
            let body = Body::from(body);
            Ok::<_, std::io::Error>(Response::builder().status(code).body(body).unwrap())
        });
        Cluster::from_client(Client::new(service, namespace.to_owned()), namespace)
            .with_report_key(Some(report_key()))
    }

    fn cancel_args(run: &str) -> CancelArgs {
        CancelArgs {
            run: run.into(),
            grace: Duration::ZERO,
            cluster: ClusterArgs {
                namespace: "runs".into(),
                access: AccessArgs::default(),
            },
            show: ShowArgs::default(),
        }
    }

    #[tokio::test]
    async fn runs_are_listed_as_a_table_and_as_json() {
        let (mut out, shown, _) = output(false);
        list::list(&cluster("runs"), &mut out).await.unwrap();
        let table = shown.text();
        assert_eq!(table.lines().count(), 3, "{table}");
        assert!(
            table.contains("running") && table.contains("node-1"),
            "{table}"
        );

        let (mut out, shown, _) = output(true);
        list::list(&cluster("runs"), &mut out).await.unwrap();
        let answer: Value = serde_json::from_str(&shown.text()).unwrap();
        assert_eq!(answer["namespace"], "runs");
        let run = &answer["runs"][0];
        for (field, value) in [
            ("jobId", "42"),
            ("stepId", "a"),
            ("name", "job-42-a"),
            ("stepType", "plan"),
            ("state", "running"),
            ("node", "node-1"),
            ("started", "2026-01-01T00:00:03Z"),
        ] {
            assert_eq!(run[field], value, "{field} in {run}");
        }
    }

    #[tokio::test]
    async fn a_run_is_explained_by_its_job_and_step() {
        let (mut out, shown, _) = output(true);
        explain::explain("42/a", &cluster("runs"), &mut out)
            .await
            .unwrap();
        let answer: Value = serde_json::from_str(&shown.text()).unwrap();
        assert_eq!(
            (&answer["running"], &answer["name"]),
            (&json!(true), &json!("job-42-a"))
        );
        assert_eq!(answer["timeline"][0]["what"], "accepted");
    }

    /// Whose Job is gone, and which may have left events.
    #[tokio::test]
    async fn a_run_that_is_not_found_differs_from_one_that_may_not_be_read() {
        let (mut out, ..) = output(false);
        let unknown = explain::explain("77", &cluster("runs"), &mut out).await;
        let unknown = unknown.unwrap_err();
        assert!(unknown.to_string().contains("no run `77`"), "{unknown}");
        // Its events are forbidden.
        let refused = explain::explain("77", &cluster("mute"), &mut out).await;
        let refused = refused.unwrap_err();
        let told = chain(&refused);
        assert!(told.contains("what is left of the run"), "{told}");
        assert!(told.contains("forbidden"), "{told}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("check")));
    }

    #[tokio::test]
    async fn cancelling_prints_what_it_did_and_asks_which_of_several_runs_is_meant() {
        let (mut out, shown, _) = output(false);
        cancel::cancel(&cancel_args("job-42-a"), &cluster("runs"), &mut out)
            .await
            .unwrap();
        assert!(
            shown
                .text()
                .starts_with("job-42-a: its executor is being stopped."),
            "{}",
            shown.text()
        );
        let error = cancel::cancel(&cancel_args("42"), &cluster("runs"), &mut out)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("may mean any of 2"), "{error}");
    }

    #[tokio::test]
    async fn a_run_is_stayed_with_to_its_end_and_its_outcome_is_passed_on() {
        let key = RunRef {
            job_id: "9".into(),
            step_id: "z".into(),
            name: "job-9-z".into(),
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            step_type: "terraformPlan",
            lease: None,
        };
        let (mut out, shown, said) = output(false);
        let exit = launch::stay(&cluster("runs"), &key, true, &mut out)
            .await
            .unwrap();
        assert_eq!(exit, Exit::StepFailed);
        assert_eq!(shown.text(), "Error: no such thing\n");
        assert!(said.text().contains("the plan failed"), "{}", said.text());
    }

    #[tokio::test]
    async fn a_refusal_names_what_was_refused_and_where_to_look() {
        let (mut out, _, said) = output(false);
        let error = list::list(&cluster("other"), &mut out).await.unwrap_err();
        assert_eq!(error.exit, Exit::BadConfiguration);
        out.fail(&error);
        let said = said.text();
        assert!(
            said.contains("is forbidden") && said.contains("api-launcher check"),
            "{said}"
        );
    }
}
