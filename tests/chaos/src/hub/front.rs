//! The way into the store, behind the proxy that breaks connections. It sees whole requests: it keeps single writes back, so that
//! the store does them late, and notes which locks are removed.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use job_contract::encoding::hex;
use md5::{Digest as _, Md5};
use test_peers::proxy::{Call, Fate, Held, Moment, Proxy};
use tokio::sync::oneshot;

use crate::peers::lock;

/// What the name of a lock ends with.
const LOCK: &str = ".tflock";

/// A write of a workspace's state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Write {
    State,
    Lock,
}

impl Write {
    /// Whether a call is this write, before the store has it.
    fn is(self, call: &Call, workspace: &str) -> bool {
        let end = match self {
            Self::State => format!("/{workspace}/terraform.tfstate"),
            Self::Lock => format!("/{workspace}/terraform.tfstate{LOCK}"),
        };
        let request = &call.request;
        call.moment() == Moment::Sent && request.method == "PUT" && request.path.ends_with(&end)
    }
}

/// A request that removes a lock.
#[derive(Clone, Debug)]
pub(crate) struct Removal {
    pub(crate) at: SystemTime,
    path: String,
    /// What the holder of the lock has written into it.
    pub(crate) info: String,
}

/// The proxy before the store.
#[derive(Debug)]
pub(crate) struct StoreFront {
    proxy: Proxy,
    locks: Arc<Mutex<Locks>>,
}

impl StoreFront {
    /// Listens on a free port.
    pub(crate) fn start(store: SocketAddr) -> io::Result<Self> {
        let proxy = Proxy::of_calls(&[store])?;
        let locks = Arc::<Mutex<Locks>>::default();
        let inner = Arc::clone(&locks);
        // It is the oldest rule, so that it sees every call.
        proxy.rule(usize::MAX, move |call| {
            lock(&inner).note(call);
            None
        });
        Ok(Self { proxy, locks })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.proxy.address()
    }

    /// Keeps the next write of a workspace back. Its sender gets no answer, and repeats it.
    pub(crate) fn keep_back(&self, write: Write, workspace: &str) -> oneshot::Receiver<Call> {
        let (sender, kept) = oneshot::channel();
        let (mut sender, workspace) = (Some(sender), workspace.to_owned());
        self.proxy.rule(1, move |call| {
            let sender = if write.is(call, &workspace) {
                sender.take()
            } else {
                None
            };
            // Without a receiver, the fault does not wait any more.
            sender?.send(call.clone()).ok()?;
            Some(Fate::Drop)
        });
        kept
    }

    /// Lets the store do a write that was kept back.
    pub(crate) async fn pass_on(&self, late: &Call) -> io::Result<()> {
        self.proxy.repeat(late).await.map(drop)
    }

    /// Holds the next write of a workspace. Its sender waits for the answer.
    pub(crate) fn hold(&self, write: Write, workspace: &str) -> oneshot::Receiver<Held> {
        let workspace = workspace.to_owned();
        self.proxy.hold(move |call| write.is(call, &workspace))
    }

    /// The requests that remove locks of a workspace, so far.
    pub(crate) fn removals(&self, workspace: &str) -> Vec<Removal> {
        let is_its = |removal: &&Removal| removal.path.split('/').any(|part| part == workspace);
        let locks = lock(&self.locks);
        locks.removals.iter().filter(is_its).cloned().collect()
    }
}

#[derive(Debug, Default)]
struct Locks {
    /// What was written into locks, by path, in order.
    written: BTreeMap<String, Vec<String>>,
    removals: Vec<Removal>,
}

impl Locks {
    fn note(&mut self, call: &Call) {
        let request = &call.request;
        if call.moment() != Moment::Sent || !request.path.ends_with(LOCK) {
            return;
        }
        let written = self.written.entry(request.path.clone()).or_default();
        match &*request.method {
            "PUT" => written.push(call.body()),
            "DELETE" => {
                // The store removes no other lock than the one with this tag.
                let tag = request.header("if-match").map(|tag| tag.trim_matches('"'));
                let is_tagged = |info: &&String| {
                    tag.is_some_and(|tag| hex(&Md5::digest(info.as_bytes())) == tag)
                };
                let info = written.iter().find(is_tagged).or(written.last());
                self.removals.push(Removal {
                    at: SystemTime::now(),
                    path: request.path.clone(),
                    info: info.cloned().unwrap_or_default(),
                });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use test_peers::http::{Response, Server};

    use super::*;

    #[tokio::test]
    async fn a_write_is_done_late_and_a_removal_names_the_lock_with_its_tag() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::start(|_| Response::new(200, "")).unwrap();
        let front = StoreFront::start(server.address()).unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let url = |workspace: &str| {
            let store = front.address();
            format!("http://{store}/states/tfstate/o/{workspace}/terraform.tfstate{LOCK}")
        };
        let put = |info: &'static str| client.put(url("w")).body(info).send();
        let kept = front.keep_back(Write::Lock, "w");
        assert!(client.put(url("v")).body("other").send().await.is_ok());
        assert!(put("one").await.is_err());
        assert!(put("one").await.is_ok());
        assert!(put("two").await.is_ok());
        assert_eq!(server.requests().len(), 3);
        front.pass_on(&kept.await.unwrap()).await.unwrap();
        let late = server.requests().pop().unwrap();
        assert_eq!((&*late.method, &*late.body), ("PUT", &b"one"[..]));

        let tag = format!("\"{}\"", hex(&Md5::digest("one")));
        let remove = || client.delete(url("w"));
        remove().header("if-match", tag).send().await.unwrap();
        remove().send().await.unwrap();
        let removals = front.removals("w").into_iter();
        let infos: Vec<String> = removals.map(|removal| removal.info).collect();
        assert_eq!(infos, ["one", "two"]);
        assert!(front.removals("v").is_empty());
    }
}
