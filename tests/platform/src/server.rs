//! The HTTP server: a port of loopback that can be closed and opened again.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::http;
use crate::platform::Shared;

const BACKLOG: u32 = 1024;

#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    /// Whether it should be open.
    wanted: watch::Sender<bool>,
    /// Whether it is open.
    open: watch::Receiver<bool>,
}

impl Server {
    pub(crate) async fn start(shared: Arc<Shared>) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (wanted, wish) = watch::channel(true);
        let (state, open) = watch::channel(true);
        tokio::spawn(run(shared, listener, address, wish, state));
        Ok(Self {
            address,
            wanted,
            open,
        })
    }

    pub(crate) fn url(&self, host: Option<&str>) -> String {
        let own = self.address.ip().to_string();
        format!("http://{}:{}", host.unwrap_or(&own), self.address.port())
    }

    pub(crate) async fn go_down(&self) {
        self.become_open(false).await;
    }

    pub(crate) async fn come_up(&self) {
        self.become_open(true).await;
    }

    async fn become_open(&self, open: bool) {
        self.wanted.send_replace(open);
        let mut state = self.open.clone();
        let reached = state.wait_for(|is_open| *is_open == open).await;
        reached.expect("the port could be taken again");
    }
}

/// Serves while the port should be open. While it is closed, the socket stays bound: connections are refused, and no other
/// process gets the port.
async fn run(
    shared: Arc<Shared>,
    mut listener: TcpListener,
    address: SocketAddr,
    mut wish: watch::Receiver<bool>,
    state: watch::Sender<bool>,
) {
    loop {
        let end = CancellationToken::new();
        state.send_replace(true);
        loop {
            tokio::select! {
                connection = listener.accept() => if let Ok((stream, _)) = connection {
                    tokio::spawn(serve(Arc::clone(&shared), stream, end.clone()));
                },
                shut = wish.wait_for(|open| !open) => match shut {
                    Ok(_) => break,
                    Err(_) => return,
                },
            }
        }
        drop(listener);
        end.cancel();
        let Ok(port) = keep(address) else {
            return;
        };
        state.send_replace(false);
        if wish.wait_for(|open| *open).await.is_err() {
            return;
        }
        match port.listen(BACKLOG) {
            Ok(again) => listener = again,
            Err(_) => return,
        }
    }
}

fn keep(address: SocketAddr) -> io::Result<TcpSocket> {
    let port = TcpSocket::new_v4()?;
    port.set_reuseaddr(true)?;
    port.bind(address)?;
    Ok(port)
}

async fn serve(shared: Arc<Shared>, stream: TcpStream, end: CancellationToken) {
    let service =
        hyper::service::service_fn(move |request| http::serve(Arc::clone(&shared), request));
    let serving =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // A client may close its connection.
        _ = serving => {}
        () = end.cancelled() => {}
    }
}
