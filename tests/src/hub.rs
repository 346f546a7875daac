//! A fake hub for executors: leases, claims, ends, and a relay to the test platform. It enforces the protocol, and
//! relays only requests about the executor's own step.
//!
//! It differs from a hub in these points:
//! - No time passes: leases do not expire, and state and log are taken for longer than ten minutes after the end.
//! - It accepts a cancelled task, and refuses an end that comes again.
//! - It refuses the calls of agents. It has no store, and reports no outcome to the platform.
//! - It passes documents on as they are, without the hub's checks and limits, and with the addresses that are in them.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use job_contract::JobData;
use platform::terrakube::{TokenSource, token};
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::lease::{Acceptance, End, Ended, Lease};
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::problem::{Code, MEDIA_TYPE, Problem};
use pool_protocol::task::TaskState;
use pool_protocol::token::{JobGrant, JobTokenKey};
use pool_protocol::version::{HEADER, Versions};
use pool_protocol::{IDEMPOTENCY_KEY, lease};
use secrecy::ExposeSecret as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use test_peers::http::{Request, Response, Server, pass_on};
use test_peers::port::Port;

use crate::process::DEADLINE;

/// A short lease makes heartbeats frequent.
const LEASE_SECONDS: u32 = 3;
/// The path to which the platform dispatches.
const DISPATCH: &str = "/pools/eu/api/v1/terraform-rs";

/// A hub. It refuses connections while it is down.
#[derive(Debug)]
pub struct Hub {
    shared: Arc<Shared>,
    port: Port,
    server: Option<Server>,
    dispatched: Mutex<Receiver<LeasedStep>>,
}

/// A dispatched step and its lease.
#[derive(Clone, Debug)]
pub struct LeasedStep {
    pub lease: LeaseId,
    /// URL of the lease.
    pub url: String,
    pub token: String,
    pub data: JobData,
}

/// The state of a task.
#[derive(Clone, Debug)]
pub struct Task {
    pub state: TaskState,
    /// UID of the executor that accepted it.
    pub holder: Option<String>,
    pub heartbeats: usize,
    pub end: Option<End>,
    grant: JobGrant,
    data: JobData,
    cancel_requested: bool,
}

/// A request that was relayed or refused.
#[derive(Clone, Debug)]
pub struct Relayed {
    pub method: String,
    pub path: String,
    /// Why it was refused.
    pub refused: Option<String>,
}

#[derive(Debug)]
struct Shared {
    key: JobTokenKey,
    platform: SocketAddr,
    tokens: TokenSource,
    address: SocketAddr,
    dispatched: Mutex<Sender<LeasedStep>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    versions: Versions,
    tasks: Vec<Task>,
    relayed: Vec<Relayed>,
    /// The number of HTML pages to send instead of responses, by the end of the path.
    pages: Vec<(&'static str, usize)>,
}

impl Hub {
    /// Starts a hub for the platform at this address with this secret.
    pub fn start(platform: &str, secret: &str) -> Self {
        let port = Port::take().unwrap();
        let (sender, dispatched) = channel();
        let platform = platform.trim_start_matches("http://");
        let shared = Arc::new(Shared {
            key: JobTokenKey::new(b"the key of the hub of the tests!".to_vec()),
            platform: platform.parse().unwrap(),
            tokens: TokenSource::parse(secret).unwrap(),
            address: port.address(),
            dispatched: Mutex::new(sender),
            inner: Mutex::new(Inner {
                versions: Versions::OURS,
                tasks: Vec::new(),
                relayed: Vec::new(),
                pages: Vec::new(),
            }),
        });
        let mut hub = Self {
            shared,
            port,
            server: None,
            dispatched: Mutex::new(dispatched),
        };
        hub.come_up();
        hub
    }

    /// Returns the URL to which the platform dispatches.
    pub fn dispatch_url(&self) -> String {
        format!("http://{}{DISPATCH}", self.port.address())
    }

    /// Refuses connections from now on.
    pub fn go_down(&mut self) {
        self.server = None;
    }

    /// Accepts connections again.
    pub fn come_up(&mut self) {
        let shared = Arc::clone(&self.shared);
        let server = Server::start_at(self.port.address(), move |request| shared.answer(request));
        self.server = Some(server.unwrap());
    }

    /// Waits for the next step. It is leased at once.
    pub fn next_step(&self) -> LeasedStep {
        let dispatched = lock(&self.dispatched).recv_timeout(DEADLINE);
        dispatched.expect("no step was dispatched")
    }

    /// Returns the task of a lease.
    pub fn task(&self, lease: LeaseId) -> Task {
        lock(&self.shared.inner).task(lease).unwrap().clone()
    }

    /// Returns all requests to the platform so far.
    pub fn relayed(&self) -> Vec<Relayed> {
        lock(&self.shared.inner).relayed.clone()
    }

    /// Fails if the relay refused a request.
    #[track_caller]
    pub fn assert_nothing_refused(&self) {
        let refused: Vec<_> = self.relayed();
        let refused: Vec<_> = refused.iter().filter(|one| one.refused.is_some()).collect();
        assert!(refused.is_empty(), "{refused:#?}");
    }

    /// Accepts the task for another pod.
    pub fn accept_as(&self, lease: LeaseId, uid: &str) {
        self.change(lease, |task| {
            task.state = TaskState::Running;
            task.holder = Some(uid.to_owned());
        });
    }

    /// Requests a cancellation in the responses to heartbeats.
    pub fn cancel(&self, lease: LeaseId) {
        self.change(lease, |task| task.cancel_requested = true);
    }

    /// Leases the task to another instance.
    pub fn supersede(&self, lease: LeaseId) {
        self.change(lease, |task| task.grant.fencing_token += 1);
    }

    /// Fails the task.
    pub fn give_up(&self, lease: LeaseId) {
        self.change(lease, |task| task.state = TaskState::Failed);
    }

    /// Makes the hub support these versions only.
    pub fn support_versions(&self, versions: Versions) {
        lock(&self.shared.inner).versions = versions;
    }

    /// Responds to this many requests whose path ends with `end` with the page of a proxy, with status 200. The hub
    /// does not process these requests.
    pub fn answer_with_pages(&self, end: &'static str, count: usize) {
        lock(&self.shared.inner).pages.push((end, count));
    }

    /// Returns how many pages are left to send.
    pub fn pages_left(&self) -> usize {
        let inner = lock(&self.shared.inner);
        inner.pages.iter().map(|(_, count)| count).sum()
    }

    fn change(&self, lease: LeaseId, change: impl FnOnce(&mut Task)) {
        change(lock(&self.shared.inner).task(lease).unwrap());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn task(&mut self, lease: LeaseId) -> Result<&mut Task, Problem> {
        let mut tasks = self.tasks.iter_mut();
        let found = tasks.find(|task| task.grant.lease == lease);
        found.ok_or_else(|| Problem::new(Code::TaskNotFound, "there is no such lease"))
    }

    fn take_page(&mut self, path: &str) -> bool {
        let mut pages = self.pages.iter_mut();
        let page = pages.find(|(end, count)| path.ends_with(end) && *count > 0);
        page.map(|(_, count)| *count -= 1).is_some()
    }
}

type Answer = Result<Response, Problem>;

impl Shared {
    fn answer(&self, request: &Request) -> Response {
        if request.path == DISPATCH {
            return self.accept_dispatch(request);
        }
        if lock(&self.inner).take_page(&request.path) {
            let page = "<!doctype html><title>Please sign in</title>";
            return Response::new(200, page)
                .with_header("Content-Type", "text/html; charset=utf-8");
        }
        self.process(request).unwrap_or_else(|problem| {
            let text = serde_json::to_vec(&problem).unwrap();
            Response::new(problem.status, text).with_header("Content-Type", MEDIA_TYPE)
        })
    }

    fn accept_dispatch(&self, request: &Request) -> Response {
        let data: JobData = serde_json::from_slice(&request.body).unwrap();
        let grant = JobGrant {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 1,
        };
        let accept = path::lease(grant.task, grant.lease, LeaseCall::Accept);
        let base = accept.rsplit_once('/').unwrap().0;
        let step = LeasedStep {
            lease: grant.lease,
            url: format!("http://{}{base}", self.address),
            token: self.key.sign(grant),
            data: data.clone(),
        };
        lock(&self.inner).tasks.push(Task {
            state: TaskState::Leased,
            holder: None,
            heartbeats: 0,
            end: None,
            grant,
            data,
            cancel_requested: false,
        });
        lock(&self.dispatched).send(step).unwrap();
        Response::new(202, "{}").with_header("Content-Type", "application/json")
    }

    fn process(&self, request: &Request) -> Answer {
        lock(&self.inner).versions.check(request.header(HEADER))?;
        let invalid = |text: &str| Problem::new(Code::RequestInvalid, text);
        if !request
            .header("user-agent")
            .is_some_and(|agent| agent.starts_with("mayfly"))
        {
            return Err(invalid("no User-Agent"));
        }
        let unknown = || Problem::new(Code::TaskNotFound, format!("no {}", request.path));
        let mut parts = request.path.splitn(9, '/').skip(4);
        let (Some("tasks"), Some(task), Some("leases"), Some(lease), Some(rest)) = (
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
        ) else {
            return Err(unknown());
        };
        let (task, lease) = (task.parse().unwrap(), lease.parse().unwrap());
        let bearer = request.header("authorization");
        let token = bearer.and_then(|bearer| bearer.strip_prefix("Bearer "));
        let grant = token.and_then(|token| self.key.verify(token));
        let grant = grant.filter(|grant| (grant.task, grant.lease) == (task, lease));
        let Some(grant) = grant else {
            return Err(Problem::new(
                Code::ExecutorAuthenticationFailed,
                "no token of this lease",
            ));
        };
        if lock(&self.inner).task(lease)?.grant != grant {
            let text = "the task is leased to another instance";
            return Err(Problem::new(Code::LeaseSuperseded, text));
        }
        if let Some(path) = rest.strip_prefix("platform/") {
            return self.relay(request, lease, path);
        }
        let call = LeaseCall::of_name(rest).ok_or_else(unknown)?;
        let key = request.header(IDEMPOTENCY_KEY).unwrap_or_default();
        if request.method != "POST" || key.len() != 36 {
            return Err(invalid("a call is a POST with an Idempotency-Key"));
        }
        self.call(request, lease, call)
    }

    fn call(&self, request: &Request, lease: LeaseId, call: LeaseCall) -> Answer {
        let mut inner = lock(&self.inner);
        let task = inner.task(lease)?;
        let over = || Problem::new(Code::TaskAlreadyTerminal, "the task is over");
        match call {
            LeaseCall::Accept | LeaseCall::Heartbeat => {
                let uid = read::<Acceptance>(request)?.holder.uid;
                if task.state.is_terminal() {
                    return Err(over());
                }
                if task.holder.as_ref().is_some_and(|holder| *holder != uid) {
                    let text = "another pod has accepted the task";
                    return Err(Problem::new(Code::LeaseSuperseded, text));
                }
                if call == LeaseCall::Heartbeat {
                    task.heartbeats += 1;
                }
                task.holder = Some(uid);
                task.state = TaskState::Running;
                Ok(json(&Lease {
                    task_id: task.grant.task,
                    lease_id: lease,
                    fencing_token: task.grant.fencing_token,
                    state: task.state,
                    expires_at: String::new(),
                    expires_in_seconds: LEASE_SECONDS,
                    job_token: self.key.sign(task.grant),
                    cancel_requested: task.cancel_requested,
                }))
            }
            LeaseCall::Complete | LeaseCall::Fail | LeaseCall::Cancelled => {
                let end = read::<lease::End>(request)?;
                let state = match call {
                    LeaseCall::Complete => TaskState::Completed,
                    LeaseCall::Fail => TaskState::Failed,
                    _ => TaskState::Cancelled,
                };
                if task.state != TaskState::Running {
                    return Err(over());
                }
                (task.state, task.end) = (state, Some(end));
                Ok(json(&Ended {
                    task_id: task.grant.task,
                    state,
                }))
            }
            LeaseCall::Started | LeaseCall::Decline => Err(Problem::new(
                Code::RequestInvalid,
                "no executor makes this call",
            )),
        }
    }

    fn relay(&self, request: &Request, lease: LeaseId, path: &str) -> Answer {
        let mut inner = lock(&self.inner);
        let task = inner.task(lease)?;
        let refused = if !may_call(task, request, path) {
            Some((
                Code::ExecutorPoolForbidden,
                "not for an executor of this step",
            ))
        } else if task.state.is_terminal() && !is_final(request, path) {
            Some((Code::TaskAlreadyTerminal, "the task is over"))
        } else if task.state == TaskState::Leased && !is_read(request, path) {
            Some((Code::LeaseNotAccepted, "the task is not accepted"))
        } else {
            None
        };
        inner.relayed.push(Relayed {
            method: request.method.clone(),
            path: path.to_owned(),
            refused: refused.map(|(_, why)| why.to_owned()),
        });
        drop(inner);
        if let Some((code, why)) = refused {
            return Err(Problem::new(code, why));
        }
        let token = self.tokens.mint(token::CALL).unwrap();
        let mut swapped = request.clone();
        swapped.path = format!("/{path}");
        swapped
            .headers
            .retain(|(name, _)| name != "authorization" && name != HEADER);
        let bearer = format!("Bearer {}", token.expose_secret());
        swapped.headers.push(("authorization".to_owned(), bearer));
        let host = self.platform.to_string();
        let answer = pass_on(&swapped, self.platform, &host);
        Ok(answer.unwrap_or_else(|_| Response::new(502, "")))
    }
}

/// Returns whether an executor may make the call before it accepts its task.
fn is_read(request: &Request, path: &str) -> bool {
    request.method == "GET" && !path.ends_with("/history")
}

/// Returns whether an executor may make the call after the end of its task: it stores its state and its log.
fn is_final(request: &Request, path: &str) -> bool {
    let reads_job = request.method == "GET" && path.contains("/job/");
    reads_job || path.ends_with("/history") || path.starts_with("logs")
}

/// Returns whether an executor may send a request. It must be about the step of the lease.
fn may_call(task: &Task, request: &Request, path: &str) -> bool {
    let data = &task.data;
    let (org, job) = (&*data.organization_id, &*data.job_id);
    let (workspace, step) = (&*data.workspace_id, &*data.step_id);
    let parts: Vec<&str> = path.split('/').collect();
    let body = serde_json::from_slice::<Value>(&request.body).unwrap_or_default();
    let about = |kind: &str, id: &str| body["data"]["type"] == kind && body["data"]["id"] == id;
    match (&*request.method, &*parts) {
        ("GET", ["api", "v1", "organization", o, "job", j]) => {
            (*o, *j) == (org, job) && request.query == "include=step"
        }
        ("PATCH", ["api", "v1", "organization", o, "job", j]) => {
            (*o, *j) == (org, job) && about("job", job)
        }
        ("PATCH", ["api", "v1", "organization", o, "job", j, "step", s]) => {
            (*o, *j, *s) == (org, job, step) && about("step", step)
        }
        ("GET", ["api", "v1", "organization", o, "workspace", w, "history"]) => {
            // `filter[history]=jobReference=='412'`, as forms encode it.
            let filter = format!("filter%5Bhistory%5D=jobReference%3D%3D%27{job}%27");
            (*o, *w) == (org, workspace) && request.query == filter
        }
        ("POST", ["api", "v1", "organization", o, "workspace", w, "history"]) => {
            let reference = &body["data"]["attributes"]["jobReference"];
            (*o, *w) == (org, workspace) && reference == job
        }
        ("GET" | "POST", ["context", "v1", j]) => *j == job,
        ("POST", ["logs", j, "setup-consumer-groups"]) => *j == job,
        ("POST", ["logs"]) => {
            let lines = body["data"].as_array();
            lines.is_some_and(|lines| {
                let mut lines = lines.iter();
                let number = job.parse::<u64>().ok();
                lines.all(|line| line["jobId"].as_u64() == number && line["stepId"] == step)
            })
        }
        (
            "GET",
            [
                "remote",
                "tfe",
                "v2",
                "configuration-versions",
                _,
                "terraformContent.tar.gz",
            ],
        ) => data
            .source
            .as_deref()
            .is_some_and(|source| source.ends_with(path)),
        _ => false,
    }
}

fn read<T: DeserializeOwned>(request: &Request) -> Result<T, Problem> {
    serde_json::from_slice(&request.body)
        .map_err(|error| Problem::new(Code::RequestInvalid, error.to_string()))
}

fn json(document: &impl Serialize) -> Response {
    let text = serde_json::to_vec(document).unwrap();
    Response::new(200, text).with_header("Content-Type", "application/json")
}
