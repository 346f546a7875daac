//! Ports for programs that have to be told theirs.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

/// A port of loopback that is given to nobody else while this lives, whether a program listens on it or not: one that
/// ends may be started on it again, and as long as none is there connections are refused.
///
/// It is bound and not listened on. Whoever binds this very port, and with `SO_REUSEADDR` as servers do, may have it
/// all the same; who takes any port there is gets another.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _kept: TcpSocket,
}

impl Port {
    /// Keeps a free one.
    ///
    /// # Errors
    /// Fails when there is none.
    pub fn keep() -> io::Result<Self> {
        let kept = TcpSocket::new_v4()?;
        kept.set_reuseaddr(true)?;
        kept.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        Ok(Self {
            number: kept.local_addr()?.port(),
            _kept: kept,
        })
    }

    /// Its number.
    pub const fn number(&self) -> u16 {
        self.number
    }

    /// `127.0.0.1:port`
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.number))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_port_is_there_for_one_server_after_the_other_and_for_nobody_else() {
        let port = Port::keep().unwrap();
        for _ in 0..2 {
            let refused = TcpStream::connect(port.address()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
            let server = TcpListener::bind(port.address()).unwrap();
            TcpStream::connect(port.address()).unwrap();
            drop(server);
        }
        // More than half of all there are.
        let others: Vec<_> = (0..500)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let taken = |other: &TcpListener| other.local_addr().unwrap() == port.address();
        assert!(!others.iter().any(taken));
    }
}
