//! What a proxy of calls does: it reads HTTP/1.1, notes each call, and asks the rules before it passes a request or a response on.
//!
//! A request is read to its end first. So is a response with a known length; another one passes as it comes. Each request has a
//! connection of its own to the server, which ends if the client goes away.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use http_body_util::{BodyExt as _, Collected, Either, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1::handshake;
use hyper::header::{CONNECTION, HeaderValue, TRANSFER_ENCODING};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::{Proxy, Shared, lock};
use crate::http::{Request, Response};

/// Headers that are about one connection, or that depend on how the body is sent.
const OF_CONNECTION: [&str; 4] = [
    "connection",
    "content-length",
    "expect",
    "transfer-encoding",
];

type Answer = hyper::Response<Either<Full<Bytes>, Incoming>>;

/// Where a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// It was sent, and the server does not have it.
    Sent,
    /// The server has done it, and the caller does not know.
    Answered,
}

/// A call as it was made.
#[derive(Clone, Debug)]
pub struct Call {
    /// Its method and path, without ids: `POST /tasks/{}/accept`.
    pub class: String,
    /// Its number in its class. The first one has number 1.
    pub number: usize,
    /// What was sent.
    pub request: Request,
    /// The status of the server's response. Zero if there is none.
    pub status: u16,
    /// The body of that response, if its length was known.
    pub answer: Vec<u8>,
}

impl Call {
    /// Where it is.
    pub fn moment(&self) -> Moment {
        match self.status {
            0 => Moment::Sent,
            _ => Moment::Answered,
        }
    }

    /// Whether it is this call of a class, at this moment.
    pub fn is(&self, class: &str, number: usize, moment: Moment) -> bool {
        (&*self.class, self.number, self.moment()) == (class, number, moment)
    }

    /// The body of the request.
    pub fn body(&self) -> String {
        String::from_utf8_lossy(&self.request.body).into_owned()
    }

    /// Whether this id is in the request.
    pub fn is_about(&self, id: &str) -> bool {
        let Request {
            path,
            query,
            headers,
            ..
        } = &self.request;
        let mut texts = headers.iter().map(|(_, value)| value).chain([path, query]);
        texts.any(|text| text.contains(id)) || self.body().contains(id)
    }
}

/// What happens to a call.
#[derive(Debug)]
pub enum Fate {
    /// The connections end.
    Drop,
    /// It goes on after this time.
    Delay(Duration),
    /// It goes on when this says so. The connections end if it cannot any more.
    Hold(oneshot::Receiver<()>),
    /// The client gets this response.
    Answer(Response),
    /// Of a call that was answered: the request arrives again, and the client gets the second response.
    Repeat,
}

impl Fate {
    /// The page of a gateway that wants a password, with status 200.
    pub fn page() -> Self {
        let page = Response::new(200, "<!doctype html><title>Please sign in</title>");
        Self::Answer(page.with_header("Content-Type", "text/html"))
    }
}

/// A call that is held. If this is dropped, its connections end.
#[derive(Debug)]
pub struct Held(oneshot::Sender<()>);

impl Held {
    /// The call goes on.
    pub fn release(self) {
        // The caller may have gone.
        let _ = self.0.send(());
    }
}

/// The calls so far, and the rules for them.
#[derive(Debug, Default)]
pub(super) struct Calls {
    made: Vec<Call>,
    counts: HashMap<String, usize>,
    rules: Vec<Rule>,
}

type Decide = dyn FnMut(&Call) -> Option<Fate> + Send;

struct Rule {
    left: usize,
    decide: Box<Decide>,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rule for {} calls", self.left)
    }
}

impl Proxy {
    /// Listens on a free port, reads HTTP, and passes each call on to the next server. Without one, connections end without a
    /// response.
    pub fn of_calls(servers: &[SocketAddr]) -> io::Result<Self> {
        Self::listen(servers, Some(Mutex::default()))
    }

    fn known(&self) -> MutexGuard<'_, Calls> {
        self.shared.calls()
    }

    /// All calls so far.
    pub fn calls(&self) -> Vec<Call> {
        self.known().made.clone()
    }

    /// Decides what happens to the next `times` calls for which it returns something. It sees each call at both moments, before
    /// it goes on. The oldest rule that returns something decides. A rule must not use the proxy.
    pub fn rule(&self, times: usize, decide: impl FnMut(&Call) -> Option<Fate> + Send + 'static) {
        self.known().rules.push(Rule {
            left: times,
            decide: Box::new(decide),
        });
    }

    /// How many rules have calls left to decide on.
    pub fn rules_left(&self) -> usize {
        self.known().rules.len()
    }

    /// Removes all rules. Calls that are held stay held.
    pub fn remove_rules(&self) {
        self.known().rules.clear();
    }

    /// Holds the next call of which this is true.
    pub fn hold(&self, is_it: impl Fn(&Call) -> bool + Send + 'static) -> oneshot::Receiver<Held> {
        let (caught, held) = oneshot::channel();
        let mut caught = Some(caught);
        self.rule(1, move |call| {
            let caught = if is_it(call) { caught.take() } else { None };
            let (release, released) = oneshot::channel();
            // Without a receiver the test does not wait any more.
            let _ = caught?.send(Held(release));
            Some(Fate::Hold(released))
        });
        held
    }

    /// Makes a call again, past the rules, and returns status and body of the response.
    pub async fn repeat(&self, call: &Call) -> io::Result<(u16, String)> {
        let response = self.shared.ask(&call.request).await?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await;
        let body = body.map_err(io::Error::other)?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }
}

/// Passes on the calls of one connection.
pub(super) async fn converse(client: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let service = service_fn(|request| Arc::clone(shared).pass(request));
    let serving = http1::Builder::new().serve_connection(TokioIo::new(client), service);
    serving.await.map_err(io::Error::other)
}

impl Shared {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        lock(self.calls.as_ref().expect("a proxy of calls"))
    }

    async fn pass(self: Arc<Self>, request: hyper::Request<Incoming>) -> io::Result<Answer> {
        let request = read(request).await?;
        let at = self.note(&request);
        if let Some(other) = self.meet(at, &request).await? {
            return Ok(other);
        }
        let response = self.ask(&request).await?;
        self.note_answer(at, &response).await;
        let other = self.meet(at, &request).await?;
        Ok(other.unwrap_or(response))
    }

    fn note(&self, request: &Request) -> usize {
        let mut calls = self.calls();
        let class = class(&request.method, &request.path);
        let number = calls.counts.entry(class.clone()).or_default();
        *number += 1;
        let call = Call {
            class,
            number: *number,
            request: request.clone(),
            status: 0,
            answer: Vec::new(),
        };
        calls.made.push(call);
        calls.made.len() - 1
    }

    async fn note_answer(&self, at: usize, response: &Answer) {
        let body = match response.body() {
            Either::Left(whole) => whole.clone().collect().await.map(Collected::to_bytes),
            Either::Right(_) => Ok(Bytes::new()),
        };
        let call = &mut self.calls().made[at];
        call.status = response.status().as_u16();
        call.answer = body.unwrap_or_default().to_vec();
    }

    /// What a rule does to a call. Returns the response to send, if that is not the server's own.
    async fn meet(&self, at: usize, request: &Request) -> io::Result<Option<Answer>> {
        let fate = self.calls().decide(at);
        let cut = || io::Error::from(io::ErrorKind::ConnectionReset);
        match fate {
            None => {}
            Some(Fate::Drop) => return Err(cut()),
            Some(Fate::Delay(time)) => tokio::time::sleep(time).await,
            Some(Fate::Hold(released)) => released.await.map_err(|_| cut())?,
            Some(Fate::Answer(response)) => return whole(response).map(Some),
            Some(Fate::Repeat) => return self.ask(request).await.map(Some),
        }
        Ok(None)
    }

    async fn ask(&self, request: &Request) -> io::Result<Answer> {
        let server = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = handshake(server).await.map_err(io::Error::other)?;
        // It ends with the response.
        tokio::spawn(connection);
        let response = sender.send_request(outgoing(request)?).await;
        let (mut head, body) = response.map_err(io::Error::other)?.into_parts();
        head.headers.remove(CONNECTION);
        head.headers.remove(TRANSFER_ENCODING);
        let body = match body.size_hint().exact() {
            Some(_) => Either::Left(Full::new(read_body(body).await?)),
            None => Either::Right(body),
        };
        Ok(hyper::Response::from_parts(head, body))
    }
}

impl Calls {
    fn decide(&mut self, at: usize) -> Option<Fate> {
        let call = &self.made[at];
        let mut rules = self.rules.iter_mut().enumerate();
        let (index, fate) = rules.find_map(|(index, rule)| Some((index, (rule.decide)(call)?)))?;
        self.rules[index].left -= 1;
        if self.rules[index].left == 0 {
            self.rules.remove(index);
        }
        Some(fate)
    }
}

async fn read_body(body: Incoming) -> io::Result<Bytes> {
    let body = body.collect().await.map_err(io::Error::other)?;
    Ok(body.to_bytes())
}

async fn read(request: hyper::Request<Incoming>) -> io::Result<Request> {
    let (head, body) = request.into_parts();
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let headers = head.headers.iter();
    Ok(Request {
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        headers: headers
            .map(|(name, value)| (name.to_string(), text(value)))
            .collect(),
        body: read_body(body).await?.to_vec(),
    })
}

fn outgoing(request: &Request) -> io::Result<hyper::Request<Full<Bytes>>> {
    let mut outgoing = hyper::Request::builder()
        .method(&*request.method)
        .uri(request.target());
    for (name, value) in &request.headers {
        // The client of `hyper` does not say that a body is empty.
        let says_empty = name == "content-length" && value == "0";
        if says_empty || !OF_CONNECTION.contains(&&**name) {
            outgoing = outgoing.header(name, value);
        }
    }
    let body = Full::from(request.body.clone());
    outgoing.body(body).map_err(io::Error::other)
}

fn whole(response: Response) -> io::Result<Answer> {
    let mut whole = hyper::Response::builder().status(response.status);
    for (name, value) in response.headers {
        whole = whole.header(name, value);
    }
    let body = Either::Left(Full::from(response.body));
    whole.body(body).map_err(io::Error::other)
}

/// `POST …/tasks/{}/leases/{}/accept`, say.
fn class(method: &str, path: &str) -> String {
    let is_id = |part: &str| {
        part.bytes().all(|byte| byte.is_ascii_digit()) || part.len() >= 20 && part.contains('-')
    };
    let parts = path.split('/').skip(1);
    let parts: Vec<&str> = parts
        .map(|part| if is_id(part) { "{}" } else { part })
        .collect();
    format!("{method} /{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;
    use crate::http::{Server, ask};

    fn server() -> Server {
        Server::start(|request| Response::new(200, request.path.clone())).unwrap()
    }

    fn get(proxy: &Proxy, path: &str) -> Option<(u16, String)> {
        let answer = ask(proxy.address(), "GET", path, &[], b"");
        answer.ok().filter(|(status, _)| *status != 0)
    }

    #[tokio::test]
    async fn each_fate_does_what_it_says_on_the_side_that_it_says() {
        let server = server();
        let proxy = Proxy::of_calls(&[server.address()]).unwrap();
        let wait = Duration::from_millis(20);
        for (moment, fate, answer, times) in [
            (Moment::Sent, Fate::Drop, None, 0),
            (Moment::Answered, Fate::Drop, None, 1),
            (
                Moment::Sent,
                Fate::Answer(Response::new(418, "own")),
                Some((418, "own")),
                0,
            ),
            (
                Moment::Answered,
                Fate::Answer(Response::new(418, "own")),
                Some((418, "own")),
                1,
            ),
            (Moment::Sent, Fate::Delay(wait), Some((200, "/1")), 1),
            (Moment::Answered, Fate::Delay(wait), Some((200, "/1")), 1),
            (Moment::Answered, Fate::Repeat, Some((200, "/1")), 2),
        ] {
            let name = format!("{moment:?}: {fate:?}");
            let before = server.requests().len();
            let mut fate = Some(fate);
            proxy.rule(1, move |call| {
                (call.moment() == moment).then(|| fate.take())?
            });
            let found = get(&proxy, "/1");
            let found = found.as_ref().map(|(status, body)| (*status, &**body));
            assert_eq!(
                (found, server.requests().len() - before),
                (answer, times),
                "{name}"
            );
            assert_eq!(proxy.rules_left(), 0, "{name}");
        }
        let calls = proxy.calls();
        assert!(calls.iter().all(|call| call.class == "GET /{}"));
        assert_eq!(calls.last().unwrap().number, 7);
        assert_eq!(calls.iter().filter(|call| call.status == 200).count(), 5);
        let again = proxy.repeat(&calls[0]).await.unwrap();
        assert_eq!(again, (200, "/1".to_owned()));
    }

    #[test]
    fn a_call_that_is_held_goes_on_when_it_is_released_and_ends_when_it_is_not() {
        let server = server();
        let proxy = Arc::new(Proxy::of_calls(&[server.address()]).unwrap());
        for moment in [Moment::Sent, Moment::Answered] {
            for is_released in [true, false] {
                let before = server.requests().len();
                let number = proxy.calls().len() + 2;
                let held = proxy.hold(move |call| call.is("GET /a", number, moment));
                assert!(get(&proxy, "/a").is_some());
                let caller = Arc::clone(&proxy);
                let caller = std::thread::spawn(move || get(&caller, "/a"));
                let held = held.blocking_recv().unwrap();
                let seen = usize::from(moment == Moment::Answered);
                assert_eq!(server.requests().len() - before, 1 + seen);
                if is_released {
                    held.release();
                } else {
                    drop(held);
                }
                assert_eq!(caller.join().unwrap().is_some(), is_released, "{moment:?}");
            }
        }
    }

    #[test]
    fn a_response_without_a_length_passes_as_it_comes_and_the_server_sees_the_client_go() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::of_calls(&[listener.local_addr().unwrap()]).unwrap();
        let mut client = std::net::TcpStream::connect(proxy.address()).unwrap();
        client
            .write_all(b"GET /logs HTTP/1.1\r\nHost: a\r\n\r\n")
            .unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let until = |stream: &mut std::net::TcpStream, end: &str| {
            let (mut text, mut byte) = (Vec::new(), [0]);
            while !text.ends_with(end.as_bytes()) {
                stream.read_exact(&mut byte).unwrap();
                text.push(byte[0]);
            }
        };
        until(&mut server, "\r\n\r\n");
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        server.write_all(head.as_bytes()).unwrap();
        for line in ["one", "two"] {
            server
                .write_all(format!("3\r\n{line}\r\n").as_bytes())
                .unwrap();
            until(&mut client, line);
        }
        drop(client);
        assert_eq!(server.read(&mut [0]).unwrap_or(0), 0);
    }
}
