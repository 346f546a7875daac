//! Pods that cannot store their state, with a store that other pods reach.

use std::fs;

use integration_tests::repository::chain;
use integration_tests::{Repository, job};
use job_contract::{JobData, StepType};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_cluster::State;
use test_platform::launcher::Launcher;
use tokio::task::block_in_place;
use verdict::VerdictKind;

use super::{Fixture, name};
use crate::state::{Bucket, is_lock, is_state};

impl Fixture {
    /// The executor's image, with the settings of this store.
    fn image_with(&self, bucket: &Bucket) {
        let settings = bucket.settings();
        let words = settings.map(|(name, value)| format!("export {name}='{value}'"));
        self.image_that_first(&words.join("\n"));
    }

    async fn until_logged(&self, words: &str) {
        let is_logged = |_: &State| {
            let logs = self.cluster.container_logs();
            logs.iter().any(|log| log.contains(words)).then_some(())
        };
        self.until(words, is_logged).await;
    }

    /// A plan in a pod of its own, whose Job has ended so.
    async fn planned(
        &self,
        launcher: &Launcher,
        (repository, job_id): (&Repository, &str),
        condition: &str,
    ) -> JobData {
        let plan = job::in_job(&job::plan(repository), job_id);
        self.machine.queue(&[&plan]);
        launcher.endpoint.accept(&plan).await;
        self.until_over(&plan, condition).await;
        plan
    }
}

/// The store takes the copy of a state, but not the state. Then the container is killed for its memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_a_killed_pod_has_kept_holds_other_pods_back_until_it_is_stored() {
    let fixture = or_skip!(Fixture::new().await);
    let (bucket, gate) = (Bucket::new(), fixture.machine.gate());
    fixture.image_with(&bucket);
    let repository = gate.repository();
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let at_the_gate = block_in_place(|| gate.reached());
    let pod = fixture.pod_at_work(&apply, || true).await;
    // A push that is killed would leave its lock.
    let is_refused = |path: &str| is_state(path) || is_lock(path);
    bucket.endpoint.refuse("PUT", is_refused, usize::MAX);
    drop(at_the_gate);
    let words = "The executor tries again to store it.";
    fixture.until_logged(words).await;
    assert!(fixture.cluster.oom_kill(&pod));
    fixture.until_over(&apply, "Failed").await;
    assert_eq!(fixture.verdict(&apply).await, VerdictKind::OomKilled);
    bucket.endpoint.open();

    let plan = (&repository, "413");
    let refused = fixture.planned(&launcher, plan, "Failed").await;
    let told = fixture.told(&["explain", &name(&refused)]);
    let kept = format!("/errored-{}-{}", apply.job_id, apply.step_id);
    let ids = format!("{}/{}", job::ORGANIZATION, job::WORKSPACE);
    let command = format!("`api-launcher state store {ids}`");
    for words in [kept, command] {
        assert!(told.contains(&words), "{words}: {told}");
    }

    let stored = block_in_place(|| bucket.state_command(&fixture.machine, &["store"]));
    assert_eq!(stored.code(), 0, "{stored}");
    assert_eq!(block_in_place(|| bucket.resources()).len(), 3, "{stored}");
    let plan = (&repository, "414");
    fixture.planned(&launcher, plan, "Complete").await;
    fixture.until_logged("No changes").await;
}

/// No disk takes the state, the store is away, and the tool is killed, as the kernel does for want of memory, before it has given its
/// lock back.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_a_pod_can_put_nowhere_is_held_until_the_store_is_back() {
    let fixture = or_skip!(Fixture::new().await);
    let (bucket, gate) = (Bucket::new(), fixture.machine.gate());
    fixture.image_with(&bucket);
    let noted = fixture.machine.scratch("tool");
    // The tool cannot write its last resort, and prints it.
    let command = format!(
        "echo $PPID > {}; mkdir errored.tfstate; exec cat {}",
        noted.display(),
        gate.path().display()
    );
    let repository = Repository::module(&chain(&format!("command = \"{command}\"")));
    let apply = job::step(StepType::Apply, &repository);
    fixture.machine.queue(&[&apply]);
    let launcher = fixture.serve_reporting();
    launcher.endpoint.accept(&apply).await;
    let at_the_gate = block_in_place(|| gate.reached());
    let in_the_way = fixture.machine.data_dir().join("errored");
    fs::write(&in_the_way, "in the way").unwrap();
    bucket.endpoint.refuse("PUT", |_| true, usize::MAX);
    let unlock = bucket.endpoint.hold("DELETE", is_lock);
    drop(at_the_gate);
    block_in_place(|| unlock.wait());
    let tool = fs::read_to_string(noted).unwrap();
    let tool = Pid::from_raw(tool.trim().parse().unwrap());
    kill(tool, Signal::SIGKILL).unwrap();
    let words = "Until then, only the executor has it, in its memory.";
    fixture.until_logged(words).await;
    fs::remove_file(in_the_way).unwrap();
    bucket.endpoint.open();
    fixture.until_over(&apply, "Failed").await;
    fixture.until_logged("The state is stored.").await;
    assert_eq!(block_in_place(|| bucket.resources()).len(), 3);
    assert_eq!(block_in_place(|| bucket.lock()), None);
    let plan = (&repository, "413");
    fixture.planned(&launcher, plan, "Complete").await;
    fixture.until_logged("No changes").await;
}
