//! The images, built for this machine without a daemon over a base of Debian packages, and started as pods are: the
//! launcher's takes a dispatch, and the executor's runs the Job that came of it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use images::Program;
use images::base::Base;
use images::builder::{Build, Builder, Image};
use images::sbom::{DOC_DIR, LICENCES_FILE, SBOM_FILE, Sbom};
use integration_tests::container::{Container, RunningContainer};
use integration_tests::machine::{files_below, give_away};
use integration_tests::process::Stream;
use integration_tests::{Finished, Repository, Running, job};
use job_contract::{JobData, env};
use k8s_openapi::api::core::v1::{EnvVar, PodSpec};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;
use test_cluster::{Cluster, State};
use test_platform::Secret;
use test_platform::launcher::{self, Endpoint};

use super::{Fixture, LAUNCHER, ROLES, job_data, name, rules, until_ready};

/// Name of the imported base.
const BASE: &str = "localhost/base";
/// Where a container sees the repository of its step.
const SOURCE: &str = "/srv/source";
/// The user of both images.
const USER: u32 = 1000;

/// A builder with a storage of its own, and the programs of this build.
struct Workshop {
    folder: TempDir,
    builder: Builder,
    mounted: Vec<String>,
}

impl Workshop {
    fn open() -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "images are built and started as root: run this test as root"
        );
        // Not among temporary files, which often lie in memory.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let builder = Builder::in_folder(folder.path().join("storage"));
        builder.import(&Base::installed(), BASE).unwrap();
        Self {
            folder,
            builder,
            mounted: Vec::new(),
        }
    }

    /// Builds an image from the base and a fresh copy of the program.
    fn build(&self, program: Program) -> Image {
        let binary = match program {
            Program::Launcher => crate::LAUNCHER,
            Program::Executor => crate::EXECUTOR,
        };
        let programs = self.folder.path().join("programs");
        let root = programs.join(program.name());
        images::lay_out(Path::new(binary), program, &root).unwrap();
        let build = Build {
            program,
            name: name_of(program),
            programs: Some(programs),
            offline: Some(Base::installed()),
            arguments: vec![
                ("DEBIAN_IMAGE".to_owned(), BASE.to_owned()),
                ("VERSION".to_owned(), "1.2.3".to_owned()),
            ],
            epoch: 1_000_000_000,
        };
        self.builder.build(&build).unwrap();
        let layout = self.layout(program);
        let image = self.builder.export(&name_of(program), &layout).unwrap();
        let index = fs::read(layout.join("index.json")).unwrap();
        let index: Value = serde_json::from_slice(&index).unwrap();
        let names = &index["manifests"][0]["annotations"];
        assert_eq!(names["io.containerd.image.name"], name_of(program));
        image
    }

    fn layout(&self, program: Program) -> PathBuf {
        self.folder.path().join(program.image())
    }

    /// An image, and its file system in a copy of its own.
    fn started(&mut self, program: Program) -> (PathBuf, Image) {
        let image = self.build(program);
        let (container, root) = self.builder.mount(&name_of(program)).unwrap();
        self.mounted.push(container);
        tell_size(program, &image, &root);
        (root, image)
    }
}

/// As an operator names it for a registry.
fn name_of(program: Program) -> String {
    format!("registry.example.test/team/{}:1.2.3", program.image())
}

/// containerd with folders of its own, and no plugin for Kubernetes.
struct Containerd {
    folder: TempDir,
    running: Running,
}

impl Containerd {
    fn start() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| folder.path().join(name);
        let config = "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n";
        fs::write(path("config.toml"), config).unwrap();
        let mut command = Command::new("containerd");
        for (flag, name) in [
            ("--config", "config.toml"),
            ("--root", "root"),
            ("--state", "state"),
            ("--address", "socket"),
        ] {
            command.arg(flag).arg(path(name));
        }
        let running = Running::start(&mut command);
        running.line_with(Stream::Stderr, "containerd successfully booted");
        Self { folder, running }
    }

    /// What a shell says where `ctr` reaches this containerd.
    fn shell(&self, script: &str) -> Finished {
        let mut command = Command::new("sh");
        command
            .args(["-ec", script])
            .env("CONTAINERD_ADDRESS", self.folder.path().join("socket"));
        Running::start(&mut command).wait()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.running.signal(Signal::SIGTERM);
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        for container in &self.mounted {
            // The storage can be removed only once nothing of it is mounted.
            drop(self.builder.remove_container(container));
        }
    }
}

#[expect(
    clippy::print_stdout,
    reason = "sizes are for whoever reads the test's output"
)]
fn tell_size(program: Program, image: &Image, root: &Path) {
    let binary = root.join("usr/local/bin").join(program.name());
    let binary = binary.metadata().unwrap().len() / 1_000_000;
    println!(
        "{}: {image}; {binary} MB of it the unoptimised binary, unpacked",
        program.image()
    );
}

/// A launcher's container that serves, and where it takes dispatches.
fn serve(fixture: &Fixture, (root, image): &(PathBuf, Image)) -> (RunningContainer, Endpoint) {
    let kubeconfig = fixture
        .cluster
        .kubeconfig_file(LAUNCHER, &fixture.runs)
        .unwrap();
    let readable = fixture.machine.scratch("kubeconfig");
    fs::copy(kubeconfig, &readable).unwrap();
    fs::set_permissions(&readable, fs::Permissions::from_mode(0o644)).unwrap();
    let secret = Secret::long().text();
    let container = Container::of(root, &image.config)
        .bind(&readable, "/etc/kubeconfig", &["ro"])
        .env("KUBECONFIG", "/etc/kubeconfig")
        .env("ExecutorEphemeralNamespace", &fixture.runs)
        .env("ExecutorEphemeralSecret", "")
        .env(env::INTERNAL_SECRET, &secret)
        .env(env::LISTEN, "127.0.0.1:0")
        .env(env::LOG_FORMAT, "json")
        .start();
    let address = launcher::address(container.running());
    let endpoint = Endpoint::new(address, Secret::long());
    (container, endpoint)
}

/// The executor's container as its Job says: environment, volumes and user.
fn run_pod(
    fixture: &Fixture,
    (root, image): &(PathBuf, Image),
    pod: &Pod,
    source: &Path,
) -> Finished {
    let security = pod.spec.security_context.as_ref().unwrap();
    let user = [security.run_as_user, security.run_as_group].map(Option::unwrap);
    assert_eq!(
        image.config["User"],
        format!("{}:{}", user[0], user[1]),
        "image and Job agree"
    );
    let executor = &pod.spec.containers[0];
    let mut container = Container::of(root, &image.config);
    for mount in executor.volume_mounts.iter().flatten() {
        container = container.empty_dir(&mount.mount_path);
    }
    for variable in executor.env.iter().flatten() {
        container = container.env(&variable.name, &value_of(variable, &pod.job_data));
    }
    let tool = which::which("terraform").unwrap();
    container
        .bind(source, SOURCE, &["ro"])
        .bind(&tool, "/usr/local/bin/terraform", &["ro"])
        // The platform of this journey: records and plans in a folder.
        .bind(&fixture.machine.data_dir(), "/srv/data", &["rw"])
        .env(env::DATA_DIR, "/srv/data")
        .env(env::TOOL_SELECTION, "installed")
        .run()
}

/// What the kubelet makes of a variable.
fn value_of(variable: &EnvVar, job_data: &str) -> String {
    match (&variable.value, &variable.value_from) {
        (Some(value), _) => value.clone(),
        (None, Some(source)) if source.secret_key_ref.is_some() => job_data.to_owned(),
        (None, _) => format!("the-{}", variable.name.to_lowercase()),
    }
}

/// What a shell says in the executor's container.
fn say((root, image): &(PathBuf, Image), script: &str) -> Finished {
    Container::of(root, &image.config)
        .empty_dir("/tmp")
        .instead(&["/bin/bash", "-c", script])
        .run()
}

/// What a dispatch made in the cluster.
struct Pod {
    spec: PodSpec,
    job_data: String,
}

async fn pod_of(fixture: &Fixture, step: &JobData) -> Pod {
    let name = name(step);
    let job = |state: &State| state.job(&name).cloned();
    let job = fixture.until("the Job is made", job).await;
    let named = job_data(&job).unwrap();
    // The Secret comes after its Job, which owns it.
    let secret = |state: &State| {
        let mut secrets = state.secrets.iter();
        let secret = secrets.find(|secret| secret.metadata.name.as_deref() == Some(named));
        secret.cloned()
    };
    let secret = fixture.until("the Secret is made", secret).await;
    let spec = job.spec.unwrap().template.spec.unwrap();
    let data = secret.data.as_ref().unwrap()["job-data"].0.clone();
    let job_data = String::from_utf8(data).unwrap();
    Pod { spec, job_data }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_dispatched_to_the_launchers_image_runs_in_the_executors_image() {
    let fixture = or_skip!(Fixture::of(Cluster::builder().without_kubelet(), &rules(ROLES)).await);
    let mut workshop = Workshop::open();
    let launcher = workshop.started(Program::Launcher);
    let executor = workshop.started(Program::Executor);
    let (serving, endpoint) = serve(&fixture, &launcher);
    assert_eq!(
        endpoint.get("/actuator/health/liveness").await.unwrap(),
        200
    );
    until_ready(&endpoint).await;

    let good = Repository::fixture();
    let bad = Repository::module("output \"broken\" {\n  value = var.nowhere\n}\n");
    for (number, repository, code, shown) in
        [("412", &good, 0, "1 to add"), ("413", &bad, 1, "nowhere")]
    {
        let step = JobData {
            source: Some(format!("file://{SOURCE}")),
            ..job::in_job(&job::plan(repository), number)
        };
        fixture.machine.queue(&[&step]);
        assert_eq!(endpoint.post(&step).await.unwrap(), 202);
        let pod = pod_of(&fixture, &step).await;
        give_away(repository.path(), USER);
        give_away(&fixture.machine.data_dir(), USER);

        let finished = run_pod(&fixture, &executor, &pod, repository.path());

        assert_eq!(finished.code(), code, "{finished}");
        assert!(finished.stdout.contains(shown), "{finished}");
        assert_eq!(fixture.machine.plan_file(&step).exists(), code == 0);
    }

    serving.running().signal(Signal::SIGTERM);
    let finished = serving.wait();
    assert_eq!(finished.code(), 0, "{finished}");
}

#[test]
fn images_are_the_same_whenever_they_are_built_and_hold_what_they_should() {
    let mut workshop = Workshop::open();
    let first = Program::ALL.map(|program| workshop.build(program).digest);
    let images = Program::ALL.map(|program| workshop.started(program));
    let second = images.each_ref().map(|(_, image)| image.digest.clone());
    assert_eq!(first, second);
    for (program, (_, image)) in Program::ALL.iter().zip(&images) {
        let label = |name: &str| {
            let name = format!("org.opencontainers.image.{name}");
            image.config["Labels"][name].as_str().unwrap().to_owned()
        };
        assert_eq!(label("title"), program.image());
        assert_eq!(label("version"), "1.2.3");
        assert_eq!(label("licenses"), "Apache-2.0");
        assert_eq!(label("base.name"), BASE);
    }
    let containerd = Containerd::start();
    for program in Program::ALL {
        assert_containerd_starts_it(&containerd, &workshop.layout(program), program);
    }
    let [launcher, executor] = images;
    assert_holds_a_program_and_no_shell(&launcher);
    assert_carries_what_scripts_and_git_need(&executor);
    assert_says_its_licences(&executor);
}

/// With the commands of docs/images.md.
fn assert_containerd_starts_it(containerd: &Containerd, layout: &Path, program: Program) {
    let (layout, image, program) = (layout.display(), name_of(program), program.name());
    let imported = containerd.shell(&format!(
        "tar --create --directory {layout} . | \
           ctr --namespace k8s.io images import --snapshotter native -\n\
         ctr --namespace k8s.io images list --quiet\n\
         ctr --namespace k8s.io run --snapshotter native --rm {image} {program} \
           /usr/local/bin/{program} --version"
    ));
    let mut lines = imported.stdout.lines();
    assert!(lines.any(|line| line == image), "{imported}");
    assert_eq!(imported.code(), 0, "{imported}");
}

fn assert_holds_a_program_and_no_shell((root, image): &(PathBuf, Image)) {
    let version = Container::of(root, &image.config)
        .instead(&["/usr/local/bin/api-launcher", "--version"])
        .run();
    assert_eq!(version.code(), 0, "{version}");
    let programs: Vec<_> = ["usr/bin", "usr/sbin", "usr/local"]
        .iter()
        .flat_map(|folder| files_below(&root.join(folder)))
        .map(|path| path.strip_prefix(root).unwrap().to_owned())
        .collect();
    assert_eq!(programs, [Path::new("usr/local/bin/api-launcher")]);
    let roots = fs::read_to_string(root.join("etc/ssl/certs/ca-certificates.crt")).unwrap();
    assert!(roots.matches("BEGIN CERTIFICATE").count() > 100);
    // Where there is no dpkg, scanners look here.
    for package in ["base-files", "ca-certificates", "libc6", "libgcc-s1"] {
        let entry = root.join("var/lib/dpkg/status.d").join(package);
        let entry = fs::read_to_string(entry).unwrap();
        assert!(entry.contains("\nVersion: "), "{entry}");
        let copyright = root.join("usr/share/doc").join(package).join("copyright");
        assert!(copyright.exists(), "{}", copyright.display());
    }
}

fn assert_carries_what_scripts_and_git_need(executor: &(PathBuf, Image)) {
    let said = say(
        executor,
        r#"set -e
        id -u; id -un; echo "$HOME"
        git --version; ssh -V 2>&1; echo '{"a": [1, 2]}' | jq --compact-output .a
        # The user has a name, without which ssh would not even start.
        ssh -G git.example.test | grep '^user '
        grep -c 'BEGIN CERTIFICATE' /etc/ssl/certs/ca-certificates.crt
        touch /tmp/more; ! touch /usr/local/bin/more 2>/dev/null"#,
    );
    assert_eq!(said.code(), 0, "{said}");
    let lines: Vec<_> = said.stdout.lines().collect();
    assert_eq!(lines[..3], ["1000", "mayfly", "/home/mayfly"], "{said}");
    assert!(lines[3].starts_with("git version 2."), "{said}");
    assert!(lines[4].starts_with("OpenSSH_"), "{said}");
    assert_eq!(lines[5..7], ["[1,2]", "user mayfly"], "{said}");
    assert!(lines[7].parse::<u32>().unwrap() > 100, "{said}");

    // The entry point is the executor, which misses its job data.
    let empty = Container::of(&executor.0, &executor.1.config).run();
    assert_eq!(empty.code(), 65, "{empty}");
}

/// Each package of the distribution, and each crate of the program.
fn assert_says_its_licences(executor: &(PathBuf, Image)) {
    let said = say(
        executor,
        "for package in $(dpkg-query --show --showformat '${Package} '); do \
           [ -s /usr/share/doc/$package/copyright ] || echo $package; done",
    );
    assert_eq!((said.code(), said.stdout.as_str()), (0, ""), "{said}");
    let documents = executor.0.join(DOC_DIR);
    let licences = fs::read_to_string(documents.join(LICENCES_FILE)).unwrap();
    assert!(licences.contains("\nrustls "), "{licences}");
    assert!(documents.join(SBOM_FILE).exists());
}

#[test]
fn extras_are_known_by_name_and_others_refused() {
    let extras = |list: &str| {
        let script = images::workspace_root().join("images/packages.sh");
        Running::start(Command::new("sh").arg(script).args(["extras", list])).wait()
    };
    let packages = |list: &str| {
        let finished = extras(list);
        assert_eq!(finished.code(), 0, "{finished}");
        let words: Vec<_> = finished
            .stdout
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        words
    };
    assert_eq!(packages(""), Vec::<String>::new());
    assert_eq!(
        packages("groovy,azure-cli,aws-cli"),
        ["groovy", "default-jre-headless", "azure-cli", "awscli"]
    );
    let refused = extras("groovy,gcloud");
    assert_eq!(refused.code(), 64, "{refused}");
    assert!(refused.stderr.contains("not `gcloud`"), "{refused}");
}

/// Asked of the schema itself, by the library of those who wrote it.
#[test]
fn the_software_lists_follow_their_schema() {
    let folder = tempfile::tempdir().unwrap();
    for program in Program::ALL {
        Sbom::of(program).unwrap().write(folder.path()).unwrap();
        let sbom = folder.path().join(DOC_DIR).join(SBOM_FILE);
        let check = "import sys\n\
            from cyclonedx.schema import SchemaVersion\n\
            from cyclonedx.validation.json import JsonStrictValidator\n\
            text = open(sys.argv[1]).read()\n\
            sys.exit(str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) or '') or 0)\n";
        let python = test_peers::installed("python/bin/python");
        let mut command = Command::new(python);
        let checked = Running::start(command.args(["-c", check]).arg(sbom)).wait();
        assert_eq!(checked.code(), 0, "{checked}");
    }
}
