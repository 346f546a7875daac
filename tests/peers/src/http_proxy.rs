//! A reverse proxy for HTTP that refuses chosen requests, answers them with errors until the test ends that, or holds them. Unlike
//! [`crate::proxy`] it names a host of its own to the server, so that signatures of requests to S3 stay valid.

use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::http::{Request, Response, Server, pass_on};
use crate::wait::DEADLINE;

/// The proxy. It forwards every request without a rule.
#[derive(Debug)]
pub struct HttpProxy {
    server: Server,
    rules: Arc<Mutex<Vec<Rule>>>,
}

#[derive(Debug)]
struct Rule {
    method: &'static str,
    path: fn(&str) -> bool,
    what: What,
}

#[derive(Debug)]
enum What {
    /// Refuse so many requests.
    Refuse(usize),
    /// Answer with an error until the value is gone.
    Fail(Weak<()>),
    /// Hold one request until the sender is gone.
    Hold(Sender<()>, Receiver<()>),
}

/// A request that the proxy holds. On drop the proxy answers it with an error and does not forward it.
#[derive(Debug)]
pub struct Held {
    came: Receiver<()>,
    _open: Sender<()>,
}

impl Held {
    /// Waits until the request has arrived.
    ///
    /// # Panics
    /// When it does not arrive in time.
    pub fn wait(&self) {
        self.came
            .recv_timeout(DEADLINE)
            .expect("the request to hold did not arrive");
    }
}

/// Requests of a kind fail as long as this value exists.
#[derive(Debug)]
pub struct Failing {
    _that: Arc<()>,
}

impl HttpProxy {
    /// A proxy to the server at this address. The forwarded `Host` header is `host`.
    ///
    /// # Errors
    /// Fails when it cannot listen.
    pub fn to(server: SocketAddr, host: &str) -> io::Result<Self> {
        let rules = Arc::<Mutex<Vec<Rule>>>::default();
        let (known, host) = (Arc::clone(&rules), host.to_owned());
        let server = Server::start(move |request| match refusal(&known, request) {
            Some(answer) => answer,
            None => pass_on(request, server, &host)
                .unwrap_or_else(|error| Response::new(502, error.to_string())),
        })?;
        Ok(Self { server, rules })
    }

    /// Address of the proxy.
    pub fn url(&self) -> String {
        format!("http://{}", self.server.address())
    }

    /// Refuses the next requests of this method to matching paths.
    pub fn refuse(&self, method: &'static str, path: fn(&str) -> bool, times: usize) {
        lock(&self.rules).push(Rule {
            method,
            path,
            what: What::Refuse(times),
        });
    }

    /// Answers 503 to requests of this method to matching paths, until the value is dropped.
    #[must_use]
    pub fn fail(&self, method: &'static str, path: fn(&str) -> bool) -> Failing {
        let that = Arc::new(());
        lock(&self.rules).push(Rule {
            method,
            path,
            what: What::Fail(Arc::downgrade(&that)),
        });
        Failing { _that: that }
    }

    /// Holds the next request of this method to a matching path.
    pub fn hold(&self, method: &'static str, path: fn(&str) -> bool) -> Held {
        let ((tell, came), (open, opened)) = (channel(), channel());
        lock(&self.rules).push(Rule {
            method,
            path,
            what: What::Hold(tell, opened),
        });
        Held { came, _open: open }
    }

    /// Paths of all requests of this method so far, also of those that were not forwarded.
    pub fn asked(&self, method: &str) -> Vec<String> {
        let requests = self.server.requests().into_iter();
        let asked = requests.filter(|request| request.method == method);
        asked.map(|request| request.path).collect()
    }

    /// Removes all rules. Held requests stay held.
    pub fn open(&self) {
        lock(&self.rules).clear();
    }
}

fn lock(rules: &Mutex<Vec<Rule>>) -> MutexGuard<'_, Vec<Rule>> {
    rules.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The answer to a request that is not forwarded.
fn refusal(rules: &Mutex<Vec<Rule>>, request: &Request) -> Option<Response> {
    let denied = Response::new(403, "<Error><Code>AccessDenied</Code></Error>")
        .with_header("Content-Type", "application/xml");
    let mut rules = lock(rules);
    let index = rules
        .iter()
        .position(|rule| rule.method == request.method && (rule.path)(&request.path))?;
    if let What::Refuse(times) = &mut rules[index].what {
        *times -= 1;
        if *times == 0 {
            rules.remove(index);
        }
        return Some(denied);
    }
    if let What::Fail(that) = &rules[index].what
        && that.strong_count() > 0
    {
        let busy = "<Error><Code>SlowDown</Code></Error>";
        return Some(Response::new(503, busy).with_header("Content-Type", "application/xml"));
    }
    let rule = rules.remove(index);
    drop(rules);
    if let What::Fail(..) = rule.what {
        return None;
    }
    if let What::Hold(tell, opened) = rule.what {
        // The test may wait for it no more.
        let _ = tell.send(());
        let _ = opened.recv();
    }
    Some(denied)
}
