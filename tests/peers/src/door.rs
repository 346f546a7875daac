//! A way to a server of HTTP on which requests can be refused, fail for a while, or held and never let on. Knows nothing of what is served.

use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::http::{Request, Response, Server, pass_on};

/// No test waits longer for a request.
const PATIENCE: Duration = Duration::from_secs(90);

/// An address at which a server is reached as long as nothing is said against it.
#[derive(Debug)]
pub struct Door {
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
    /// So many times.
    Refuse(usize),
    /// For so long after the first request.
    Fail(Duration, Option<Instant>),
    /// Once: told when it came, answered when its sender is gone.
    Hold(Sender<()>, Receiver<()>),
}

/// A request that is held. It is answered with an error, and never let on, when this is dropped.
#[derive(Debug)]
pub struct Held {
    came: Receiver<()>,
    _open: Sender<()>,
}

impl Held {
    /// Waits until the request has come.
    ///
    /// # Panics
    /// When it does not come.
    pub fn wait(&self) {
        self.came
            .recv_timeout(PATIENCE)
            .expect("the request that is to be held never came");
    }
}

impl Door {
    /// A door to the server at this address, which is told `host`.
    ///
    /// # Errors
    /// Fails when it cannot listen.
    pub fn to(server: SocketAddr, host: &str) -> io::Result<Self> {
        let rules = Arc::<Mutex<Vec<Rule>>>::default();
        let (known, host) = (Arc::clone(&rules), host.to_owned());
        let server = Server::start(move |request| match against(&known, request) {
            Some(answer) => answer,
            None => pass_on(request, server, &host)
                .unwrap_or_else(|error| Response::new(502, error.to_string())),
        })?;
        Ok(Self { server, rules })
    }

    /// Address of the door.
    pub fn url(&self) -> String {
        format!("http://{}", self.server.address())
    }

    /// Denies the next so many requests of this method to such paths.
    pub fn refuse(&self, method: &'static str, path: fn(&str) -> bool, times: usize) {
        lock(&self.rules).push(Rule {
            method,
            path,
            what: What::Refuse(times),
        });
    }

    /// Answers 503 to requests of this method to such paths, until so long after the first of them.
    pub fn fail_for(&self, method: &'static str, path: fn(&str) -> bool, time: Duration) {
        lock(&self.rules).push(Rule {
            method,
            path,
            what: What::Fail(time, None),
        });
    }

    /// Holds the next request of this method to such a path.
    pub fn hold(&self, method: &'static str, path: fn(&str) -> bool) -> Held {
        let ((tell, came), (open, opened)) = (channel(), channel());
        lock(&self.rules).push(Rule {
            method,
            path,
            what: What::Hold(tell, opened),
        });
        Held { came, _open: open }
    }

    /// Paths of the requests of this method so far, let on or not.
    pub fn asked(&self, method: &str) -> Vec<String> {
        let requests = self.server.requests().into_iter();
        let asked = requests.filter(|request| request.method == method);
        asked.map(|request| request.path).collect()
    }

    /// Lets everything on again that is not held.
    pub fn open(&self) {
        lock(&self.rules).clear();
    }
}

fn lock(rules: &Mutex<Vec<Rule>>) -> MutexGuard<'_, Vec<Rule>> {
    rules.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The answer to a request that is not let on.
fn against(rules: &Mutex<Vec<Rule>>, request: &Request) -> Option<Response> {
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
    if let What::Fail(time, first) = &mut rules[index].what
        && first.get_or_insert_with(Instant::now).elapsed() < *time
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
        // Whoever waits for it may have given up.
        let _ = tell.send(());
        let _ = opened.recv();
    }
    Some(denied)
}
