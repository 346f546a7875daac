//! Pods that are disrupted, before and after their executor has taken the step.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use integration_tests::{Repository, job};
use job_contract::{Exit, StepType, env};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{EvictParams, PostParams};
use serde_json::{Value, json};
use test_cluster::ADMIN;
use verdict::VerdictKind;

use super::{Fixture, name};

impl Fixture {
    /// An image whose first executor gets no further than fetching the source: `begun` appears, and the fetch
    /// never ends. Later ones do their work.
    fn image_that_hangs_once(&self) -> std::path::PathBuf {
        let (bin, begun) = (self.machine.scratch("bin"), self.machine.scratch("begun"));
        fs::create_dir(&bin).unwrap();
        let script = format!(
            "#!/bin/sh\nif ! test -e '{0}'; then : > '{0}'; exec sleep 1000; fi\nPATH=\"${{PATH#*:}}\" exec git \"$@\"\n",
            begun.display()
        );
        let git = bin.join("git");
        fs::write(&git, script).unwrap();
        fs::set_permissions(&git, fs::Permissions::from_mode(0o755)).unwrap();
        self.image_that_first(&format!("export PATH='{}':\"$PATH\"", bin.display()));
        begun
    }

    async fn first_pod(&self, run: &str, is_there: impl Fn() -> bool) -> Pod {
        self.until("the pod is at work", |state| {
            let pod = (*state.pods_of(run).first()?).clone();
            let running = pod.status.as_ref()?.phase.as_deref()? == "Running";
            (running && is_there()).then_some(pod)
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_preempted_before_its_claim_is_run_by_another_pod() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let begun = fixture.image_that_hangs_once();
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.first_pod(&name(&apply), || begun.exists()).await;
    fixture.cluster.preempt(&pod).await.unwrap();
    fixture.until_over(&apply, "Complete").await;
    assert_eq!(
        fixture.machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    let explanation = fixture.library().explain(&name(&apply)).await.unwrap();
    assert_eq!(explanation.verdict.unwrap().kind, VerdictKind::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_run_waited_for_stays_in_its_log() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let image = "registry.example.test/late:1";
    let data = fixture.machine.data_dir();
    let settings = [
        ("ExecutorEphemeralImage", image),
        (env::DATA_DIR, data.to_str().unwrap()),
    ];
    let launcher = fixture.serve_with(&settings);
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    launcher.endpoint.accept(&plan).await;
    let said = |text: &str| text.contains("late:1");
    fixture
        .until("the reason is in the log", |_| {
            let output = fixture.machine.output_if_any(&plan)?;
            said(&output).then_some(())
        })
        .await;
    fixture
        .cluster
        .image(image, &fixture.program_that_first(""));
    fixture.until_over(&plan, "Complete").await;
    let stored = fixture.machine.step_output(&plan);
    let (head, rest) = stored.split_once('\n').unwrap();
    assert!(said(head), "{stored}");
    assert!(
        rest.contains("Terraform") || rest.contains("OpenTofu"),
        "{stored}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_evicted_without_grace_before_its_claim_is_run_by_another_pod() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let begun = fixture.image_that_hangs_once();
    let plan = job::plan(&repository);
    fixture.machine.queue(&[&plan]);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&plan).await;
    let pod = fixture.first_pod(&name(&plan), || begun.exists()).await;
    fixture.cluster.lose_node(&pod).await.unwrap();
    fixture.cluster.remove_node_of(&pod).await.unwrap();
    fixture.until_over(&plan, "Complete").await;
    let statuses = fixture.machine.statuses(&plan);
    assert_eq!(statuses.1, "completed");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_verdict_of_a_preempted_run_names_the_preemption_after_its_pod_is_deleted() {
    let fixture = or_skip!(Fixture::new().await);
    let (_repository, apply) = super::endings::endless(&fixture);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let at_work = || super::endings::begun(&fixture) == 1;
    let pod = fixture.first_pod(&name(&apply), at_work).await;
    fixture.cluster.preempt(&pod).await.unwrap();
    fixture.until_over(&apply, "Failed").await;
    let run = name(&apply);
    fixture
        .until("the pod is gone", |state| {
            state.pods_of(&run).is_empty().then_some(())
        })
        .await;
    // At once, whether or not the watcher has written it down.
    let explanation = fixture.library().explain(&run).await.unwrap();
    assert_ne!(explanation.verdict.unwrap().kind, VerdictKind::Lost);
    fixture
        .until("the verdict is on the Job", |state| {
            let job = state.job(&run)?;
            let annotations = job.metadata.annotations.as_ref()?;
            annotations.contains_key("mayfly.dev/verdict").then_some(())
        })
        .await;
    let explanation = fixture.library().explain(&run).await.unwrap();
    assert_eq!(explanation.verdict.unwrap().kind, VerdictKind::Preempted);
    assert_eq!(
        fixture.machine.statuses(&apply),
        ("failed".into(), "failed".into())
    );
    assert_eq!(super::endings::begun(&fixture), 1);
}

/// As `kubectl drain` does it: through the eviction API, with the pod's own grace.
#[tokio::test(flavor = "multi_thread")]
async fn an_apply_on_a_drained_node_saves_its_state_and_reports_its_changes() {
    let fixture = or_skip!(Fixture::new().await);
    let begun = fixture.machine.scratch("begun");
    let repository = Repository::module(&format!(
        "resource \"terraform_data\" \"first\" {{}}\nresource \"terraform_data\" \"second\" {{\n  depends_on = \
         [terraform_data.first]\n  provisioner \"local-exec\" {{\n    command = \"touch {}; exec sleep 1000\"\n  \
         }}\n}}\nresource \"terraform_data\" \"third\" {{\n  depends_on = [terraform_data.second]\n}}\n",
        begun.display()
    ));
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let pod = fixture.first_pod(&name(&apply), || begun.exists()).await;
    let pods = Api::<Pod>::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs);
    let pod = pod.metadata.name.unwrap();
    pods.evict(&pod, &EvictParams::default()).await.unwrap();
    fixture.until_over(&apply, "Failed").await;

    let resources = fixture.machine.resources(&apply);
    assert!(resources.contains(&"terraform_data.first".to_owned()));
    assert!(!resources.contains(&"terraform_data.third".to_owned()));
    assert_eq!(fixture.machine.record(&apply).history.len(), 1);
    let output = fixture.machine.step_output(&apply);
    assert_eq!(output.matches("Interrupt received").count(), 1, "{output}");
    for words in [
        "stopped by signal 15 before it was done: 1 of 3 changes was made",
        "1 was not begun; the state is stored",
    ] {
        assert!(output.contains(words), "{words}: {output}");
    }
}

/// The second pod would find its own data folder empty, and apply again what the first has applied.
#[tokio::test(flavor = "multi_thread")]
async fn an_apply_whose_claim_ends_with_its_pod_is_never_begun_again() {
    let fixture = or_skip!(Fixture::new().await);
    fixture.image_that_shares_nothing();
    let ledger = fixture.machine.scratch("ledger");
    // The executor is stopped, so that it neither saves nor reports anything.
    let repository = Repository::module(&format!(
        "resource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = \"kill -STOP $(cut -d' ' \
         -f4 /proc/$PPID/stat); echo begun >> {}; sleep 600\"\n  }}\n}}\n",
        ledger.display()
    ));
    let apply = job::step(StepType::Apply, &repository);
    let launcher = fixture.serve_with(&[(env::RECORDS, "pod")]);
    launcher.endpoint.accept(&apply).await;
    let run = name(&apply);
    let at_work = || super::endings::begun(&fixture) == 1;
    let pod = fixture.first_pod(&run, at_work).await;
    let pods = Api::<Pod>::namespaced(fixture.cluster.client(ADMIN).unwrap(), &fixture.runs);
    let (pod, at_once) = (pod.metadata.name.unwrap(), PostParams::default());
    // The client's own eviction misspells the options of the deletion, and so loses them.
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod},
        "deleteOptions": {"gracePeriodSeconds": 1},
    });
    let evicted: Value = pods
        .create_subresource("eviction", &pod, &at_once, &eviction)
        .await
        .unwrap();
    assert_eq!(evicted["status"], "Success");
    fixture.until_over(&apply, "Failed").await;
    assert_eq!(super::endings::begun(&fixture), 1);
    fixture.until_recorded(&apply).await;
    let verdict = fixture
        .library()
        .explain(&run)
        .await
        .unwrap()
        .verdict
        .unwrap();
    assert_eq!(verdict.kind, VerdictKind::Evicted, "{verdict:?}");
    assert!(verdict.outcome != Exit::Done, "{verdict:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_without_records_names_the_missing_setting() {
    let fixture = or_skip!(Fixture::new().await);
    fixture.image_that_shares_nothing();
    let apply = job::step(StepType::Apply, &Repository::fixture());
    let launcher = fixture.serve_with(&[(env::RECORDS, "")]);
    launcher.endpoint.accept(&apply).await;
    fixture.until_over(&apply, "Failed").await;
    let explanation = fixture.library().explain(&name(&apply)).await.unwrap();
    let verdict = explanation.verdict.unwrap();
    assert_eq!(verdict.outcome, Exit::BadConfiguration, "{verdict:?}");
    assert!(format!("{verdict:?}").contains(env::API_URL), "{verdict:?}");
}
