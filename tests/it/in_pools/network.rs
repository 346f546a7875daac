//! An agent whose network refuses every incoming connection, and lets out what goes to the hub and to the source alone.

use std::fs;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use integration_tests::repository::chain;
use integration_tests::{Repository, Running};
use job_contract::env;
use nix::sys::signal::Signal;
use test_cluster::Cluster;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::Server;
use test_peers::modules::{MODULE, ModuleRegistry};
use test_peers::skips::needed;
use test_platform::{Flow, Job, NewJob, ORGANIZATION, Records, Status, Variable, Workspace};

use super::agent::ends_with;
use super::agent_in_cluster;
use super::fixture::{Fixture, Hub};
use crate::in_cluster::Fixture as ClusterFixture;

/// Where the agent listens for probes.
const HEALTH: u16 = 8080;
const PATIENCE: Duration = Duration::from_secs(10);

/// A network with one neighbour, this machine. It ends with this value, and with this process.
struct Network {
    /// Keeps the network until its input ends.
    keeper: Child,
    /// Addresses of this machine and of the network itself.
    here: Ipv4Addr,
    there: Ipv4Addr,
}

impl Network {
    /// Makes one. It needs root.
    fn new() -> io::Result<Self> {
        let keeper = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo ready; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| io::Error::other(format!("`unshare` cannot be started: {error}")))?;
        // Of the range for tests of networks (RFC 2544), so that no real address is hidden. One for each network.
        let number = keeper.id() % (1 << 15);
        let base = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + number * 4;
        let mut network = Self {
            keeper,
            here: Ipv4Addr::from(base + 1),
            there: Ipv4Addr::from(base + 2),
        };
        let mut ready = [0; 6];
        let output = network.keeper.stdout.as_mut();
        let is_ready = output.map(|output| output.read_exact(&mut ready));
        if !matches!(is_ready, Some(Ok(()))) {
            let mut said = String::new();
            if let Some(errors) = &mut network.keeper.stderr {
                errors.read_to_string(&mut said)?;
            }
            let said = said.trim();
            return Err(io::Error::other(format!("no network namespace: {said}")));
        }
        let (outer, inner) = (format!("mfo{number}"), format!("mfi{number}"));
        let keeper = network.keeper.id().to_string();
        let (here, there) = (
            format!("{}/30", network.here),
            format!("{}/30", network.there),
        );
        run(
            "ip",
            &[
                "link", "add", &outer, "type", "veth", "peer", "name", &inner, "netns", &keeper,
            ],
        )?;
        run("ip", &["address", "add", &here, "dev", &outer])?;
        run("ip", &["link", "set", &outer, "up"])?;
        network.run("ip", &["address", "add", &there, "dev", &inner])?;
        network.run("ip", &["link", "set", &inner, "up"])?;
        network.run("ip", &["link", "set", "lo", "up"])?;
        Ok(network)
    }

    /// Refuses what comes in, and what goes out to other addresses than these. Counts both.
    fn close(&self, to: &[SocketAddr]) -> io::Result<()> {
        let rule = |rule: &str| {
            let words: Vec<_> = rule.split(' ').collect();
            self.run("iptables", &words)
        };
        rule("-A INPUT -i lo -j ACCEPT")?;
        rule("-A INPUT -p tcp --syn -j REJECT --reject-with tcp-reset")?;
        rule("-A INPUT -p tcp -j ACCEPT")?;
        rule("-P INPUT DROP")?;
        rule("-A OUTPUT -o lo -j ACCEPT")?;
        // The answer to a refused connection.
        rule("-A OUTPUT -p tcp --tcp-flags RST RST -j ACCEPT")?;
        for address in to {
            let (address, port) = (address.ip(), address.port());
            rule(&format!(
                "-A OUTPUT -p tcp -d {address} --dport {port} -j ACCEPT"
            ))?;
        }
        rule("-A OUTPUT -j REJECT")?;
        Ok(())
    }

    /// Packets that each rule of a chain has matched, with the rule.
    fn counts(&self, chain: &str) -> io::Result<Vec<(u64, String)>> {
        let listed = self.run("iptables", &["-L", chain, "-n", "-v", "-x"])?;
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let count = |line: &str| {
            let count = line.split_whitespace().next()?.parse().ok()?;
            Some((count, line.to_owned()))
        };
        Ok(text.lines().filter_map(count).collect())
    }

    /// The same command inside.
    fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside
            .arg(format!("--net=/proc/{}/ns/net", self.keeper.id()))
            .arg(command.get_program())
            .args(command.get_args())
            .env_clear();
        for (name, value) in command.get_envs() {
            inside.env(name, value.unwrap_or_default());
        }
        inside
    }

    /// A cluster whose pods are inside, and whose API server listens on this side.
    async fn cluster(&self, fixture: &Fixture) -> Option<ClusterFixture> {
        let parts = Cluster::builder().listening_at(self.here.into());
        let cluster = agent_in_cluster::cluster(parts).await?;
        let keeper = self.keeper.id();
        let words = format!(
            "[ \"$INSIDE\" ] || INSIDE=1 exec nsenter --net=/proc/{keeper}/ns/net \"$0\" \"$@\""
        );
        agent_in_cluster::prepare_with(&cluster, fixture, &words);
        Some(cluster)
    }

    fn run(&self, program: &str, args: &[&str]) -> io::Result<Output> {
        let namespace = format!("--net=/proc/{}/ns/net", self.keeper.id());
        let all: Vec<_> = [&*namespace, program]
            .into_iter()
            .chain(args.iter().copied())
            .collect();
        run("nsenter", &all)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

fn run(program: &str, args: &[&str]) -> io::Result<Output> {
    let output = Command::new(program).args(args).output();
    let output = output.map_err(|error| io::Error::other(format!("`{program}`: {error}")))?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    Err(io::Error::other(format!(
        "`{program} {}`: {said}",
        args.join(" ")
    )))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_nothing_can_connect_to_takes_a_run_and_calls_the_hub_and_the_source_alone() {
    let Some(network) = needed(Network::new()) else {
        return;
    };
    let fixture = Fixture::new()
        .await
        .with(env::LISTEN, &format!("{}:0", network.here));
    let hub = fixture.serve();
    let repository = Repository::fixture();
    let options = GitHttpOptions {
        address: Some(IpAddr::V4(network.here)),
        ..GitHttpOptions::default()
    };
    let source = git_http::serve(repository.path(), options).unwrap();
    let Some(()) = needed(network.close(&[hub.address(), source.address()])) else {
        return;
    };

    let mut command = fixture.agent(&hub.url());
    command.env("MAYFLY_AGENT_LISTEN", format!("0.0.0.0:{HEALTH}"));
    let agent = Running::start(&mut network.inside(&command));
    let workspace = Workspace::new(&format!("{}/.git", source.url()));
    let workspace = fixture.platform.workspace(workspace);
    let job = NewJob::new(&workspace, Flow::plan_apply());
    let job = fixture.platform.start_job(job);
    let job = fixture.platform.until_job(job, Status::Completed).await;
    assert_eq!(job.step_statuses(), [Status::Completed; 2]);

    // The agent listens, and only its own network reaches it.
    let probe = format!("exec 3<>/dev/tcp/127.0.0.1/{HEALTH}");
    network.run("bash", &["-c", &probe]).unwrap();
    let address = SocketAddr::from((network.there, HEALTH));
    let refused = TcpStream::connect_timeout(&address, PATIENCE).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    let incoming = network.counts("INPUT").unwrap();
    let matched = |rules: &[(u64, String)], part: &str| {
        let rule = rules.iter().find(|(_, rule)| rule.contains(part));
        rule.unwrap_or_else(|| panic!("no rule {part}: {rules:?}"))
            .0
    };
    assert_eq!(matched(&incoming, "REJECT"), 1, "{incoming:?}");

    agent.signal(Signal::SIGTERM);
    ends_with(agent, 0);
    let outgoing = network.counts("OUTPUT").unwrap();
    assert_eq!(matched(&outgoing, "REJECT"), 0, "{outgoing:?}");
    for server in [hub.address(), source.address()] {
        let port = format!("dpt:{}", server.port());
        assert!(matched(&outgoing, &port) > 0, "{outgoing:?}");
    }
    fixture.platform.assert_kept().await;
}

/// What a script asks the platform. Each line of its output is a name and a status.
const SCRIPT: &str = r#"
set -eu
ask() { curl -sS --path-as-is -o answer -w '%{http_code}\n' -H "Authorization: Bearer $terrakubeToken" "$@"; }
api=$terrakubeApi/api/v1/organization/$organizationId
echo "context $(ask -d '{"cost":"12"}' "$terrakubeApi/context/v1/$jobId")"
echo "another context $(ask "$terrakubeApi/context/v1/0")"
echo "workspace $(ask "$api/workspace/$workspaceId")"
cat answer; echo
echo "again $(ask "$api/workspace/$workspaceId")"
echo "another workspace $(ask "$api/workspace/other")"
echo "status $(ask -X PATCH -d '{}' "$api/job/$jobId")"
echo "way out $(ask "$terrakubeApi/context/v1/../../api/v1/organization/$organizationId/job/$jobId")"
echo "nobody $(terrakubeToken=x ask "$api/workspace/$workspaceId")"
"#;

/// A closed network with an agent, a platform with a registry of modules, and the hub between them.
pub(super) struct Enclosed {
    agent: Running,
    /// Of an agent on target `kubernetes`. Its pods are in the network too.
    cluster: Option<ClusterFixture>,
    _hub: Hub,
    fixture: Fixture,
    registry: ModuleRegistry,
    /// Serves a repository to the agent's network.
    source: Server,
    _repository: Repository,
    /// The last one, because the servers above end by a connection to their address.
    network: Network,
}

impl Enclosed {
    /// `main`: the root module, for the address of the registry. `None`: the machine has no such networks.
    async fn new(main: impl Fn(&str) -> String, on: Target) -> Option<Self> {
        let network = needed(Network::new())?;
        let fixture = Fixture::new().await;
        let cluster = match on {
            Target::Process => None,
            Target::Kubernetes => Some(network.cluster(&fixture).await?),
        };
        let module = r#"output "greeting" { value = "from the registry" }"#;
        let check = fixture.platform.token_check();
        let registry = ModuleRegistry::start(ORGANIZATION, module, check).unwrap();
        let trusted = fixture.path("registry.pem");
        fs::write(&trusted, registry.certificate()).unwrap();
        let fixture = fixture
            .with(env::LISTEN, &format!("{}:0", network.here))
            .with(env::REGISTRY_DOMAIN, &registry.host())
            .with("SSL_CERT_FILE", trusted.to_str().unwrap());
        let hub = fixture.serve();
        let repository = Repository::module(&main(&registry.host()));
        let options = GitHttpOptions {
            address: Some(IpAddr::V4(network.here)),
            ..GitHttpOptions::default()
        };
        let source = git_http::serve(repository.path(), options).unwrap();
        let mut open = vec![hub.address(), source.address()];
        open.extend(cluster.as_ref().map(|cluster| cluster.cluster.address()));
        needed(network.close(&open))?;
        let agent = match &cluster {
            None => fixture.agent(&hub.url()),
            Some(cluster) => agent_in_cluster::command(cluster, &fixture, &hub),
        };
        let agent = Running::start(&mut network.inside(&agent));
        Some(Self {
            agent,
            cluster,
            _hub: hub,
            fixture,
            registry,
            source,
            _repository: repository,
            network,
        })
    }

    /// A workspace of the repository, with a value of its variable `command`.
    fn workspace(&self, command: &str) -> String {
        let workspace = Workspace::new(&format!("{}/.git", self.source.url()));
        let workspace = workspace.with(Variable::terraform("command", command));
        self.fixture.platform.workspace(workspace)
    }

    fn start(&self, workspace: &str, flow: Vec<Flow>) -> u32 {
        self.fixture
            .platform
            .start_job(NewJob::new(workspace, flow))
    }

    async fn ends(&self, job: u32, status: Status) -> Job {
        let platform = &self.fixture.platform;
        let is_over = |records: &Records| {
            let found = records.job(job);
            (found.status.is_terminal() || found.status == status).then(|| found.clone())
        };
        let ended = platform.until("the end of the job", is_over).await;
        let pods = self.cluster.iter();
        let pods = pods.flat_map(|cluster| cluster.cluster.container_logs());
        let pods: Vec<_> = pods.collect();
        assert_eq!(ended.status, status, "{pods:?}\n{}", platform.report());
        ended
    }

    fn output(&self, job: &Job, step: usize) -> String {
        let platform = &self.fixture.platform;
        let found = platform.step_output(job.id, &job.steps[step].id);
        found.unwrap_or_else(|| panic!("no output\n{}", platform.report()))
    }

    /// Ends the agent. Nothing has tried to leave the network.
    async fn end(self) {
        self.agent.signal(Signal::SIGTERM);
        ends_with(self.agent, 0);
        let outgoing = self.network.counts("OUTPUT").unwrap();
        let rejecting = outgoing.iter().find(|(_, rule)| rule.contains("REJECT"));
        assert_eq!(rejecting.unwrap().0, 0, "{outgoing:?}");
        self.fixture.platform.assert_kept().await;
    }
}

/// Where the agent runs executors.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Process,
    Kubernetes,
}

/// A root module that calls the module of an organization.
fn calling(registry: &str, organization: &str) -> String {
    let [name, provider, version] = MODULE;
    format!(
        r#"
module "net" {{
  source  = "{registry}/{organization}/{name}/{provider}"
  version = "{version}"
}}
resource "terraform_data" "it" {{
  input = module.net.greeting
}}
output "greeting" {{
  value = terraform_data.it.output
}}
"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_of_the_platform_and_the_live_view_pass_the_hub() {
    modules_and_the_live_view_pass(Target::Process).await;
}

pub(super) async fn modules_and_the_live_view_pass(on: Target) {
    let Some(it) = Enclosed::new(|registry| calling(registry, ORGANIZATION), on).await else {
        return;
    };
    let job = it.start(&it.workspace(""), Flow::plan_apply());
    let job = it.ends(job, Status::Completed).await;
    let applied = it.output(&job, 1);
    assert!(applied.contains("from the registry"), "{applied}");
    let live = it.fixture.platform.structured(job.id).await;
    let of = |phase: &str| live.iter().any(|state| state["phase"] == phase);
    assert!(of("plan") && of("apply"), "{live:?}");
    it.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_of_other_organizations_do_not_pass_the_hub() {
    let Some(it) = Enclosed::new(|registry| calling(registry, "other"), Target::Process).await
    else {
        return;
    };
    let job = it.start(&it.workspace(""), Flow::only("terraformPlan"));
    let job = it.ends(job, Status::Failed).await;
    let said = it.output(&job, 0);
    let why = "passes on modules and providers of `acme` alone";
    assert!(said.contains(why), "{said}");
    assert_eq!(it.registry.asked(), Vec::<String>::new());
    it.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_ask_the_platform_what_the_file_of_the_pools_lets_them() {
    scripts_ask_what_they_may(Target::Process).await;
}

pub(super) async fn scripts_ask_what_they_may(on: Target) {
    let Some(it) = Enclosed::new(|_| String::new(), on).await else {
        return;
    };
    let scripts = || vec![Flow::new("customScripts", 50).with_script(SCRIPT)];
    let job = it.start(&it.workspace(""), scripts());
    let job = it.ends(job, Status::Completed).await;
    let said = it.output(&job, 0);
    let has_all = |said: &str, lines: &[&str]| {
        for line in lines {
            let found = said.lines().any(|found| found == *line);
            assert!(found, "no `{line}` in {said}");
        }
    };
    let in_any_case = ["another workspace 403", "status 403", "way out 400"];
    has_all(&said, &in_any_case);
    let refused_here = [
        "context 200",
        "another context 403",
        "workspace 403",
        "again 403",
        "nobody 401",
    ];
    has_all(&said, &refused_here);
    let refused = said.lines().filter(|line| {
        line.starts_with("The hub refused") && line.contains("does not let scripts of this pool")
    });
    assert_eq!(refused.count(), 1, "{said}");
    let context = it.fixture.platform.records().contexts[&job.id].clone();
    assert_eq!(context["cost"], "12");

    let token = format!("{{id: t0, sha256: {}}}", it.fixture.token.digest());
    it.fixture.replace_pools(&format!(
        "pools:\n  eu:\n    organizations: [{}]\n    scripts: workspace\n    tokens: [{token}]\n",
        it.fixture.platform.organization()
    ));
    let job = it.start(&it.workspace(""), scripts());
    let job = it.ends(job, Status::Completed).await;
    let said = it.output(&job, 0);
    has_all(&said, &in_any_case);
    has_all(&said, &["workspace 200", "again 200"]);
    assert!(said.contains("network-dev"), "{said}");
    it.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_a_closed_network_end_as_elsewhere() {
    runs_end_as_elsewhere(Target::Process).await;
}

pub(super) async fn runs_end_as_elsewhere(on: Target) {
    let main = chain("command = var.command") + "variable \"command\" {}\n";
    let Some(it) = Enclosed::new(|_| main.clone(), on).await else {
        return;
    };
    let workspace = it.workspace("true");
    let mut flow = Flow::plan_apply();
    flow.push(Flow::new("terraformDestroy", 300));
    let job = it.start(&workspace, flow);
    let job = it.ends(job, Status::Completed).await;
    assert!(
        it.output(&job, 2).contains("3 destroyed"),
        "{}",
        it.output(&job, 2)
    );

    // The hub has what a failed apply has made.
    let workspace = it.workspace("exit 9");
    let job = it.start(&workspace, Flow::plan_apply());
    it.ends(job, Status::Failed).await;
    let job = it.start(&workspace, Flow::only("terraformPlan"));
    let job = it.ends(job, Status::Completed).await;
    let planned = it.output(&job, 0);
    assert!(
        planned.contains("terraform_data.first: Refreshing"),
        "{planned}"
    );

    // And what a cancelled one has made.
    let gate = it.fixture.gate();
    let workspace = it.workspace(&gate.words());
    let job = it.start(&workspace, Flow::plan_apply());
    let _at_gate = gate.reached();
    it.fixture.platform.cancel(job).await;
    it.ends(job, Status::Cancelled).await;
    let job = it.start(&workspace, Flow::only("terraformPlan"));
    let job = it.ends(job, Status::Completed).await;
    let planned = it.output(&job, 0);
    assert!(
        planned.contains("terraform_data.first: Refreshing"),
        "{planned}"
    );
    it.end().await;
}
