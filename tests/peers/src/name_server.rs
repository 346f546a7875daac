//! A name server on loopback that knows no name and keeps what it was asked for, and a program that asks no other.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

const PORT: u16 = 53;
/// Larger than any question of a resolver.
const MAX_PACKET_BYTES: usize = 4096;
const HEADER_BYTES: usize = 12;
/// An answer that says: there is no such name.
const NO_SUCH_NAME: [u8; 2] = [0x81, 0x83];
/// Mounts the file over the system's, for this program and what it starts. `$0` is the file.
const MOUNT: &str = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";

/// A running server.
#[derive(Debug)]
pub struct NameServer {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    answering: Option<JoinHandle<()>>,
}

impl NameServer {
    /// Starts one. Only root may listen on the port of name servers, and give a program another one than the system's.
    ///
    /// # Errors
    /// Says what is missing here.
    pub fn start() -> Result<Self, String> {
        let is_possible = Command::new("unshare").args(["--mount", "true"]).output();
        if !is_possible.is_ok_and(|output| output.status.success()) {
            return Err("`unshare --mount` fails, which needs root".to_owned());
        }
        let socket = bind().map_err(|error| format!("port {PORT}: {error}"))?;
        let address = socket.local_addr().map_err(|error| error.to_string())?;
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let kept = Arc::clone(&asked);
        let answering = std::thread::spawn(move || answer(&socket, &kept));
        Ok(Self {
            address,
            asked,
            answering: Some(answering),
        })
    }

    /// The words before a program that make this its only name server. They write `file`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn words(&self, file: &Path) -> io::Result<Vec<String>> {
        let text = format!("nameserver {}\noptions attempts:1\n", self.address.ip());
        std::fs::write(file, text)?;
        let words = ["unshare", "--mount", "sh", "-c", MOUNT].map(str::to_owned);
        let file = file.display().to_string();
        Ok(words.into_iter().chain([file]).collect())
    }

    /// The names that it was asked for.
    pub fn asked(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.clone()
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        // An empty packet ends the thread.
        let sent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|socket| socket.send_to(&[], self.address));
        if let Some(answering) = self.answering.take().filter(|_| sent.is_ok()) {
            let _ = answering.join();
        }
    }
}

/// Listens at an address of its own: several tests may have a server at a time, in one process or in several.
fn bind() -> io::Result<UdpSocket> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id().wrapping_add(STARTED.fetch_add(1, Ordering::Relaxed));
        let address = u32::from(Ipv4Addr::new(127, 64, 0, 1)) + number % (1 << 22);
        match UdpSocket::bind((Ipv4Addr::from(address), PORT)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
    }
}

fn answer(socket: &UdpSocket, asked: &Mutex<Vec<String>>) {
    let mut packet = [0; MAX_PACKET_BYTES];
    while let Ok((length @ 1.., client)) = socket.recv_from(&mut packet) {
        let Some((name, end)) = question(&packet[..length]) else {
            continue;
        };
        asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(name);
        // The id and the question, and no record.
        let mut answer = packet[..end].to_vec();
        answer[2..4].copy_from_slice(&NO_SUCH_NAME);
        answer[4..HEADER_BYTES].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        // A client that has gone needs no answer.
        let _ = socket.send_to(&answer, client);
    }
}

/// The name in the question of a packet, and where the question ends.
fn question(packet: &[u8]) -> Option<(String, usize)> {
    /// Type and class follow the name.
    const REST_BYTES: usize = 4;
    let (mut labels, mut at) = (Vec::new(), HEADER_BYTES);
    loop {
        let length = usize::from(*packet.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        let label = packet.get(at..at + length)?;
        labels.push(String::from_utf8_lossy(label).into_owned());
        at += length;
    }
    let end = at + REST_BYTES;
    (end <= packet.len()).then(|| (labels.join("."), end))
}
