//! Counts the requests of an agent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A proxy of connections that counts requests.
pub(super) struct Counting {
    address: SocketAddr,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) heartbeats: usize,
    pub(super) others: usize,
}

impl Counting {
    pub(super) async fn before(hub: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = Self {
            address: listener.local_addr()?,
            counts: Arc::default(),
        };
        let counts = Arc::clone(&proxy.counts);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, hub, Arc::clone(&counts)));
            }
        });
        Ok(proxy)
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Counts from now on.
    pub(super) fn count(&self) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = Counts::default();
    }

    pub(super) fn counted(&self) -> Counts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn pass(client: TcpStream, hub: SocketAddr, counts: Arc<Mutex<Counts>>) -> Result<()> {
    let mut hub = TcpStream::connect(hub).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_hub, mut to_hub) = hub.split();
    let up = async {
        let mut piece = vec![0; 64 * 1024];
        loop {
            let length = from_client.read(&mut piece).await?;
            if length == 0 {
                return anyhow::Ok(());
            }
            // A small request comes in one piece.
            let text = String::from_utf8_lossy(&piece[..length]);
            if let Some(line) = text.lines().next()
                && line.ends_with(" HTTP/1.1")
            {
                let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
                if line.contains("/heartbeat ") {
                    counts.heartbeats += 1;
                } else {
                    counts.others += 1;
                }
            }
            to_hub.write_all(&piece[..length]).await?;
        }
    };
    let down = tokio::io::copy(&mut from_hub, &mut to_client);
    tokio::select! {
        result = up => result,
        result = down => Ok(result.map(drop)?),
    }
}
