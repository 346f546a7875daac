//! The way to the clouds: an HTTPS proxy that answers for their hosts with a certificate of its own and passes
//! what it hears on to servers on loopback. Programs under test keep their real addresses.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::thread::JoinHandle;

use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

/// A running proxy.
#[derive(Debug)]
pub struct Clouds {
    address: SocketAddr,
    folder: TempDir,
    asked: Arc<Mutex<Vec<String>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

type Routes = Vec<(String, SocketAddr)>;

impl Clouds {
    /// Starts a proxy that leads these hosts to these servers, and refuses all others.
    ///
    /// # Errors
    /// Fails when no certificate can be made or no port had.
    pub fn start(routes: &[(&str, SocketAddr)]) -> io::Result<Self> {
        let routes: Routes = routes
            .iter()
            .map(|(host, server)| ((*host).to_owned(), *server))
            .collect();
        let folder = tempfile::tempdir()?;
        let config = certified(&routes, &folder.path().join("ca.pem"))?;
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&asked);
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    _ = accept(listener, config, routes, seen) => {}
                }
            });
        });
        Ok(Self {
            address,
            folder,
            asked,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// What a program has to find in its environment to take this way.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        [
            ("HTTPS_PROXY", format!("http://{}", self.address)),
            ("SSL_CERT_FILE", self.certificate().display().to_string()),
        ]
    }

    fn certificate(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Hosts that were asked for.
    pub fn asked(&self) -> Vec<String> {
        self.asked
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Clouds {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn certified(routes: &Routes, pem: &Path) -> io::Result<Arc<ServerConfig>> {
    let hosts: Vec<_> = routes.iter().map(|(host, _)| host.clone()).collect();
    let signed = rcgen::generate_simple_self_signed(hosts).map_err(io::Error::other)?;
    std::fs::write(pem, signed.cert.pem())?;
    let key = PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], PrivateKeyDer::Pkcs8(key))
        .map_err(io::Error::other)?;
    Ok(Arc::new(config))
}

async fn accept(
    listener: std::net::TcpListener,
    config: Arc<ServerConfig>,
    routes: Routes,
    asked: Arc<Mutex<Vec<String>>>,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let (acceptor, routes) = (TlsAcceptor::from(config), Arc::new(routes));
    loop {
        let (client, _) = listener.accept().await?;
        let (acceptor, routes, asked) = (acceptor.clone(), Arc::clone(&routes), Arc::clone(&asked));
        // A peer that goes away in the middle is the peer's business.
        tokio::spawn(async move { drop(lead(client, acceptor, &routes, &asked).await) });
    }
}

async fn lead(
    client: TcpStream,
    acceptor: TlsAcceptor,
    routes: &Routes,
    asked: &Mutex<Vec<String>>,
) -> io::Result<()> {
    let mut client = BufReader::new(client);
    let mut first = String::new();
    client.read_line(&mut first).await?;
    // The rest of the head says nothing that matters.
    loop {
        let mut line = String::new();
        if client.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if line.trim_end().is_empty() {
            break;
        }
    }
    let host = first
        .strip_prefix("CONNECT ")
        .and_then(|rest| rest.split(':').next())
        .unwrap_or_default();
    asked
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .push(host.to_owned());
    let Some((_, server)) = routes.iter().find(|(known, _)| known == host) else {
        return client.write_all(b"HTTP/1.1 502 No\r\n\r\n").await;
    };
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    let mut client = acceptor.accept(client).await?;
    let mut server = TcpStream::connect(server).await?;
    copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}
