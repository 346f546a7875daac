//! Proxies and authorities where installations of the platform keep them: options of a virtual machine and service bindings.

use std::fs;

use integration_tests::job::{self, before_init};
use integration_tests::{FakeTool, Repository};
use job_contract::{JobData, env};
use test_peers::git_http::{self, GitHttpOptions};

use crate::machine;

#[test]
fn a_bound_authority_is_trusted_by_git_and_by_what_runs_start() {
    let (machine, repository) = (machine(), Repository::fixture());
    let options = GitHttpOptions {
        tls: true,
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.path(), options).unwrap();
    let binding = machine.scratch("bindings").join("corp");
    fs::create_dir_all(&binding).unwrap();
    fs::write(binding.join("type"), "ca-certificates").unwrap();
    fs::write(binding.join("ca.crt"), server.certificate().unwrap()).unwrap();
    let url = format!("{}/.git", server.url());
    let script = format!(
        "git ls-remote {url} main | grep -q main && tail -n 3 \"$REQUESTS_CA_BUNDLE\" && echo script-trusts-it"
    );
    let plan = JobData {
        source: Some(url),
        command_list: vec![before_init(job::bash(1, &script))],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let tool = FakeTool::new();
    let run = || machine.executor(&plan).env("PATH", tool.path());
    let refused = run().run();
    assert!(refused.error().contains("certificate"), "{refused}");

    machine.queue(&[&plan]);
    let outcome = run()
        .env("SERVICE_BINDING_ROOT", machine.scratch("bindings"))
        .run()
        .expect_code(0);
    assert!(outcome.log().contains("script-trusts-it"), "{outcome}");
}

#[test]
fn runs_can_have_authorities_of_their_own_and_proxies_of_the_virtual_machine() {
    let (machine, repository) = (machine(), Repository::fixture());
    let server = git_http::serve(
        repository.path(),
        GitHttpOptions {
            tls: true,
            ..GitHttpOptions::default()
        },
    )
    .unwrap();
    let bundle = machine.scratch("runs.pem");
    fs::write(&bundle, server.certificate().unwrap()).unwrap();
    let script =
        "echo trusts=$SSL_CERT_FILE $GIT_SSL_CAINFO; echo proxy=$https_proxy direct=$NO_PROXY";
    let plan = JobData {
        command_list: vec![before_init(job::bash(1, script))],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let tool = FakeTool::new();
    let options = "-Dhttps.proxyHost=proxy.corp -Dhttps.proxyPort=3128 -Dhttps.proxyUser=me \
                   -Dhttps.proxyPassword=hunter2-hunter2 -Dhttp.nonProxyHosts=*.corp|10.*";
    let run = |options: &str| {
        let run = machine.executor(&plan).env("PATH", tool.path());
        run.env(env::RUN_CA_FILE, &bundle)
            .env(env::JAVA_TOOL_OPTIONS, options)
    };
    let outcome = run(options).run().expect_code(0);
    let bundle = bundle.display();
    assert!(
        outcome.log().contains(&format!("trusts={bundle} {bundle}")),
        "{outcome}"
    );
    assert!(
        outcome
            .log()
            .contains("@proxy.corp:3128 direct=.corp,10.0.0.0/8"),
        "{outcome}"
    );
    assert!(!outcome.log().contains("hunter2-hunter2"), "{outcome}");

    let outcome = run("-Dhttps.proxyHost=p -Dhttps.proxyPort=no-port")
        .run()
        .expect_code(64);
    assert!(
        outcome
            .error()
            .contains("`JAVA_TOOL_OPTIONS` has `https.proxyPort`, which is no port"),
        "{outcome}"
    );
}
