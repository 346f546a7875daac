//! The places of connections. A client address has a share of them, so that one client cannot take all. A connection
//! that needs a place when none is free gets that of an idle one, which a client can open again.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio_util::sync::CancellationToken;

/// The places of a listener.
#[derive(Debug)]
pub(super) struct Places {
    /// The most connections.
    total: usize,
    /// Those of one client address.
    each: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Numbers connections, and moments at which they became idle.
    next: u64,
    connections: HashMap<u64, Connection>,
    peers: HashMap<IpAddr, Peer>,
}

#[derive(Debug)]
struct Connection {
    peer: IpAddr,
    requests: usize,
    /// Since when it is idle.
    idle: Option<u64>,
    closing: CancellationToken,
}

/// The connections of one address.
#[derive(Debug, Default)]
struct Peer {
    open: usize,
    /// The idle ones, the oldest first.
    idle: BTreeMap<u64, u64>,
}

/// The place of a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    id: u64,
    closing: CancellationToken,
    had_request: AtomicBool,
}

/// A request in progress, until it is dropped.
#[derive(Debug)]
pub(super) struct Busy(Arc<Place>);

impl Places {
    pub(super) fn new(total: usize, each: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            each,
            state: Mutex::default(),
        })
    }

    /// Returns a place for a connection from this address, or `None` if all of its places are busy.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let peer = network(address);
        let mut state = self.lock();
        let of_peer = state.peers.get(&peer).map_or(0, |peer| peer.open);
        if of_peer >= self.each {
            state.close_idle(peer)?;
        } else if state.connections.len() >= self.total {
            let with_idle = state.peers.iter().filter(|(_, peer)| !peer.idle.is_empty());
            let (largest, _) = with_idle.max_by_key(|(_, peer)| peer.open)?;
            let largest = *largest;
            state.close_idle(largest)?;
        }
        let id = state.number();
        let closing = CancellationToken::new();
        let connection = Connection {
            peer,
            requests: 0,
            idle: None,
            closing: closing.clone(),
        };
        state.connections.insert(id, connection);
        state.peers.entry(peer).or_default().open += 1;
        state.set_idle(id);
        Some(Place {
            places: Arc::clone(self),
            id,
            closing,
            had_request: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        runtime::lock(&self.state)
    }

    /// Returns how many places are taken.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.lock().connections.len()
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn set_idle(&mut self, id: u64) {
        let now = self.number();
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.idle = Some(now);
            let peer = self.peers.entry(connection.peer).or_default();
            peer.idle.insert(now, id);
        }
    }

    fn begin_request(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.requests += 1;
        if let (Some(since), Some(peer)) =
            (connection.idle.take(), self.peers.get_mut(&connection.peer))
        {
            peer.idle.remove(&since);
        }
    }

    fn end_request(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.requests -= 1;
        if connection.requests == 0 {
            self.set_idle(id);
        }
    }

    /// Closes the connection of this address that has been idle longest.
    fn close_idle(&mut self, peer: IpAddr) -> Option<()> {
        let (_, id) = self.peers.get(&peer)?.idle.first_key_value()?;
        self.remove(*id)?.closing.cancel();
        Some(())
    }

    fn remove(&mut self, id: u64) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        if let Some(peer) = self.peers.get_mut(&connection.peer) {
            peer.open -= 1;
            if let Some(since) = connection.idle {
                peer.idle.remove(&since);
            }
            if peer.open == 0 {
                self.peers.remove(&connection.peer);
            }
        }
        Some(connection)
    }
}

impl Place {
    /// Marks the connection as busy. It is idle again once the request is over.
    pub(super) fn begin_request(self: &Arc<Self>) -> Busy {
        self.had_request.store(true, Ordering::Relaxed);
        self.places.lock().begin_request(self.id);
        Busy(Arc::clone(self))
    }

    /// Returns whether a whole head of a request has come.
    pub(super) fn had_request(&self) -> bool {
        self.had_request.load(Ordering::Relaxed)
    }

    /// Returns once another connection has got the place.
    pub(super) async fn lost(&self) {
        self.closing.cancelled().await;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.places.lock().end_request(self.0.id);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().remove(self.id);
    }
}

/// Returns what counts as one client: an IPv4 address, or the /64 that one IPv6 host can have alone.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let bits = u128::from(address) >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from(bits))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn enter(places: &Arc<Places>, last: u8) -> Option<Arc<Place>> {
        places.enter(ip(last)).map(Arc::new)
    }

    fn is_lost(place: &Place) -> bool {
        place.closing.is_cancelled()
    }

    #[test]
    fn a_client_at_its_share_loses_its_connection_that_was_idle_longest() {
        let places = Places::new(10, 2);
        let [first, second] = [1, 1].map(|client| enter(&places, client).unwrap());
        let other = enter(&places, 2).unwrap();
        // The first is idle for a shorter time than the second.
        drop(first.begin_request());
        let third = enter(&places, 1).unwrap();
        assert!(is_lost(&second) && !is_lost(&first) && !is_lost(&other));
        let _requests = [first.begin_request(), third.begin_request()];
        assert!(enter(&places, 1).is_none(), "busy connections stay");
        assert!(enter(&places, 2).is_some(), "others have their share");
    }

    #[test]
    fn when_all_places_are_taken_the_client_with_most_loses_one() {
        let places = Places::new(4, 3);
        let many = [1, 1, 1].map(|client| enter(&places, client).unwrap());
        let few = enter(&places, 2).unwrap();
        let new = enter(&places, 3).unwrap();
        assert!(is_lost(&many[0]) && !is_lost(&few));
        let all = [&many[1], &many[2], &few, &new];
        let _requests = all.map(Place::begin_request);
        assert!(enter(&places, 4).is_none());
        assert_eq!(places.taken(), 4);
    }

    #[test]
    fn a_connection_is_busy_until_its_last_request_is_over_and_then_leaves_nothing() {
        let places = Places::new(1, 1);
        let place = enter(&places, 1).unwrap();
        assert!(!place.had_request());
        let [one, two] = [(); 2].map(|()| place.begin_request());
        assert!(place.had_request());
        drop(one);
        assert!(enter(&places, 1).is_none());
        drop(two);
        let next = enter(&places, 1).unwrap();
        assert!(is_lost(&place));
        // What the lost connection still does counts no more.
        drop(place.begin_request());
        drop(place);
        assert_eq!(places.taken(), 1);
        drop(next);
        let state = places.lock();
        assert!(state.connections.is_empty() && state.peers.is_empty());
    }

    #[rstest]
    #[case("192.0.2.1", "192.0.2.1")]
    #[case("::ffff:192.0.2.1", "192.0.2.1")]
    #[case("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::")]
    #[case("::1", "::")]
    fn hosts_of_a_network_of_ipv6_count_as_one(#[case] address: &str, #[case] expected: &str) {
        assert_eq!(network(address.parse().unwrap()).to_string(), expected);
    }
}
