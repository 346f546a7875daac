//! Two pods and one volume: providers come from the store, with the registry gone, and the files of a plan reach its apply. In mode
//! `fill`, runs only read the store, and Jobs of the operator fetch what they lacked.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::slice;

use integration_tests::machine::files_below;
use integration_tests::process::Stream;
use integration_tests::{Repository, job};
use job_contract::report::{Author, FinalReport, ReportKey};
use job_contract::{JobData, Tool, env, labels};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use test_cluster::{ADMIN, Fault, State};
use test_peers::providers::{NAMESPACE, PROVIDERS, Registry, present};
use test_peers::skips::needed;
use test_peers::wait;

use super::{Fixture, LAUNCHER, REPORT_KEY, deliver_all, name};

const STORE: &str = "/var/cache/mayfly";
const CLAIM: &str = "store";
/// More requests than there are retries.
const MANY: usize = 100;
const LOCK_FILE: &str = ".terraform.lock.hcl";

/// A cluster with a registry of providers, and a module that is locked to them.
struct Stored {
    /// Until it is gone.
    registry: Option<Registry>,
    host: String,
    repository: Repository,
    fixture: Fixture,
}

impl Stored {
    async fn new() -> Option<Self> {
        needed(present())?;
        let fixture = Fixture::new().await?;
        let registry = Registry::start().unwrap();
        let certificate = fixture.machine.scratch("ca.pem");
        fs::write(&certificate, registry.certificate()).unwrap();
        fixture.image_that_first(&format!("export SSL_CERT_FILE='{}'", certificate.display()));
        make_claim(&fixture).await;
        let host = registry.host();
        let module = module(&host);
        let kept = fixture.machine.scratch("lock.hcl");
        let keep = format!("cp {LOCK_FILE} '{}'", kept.display());
        let unlocked = Repository::with(&[("main.tf", &module)]);
        let first = JobData {
            command_list: vec![job::before(job::bash(1, &keep))],
            ..job::in_job(&job::plan_by(Tool::Terraform, &unlocked), "1")
        };
        fixture.machine.queue(&[&first]);
        // In another folder than that of the pods.
        let elsewhere = fixture.machine.scratch("own-store");
        let run = fixture.machine.executor(&first);
        let run = run.env("SSL_CERT_FILE", &certificate);
        run.env(env::PROVIDER_CACHE_DIR, elsewhere)
            .run()
            .expect_code(0);
        let lock = fs::read_to_string(kept).unwrap();
        Some(Self {
            registry: Some(registry),
            host,
            repository: Repository::with(&[("main.tf", &module), (LOCK_FILE, &lock)]),
            fixture,
        })
    }

    fn settings<'s>(&'s self, mode: &'s str) -> [(&'s str, &'s str); 4] {
        [
            (env::PROVIDER_CACHE_MODE, mode),
            (env::PROVIDER_CACHE_REGISTRIES, &self.host),
            (env::DEPLOYMENT_PLUGIN_CACHE_DIR, STORE),
            (env::DEPLOYMENT_PLUGIN_CACHE_CLAIM, CLAIM),
        ]
    }

    /// A plan whose script makes a file that its apply needs.
    fn plan(&self, job_id: &str) -> JobData {
        let plan = job::plan_by(Tool::Terraform, &self.repository);
        JobData {
            command_list: vec![job::before(job::bash(1, "printf packed > lambda.zip"))],
            workspace_id: format!("w-{job_id}"),
            ..job::in_job(&plan, job_id)
        }
    }

    fn apply_after(plan: &JobData) -> JobData {
        JobData {
            command_list: vec![job::before(job::bash(1, "grep -q packed lambda.zip"))],
            ..job::apply_after(plan)
        }
    }

    /// The archives in the store.
    fn archives(&self) -> Vec<PathBuf> {
        let folder = self.fixture.cluster.claim_dir(&self.fixture.runs, CLAIM);
        let files = if folder.is_dir() {
            files_below(&folder)
        } else {
            Vec::new()
        };
        files
            .into_iter()
            .filter(|path| path.extension().is_some_and(|end| end == "zip"))
            .collect()
    }

    #[track_caller]
    fn says(&self, job: &JobData, stored: usize, fetched: usize) {
        let line = format!("Providers: {stored} from the store, {fetched} downloaded.");
        let log = self.fixture.machine.step_output(job);
        assert!(log.contains(&line), "{line}: {log}");
    }

    /// The Jobs that fill the store, all of which have ended well.
    async fn until_filled(&self) -> usize {
        let over = |state: &State| {
            let mut fills = fills(state);
            let all_over = fills.all(|job| state.has_condition(&job_name(job), "Complete"));
            let count = self::fills(state).count();
            (count > 0 && all_over).then_some(count)
        };
        self.fixture.until("the store is filled", over).await
    }
}

async fn make_claim(fixture: &Fixture) {
    let client = fixture.cluster.client(ADMIN).unwrap();
    let claims = Api::<PersistentVolumeClaim>::namespaced(client, &fixture.runs);
    let claim = serde_json::from_value(json!({
        "metadata": {"name": CLAIM},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
        },
    }));
    let (params, claim) = (PostParams::default(), claim.unwrap());
    claims.create(&params, &claim).await.unwrap();
}

fn job_name(job: &Job) -> String {
    job.metadata.name.clone().unwrap()
}

fn fills(state: &State) -> impl Iterator<Item = &Job> {
    state.jobs.iter().filter(|job| {
        let labels = job.metadata.labels.as_ref();
        let manager = labels.and_then(|labels| labels.get(labels::MANAGED_BY));
        manager.is_some_and(|manager| manager == labels::MANAGED_BY_FILL)
    })
}

/// Two providers, and a resource of each.
fn module(host: &str) -> String {
    let version = |wanted: &str| {
        let mut all = PROVIDERS.iter();
        all.find(|(name, _)| *name == wanted).unwrap().1
    };
    let required = ["null", "random"].map(|name| {
        let version = version(name);
        format!("    {name} = {{\n      source = \"{host}/{NAMESPACE}/{name}\"\n      version = \"{version}\"\n    }}\n")
    });
    format!(
        "terraform {{\n  required_providers {{\n{}  }}\n}}\nresource \"random_pet\" \"one\" {{}}\nresource \"null_resource\" \
         \"one\" {{}}\n",
        required.concat()
    )
}

/// Makes plan and apply in a cluster whose registry is gone.
async fn plan_and_apply_without_registry(it: &Stored, mode: &str) {
    let launcher = it.fixture.serve_with(&it.settings(mode));
    let plan = it.plan("20");
    let apply = Stored::apply_after(&plan);
    it.fixture.machine.queue(&[&plan, &apply]);
    for step in [&plan, &apply] {
        launcher.endpoint.accept(step).await;
        it.fixture.until_over(step, "Complete").await;
        let (_, status) = it.fixture.machine.statuses(step);
        assert_eq!(
            status,
            "completed",
            "{}",
            it.fixture.machine.step_output(step)
        );
        it.says(step, 2, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_apply_finds_the_files_of_its_plan_and_the_providers_of_an_earlier_run() {
    let mut it = or_skip!(Stored::new().await);
    let launcher = it.fixture.serve_with(&it.settings("runs"));
    let first = it.plan("10");
    it.fixture.machine.queue(&[&first]);
    launcher.endpoint.accept(&first).await;
    it.fixture.until_over(&first, "Complete").await;
    it.says(&first, 0, 2);
    assert_eq!(it.archives().len(), 2);
    drop(launcher);
    drop(it.registry.take());
    plan_and_apply_without_registry(&it, "runs").await;
    assert_eq!(fills(&it.fixture.state().await).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_runs_makes_one_job_that_fetches_what_they_lacked() {
    let mut it = or_skip!(Stored::new().await);
    let launcher = it.fixture.serve_with(&it.settings("fill"));
    let burst = ["10", "11", "12"].map(|id| it.plan(id));
    it.fixture.machine.queue(&burst.each_ref());
    deliver_all(slice::from_ref(&launcher.endpoint), &burst).await;
    for run in &burst {
        it.fixture.until_over(run, "Complete").await;
        // None was faster than the Job of another, or it has them from there.
        let log = it.fixture.machine.step_output(run);
        assert!(log.contains("Providers: "), "{log}");
    }
    let lacked_all = |run: &&JobData| {
        let log = it.fixture.machine.step_output(run);
        log.contains("Providers: 0 from the store, 2 downloaded.")
    };
    let first = burst.iter().find(lacked_all).expect("one was first");
    assert_eq!(it.until_filled().await, 1);
    assert_eq!(it.archives().len(), 2);
    let told = it.fixture.json(&["explain", &first.job_id]);
    let of_jobs = &told["storeFilling"]["jobs"];
    assert_eq!(of_jobs[0]["state"], "completed", "{told}");
    assert_eq!(of_jobs[0]["packages"], told["storeFilling"]["lacked"]);
    let state = it.fixture.state().await;
    let job = serde_json::to_string(fills(&state).next().unwrap()).unwrap();
    assert!(
        !job.contains("EphemeralJobData") && !job.contains("secretRef"),
        "{job}"
    );
    drop(launcher);
    drop(it.registry.take());
    plan_and_apply_without_registry(&it, "fill").await;
    assert_eq!(
        fills(&it.fixture.state().await).count(),
        1,
        "nothing more was wanted"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_is_killed_before_it_makes_the_job_is_followed_by_one_that_does() {
    let it = or_skip!(Stored::new().await);
    let doomed = it.fixture.serve_with(&it.settings("fill"));
    let run = it.plan("10");
    it.fixture.machine.queue(&[&run]);
    doomed.endpoint.accept(&run).await;
    let faults = it.fixture.cluster.faults();
    faults.next_of(LAUNCHER, MANY, "create", "jobs", Fault::Hang);
    it.fixture.until_over(&run, "Complete").await;
    wait::until("it is about to make the Job", async || {
        it.fixture.cluster.faults().left() < MANY
    })
    .await;
    doomed.crash();
    faults.clear();
    assert_eq!(fills(&it.fixture.state().await).count(), 0);
    let _next = it.fixture.serve_with(&it.settings("fill"));
    assert_eq!(it.until_filled().await, 1);
    assert_eq!(it.archives().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_shows_the_job_that_could_not_fetch_what_a_run_lacked() {
    let it = or_skip!(Stored::new().await);
    let faults = it.fixture.cluster.faults();
    let launcher = it.fixture.serve_with(&it.settings("fill"));
    let run = it.plan("10");
    it.fixture.machine.queue(&[&run]);
    launcher.endpoint.accept(&run).await;
    // No Job is made before the registry has lost what the run could fetch.
    it.fixture
        .until("the executor's Job is there", |state: &State| {
            state.job(&name(&run)).map(drop)
        })
        .await;
    faults.next_of(LAUNCHER, MANY, "create", "jobs", Fault::Hang);
    it.fixture.until_over(&run, "Complete").await;
    let log = it.fixture.machine.step_output(&run);
    assert!(
        log.contains("Not in the store, which this run only reads: 2."),
        "{log}"
    );
    wait::until("it is about to make the Job", async || faults.left() < MANY).await;
    launcher.crash();
    faults.clear();
    let told = it.fixture.json(&["explain", "10"]);
    let filling = &told["storeFilling"];
    assert_eq!(filling["lacked"].as_array().unwrap().len(), 2, "{told}");
    assert_eq!(filling["jobs"], json!([]));
    it.registry.as_ref().unwrap().lose_archives();
    let _next = it.fixture.serve_with(&it.settings("fill"));
    let failed = |state: &State| {
        let job = job_name(fills(state).next()?);
        state.has_condition(&job, "Failed").then_some(job)
    };
    let job = it.fixture.until("the Job has failed", failed).await;
    let text = it.fixture.told(&["explain", "10"]);
    for expected in [
        &format!("{job}, failed: {}/{NAMESPACE}/null/", it.host),
        "404",
        &format!("kubectl delete job {job}"),
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

/// As a run names it that lacked it.
fn package(host: &str, name: &str) -> String {
    let (_, version) = PROVIDERS.iter().find(|(other, _)| *other == name).unwrap();
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    };
    format!("{host}/{NAMESPACE}/{name}/{version}/linux_{architecture}")
}

/// Code of a run can write the termination message, and the worst one has got the key of reports.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_lies_about_what_it_lacked_causes_only_the_fetch_of_genuine_packages() {
    let it = or_skip!(Stored::new().await);
    let foreign = Registry::start().unwrap();
    let gate = it.fixture.machine.gate();
    it.fixture.image_that_first(&format!(
        "export SSL_CERT_FILE='{}'\nif [ \"$1\" != fill ]; then cat '{}' > \"$MAYFLY_TERMINATION_LOG\"; exit 0; fi",
        it.fixture.machine.scratch("ca.pem").display(),
        gate.path().display(),
    ));
    let launcher = it.fixture.serve_with(&it.settings("fill"));
    let ends_with = async |job_id: &str, message: &dyn Fn(FinalReport) -> String| {
        let run = it.plan(job_id);
        it.fixture.machine.queue(&[&run]);
        launcher.endpoint.accept(&run).await;
        let run_name = name(&run);
        let pod = |state: &State| state.pods_of(&run_name).first().and_then(|pod| pod.uid());
        let uid = it.fixture.until("the pod is there", pod).await;
        let report = FinalReport {
            job_id: run.job_id.clone(),
            step_id: run.step_id.clone(),
            author: Some(Author {
                run: uid,
                exit_code: 0,
            }),
            ..FinalReport::default()
        };
        gate.reached()
            .write_all(message(report).as_bytes())
            .unwrap();
        it.fixture.until_over(&run, "Complete").await;
    };
    let key = ReportKey::parse(REPORT_KEY).unwrap();
    let lies = |report, wanted: &[String]| {
        let wanted = wanted.to_vec();
        FinalReport { wanted, ..report }
    };
    let sealed = |report: FinalReport| report.to_termination_message(Some(&key));
    let (wanted, unwanted) = (package(&it.host, "null"), package(&it.host, "random"));
    let other = foreign.host();

    // No executor has said this, or that of another run.
    let forged = slice::from_ref(&unwanted);
    ends_with("10", &|report| {
        lies(report, forged).to_termination_message(None)
    })
    .await;
    ends_with("11", &|report| {
        let author = Some(Author {
            run: "another".to_owned(),
            exit_code: 0,
        });
        sealed(lies(FinalReport { author, ..report }, forged))
    })
    .await;
    // The kubelet keeps the beginning.
    ends_with("12", &|report| {
        let many = vec![unwanted.clone(); 1000];
        serde_json::to_string(&lies(report, &many)).unwrap()
    })
    .await;
    let no_packages = [
        package(&other, "null"),
        wanted.replace(NAMESPACE, &format!("http:{other}")),
        wanted.replace(NAMESPACE, "..%2f.."),
        wanted.replace(NAMESPACE, ".."),
        wanted.replace("linux_", "../../../linux_"),
        wanted.replace("/null/", "/null/../../../"),
        format!("{}@{other}{}", it.host, &wanted[it.host.len()..]),
        format!("{}.example.test", it.host),
        format!("--registries={other}"),
        format!("--store={}", it.fixture.machine.folder().display()),
        "../../../etc/passwd".to_owned(),
        String::new(),
    ];
    ends_with("13", &|report| sealed(lies(report, &no_packages))).await;
    let mixed = [&no_packages[..], &vec![wanted.clone(); 5]].concat();
    ends_with("14", &|report| sealed(lies(report, &mixed))).await;

    assert_eq!(it.until_filled().await, 1);
    let state = it.fixture.state().await;
    let spec = fills(&state).next().and_then(|job| job.spec.clone());
    let spec = spec.and_then(|spec| spec.template.spec).unwrap();
    let arguments = spec.containers[0].args.clone().unwrap();
    assert_eq!(arguments, ["fill".to_owned(), wanted.clone()]);
    assert_eq!(foreign.asked(), 0);
    let claim = it.fixture.cluster.claim_dir(&it.fixture.runs, CLAIM);
    let folder = format!("/{wanted}/");
    for file in files_below(&claim) {
        assert!(file.to_string_lossy().contains(&folder), "{file:?}");
    }
    let archives = it.archives();
    let [archive] = &archives[..] else {
        panic!("{archives:?}")
    };
    let [genuine, _] = it
        .registry
        .as_ref()
        .unwrap()
        .archives("null", "2.2.0")
        .unwrap();
    assert_eq!(fs::read(archive).unwrap(), fs::read(genuine).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_names_the_claim_of_the_store_is_refused() {
    let it = or_skip!(Stored::new().await);
    let data_dir = it.fixture.machine.data_dir();
    let data_dir = (env::DATA_DIR, data_dir.to_str().unwrap());
    let settings = [&it.settings("fill")[..], &[data_dir]].concat();
    let launcher = it.fixture.serve_with(&settings);
    let mut run = it.plan("10");
    let variables = &mut run.environment_variables;
    variables.insert(env::PLUGIN_CACHE_CLAIM.to_owned(), CLAIM.to_owned());
    variables.insert(env::PLUGIN_CACHE_DIR.to_owned(), "/cache".to_owned());
    it.fixture.machine.queue(&[&run]);
    assert_eq!(launcher.endpoint.post(&run).await.unwrap(), 400);
    let output = it.fixture.machine.step_output(&run);
    assert!(
        output.contains("`PVC_CLAIM_NAME` asks for the claim `store`"),
        "{output}"
    );
    assert!(it.fixture.state().await.job(&name(&run)).is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_does_not_exist_is_an_empty_folder_and_a_line_in_the_log() {
    let (fixture, repository) = (or_skip!(Fixture::new().await), Repository::fixture());
    let launcher = fixture.serve();
    let mut plan = job::plan(&repository);
    let variables = &mut plan.environment_variables;
    variables.insert(env::PLUGIN_CACHE_CLAIM.to_owned(), "gone".to_owned());
    variables.insert(env::PLUGIN_CACHE_DIR.to_owned(), "/cache".to_owned());
    fixture.machine.queue(&[&plan]);
    launcher.endpoint.accept(&plan).await;
    fixture.until_over(&plan, "Complete").await;
    let line = "The claim `gone` of the plugin cache does not exist.";
    launcher.running.wait_for(Stream::Stderr, line);
}
