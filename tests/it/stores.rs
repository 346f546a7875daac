//! Whole steps with every store: artifacts through our own clients, state through the tool's own backends, at
//! the addresses they have in a deployment.

use std::fs;
use std::path::Path;
use std::process::Command;

use artifact_store::{
    AzureLogin, AzureSettings, GcsLogin, GcsSettings, Handover, HttpUrl, RequestTiming,
    S3Credentials, S3Settings, ServedStore, StaticKeys, Store, StoreSettings,
};
use axum::body::Bytes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration_tests::machine::{ExecutorRun, files_below};
use integration_tests::{FakeTool, Gate, Machine, Outcome, Repository, Running, job};
use job_contract::keys::{Area, ObjectKey, PLAN_FILE};
use job_contract::report::StateStatus;
use job_contract::{JobData, StepType, Tool, env};
use secrecy::SecretString;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_peers::azurite::{self, Azurite};
use test_peers::clouds::Clouds;
use test_peers::gcs::{self, Gcs};
use test_peers::s3::{self, S3};
use url::Url;

use crate::machine;

mod keyless;

const MODULE: &str = "resource \"terraform_data\" \"kept\" {\n  input = \"in the store\"\n}\n\
                      output \"kept\" {\n  value = terraform_data.kept.output\n}\n";

/// What the user's code can see after the operation, with the tool's own files, and a use of the tool in there.
const LOOK_AROUND: &str = "cp -a . \"$LOOK\"; $TOOL state list > \"$LOOK/listed\"; env; \
                           cat \"${AWS_SHARED_CREDENTIALS_FILE:-/dev/null}\" \
                           \"${GOOGLE_BACKEND_CREDENTIALS:-/dev/null}\"";

/// A store as the executor is told of it, and as the test looks into it.
struct Fixture {
    environment: Vec<(&'static str, String)>,
    /// Variables of the run itself.
    variables: Vec<(&'static str, &'static str)>,
    /// Credentials that must lie nowhere.
    secrets: Vec<String>,
    store: Store,
    /// What comes before a key of the area of states in a reference.
    address: String,
    /// Where the tool's backend keeps the state.
    state: ObjectKey,
}

struct Journey<'p> {
    tool: Tool,
    fixture: &'p Fixture,
    machine: Machine,
    look: TempDir,
}

impl<'p> Journey<'p> {
    fn new(fixture: &'p Fixture) -> Self {
        Self::with(Tool::Terraform, fixture)
    }

    fn with(tool: Tool, fixture: &'p Fixture) -> Self {
        Self {
            tool,
            fixture,
            machine: machine(),
            look: tempfile::tempdir().unwrap(),
        }
    }

    fn plan(&self, repository: &Repository) -> JobData {
        let mut plan = JobData {
            command_list: vec![job::after(job::bash(1, LOOK_AROUND))],
            ..job::plan_by(self.tool, repository)
        };
        let look = ("LOOK", self.look.path().to_str().unwrap());
        let tool = ("TOOL", self.tool.binary());
        for (name, value) in self.fixture.variables.iter().chain([&look, &tool]) {
            plan.environment_variables
                .insert((*name).to_owned(), (*value).to_owned());
        }
        plan
    }

    fn executor(&self, job: &JobData) -> ExecutorRun<'_> {
        let start = self.machine.executor(job);
        let fixture = &self.fixture.environment;
        fixture
            .iter()
            .fold(start, |run, (name, value)| run.env(name, value))
    }

    /// Until then, no run of the workspace begins.
    fn drop_kept_state(&self) {
        let workspace = format!("{}/{}", job::ORGANIZATION, job::WORKSPACE);
        let mut command = Command::new(crate::LAUNCHER);
        command
            .args(["state", "drop", &workspace])
            .env_clear()
            .env(env::DATA_DIR, self.machine.data_dir());
        for (name, value) in &self.fixture.environment {
            command.env(name, value);
        }
        let done = Running::start(&mut command).wait();
        assert_eq!(done.code(), 0, "{done}");
    }

    fn run(&self, job: &JobData) -> Outcome {
        self.executor(job).run().expect_code(0)
    }

    fn read(&self, key: &ObjectKey) -> Option<Vec<u8>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let read = runtime.block_on(self.fixture.store.read(key)).unwrap();
        read.map(|bytes| bytes.to_vec())
    }

    fn state(&self, key: &ObjectKey) -> Value {
        let state = self.read(key).unwrap_or_else(|| panic!("no {key:?}"));
        serde_json::from_slice(&state).unwrap()
    }

    fn assert_no_secret_lies_about(&self, outcome: &Outcome) {
        let mut places = vec![("the log".to_owned(), outcome.to_string())];
        for path in files_below(self.look.path()) {
            places.push((path.display().to_string(), text_of(&path)));
        }
        for secret in &self.fixture.secrets {
            for (name, text) in &places {
                assert!(!text.contains(secret), "{secret} lies in {name}");
            }
        }
    }
}

/// The text of a file; of a plan, that of everything in it.
fn text_of(path: &Path) -> String {
    let mut text = fs::read(path).unwrap();
    if path.ends_with(PLAN_FILE) {
        let mut archive = zip::ZipArchive::new(fs::File::open(path).unwrap()).unwrap();
        for index in 0..archive.len() {
            std::io::copy(&mut archive.by_index(index).unwrap(), &mut text).unwrap();
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// The default template: what was planned is applied, by another process, and everything lies where the platform
/// looks for it.
fn plans_and_applies(fixture: &Fixture) -> TempDir {
    plans_and_applies_by(Tool::Terraform, fixture)
}

fn plans_and_applies_by(tool: Tool, fixture: &Fixture) -> TempDir {
    let journey = Journey::with(tool, fixture);
    let repository = Repository::module(MODULE);
    let plan = journey.plan(&repository);
    let apply = job::apply_after(&plan);
    journey.machine.queue(&[&plan, &apply]);

    let outcome = journey.run(&plan);
    let key = ObjectKey::plan(
        &plan.organization_id,
        &plan.workspace_id,
        &plan.job_id,
        &plan.step_id,
    );
    let reference = journey.machine.record(&plan).terraform_plan;
    assert_eq!(reference, Some(format!("{}{}", fixture.address, key.path)));
    assert!(journey.read(&key).unwrap().starts_with(b"PK"));
    journey.assert_no_secret_lies_about(&outcome);
    // There would have been something to find.
    assert!(
        journey
            .look
            .path()
            .join(".terraform/terraform.tfstate")
            .exists()
    );

    let outcome = journey.run(&apply);
    assert_eq!(
        journey.machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    journey.assert_no_secret_lies_about(&outcome);
    let listed = fs::read_to_string(journey.look.path().join("listed")).unwrap();
    assert_eq!(listed.trim(), "terraform_data.kept", "{outcome}");
    publishes_its_state(&journey, &apply);

    let key = ObjectKey::step_output(&apply.organization_id, &apply.job_id, &apply.step_id);
    let output = String::from_utf8(journey.read(&key).unwrap()).unwrap();
    assert!(
        output.contains("Apply complete! Resources: 1 added"),
        "{output}"
    );
    journey.look
}

fn publishes_its_state(journey: &Journey<'_>, apply: &JobData) {
    let current = journey.state(&journey.fixture.state);
    assert_eq!(current["outputs"]["kept"]["value"], "in the store");
    let record = journey.machine.record(apply);
    let published = record.history.last().unwrap();
    assert_eq!(published.serial, current["serial"].as_u64().unwrap());
    assert_eq!(published.lineage, current["lineage"].as_str().unwrap());
    let path = published
        .output
        .strip_prefix(&journey.fixture.address)
        .unwrap_or_else(|| panic!("{}", published.output));
    let rendered = ObjectKey {
        area: Area::State,
        path: path.to_owned(),
    };
    assert_eq!(
        journey.state(&rendered)["values"]["outputs"]["kept"]["value"],
        "in the store"
    );
    let raw = ObjectKey {
        path: path.replace(".json", ".raw.json"),
        ..rendered
    };
    assert_eq!(journey.state(&raw), current);
}

/// A backend of the source, and one that `init` has set up in another place, end a step before its plan.
fn refuses_another_place(fixture: &Fixture) {
    let noted = r#"{"version":3,"backend":{"type":"local","config":{"path":"elsewhere"}}}"#;
    let init = format!("mkdir -p .terraform\necho '{noted}' > .terraform/terraform.tfstate");
    let elsewhere = "terraform {\n  backend \"local\" {}\n}\n";
    for (tool, file, words) in [
        (FakeTool::new(), "zz_override.tf", "`zz_override.tf`"),
        (FakeTool::new().on("init", &init), "zz.txt", "`local`"),
    ] {
        let journey = Journey::new(fixture);
        let repository = Repository::with(&[("main.tf", MODULE), (file, elsewhere)]);
        let plan = job::in_job(&job::plan(&repository), "9001");
        journey.machine.queue(&[&plan]);
        let executor = journey.executor(&plan).env("PATH", tool.path());
        let outcome = executor.run().expect_code(1);
        assert!(outcome.error().contains(words), "{outcome}");
        assert!(!tool.was_called("plan"), "{outcome}");
    }
}

/// After an apply, the store is asked for lineage and serial. It has neither what a tool has written elsewhere, nor what has not
/// arrived.
fn keeps_a_state_that_it_lacks(fixture: &Fixture) {
    let (journey, repository) = (Journey::new(fixture), Repository::module(MODULE));
    let stored = journey.state(&fixture.state);
    let (lineage, serial) = (&stored["lineage"], stored["serial"].as_u64().unwrap());
    let of_tool = json!("of-the-tool");
    for (job_id, lineage, serial) in [("9002", &of_tool, serial), ("9003", lineage, serial + 1)] {
        let written = json!({"version": 4, "serial": serial, "lineage": lineage, "outputs": {}, "resources": [{}]});
        let tool = FakeTool::new().on("state", &format!("echo '{written}'"));
        let apply = job::in_job(&job::step(StepType::Apply, &repository), job_id);
        journey.machine.queue(&[&apply]);
        let executor = journey.executor(&apply).env("PATH", tool.path());
        let outcome = executor.run().expect_code(1);
        assert_eq!(outcome.report().state, Some(StateStatus::Kept), "{outcome}");
        let kept = ObjectKey::errored_state(
            &apply.organization_id,
            &apply.workspace_id,
            &apply.job_id,
            &apply.step_id,
        );
        assert_eq!(journey.state(&kept), written, "{outcome}");
        assert_eq!(journey.state(&fixture.state), stored, "{outcome}");
        journey.drop_kept_state();
    }
}

fn backend_state() -> ObjectKey {
    ObjectKey::backend_state(job::ORGANIZATION, job::WORKSPACE)
}

fn open(settings: &StoreSettings) -> Store {
    // A second installation leaves the first in force.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Store::open(settings).unwrap()
}

/// The bucket on a service of its own, with keys.
fn s3_with_keys(server: &S3) -> Fixture {
    let url = server.url();
    let keys = [server.access_key(), server.secret_key()];
    Fixture {
        environment: vec![
            (env::STATE_TYPE, "AwsTerraformStateImpl".to_owned()),
            (env::AWS_BUCKET, s3::BUCKET.to_owned()),
            (env::AWS_REGION, s3::REGION.to_owned()),
            (env::AWS_ENDPOINT, url.clone()),
            (env::AWS_ACCESS_KEY, keys[0].to_owned()),
            (env::AWS_SECRET_KEY, keys[1].to_owned()),
            (env::AWS_USE_LOCKFILE, "true".to_owned()),
        ],
        // The run's own credentials are not the store's.
        variables: vec![
            ("AWS_ACCESS_KEY_ID", "AKIAOFTHERUN"),
            ("AWS_SECRET_ACCESS_KEY", "secret-of-the-run"),
        ],
        secrets: vec![keys[1].to_owned()],
        store: open(&StoreSettings::S3(S3Settings {
            bucket: s3::BUCKET.to_owned(),
            region: s3::REGION.to_owned(),
            endpoint: Some(HttpUrl {
                url: Url::parse(&url).unwrap(),
                text: url.clone(),
            }),
            endpoint_region: None,
            path_style: true,
            credentials: S3Credentials::Keys(StaticKeys {
                access_key: SecretString::from(keys[0]),
                secret_key: SecretString::from(keys[1]),
            }),
            role: None,
            handover: Handover::Outside,
            use_lockfile: false,
        })),
        address: format!("{url}/{}/tfstate/", s3::BUCKET),
        state: backend_state(),
    }
}

#[test]
fn s3_by_another_service_keeps_a_whole_job() {
    let server = S3::start().unwrap();
    let fixture = s3_with_keys(&server);
    plans_and_applies(&fixture);
    refuses_another_place(&fixture);
    keeps_a_state_that_it_lacks(&fixture);
    let log = server.log();
    assert!(
        log.contains("terraform.tfstate.tflock"),
        "no lock was taken"
    );
}

#[test]
fn s3_with_keys_in_the_backend_file_works_as_in_the_stock_executor() {
    let server = S3::start().unwrap();
    let mut fixture = s3_with_keys(&server);
    let include = (env::AWS_INCLUDE_BACKEND_KEYS, "true".to_owned());
    fixture.environment.push(include);
    let secret = fixture.secrets.remove(0);
    let seen = plans_and_applies(&fixture);
    // Which shows that the other tests look in the right places.
    for file in [
        "aws_backend_override.tf",
        ".terraform/terraform.tfstate",
        PLAN_FILE,
    ] {
        assert!(text_of(&seen.path().join(file)).contains(&secret), "{file}");
    }
}

/// Each pod has records of its own, and they share the store alone.
#[test]
fn what_was_reviewed_is_applied_by_a_pod_that_shares_only_the_store_with_the_planning_one() {
    let server = S3::start().unwrap();
    let fixture = s3_with_keys(&server);
    let (planning, applying) = (Journey::new(&fixture), Journey::new(&fixture));
    let module = "variable \"n\" {}\nresource \"terraform_data\" \"n\" {\n  input = var.n\n}\n\
                  output \"n\" {\n  value = terraform_data.n.output\n}\n";
    let repository = Repository::module(module);
    let with = |n: &str, job: JobData| JobData {
        variables: [("n".to_owned(), n.into())].into(),
        ..job
    };
    let plan = with("3", planning.plan(&repository));
    planning.run(&plan);
    let apply = with("5", job::apply_after(&plan));
    applying.run(&apply);
    assert_eq!(applying.state(&fixture.state)["outputs"]["n"]["value"], "3");

    // A job whose plan is gone is not applied without one.
    let note = ObjectKey::plan_record(&plan.organization_id, &plan.workspace_id, &plan.job_id);
    let text = String::from_utf8(applying.read(&note).unwrap()).unwrap();
    assert!(text.contains(&plan.step_id), "{text}");
    let tool = FakeTool::new().on("plan", "exit 1");
    let again = Journey::new(&fixture);
    let failing = again.executor(&plan).env("PATH", tool.path());
    failing.run().expect_code(1);
    let refused = Journey::new(&fixture).executor(&apply).run().expect_code(1);
    assert!(
        refused.to_string().contains("the job has a reviewed plan"),
        "{refused}"
    );
}

/// At the addresses of AWS, with the identity a pod is given there.
#[test]
fn s3_by_role_keeps_a_whole_job() {
    let server = S3::start_open().unwrap();
    let hosts = [
        format!("{}.s3.{}.amazonaws.com", s3::BUCKET, s3::REGION),
        format!("sts.{}.amazonaws.com", s3::REGION),
    ];
    let clouds = Clouds::start(&[
        (&hosts[0], server.address()),
        (&hosts[1], server.security_tokens()),
    ])
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "identity-of-the-pod").unwrap();
    let mut fixture = s3_with_keys(&server);
    fixture.environment = vec![
        (env::STATE_TYPE, "AwsTerraformStateImpl".to_owned()),
        (env::AWS_BUCKET, s3::BUCKET.to_owned()),
        (env::AWS_REGION, s3::REGION.to_owned()),
        (env::AWS_ENABLE_ROLE_AUTH, "true".to_owned()),
        (
            "AWS_ROLE_ARN",
            "arn:aws:iam::123456789012:role/store".to_owned(),
        ),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", token.display().to_string()),
    ];
    fixture.environment.extend(clouds.environment());
    fixture.address = format!("https://{}/tfstate/", hosts[0]);
    plans_and_applies(&fixture);
    let asked = clouds.asked();
    for host in hosts {
        assert!(asked.contains(&host), "{asked:?}");
    }
}

#[test]
fn azure_keeps_a_whole_job() {
    let server = Azurite::start().unwrap();
    let host = server.host();
    let clouds = Clouds::start(&[(&host, server.address())]).unwrap();
    let mut environment = vec![
        (env::STATE_TYPE, "AzureTerraformStateImpl".to_owned()),
        (env::AZURE_ACCOUNT, server.account().to_owned()),
        (env::AZURE_ACCESS_KEY, azurite::ACCOUNT_KEY.to_owned()),
        (env::AZURE_CONTAINER, "tfstate".to_owned()),
        (env::AZURE_RESOURCE_GROUP, "group".to_owned()),
    ];
    environment.extend(clouds.environment());
    let settings = StoreSettings::Azure(AzureSettings {
        account: server.account().to_owned(),
        login: AzureLogin::Key(SecretString::from(azurite::ACCOUNT_KEY)),
        container: "tfstate".to_owned(),
        resource_group: None,
        handover: Handover::Outside,
        endpoint: Url::parse(&server.url()).unwrap(),
    });
    let fixture = Fixture {
        environment,
        variables: Vec::new(),
        secrets: vec![azurite::ACCOUNT_KEY.to_owned()],
        store: open(&settings),
        address: format!("https://{host}/tfstate/"),
        state: backend_state(),
    };
    // The operator makes the container of states.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let key = ObjectKey::state_raw("o", "w", "made");
    let made = fixture.store.put(&key, "x");
    runtime.block_on(made).unwrap();
    plans_and_applies(&fixture);
    refuses_another_place(&fixture);
    keeps_a_state_that_it_lacks(&fixture);
    hub_and_tool_keep_each_other_out(&fixture, &settings, &runtime);
}

/// The lock that a hub takes is the one of the tool's own backend.
fn hub_and_tool_keep_each_other_out(
    fixture: &Fixture,
    settings: &StoreSettings,
    runtime: &tokio::runtime::Runtime,
) {
    let hub = ServedStore::open(settings, &RequestTiming::default()).unwrap();
    let state = hub.state(job::ORGANIZATION, job::WORKSPACE);
    let info = json!({"ID": "6c2a9f0e-3f0b-4b52-9d0c-6f6c8b8d7a11", "Who": "the-hub", "Operation": "OperationTypeApply",
        "Info": "", "Version": "1.14.0", "Created": "2026-11-26T00:00:00Z", "Path": ""});
    let info = Bytes::from(info.to_string());
    let lock = || runtime.block_on(state.lock(info.clone())).unwrap();
    let holder = || runtime.block_on(state.lock_info()).unwrap();

    assert!(lock());
    let journey = Journey::new(fixture);
    let gate = Gate::new(journey.look.path().join("gate"));
    let repository = gate.repository();
    // The job of the journey above has a plan.
    let apply = JobData {
        job_id: "9000".to_owned(),
        ..job::step(StepType::Apply, &repository)
    };
    let refused = journey.executor(&apply).run().expect_code(1);
    assert!(refused.log().contains("the-hub"), "{refused}");
    runtime.block_on(state.unlock(&info)).unwrap();
    assert_eq!(holder(), None);

    let journey = Journey::new(fixture);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| journey.run(&apply));
        let at_the_gate = gate.reached();
        let tools = holder().expect("the lock of the tool");
        assert!(String::from_utf8_lossy(&tools).contains("OperationTypeApply"));
        assert!(!lock());
        drop(at_the_gate);
        run.join().unwrap();
    });
    assert_eq!(holder(), None);
    assert!(lock());
}

#[test]
fn gcs_keeps_a_whole_job() {
    let server = Gcs::start().unwrap();
    let clouds = Clouds::start(&[("storage.googleapis.com", server.address())]).unwrap();
    let account = server.service_account();
    let mut environment = vec![
        (env::STATE_TYPE, "GcpTerraformStateImpl".to_owned()),
        (env::GCP_BUCKET, gcs::BUCKET.to_owned()),
        (env::GCP_PROJECT, "p".to_owned()),
        (env::GCP_CREDENTIALS, STANDARD.encode(&account)),
    ];
    environment.extend(clouds.environment());
    let key: Value = serde_json::from_str(&account).unwrap();
    let private_key = key["private_key"].as_str().unwrap();
    let fixture = Fixture {
        environment,
        variables: Vec::new(),
        secrets: vec![private_key.lines().nth(1).unwrap().to_owned()],
        store: open(&StoreSettings::Gcs(GcsSettings {
            bucket: gcs::BUCKET.to_owned(),
            login: GcsLogin::Key(SecretString::from(account.clone())),
            handover: Handover::Outside,
            endpoint: Url::parse(&server.url()).unwrap(),
        })),
        address: format!("https://storage.cloud.google.com/{}/tfstate/", gcs::BUCKET),
        state: ObjectKey {
            path: format!("{}/default.tfstate", backend_state().path),
            ..backend_state()
        },
    };
    plans_and_applies(&fixture);
    refuses_another_place(&fixture);
    keeps_a_state_that_it_lacks(&fixture);
}

#[test]
fn the_error_of_a_store_that_refuses_credentials_names_their_settings() {
    let server = S3::start().unwrap();
    let fixture = s3_with_keys(&server);
    let (machine, repository) = (machine(), Repository::module(MODULE));
    let scripts = job::scripts(&repository, vec![job::bash(1, "true")]);
    machine.queue(&[&scripts]);
    let start = machine.executor(&scripts);
    let settings = fixture.environment.iter();
    let run = settings.fold(start, |run, (name, value)| run.env(name, value));
    let outcome = run.env(env::AWS_SECRET_KEY, "wrong-secret").run();
    assert_ne!(outcome.code(), 0, "{outcome}");
    let told = outcome.report().error.clone().unwrap();
    assert!(told.contains(env::AWS_SECRET_KEY), "{told}");
    assert!(told.contains("SignatureDoesNotMatch"), "{told}");
    assert!(!outcome.to_string().contains("wrong-secret"), "{outcome}");
}
