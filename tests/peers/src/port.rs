//! A reserved port of loopback. A server can be started and stopped on it, and no other test gets the port.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

/// A reserved port. It is free again on drop.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    // This socket is bound and never listens, so connections are refused. The system does not choose this port for others. A
    // server that binds it by number with `SO_REUSEADDR` gets it.
    _held: TcpSocket,
}

impl Port {
    /// Reserves a free port.
    ///
    /// # Errors
    /// Fails when there is none.
    pub fn take() -> io::Result<Self> {
        let held = TcpSocket::new_v4()?;
        held.set_reuseaddr(true)?;
        held.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        Ok(Self {
            address: held.local_addr()?,
            _held: held,
        })
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.address.port()
    }

    /// Where a server on it is reached.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::wait;

    /// Waits until nobody listens there. A child that another test starts has the listener too, until it executes its
    /// program: until then connections are accepted, or reset when it ends.
    pub(crate) fn until_refused(address: SocketAddr) {
        wait::until_blocking("connections are refused", || {
            match TcpStream::connect(address) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
                found => Err(format!("{found:?}")),
            }
        });
    }

    #[test]
    fn a_taken_port_refuses_connections_and_is_not_given_out_again() {
        let port = Port::take().unwrap();
        until_refused(port.address());
        for _ in 0..2 {
            let server = TcpListener::bind(port.address()).unwrap();
            let client = TcpStream::connect(port.address()).unwrap();
            drop((server.accept().unwrap(), client, server));
            until_refused(port.address());
        }
        // As long as the system has others.
        let others: Vec<_> = (0..500)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let taken = |other: &TcpListener| other.local_addr().unwrap() == port.address();
        assert!(!others.iter().any(taken));
    }
}
