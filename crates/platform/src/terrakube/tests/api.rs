//! The test platform with one job that no scheduler touches, and a client that repeats requests at once.

use std::time::Duration;

use reqwest::{StatusCode, Url};
use serde_json::{Map, Value};
use test_platform::{Effect, Fault, Flow, Job, NewJob, Platform, Release, Rule, Status, Workspace};

use crate::StepRef;
use crate::calls::client::Pace;
use crate::terrakube::{Terrakube, TerrakubeConfig, TokenSource};

/// The rules that these tests break on purpose: they report in every order, with invented addresses of step outputs, and with
/// wrong tokens.
const EXPECTED: [Rule; 4] = [
    Rule::BeforeQueue,
    Rule::Output,
    Rule::Token,
    Rule::Forbidden,
];

/// The test platform. Dropping it stops it.
pub(super) struct Api {
    platform: Platform,
    job: u32,
}

impl Drop for Api {
    fn drop(&mut self) {
        let broken = self.platform.ledger().broken();
        let unexpected = broken.iter().any(|rule| !EXPECTED.contains(rule));
        assert!(
            !unexpected || std::thread::panicking(),
            "{}",
            self.platform.report()
        );
    }
}

pub(super) fn status(name: &str) -> Status {
    serde_json::from_value(name.into()).unwrap()
}

impl Api {
    /// A job with a plan step and an apply step, in that status.
    pub(super) async fn with_status(name: &str) -> Self {
        Self::of(Release::Newest, name).await
    }

    /// The same with the rules of this release.
    pub(super) async fn of(release: Release, name: &str) -> Self {
        let platform = Platform::builder().release(release).start().await.unwrap();
        platform.edit(|records| "org".clone_into(&mut records.organization));
        let workspace = platform.workspace(Workspace {
            id: "ws".to_owned(),
            ..Workspace::new("https://git.example.test/a.git")
        });
        let new = NewJob::new(&workspace, Flow::plan_apply());
        let job = platform.store_job(new, |job| {
            job.status = status(name);
            for (step, id) in job.steps.iter_mut().zip(["plan-id", "apply-id"]) {
                id.clone_into(&mut step.id);
            }
        });
        assert_eq!(job, 412);
        Self { platform, job }
    }

    /// Changes the job as another client may.
    pub(super) fn edit<T>(&self, change: impl FnOnce(&mut Job) -> T) -> T {
        let found =
            |records: &mut test_platform::Records| change(records.jobs.get_mut(&self.job).unwrap());
        self.platform.edit(found)
    }

    pub(super) fn set_step(&self, at: usize, name: &str) {
        self.edit(|job| job.steps[at].status = status(name));
    }

    /// The next request with this method and path ending fails.
    pub(super) fn fault(&self, method: &'static str, path_end: &str, effect: Effect) {
        let path = format!("{path_end}$");
        self.platform.fault(Fault::once(method, &path, effect));
    }

    pub(super) fn refuse(&self, method: &'static str, path_end: &str, status: StatusCode) {
        self.fault(method, path_end, Effect::Status(status.as_u16()));
    }

    /// Each of the next reads of the job changes its status to the next of these.
    pub(super) fn becomes(&self, names: &[&str]) {
        for name in names {
            self.fault("GET", "/job/412", Effect::Then(status(name)));
        }
    }

    pub(super) fn has_faults(&self) -> bool {
        ["GET", "POST", "PATCH"]
            .iter()
            .any(|method| self.platform.faults_left(method) > 0)
    }

    pub(super) fn config(&self) -> TerrakubeConfig {
        let url = Url::parse(&format!("{}/", self.platform.url())).unwrap();
        TerrakubeConfig {
            api_url: url.clone(),
            public_url: url,
            registry_domain: None,
            tokens: TokenSource::parse(&self.platform.secret()).unwrap(),
            dispatch_wait: Duration::from_millis(50),
            status_poll: Duration::from_millis(5),
            report_patience: Duration::from_secs(5),
            lease: None,
        }
    }

    pub(super) fn client(&self) -> Terrakube {
        client(self.config())
    }

    /// A client with these two times of [`Pace`].
    pub(super) fn claiming_client(&self, claim_write: u64, claim_settle: u64) -> Terrakube {
        let pace = Pace {
            claim_write: Duration::from_millis(claim_write),
            claim_settle: Duration::from_millis(claim_settle),
            ..PACE
        };
        Terrakube::with_pace(self.config(), None, pace).unwrap()
    }

    /// The accepted changes: id of job or step, and the attributes.
    pub(super) fn changes(&self) -> Vec<(String, Value)> {
        self.platform.ledger().changes()
    }

    /// How many reads of the job or of its states were answered.
    pub(super) fn reads(&self) -> usize {
        let ledger = self.platform.ledger();
        let reads = ledger.of("GET", "/api/").into_iter();
        reads.filter(|request| request.done).count()
    }

    pub(super) fn status(&self) -> String {
        self.platform.job(self.job).status.to_string()
    }

    pub(super) fn histories(&self) -> Vec<test_platform::History> {
        self.platform.records().histories
    }

    pub(super) fn context(&self) -> Option<Value> {
        let context = self.platform.records().contexts.remove(&self.job);
        context.map(Value::Object)
    }

    pub(super) fn set_context(&self, context: Option<Value>) {
        let context: Option<Map<String, Value>> =
            context.map(|context| serde_json::from_value(context).unwrap());
        self.platform.edit(|records| match context {
            Some(context) => records.contexts.insert(self.job, context),
            None => records.contexts.remove(&self.job),
        });
    }
}

/// Short pauses, and a limit that no test reaches.
const PACE: Pace = Pace {
    first_pause: Duration::from_millis(1),
    longest_pause: Duration::from_millis(5),
    dispatch_poll: Duration::from_millis(1),
    claim_write: Duration::from_mins(2),
    claim_settle: Duration::from_millis(20),
};

/// A client with short pauses.
pub(super) fn client(config: TerrakubeConfig) -> Terrakube {
    Terrakube::with_pace(config, None, PACE).unwrap()
}

pub(super) fn step(id: &str, step_type: &str) -> StepRef {
    StepRef {
        organization_id: "org".into(),
        workspace_id: "ws".into(),
        job_id: "412".into(),
        step_id: id.into(),
        step_type: step_type.into(),
    }
}
