//! The operator's rule for addresses: what it refuses is never asked.

use git_address::{AllowList, Match};
use job_contract::Exit;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::{Response, Server};

use super::super::*;
use super::support::*;

fn allow(fixture: &mut Fixture, pattern: &str) {
    let list = AllowList::new(pattern, Match::Full).unwrap();
    fixture.config.allowed = Some(Arc::new(list));
}

#[tokio::test]
async fn a_source_that_is_not_allowed_is_never_asked() {
    let server = Server::start(|_| Response::new(500, "")).unwrap();
    let mut fixture = Fixture::new();
    allow(&mut fixture, "https://git.acme.com/.*");
    let host = server.host();
    let job = job(&format!("http://bob:hunter2@{host}/r"), "main");
    let error = fixture.prepare(&job).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("the git URL `http://{host}/r` is not allowed by `ALLOWED_VCS_URL_REGEX`")
    );
    assert_eq!(error.exit(), Exit::BadJobData);
    assert!(error.hint().is_some());
    let target = fixture.layout.checkout().join("tools");
    let tools = clone_tools_repository(
        &format!("{}/tools", server.url()),
        "main",
        &target,
        &BTreeMap::new(),
        &fixture.layout,
        &fixture.config,
    );
    let error = tools.await.unwrap_err().to_string();
    assert!(error.contains("/tools` is not allowed by"), "{error}");
    assert!(server.requests().is_empty());
    // No git ran at all.
    assert!(!fixture.work.path().join("commands").exists());
}

#[tokio::test]
async fn a_source_that_is_allowed_is_fetched() {
    let repository = Repository::new();
    let server = git_http::serve(repository.served(), GitHttpOptions::default()).unwrap();
    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("{}/repo.git", server.url()));
    let source = format!("{}/repo.git", server.url());
    fixture.prepare(&job(&source, "main")).await.unwrap();
    assert_eq!(fixture.main_tf(), "# two");
}
