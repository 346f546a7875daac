//! Git over SSH with the key of a run.

use std::fs;

use integration_tests::{Repository, job};
use job_contract::{JobData, env};
use test_peers::sshd::Sshd;

use crate::machine;

#[test]
fn a_repository_is_fetched_over_ssh_with_the_runs_key() {
    let (machine, repository) = (machine(), Repository::fixture());
    let server = Sshd::start().unwrap();
    let known_hosts = machine.scratch("known_hosts");
    fs::write(&known_hosts, server.known_hosts_line().unwrap()).unwrap();
    let plan = JobData {
        source: Some(server.url(repository.path())),
        vcs_type: Some("SSH~id_ed25519".into()),
        access_token: Some(server.client_key().unwrap()),
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine
        .executor(&plan)
        .env(env::SSH_KNOWN_HOSTS, &known_hosts)
        .run();
    assert_eq!(outcome.code(), 0, "{outcome}\n{}", server.log());
    assert_eq!(machine.record(&plan).commit_id, Some(repository.head()));
    assert!(outcome.left_behind.is_empty(), "{outcome}");
}
