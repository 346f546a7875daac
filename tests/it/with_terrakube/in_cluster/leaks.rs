//! Secrets must not appear outside the places that need them. The test gives every kind of secret to runs of scripts, a
//! plan, an apply, a failed run, a run without content, and a run whose pod is deleted. Diagnostics are at level `trace`.
//! Then it searches all outputs for the secrets in every encoding.

use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use integration_tests::machine::files_below;
use integration_tests::{Gate, Repository, Search, TestSecret};
use job_contract::env;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_cluster::{ADMIN, State};
use test_peers::git_http::{GitHttpOptions, serve as serve_git};
use test_peers::redis::{Options, RedisServer};
use test_peers::s3::{self, S3};
use test_platform::launcher::Launcher;
use test_platform::{Flow, NewJob, Outputs, Platform, Status, Variable, Workspace};

use crate::in_cluster::Fixture;
use crate::with_terrakube::{RunTarget, Settings, Stage, quick};

/// The line of the tool when a run is at the gate.
const AT_THE_GATE: &str = "(local-exec): at-the-gate";

/// The programs an executor starts by their names.
const PROGRAMS: [&str; 3] = ["git", "terraform", "bash"];

/// The secrets of a run, and a value that is not secret.
struct Secrets {
    internal: TestSecret,
    redis: TestSecret,
    store: TestSecret,
    token: TestSecret,
    module_key: TestSecret,
    password: TestSecret,
    registry: TestSecret,
    identity: TestSecret,
    deploy_key: TestSecret,
    api_token: TestSecret,
    login: TestSecret,
    elsewhere: TestSecret,
    /// Not secret. It goes where the secrets go, and proves that the search looks there.
    open: TestSecret,
}

impl Secrets {
    fn new(store: &S3) -> Self {
        Self {
            internal: TestSecret::word("the platform's secret"),
            redis: TestSecret::awkward("the password of Redis"),
            store: TestSecret::new("the store's secret key", store.secret_key().to_owned()),
            token: TestSecret::after("the token of the repository", "ghs_"),
            module_key: TestSecret::key("the key of modules"),
            password: TestSecret::awkward("a password in the environment"),
            registry: TestSecret::word("the token of a registry"),
            identity: TestSecret::after("a dynamic credential", "eyJhbGciOiJSUzI1NiJ9.e30."),
            deploy_key: TestSecret::key("a key in the environment"),
            api_token: TestSecret::word("a token among the inputs"),
            login: TestSecret::awkward("a password among the inputs"),
            elsewhere: TestSecret::word("a password in the address of a repository"),
            open: TestSecret::word("what anybody may see"),
        }
    }

    fn all(&self) -> Vec<&TestSecret> {
        let mut all = self.withheld();
        all.extend([
            &self.store,
            &self.token,
            &self.password,
            &self.registry,
            &self.identity,
            &self.deploy_key,
            &self.api_token,
            &self.login,
            &self.elsewhere,
        ]);
        all
    }

    /// Secrets that only the executor may have in its memory.
    fn withheld(&self) -> Vec<&TestSecret> {
        vec![&self.internal, &self.redis, &self.module_key]
    }

    /// Secrets that the environment of a program must not contain.
    fn kept_from(&self, program: &str) -> Vec<&TestSecret> {
        let mut kept = self.withheld();
        kept.push(&self.store);
        kept.push(&self.elsewhere);
        match program {
            "git" => return self.all(),
            "terraform" => kept.extend([&self.token, &self.api_token, &self.login]),
            _ => {}
        }
        kept
    }

    fn workspace(&self, source: &str) -> Workspace {
        let mut workspace = Workspace::new(source)
            .with(Variable::terraform("api_token", &self.api_token.value))
            .with(Variable::terraform("db_password", &self.login.value))
            .with(Variable::terraform("open", &self.open.value))
            .with(Variable::env("DB_PASSWORD", &self.password.value))
            .with(Variable::env("DEPLOY_PRIVATE_KEY", &self.deploy_key.value))
            .with(Variable::env("OPEN", &self.open.value))
            .with(Variable::env(
                "TF_TOKEN_registry_example_test",
                &self.registry.value,
            ))
            .with(Variable::env(
                "TERRAKUBE_AWS_CREDENTIALS_FILE",
                &self.identity.value,
            ))
            .with(Variable::env(
                env::EPHEMERAL_POD_ANNOTATIONS,
                &format!("example.test/open={}", self.open.value),
            ));
        "GITHUB".clone_into(&mut workspace.vcs_type);
        workspace.connection_type = Some("STANDALONE".to_owned());
        workspace.access_token = Some(self.token.value.clone());
        workspace.module_ssh_key = Some(self.module_key.value.clone());
        workspace
    }
}

/// A script that prints every secret it can read, in the usual encodings.
const SHOW: &str = r#"
urlencode() {
  local LC_ALL=C text="$1" at c
  for ((at = 0; at < ${#text}; at++)); do
    c="${text:at:1}"
    case "$c" in [a-zA-Z0-9.~_-]) printf '%s' "$c" ;; *) printf "%%%02${2}" "'$c" ;; esac
  done
  echo
}
env; set; declare -p; tr '\0' '\n' < /proc/self/environ
cat "$AWS_WEB_IDENTITY_TOKEN_FILE" "${AWS_SHARED_CREDENTIALS_FILE:-/dev/null}"
for value in "$OPEN" "$accessToken" "$DB_PASSWORD" "$DEPLOY_PRIVATE_KEY" "$TF_TOKEN_registry_example_test" \
    "$TERRAKUBE_AWS_CREDENTIALS_FILE" "$api_token" "$db_password"; do
  printf '%s\n' "$value"; printf '%q\n' "$value"; printf '%s\n' "${value@Q}"
  printf '%s' "${value:0:13}"; printf '%s\n' "${value:13}" | head -c 7000
  sed 's/^/│   /' <<< "$value"
  urlencode "$value" X; urlencode "$value" x
  printf '%s' "$value" | od -An -v -tx1 | tr -d ' \n'; echo
  for before in '' u us user: x-access-token: 'a long line that comes before the secret, '; do
    printf '%s%s and what comes after it' "$before" "$value" | base64 -w0; echo
    printf '%s%s' "$before" "$value" | base64 -w0 | tr '+/' '-_' | tr -d '='; echo
    printf '%s%s and what comes after it' "$before" "$value" | base64
    printf '%s%s' "$before" "$value" | base64 -w64 | sed 's/^/  /'
  done
done
printf '%s' "$OPEN" > "$HOME/left-behind"
"#;

fn module(gate: &str) -> String {
    format!(
        r#"
variable "api_token" {{
  type = string
}}
variable "db_password" {{
  type = string
}}
variable "open" {{
  type = string
}}
resource "terraform_data" "shown" {{
  input = {{
    token    = var.api_token
    plain    = var.db_password
    login    = base64encode("ci:${{var.db_password}}")
    query    = urlencode(var.db_password)
    document = jsonencode({{ password = var.db_password, encoded = base64encode(var.api_token) }})
    open     = var.open
  }}
}}
resource "terraform_data" "at_work" {{
  depends_on = [terraform_data.shown]
  provisioner "local-exec" {{
    command     = "env; echo \"$SHOWN\"; echo; {gate}"
    environment = {{
      SHOWN = var.db_password
    }}
  }}
}}
output "shown" {{
  value = terraform_data.shown.output
}}
"#
    )
}

const REFUSED: &str = r#"
variable "api_token" {
  type = string
}
variable "db_password" {
  type = string
}
variable "open" {
  type = string
}
resource "terraform_data" "refused" {
  lifecycle {
    precondition {
      condition     = length(var.db_password) < 10
      error_message = "${var.open}: ${var.db_password} for ${var.api_token} was refused"
    }
  }
}
"#;

fn scripts(script: &str, after: bool) -> Value {
    json!([{
        "runtime": "BASH", "script": script, "priority": 100,
        "before": false, "after": after, "verbose": true, "beforeInit": false,
    }])
}

/// All commands that a Redis gets.
struct RedisMonitor {
    stream: TcpStream,
    listening: JoinHandle<Vec<u8>>,
}

impl RedisMonitor {
    fn of(redis: &RedisServer, password: &str) -> Self {
        let mut stream = TcpStream::connect(redis.address()).unwrap();
        let length = password.len();
        let order =
            format!("*2\r\n$4\r\nAUTH\r\n${length}\r\n{password}\r\n*1\r\n$7\r\nMONITOR\r\n");
        stream.write_all(order.as_bytes()).unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"+OK\r\n+OK\r\n");
        let mut reader = stream.try_clone().unwrap();
        let listening = std::thread::spawn(move || {
            let mut all = Vec::new();
            // Reading ends with the connection.
            let _ = reader.read_to_end(&mut all);
            all
        });
        Self { stream, listening }
    }

    fn end(self) -> Vec<u8> {
        self.stream.shutdown(Shutdown::Both).unwrap();
        self.listening.join().unwrap()
    }
}

/// Wrappers of the programs. They note arguments and environment, and start the real program.
struct ProgramWrappers(TempDir);

impl ProgramWrappers {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for program in PROGRAMS {
            let real = which::which(program).unwrap();
            let path = folder.path().join("bin").join(program);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let script = format!(
                "#!/bin/sh\nprintf '%s\\0' \"$@\" >> '{0}/{program}.arguments'\n\
                 cat /proc/$$/environ >> '{0}/{program}.environment'\nexec '{1}' \"$@\"\n",
                folder.path().display(),
                real.display(),
            );
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self(folder)
    }

    fn bin(&self) -> PathBuf {
        self.0.path().join("bin")
    }

    fn read(&self, program: &str, what: &str) -> Vec<u8> {
        fs::read(self.0.path().join(format!("{program}.{what}"))).unwrap()
    }
}

/// Processes with the variables of a run: tool, provider and scripts.
fn of_the_user(open: &TestSecret) -> Vec<PathBuf> {
    let variable = format!("OPEN={}", open.value);
    let has_it = |folder: &PathBuf| {
        let environment = fs::read(folder.join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|found| found == variable.as_bytes())
    };
    processes().filter(has_it).collect()
}

fn processes() -> impl Iterator<Item = PathBuf> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    all.filter(move |entry| entry.file_name().to_str().is_some_and(is_process))
        .map(|entry| entry.path())
}

/// The readable memory of a process. None if it has ended.
fn memory(process: &Path) -> Option<Vec<u8>> {
    let maps = unless_it_has_ended(fs::read_to_string(process.join("maps")))?;
    let mut memory = unless_it_has_ended(fs::File::open(process.join("mem")))?;
    let mut all = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (range, rights) = (words.next().unwrap(), words.next().unwrap());
        let (from, to) = range.split_once('-').unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (from, to) = (number(from), number(to));
        if !rights.starts_with("rw") {
            continue;
        }
        let mut part = vec![0; 64 * 1024];
        let mut at = from;
        // Pages that were never touched cannot all be read.
        while at < to && memory.seek(SeekFrom::Start(at)).is_ok() {
            let most = part.len().min(usize::try_from(to - at).unwrap());
            match memory.read(&mut part[..most]) {
                Ok(length) if length > 0 => {
                    if part[..length].iter().any(|byte| *byte != 0) {
                        all.extend_from_slice(&part[..length]);
                    }
                    at += length as u64;
                }
                _ => break,
            }
        }
    }
    Some(all)
}

/// The result of a read from a process. None if it has ended. Any other error fails the test.
fn unless_it_has_ended<T>(found: io::Result<T>) -> Option<T> {
    match found {
        Ok(found) => Some(found),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Secrets that were found.
#[derive(Default)]
struct Findings(Vec<String>);

impl Findings {
    /// Searches places of one kind. One of them must contain `known`, which proves that the search looks there.
    fn look(&mut self, kind: &str, known: &str, search: &Search, places: &[(String, Vec<u8>)]) {
        let holds = |bytes: &[u8]| {
            bytes
                .windows(known.len())
                .any(|part| part == known.as_bytes())
        };
        assert!(
            places.iter().any(|(_, bytes)| holds(bytes)),
            "{known:?} is nowhere in {kind}: {:?}",
            places
                .iter()
                .map(|(name, bytes)| (name, bytes.len()))
                .collect::<Vec<_>>()
        );
        for (name, bytes) in places {
            for found in search.find(bytes) {
                self.0.push(format!("{kind}, {name}: {found}"));
            }
        }
    }

    fn are_none(&self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}

fn one(name: &str, bytes: impl Into<Vec<u8>>) -> Vec<(String, Vec<u8>)> {
    vec![(name.to_owned(), bytes.into())]
}

/// Every regular file below a folder.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let files = files_below(folder).into_iter();
    let regular = files.filter(|path| path.symlink_metadata().is_ok_and(|file| file.is_file()));
    let read = |path: PathBuf| match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        read => Some((path.display().to_string(), read.unwrap())),
    };
    regular.filter_map(read).collect()
}

/// The stage, the secrets, and the recorders.
struct Scene {
    stage: Stage,
    store: S3,
    secrets: Secrets,
    wrappers: ProgramWrappers,
    gate: Gate,
    monitor: RedisMonitor,
}

impl Scene {
    async fn new() -> Option<Self> {
        let fixture = Fixture::new().await?;
        let store = S3::start().unwrap();
        let secrets = Secrets::new(&store);
        let password = &secrets.redis.value;
        let redis = RedisServer::with(Options::default().password(password)).unwrap();
        let monitor = RedisMonitor::of(&redis, password);
        let url = format!(
            "redis://:{}@{}",
            secrets.redis.in_address(),
            redis.address()
        );
        let platform = Platform::builder()
            .redis(&url)
            .secret(secrets.internal.value.as_bytes());
        let settings = [
            (env::REDIS_PASSWORD, password.as_str()),
            (env::LOG_FILTER, "trace"),
            (env::STATE_TYPE, "AwsTerraformStateImpl"),
            (env::AWS_BUCKET, s3::BUCKET),
            (env::AWS_REGION, s3::REGION),
            (env::AWS_ENDPOINT, &store.url()),
            (env::AWS_ACCESS_KEY, store.access_key()),
            (env::AWS_SECRET_KEY, store.secret_key()),
        ];
        let settings: Settings = settings
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let run_target = RunTarget::Cluster(Box::new(fixture));
        let stage = Stage::with(run_target, platform, Some(redis), settings).await;
        // The outputs are in the store. The test searches them there.
        stage
            .platform
            .read_outputs(Outputs::from_fn(|_, _, _| Some(Vec::new())));
        let wrappers = ProgramWrappers::new();
        let machine = stage.machine();
        let temporary = machine.scratch("tmp");
        fs::create_dir(&temporary).unwrap();
        stage.fixture().image_that_first(&format!(
            "{}export PATH='{}':\"$PATH\" HOME='{}' TMPDIR='{}'\n",
            quick(),
            wrappers.bin().display(),
            machine.scratch("home").display(),
            temporary.display(),
        ));
        let gate = machine.gate();
        Some(Self {
            stage,
            store,
            secrets,
            wrappers,
            gate,
            monitor,
        })
    }

    fn start(&self, source: &str, template: Vec<Flow>) -> u32 {
        let platform = &self.stage.platform;
        let workspace = platform.workspace(self.secrets.workspace(source));
        platform.start_job(NewJob::new(&workspace, template))
    }

    /// Waits until a run is at the gate, and searches all running processes.
    async fn look_at_the_living(&self, job: u32, findings: &mut Findings) {
        self.stage.platform.until_streamed(job, AT_THE_GATE).await;
        let (open, all) = (&self.secrets.open, Search::of(self.secrets.all()));
        // Peers of this test have their passwords as arguments.
        let ours = |process: &PathBuf| {
            let program = fs::read_link(process.join("exe")).unwrap_or_default();
            !program.ends_with("redis-server") && !program.ends_with("valkey-server")
        };
        let command = |process: PathBuf| {
            let name = process.display().to_string();
            (name, fs::read(process.join("cmdline")).unwrap_or_default())
        };
        let commands: Vec<_> = processes().filter(ours).map(command).collect();
        findings.look("command lines", &open.value, &all, &commands);
        let withheld = Search::of(self.secrets.withheld());
        let users = of_the_user(open);
        let memories: Vec<_> = users
            .iter()
            .filter_map(|process| {
                let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
                Some((name, memory(process)?))
            })
            .collect();
        assert!(
            memories.iter().any(|(name, _)| name.trim() == "terraform"),
            "{:?}",
            memories.iter().map(|(name, _)| name).collect::<Vec<_>>()
        );
        findings.look("memory", &open.value, &withheld, &memories);
    }

    /// The objects of the cluster that a viewer of runs can read.
    async fn objects(&self) -> Vec<(String, Vec<u8>)> {
        let fixture = self.stage.fixture();
        let state = fixture.state().await;
        let client = fixture.cluster.client(ADMIN).unwrap();
        let leases = Api::<Lease>::namespaced(client, &fixture.runs);
        let leases = leases.list(&ListParams::default()).await.unwrap().items;
        let of_secrets: Vec<_> = state
            .secrets
            .iter()
            .map(|secret| &secret.metadata)
            .collect();
        let mut objects = Vec::new();
        for (kind, list) in [
            ("Jobs", json!(state.jobs)),
            ("pods", json!(state.pods)),
            ("events", json!(state.events)),
            ("leases", json!(leases)),
            ("Secrets, without their data", json!(of_secrets)),
        ] {
            assert_ne!(list, json!([]), "no {kind}");
            objects.push((kind.to_owned(), list.to_string().into_bytes()));
        }
        objects
    }

    /// Requests to the platform, and its records.
    fn told(&self) -> Vec<(String, Vec<u8>)> {
        let requests = self.stage.platform.ledger().requests;
        let told = requests.iter().map(|request| {
            let name = format!("{} {}", request.method, request.path);
            let text = format!("{name} {}", request.body);
            (name, text.into_bytes())
        });
        let records = self.stage.platform.records();
        let contexts = json!(records.contexts).to_string();
        let jobs = format!("{:?}", records.jobs);
        told.chain(one("contexts", contexts))
            .chain(one("jobs and steps", jobs))
            .collect()
    }
}

/// A plan with its unpacked files. Any other object as it is.
fn unpacked(key: String, bytes: Vec<u8>) -> (String, Vec<u8>) {
    let mut all = bytes.clone();
    if let Ok(mut archive) = zip::ZipArchive::new(std::io::Cursor::new(bytes)) {
        for index in 0..archive.len() {
            std::io::copy(&mut archive.by_index(index).unwrap(), &mut all).unwrap();
        }
    }
    (key, all)
}

/// Whether an object may contain inputs: plans and states must.
fn holds_inputs(key: &str) -> bool {
    let name = key.rsplit('/').next().unwrap_or_default();
    name.ends_with(".tfPlan") || name.contains(".tfstate") || key.contains("/state/")
}

/// Makes runs of all kinds. Returns the one that succeeds.
async fn carry_out(scene: &Scene, findings: &mut Findings) -> u32 {
    let (stage, secrets) = (&scene.stage, &scene.secrets);
    let platform = &stage.platform;
    let gate = format!("sh -c '{}' {}", scene.gate.words(), secrets.open.value);
    let repositories = [
        Repository::module(&module(&gate)),
        Repository::module(REFUSED),
    ];
    let options = GitHttpOptions {
        credentials: Some(format!("x-access-token:{}", secrets.token.value)),
        ..GitHttpOptions::default()
    };
    let git = serve_git(repositories[0].path().parent().unwrap(), options).unwrap();
    let [shown, refused] = repositories.each_ref().map(|repository| {
        let name = repository.path().file_name().unwrap().to_str().unwrap();
        format!("{}/{name}/.git", git.url())
    });

    // The run succeeds, and prints everything.
    let mut template = Flow::plan_apply();
    template.push(Flow::new("customScripts", 50));
    template[2].commands = scripts(SHOW, false);
    template[1].commands = scripts(SHOW, true);
    let well = scene.start(&shown, template);
    scene.look_at_the_living(well, findings).await;
    scene.gate.open().await;
    platform.until_job(well, Status::Completed).await;

    // The tool fails, and a script prints everything.
    let mut template = Flow::plan_apply();
    template[0].on_failure = scripts(SHOW, false);
    let failed = scene.start(&refused, template);
    platform.until_job(failed, Status::Failed).await;

    // The source cannot be fetched.
    let nobody = format!("http://ci:{}@127.0.0.1:1/none.git", secrets.elsewhere.value);
    let lost = scene.start(&nobody, Flow::plan_apply());
    platform.until_job(lost, Status::Failed).await;

    // The pod is deleted during an apply.
    let ended = scene.start(&shown, Flow::only("terraformApply"));
    platform.until_streamed(ended, AT_THE_GATE).await;
    let there = stage.fixture().state().await;
    let name = format!("job-{ended}-");
    let names = there.pods.iter().map(kube::ResourceExt::name_any);
    let pod = names
        .into_iter()
        .find(|pod| pod.starts_with(&name))
        .unwrap();
    let client = stage.fixture().cluster.client(ADMIN).unwrap();
    let api = Api::<Pod>::namespaced(client, &stage.fixture().runs);
    api.delete(&pod, &DeleteParams::default()).await.unwrap();
    platform.until_job(ended, Status::Failed).await;
    well
}

/// Searches metrics and diagnostics of a launcher, and stops it.
async fn look_at(launcher: Launcher, well: u32, all: &Search, findings: &mut Findings) {
    let metrics = launcher.endpoint.url("/metrics");
    let metrics = reqwest::get(metrics).await.unwrap();
    let metrics = metrics.text().await.unwrap();
    findings.look("the launcher", "mayfly_", all, &one("metrics", metrics));
    let launcher = launcher.running;
    launcher.signal(Signal::SIGTERM);
    let ended = launcher.wait();
    let job = format!("job-{well}-");
    findings.look("the launcher", &job, all, &one("diagnostics", ended.stderr));
    assert_eq!(ended.stdout, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_appear_only_where_they_are_needed() {
    let scene = or_skip!(Scene::new().await);
    let (stage, secrets) = (&scene.stage, &scene.secrets);
    let launcher = stage.serve_with(&[(env::LOG_FILTER, "trace")]);
    let mut findings = Findings::default();
    let well = carry_out(&scene, &mut findings).await;

    let (all, open) = (Search::of(secrets.all()), secrets.open.value.as_str());
    findings.look("Kubernetes", open, &all, &scene.objects().await);
    findings.look("the platform", open, &all, &scene.told());
    look_at(launcher, well, &all, &mut findings).await;
    for program in PROGRAMS {
        let arguments = one(program, scene.wrappers.read(program, "arguments"));
        let known = match program {
            "git" => "clone",
            "terraform" => "apply",
            _ => "userScript.sh",
        };
        findings.look("arguments", known, &all, &arguments);
        let kept = Search::of(secrets.kept_from(program));
        let environment = one(program, scene.wrappers.read(program, "environment"));
        findings.look("environments", "PATH=", &kept, &environment);
    }

    // The end of a run is reported before its executor has removed its files.
    let is_over = |pod: &Pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        phase.is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase))
    };
    let fixture = stage.fixture();
    let all_over = |state: &State| state.pods.iter().all(is_over).then_some(());
    fixture.until("each pod ends", all_over).await;
    // Container logs, termination messages and volumes among them.
    let nodes = contents(stage.fixture().cluster.folder());
    assert!(nodes.iter().any(|(name, _)| name.ends_with(".termination")));
    findings.look("nodes", open, &all, &nodes);
    let left = contents(stage.machine().folder());
    findings.look("files left behind", open, &all, &left);
    let others = secrets.all().into_iter();
    let others = others
        .filter(|secret| ![secrets.api_token.name, secrets.login.name].contains(&secret.name));
    let (artifacts, outputs): (Vec<_>, Vec<_>) = scene
        .store
        .objects()
        .unwrap()
        .into_iter()
        .map(|(key, bytes)| unpacked(key, bytes))
        .partition(|(key, _)| holds_inputs(key));
    findings.look("outputs of steps", open, &all, &outputs);
    findings.look("plans and states", open, &Search::of(others), &artifacts);
    // As `MONITOR` escapes commands.
    let redis = String::from_utf8_lossy(&scene.monitor.end())
        .replace("\\\"", "\"")
        .replace("\\\\", "\\");
    findings.look("Redis", open, &all, &one("everything it was told", redis));
    findings.are_none();
}
