//! Faults that tests order: the next requests of a kind go wrong in a given way.

use std::sync::{Mutex, PoisonError};

use super::recorder::Request;

/// How a request goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// 429 with `Retry-After` in seconds.
    TooManyRequests(u64),
    /// 500 before anything was done.
    InternalError,
    /// 503 before anything was done.
    Unavailable,
    /// The resource version is too old: 410, and for a watch an event that says so, which ends it.
    Expired,
    /// No answer until the client goes away.
    Hang,
    /// The connection ends before anything was done.
    DropBefore,
    /// The connection ends after the work was done, before the answer.
    DropAfter,
}

#[derive(Debug)]
struct Order {
    left: usize,
    verb: String,
    resource: String,
    identity: Option<String>,
    fault: Fault,
}

/// The faults ordered and not yet used up.
#[derive(Debug, Default)]
pub struct Faults(Mutex<Vec<Order>>);

impl Faults {
    /// The next `count` requests `verb` on `resource` (`jobs`, `pods/log`; `*` is any) go wrong. The requests of the
    /// cluster's own controllers are not touched.
    pub fn next(&self, count: usize, verb: &str, resource: &str, fault: Fault) {
        self.order(count, None, verb, resource, fault);
    }

    /// As [`Faults::next`], for the requests of one identity only.
    pub fn next_of(&self, identity: &str, count: usize, verb: &str, resource: &str, fault: Fault) {
        self.order(count, Some(identity.to_owned()), verb, resource, fault);
    }

    fn order(
        &self,
        left: usize,
        identity: Option<String>,
        verb: &str,
        resource: &str,
        fault: Fault,
    ) {
        let order = Order {
            left,
            verb: verb.to_owned(),
            resource: resource.to_owned(),
            identity,
            fault,
        };
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(order);
    }

    /// How many requests are still to go wrong.
    pub fn left(&self) -> usize {
        let orders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        orders.iter().map(|order| order.left).sum()
    }

    /// Forgets every fault.
    pub fn clear(&self) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    pub(crate) fn take(&self, request: &Request) -> Option<Fault> {
        let resource = if request.subresource.is_empty() {
            request.resource.clone()
        } else {
            format!("{}/{}", request.resource, request.subresource)
        };
        let fits = |wanted: &str, is: &str| wanted == "*" || wanted == is;
        let mut orders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = orders.iter().position(|order| {
            fits(&order.verb, &request.verb)
                && fits(&order.resource, &resource)
                && match &order.identity {
                    Some(identity) => *identity == request.identity,
                    None => request.identity != crate::CONTROLLERS,
                }
        })?;
        orders[at].left -= 1;
        let fault = orders[at].fault.clone();
        if orders[at].left == 0 {
            orders.remove(at);
        }
        Some(fault)
    }
}
