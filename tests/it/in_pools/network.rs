//! An agent whose network refuses every incoming connection, and lets out what goes to the hub and to the source alone.

use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use integration_tests::{Repository, Running};
use job_contract::env;
use nix::sys::signal::Signal;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::skips::needed;
use test_platform::{Flow, NewJob, Status, Workspace};

use super::agent::ends_with;
use super::fixture::Fixture;

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
        // Of the range for tests of networks (RFC 2544), so that no real address is hidden. One for each process.
        let process = std::process::id() % (1 << 15);
        let base = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + process * 4;
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
        let (outer, inner) = (format!("mfo{process}"), format!("mfi{process}"));
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
