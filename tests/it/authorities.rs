//! Proxies and authorities where installations of the platform keep them: options of a virtual machine and service bindings.

use std::fs;

use integration_tests::job::{self, before_init};
use integration_tests::{FakeTool, Repository};
use job_contract::{JobData, env};
use serde_json::json;
use test_peers::clouds::Clouds;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::{Response, Server};

use crate::machine;

#[test]
fn bound_authorities_are_trusted_by_git_and_by_what_runs_start() {
    let (machine, repository) = (machine(), Repository::fixture());
    let server = || {
        let options = GitHttpOptions {
            tls: true,
            ..GitHttpOptions::default()
        };
        git_http::serve(repository.path(), options).unwrap()
    };
    let (server, other) = (server(), server());
    for (name, server) in [("corp", &server), ("partner", &other)] {
        let binding = machine.scratch("bindings").join(name);
        fs::create_dir_all(&binding).unwrap();
        fs::write(binding.join("type"), "ca-certificates").unwrap();
        fs::write(binding.join("ca.crt"), server.certificate().unwrap()).unwrap();
    }
    let url = format!("{}/.git", server.url());
    let script = format!(
        "for url in {url} {}/.git; do git ls-remote $url main | grep -q main || exit 1; done; \
         tail -n 3 \"$REQUESTS_CA_BUNDLE\" && echo script-trusts-them",
        other.url()
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
    assert!(outcome.log().contains("script-trusts-them"), "{outcome}");
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

/// A host that only the proxy leads to, with a certificate that only the binding has.
#[test]
fn the_executor_uses_the_proxy_of_the_virtual_machine_and_the_bound_authorities() {
    let (machine, repository) = (machine(), Repository::fixture());
    let secret = json!({ "SecretString": "canary-by-proxy" }).to_string();
    let server = Server::start(move |_| Response::new(200, secret.clone())).unwrap();
    let host = "secretsmanager.eu-central-1.amazonaws.com";
    let clouds = Clouds::start(&[(host, server.address())]).unwrap();
    let [(_, proxy), (_, authority)] = clouds.environment();
    let binding = machine.scratch("bindings").join("corp");
    fs::create_dir_all(&binding).unwrap();
    fs::write(binding.join("type"), "ca-certificates").unwrap();
    fs::copy(authority, binding.join("ca.pem")).unwrap();
    let port = proxy.rsplit(':').next().unwrap();
    let seen = machine.scratch("seen");
    let script = format!("printf %s \"$A\" > {}", seen.display());
    let mut step = job::scripts(&repository, vec![job::bash(1, &script)]);
    step.environment_variables
        .insert("A".into(), "${ssm:db}".into());
    machine.queue(&[&step]);
    let outcome = machine
        .executor(&step)
        .env(env::CUSTOMER_AWS_ACCESS_KEY_ID, "AKIAEXAMPLE")
        .env(env::CUSTOMER_AWS_SECRET_ACCESS_KEY, "key-of-aws")
        .env(env::AWS_SECRETS_REGION, "eu-central-1")
        .env("SERVICE_BINDING_ROOT", machine.scratch("bindings"))
        .env(
            env::JAVA_TOOL_OPTIONS,
            format!("-Xmx64m -Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort={port}"),
        )
        .run()
        .expect_code(0);
    assert_eq!(fs::read_to_string(seen).unwrap(), "canary-by-proxy");
    assert_eq!(clouds.asked(), [host], "{outcome}");
}
