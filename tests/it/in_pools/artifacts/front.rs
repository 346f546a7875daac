//! Hubs whose store does a request late, or is hidden or cut off by something in front of it. A folder has nothing in front of it,
//! but it can be away too.

use std::fs;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::env;
use job_contract::keys::local_backend_state;
use reqwest::StatusCode;
use serde_json::Value;
use test_peers::azurite::{self, Azurite};
use test_peers::clouds::Clouds;
use test_peers::gcs::{self, Gcs};
use test_peers::http::{Request, Response, Server, pass_on};
use test_peers::s3::S3;

use super::{Fixture, Holder, OK, settings, state};

/// What the server in front of a store does.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Rule {
    #[default]
    Pass,
    /// It refuses the next write of the state, and keeps it.
    Keep,
    /// It answers so many reads of the state with a page.
    Hide(u32),
    /// It does not wait for the answer to the next write of the state, which may have arrived.
    CutOff { arrives: bool },
}

#[derive(Default)]
struct Rules {
    rule: Rule,
    kept: Option<Request>,
}

impl Rules {
    /// The answer in place of that of the store, and whether the store gets the request.
    fn instead(&mut self, request: &Request) -> Option<(Response, bool)> {
        // The client of Google Cloud Storage encodes all of a key.
        let path = request.path.replace("%2F", "/").replace("%2E", ".");
        let is_state = path.ends_with("/terraform.tfstate") || path.ends_with("/default.tfstate");
        // What the hub asks the store is about an object of its own.
        let is_asked = path.contains("/mayfly/");
        if !is_state || is_asked || !request.query.is_empty() {
            return None;
        }
        let (rule, answer, arrives) = match (self.rule, request.method.as_str()) {
            (Rule::Keep, "PUT") => {
                self.kept = Some(request.clone());
                let refusal = "<Error><Code>AccessDenied</Code></Error>";
                (Rule::Pass, Response::new(403, refusal), false)
            }
            (Rule::Hide(left @ 1..), "GET") => {
                let rule = if left == 1 {
                    Rule::Pass
                } else {
                    Rule::Hide(left - 1)
                };
                let page = "<html>default backend - 404</html>";
                (rule, Response::new(404, page), false)
            }
            (Rule::CutOff { arrives }, "PUT") => {
                let page = "<html>502 Bad Gateway</html>";
                (Rule::Pass, Response::new(502, page), arrives)
            }
            _ => return None,
        };
        self.rule = rule;
        Some((answer, arrives))
    }
}

/// A store behind a server.
struct Front {
    server: Server,
    rules: Arc<Mutex<Rules>>,
    store: SocketAddr,
    /// The name of the store in requests.
    host: String,
}

impl Front {
    fn of(store: SocketAddr, host: &str) -> Self {
        let rules = Arc::<Mutex<Rules>>::default();
        let (of_server, name) = (Arc::clone(&rules), host.to_owned());
        let server = Server::start(move |request| {
            let passed = || pass_on(request, store, &name).unwrap();
            let instead = of_server.lock().unwrap().instead(request);
            let Some((answer, arrives)) = instead else {
                return passed();
            };
            if arrives {
                passed();
            }
            answer
        });
        Self {
            server: server.unwrap(),
            rules,
            store,
            host: host.to_owned(),
        }
    }

    fn set(&self, rule: Rule) {
        self.rules.lock().unwrap().rule = rule;
    }

    /// Whether the last rule has been followed to its end.
    fn passes(&self) -> bool {
        self.rules.lock().unwrap().rule == Rule::Pass
    }

    /// The store does the request that was kept. Returns the status of its answer.
    fn do_kept(&self) -> u16 {
        let kept = self.rules.lock().unwrap().kept.take().unwrap();
        pass_on(&kept, self.store, &self.host).unwrap().status
    }
}

/// An accepted lease at a hub with these settings.
async fn accepted<S>(
    store: S,
    settings: impl IntoIterator<Item = (&'static str, String)>,
) -> Holder<S> {
    let mut fixture = Fixture::new().await;
    for (name, value) in settings {
        fixture = fixture.with(name, &value);
    }
    let lease = Holder::on(store, fixture, "terraformApply").await;
    lease.executor.accept(&lease.lease, "pod").await.ok();
    lease
}

impl Holder<Front> {
    /// The serial in the store. To read it for a rescue makes nothing of it known to the run.
    async fn stored_serial(&self) -> Option<u64> {
        let (status, text) = self.send("GET", "state?rescue=true", b"").await;
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()["serial"].as_u64()
    }

    async fn loses_no_state(&self) {
        self.replaces_nothing_newer_by_a_late_write().await;
        self.takes_a_hidden_state_for_no_absent_one().await;
        self.has_a_write_that_was_cut_off_when_it_is_repeated()
            .await;
    }

    async fn replaces_nothing_newer_by_a_late_write(&self) {
        assert_eq!(self.write(1, "l").await.0, OK);
        self.store.set(Rule::Keep);
        assert_eq!(self.write(2, "l").await.0, StatusCode::CONFLICT);
        for serial in [2, 3] {
            assert_eq!(self.write(serial, "l").await.0, OK);
        }
        assert_eq!(self.store.do_kept(), 412);
        assert_eq!(self.stored_serial().await, Some(3));
    }

    async fn takes_a_hidden_state_for_no_absent_one(&self) {
        self.store.set(Rule::Hide(2));
        let (status, text) = self.send("GET", "state", b"").await;
        assert!(self.store.passes());
        assert_eq!((status, text.into_bytes()), (StatusCode::OK, state(3, "l")));
        self.store.set(Rule::Hide(2));
        let (status, text) = self.write(1, "other").await;
        assert!(self.store.passes());
        assert_eq!(status, StatusCode::CONFLICT, "{text}");
        assert!(text.contains("another lineage"), "{text}");
        assert_eq!(self.stored_serial().await, Some(3));
    }

    async fn has_a_write_that_was_cut_off_when_it_is_repeated(&self) {
        // The hub repeats it, and whether the first one has arrived is not known.
        for (serial, arrives, answer) in
            [(4, false, OK), (5, true, StatusCode::SERVICE_UNAVAILABLE)]
        {
            self.store.set(Rule::CutOff { arrives });
            assert_eq!(self.write(serial, "l").await.0, answer, "{arrives}");
            assert!(self.store.passes());
            assert_eq!(self.write(serial, "l").await.0, OK, "{arrives}");
            assert_eq!(self.stored_serial().await, Some(serial));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_that_is_late_hidden_or_cut_off_loses_no_state() {
    let server = S3::start_open().unwrap();
    let mut settings = settings(&server).to_vec();
    let front = Front::of(server.address(), &server.address().to_string());
    settings.push((env::AWS_ENDPOINT, front.server.url()));
    accepted(front, settings).await.loses_no_state().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn azure_that_is_late_hidden_or_cut_off_loses_no_state() {
    let server = Azurite::start().unwrap();
    let host = server.host();
    let front = Front::of(server.address(), &host);
    let clouds = Clouds::start(&[(&host, front.server.address())]).unwrap();
    let mut settings = vec![
        (env::STATE_TYPE, "AzureTerraformStateImpl".to_owned()),
        (env::AZURE_ACCOUNT, server.account().to_owned()),
        (env::AZURE_ACCESS_KEY, azurite::ACCOUNT_KEY.to_owned()),
        (env::AZURE_CONTAINER, "tfstate".to_owned()),
        (env::AZURE_RESOURCE_GROUP, "group".to_owned()),
    ];
    settings.extend(clouds.environment());
    accepted(front, settings).await.loses_no_state().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gcs_that_is_late_hidden_or_cut_off_loses_no_state() {
    let server = Gcs::start().unwrap();
    let host = "storage.googleapis.com";
    let front = Front::of(server.address(), host);
    let clouds = Clouds::start(&[(host, front.server.address())]).unwrap();
    let account = STANDARD.encode(server.service_account());
    let mut settings = vec![
        (env::STATE_TYPE, "GcpTerraformStateImpl".to_owned()),
        (env::GCP_BUCKET, gcs::BUCKET.to_owned()),
        (env::GCP_PROJECT, "p".to_owned()),
        (env::GCP_CREDENTIALS, account),
    ];
    settings.extend(clouds.environment());
    accepted(front, settings).await.loses_no_state().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_is_away_or_changed_by_others_loses_no_state() {
    let kind = (env::STATE_TYPE, "LocalTerraformStateImpl".to_owned());
    let lease = accepted((), [kind]).await;
    let (task, fixture) = (&lease.lease.task, &lease.fixture);
    let path = local_backend_state(&task.organization_id, &task.workspace_id);
    let path = fixture.path("data").join(path);
    assert_eq!(lease.write(1, "l").await.0, OK);
    fs::write(&path, state(5, "l")).unwrap();
    let (status, text) = lease.write(6, "l").await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    assert!(text.contains("somebody has changed the state"), "{text}");

    let (folder, aside) = (path.parent().unwrap(), fixture.path("aside"));
    fs::rename(folder, &aside).unwrap();
    fs::write(folder, "in the way").unwrap();
    for (method, body) in [("GET", Vec::new()), ("POST", state(6, "l"))] {
        let (status, text) = lease.send(method, "state", &body).await;
        assert_eq!(status, StatusCode::CONFLICT, "{method}: {text}");
    }
    fs::remove_file(folder).unwrap();
    fs::rename(&aside, folder).unwrap();
    let (status, text) = lease.send("GET", "state", b"").await;
    assert_eq!((status, text.into_bytes()), (StatusCode::OK, state(5, "l")));
    assert_eq!(lease.write(6, "l").await.0, OK);
    assert_eq!(fs::read(&path).unwrap(), state(6, "l"));
}
