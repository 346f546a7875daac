//! Tokens against a strict stand-in of GitHub.

use std::time::Duration;

use git_address::Address;
use job_contract::env;
use rstest::rstest;
use secret_stores::RunIds;
use test_peers::github::{APP, GitHub};
use test_peers::http::{Response, Server};

use super::*;
use crate::{Logins, Settings};

const HOUR: Duration = Duration::from_hours(1);

fn github(lifetime: Duration) -> GitHub {
    GitHub::start(std::path::Path::new("/nonexistent"), lifetime).unwrap()
}

fn logins(base: &str, app: &str, key: &str) -> Logins {
    drop(rustls::crypto::ring::default_provider().install_default());
    let list = json!([{ "url": base, "kind": "github-app", "app": app, "variable": "MAYFLY_GIT_LOGIN_APP" }]);
    let list = list.to_string();
    let own = |name: &str| match name {
        env::GIT_LOGINS => Some(list.clone()),
        "MAYFLY_GIT_LOGIN_APP" => Some(key.to_owned()),
        _ => None,
    };
    let run = RunIds {
        organization: "",
        workspace: "",
    };
    let client = Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .user_agent("test");
    let settings = Settings::read(&own, run).unwrap();
    Logins::new(settings, client.build().unwrap(), Box::new(|_| {}))
}

async fn token(logins: &Logins, url: &str) -> Option<String> {
    let found = logins.credential(&Address::parse(url).unwrap()).await?;
    assert_eq!(found.username.expose_secret(), "x-access-token");
    Some(found.password.expose_secret().to_owned())
}

#[tokio::test]
async fn a_token_is_for_one_repository_and_used_until_shortly_before_its_end() {
    let github = github(HOUR);
    let base = github.server().url();
    let logins = logins(&base, APP, github.key());
    let first = token(&logins, &format!("{base}/team/repo.git"))
        .await
        .unwrap();
    assert!(first.len() > 600);
    for same in ["team/repo", "Team/Repo.git/info/lfs"] {
        let again = token(&logins, &format!("{base}/{same}")).await.unwrap();
        assert_eq!(again, first);
    }
    let other = token(&logins, &format!("{base}/team/module.git")).await;
    assert_ne!(other.unwrap(), first);
    assert_eq!(github.tokens().len(), 2);
    assert!(logins.take_problems().is_empty());
}

#[tokio::test]
async fn a_token_that_ends_soon_is_replaced() {
    let github = github(MARGIN / 2);
    let base = github.server().url();
    let logins = logins(&base, APP, github.key());
    let url = format!("{base}/team/repo.git");
    let first = token(&logins, &url).await.unwrap();
    assert_ne!(token(&logins, &url).await.unwrap(), first);
}

#[rstest]
#[case("other/repo.git", APP, "not installed there")]
#[case("team/unselected.git", APP, "does not have this repository")]
#[case("team/renamed.git", APP, "another name")]
#[case("team/repo.git", "other-app", "refuses the key")]
#[case("team", APP, "no path of a repository")]
#[tokio::test]
async fn what_github_refuses_is_explained_and_not_asked_again(
    #[case] path: &str,
    #[case] app: &str,
    #[case] expected: &str,
) {
    let github = github(HOUR);
    let base = github.server().url();
    let logins = logins(&base, app, github.key());
    assert_eq!(token(&logins, &format!("{base}/{path}")).await, None);
    let asked = github.server().requests().len();
    assert_eq!(token(&logins, &format!("{base}/{path}")).await, None);
    assert_eq!(github.server().requests().len(), asked);
    let problems = logins.take_problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains(expected), "{problems:?}");
}

/// Fixed ids of installations would do that: names of repositories are only unique within an owner.
#[tokio::test]
async fn a_token_for_the_repository_of_another_owner_is_not_used() {
    let server = Server::start(|request| {
        let body = if request.method == "GET" {
            json!({ "id": 1 })
        } else {
            json!({ "token": "t", "expires_at": "2999-01-01T00:00:00Z", "repositories": [{ "full_name": "other/repo" }] })
        };
        Response::new(200, body.to_string())
    })
    .unwrap();
    let github = github(HOUR);
    let logins = logins(&server.url(), APP, github.key());
    let url = format!("{}/team/repo.git", server.url());
    assert_eq!(token(&logins, &url).await, None);
    assert!(logins.take_problems()[0].contains("not one of GitHub's interface"));
}

#[tokio::test]
async fn an_outage_is_tried_again_and_a_wrong_clock_is_named() {
    let server = Server::start(|_| Response::new(503, "")).unwrap();
    let github = github(HOUR);
    let base = server.url();
    let of_outage = logins(&base, APP, github.key());
    assert_eq!(token(&of_outage, &format!("{base}/team/repo")).await, None);
    assert_eq!(server.requests().len(), 3);
    assert!(of_outage.take_problems()[0].contains("status 503"));

    let server = Server::start(|_| {
        Response::new(401, "").with_header("Date", "Thu, 01 Jan 2015 00:00:00 GMT")
    })
    .unwrap();
    let base = server.url();
    let of_clock = logins(&base, APP, github.key());
    assert_eq!(token(&of_clock, &format!("{base}/team/repo")).await, None);
    assert!(of_clock.take_problems()[0].contains("its clock differs by"));
}

#[rstest]
#[case("https://github.com/team", "https://api.github.com/")]
#[case("https://acme.ghe.com", "https://api.acme.ghe.com/")]
#[case("https://ghe.acme.com:8443", "https://ghe.acme.com:8443/api/v3")]
#[case("https://github.com.evil.test", "https://github.com.evil.test/api/v3")]
fn each_server_has_its_interface(#[case] base: &str, #[case] expected: &str) {
    let base = Address::parse(base).unwrap();
    assert_eq!(api(&base).unwrap().as_str(), expected);
}
