//! What Vault lends: credentials that it makes for the run, and the tokens that they belong to. They are renewed until the run
//! ends, and then given back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::Method;
use runtime::lock;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::client::{Client, STORE};
use super::login::VaultToken;
use crate::error::ReadError;

/// The longest time that is kept. No clock can tell all times that a server may name.
const LONGEST: Duration = Duration::from_hours(24 * 366);
/// The pause after a renewal that failed, at least.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Credentials that Vault has lent.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub(super) id: String,
    pub(super) namespace: String,
    pub(super) seconds: u64,
    pub(super) is_renewable: bool,
    pub(super) token: Arc<VaultToken>,
    pub(super) token_namespace: String,
}

/// All leases of a run.
#[derive(Debug)]
pub(super) struct Leases {
    client: Client,
    held: Mutex<Vec<Lease>>,
    renewals: Arc<Renewals>,
    keeper: Mutex<Option<AbortOnDropHandle<()>>>,
}

#[derive(Debug, Default)]
struct Renewals {
    list: Mutex<Vec<Renewal>>,
    added: Notify,
}

/// Something that is renewed.
#[derive(Clone, Debug)]
struct Renewal {
    /// `None`: the token itself.
    lease: Option<String>,
    namespace: String,
    token: Arc<VaultToken>,
    due: Instant,
    ends: Instant,
}

#[derive(Default, Deserialize)]
struct Renewed {
    #[serde(default)]
    lease_duration: u64,
    auth: Option<RenewedToken>,
}

#[derive(Deserialize)]
struct RenewedToken {
    lease_duration: u64,
}

impl Renewal {
    fn new(lease: Option<String>, namespace: &str, token: &Arc<VaultToken>, seconds: u64) -> Self {
        let now = Instant::now();
        let mut renewal = Self {
            lease,
            namespace: namespace.to_owned(),
            token: Arc::clone(token),
            due: now,
            ends: now,
        };
        renewal.extend(seconds);
        renewal
    }

    /// The next renewal is after two thirds of the time.
    fn extend(&mut self, seconds: u64) {
        let now = Instant::now();
        let time = Duration::from_secs(seconds).min(LONGEST);
        self.due = now + time * 2 / 3;
        self.ends = now + time;
    }

    async fn renew(&self, client: &Client) -> Result<u64, ReadError> {
        let (method, path, document) = match &self.lease {
            Some(id) => (Method::PUT, "sys/leases/renew", json!({ "lease_id": id })),
            None => (Method::POST, "auth/token/renew-self", json!({})),
        };
        let request = client.request(method, path, &self.namespace, Some(&self.token.token))?;
        let answer = client.send(&request.json(&document)).await?;
        if !answer.is_success() {
            return Err(answer.refused(STORE, answer.usual_class(), ""));
        }
        let renewed: Renewed = answer.json(STORE)?;
        Ok(renewed
            .auth
            .map_or(renewed.lease_duration, |token| token.lease_duration))
    }
}

impl Leases {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            held: Mutex::default(),
            renewals: Arc::default(),
            keeper: Mutex::default(),
        }
    }

    pub(super) fn add(&self, lease: Lease) {
        let mut list = lock(&self.renewals.list);
        let token = &lease.token;
        let is_known =
            |renewal: &Renewal| renewal.lease.is_none() && Arc::ptr_eq(&renewal.token, token);
        if token.is_ours && token.is_renewable && !list.iter().any(is_known) {
            list.push(Renewal::new(
                None,
                &lease.token_namespace,
                token,
                token.seconds,
            ));
        }
        if lease.is_renewable {
            list.push(Renewal::new(
                Some(lease.id.clone()),
                &lease.namespace,
                token,
                lease.seconds,
            ));
        }
        drop(list);
        lock(&self.held).push(lease);
        self.renewals.added.notify_one();
    }

    /// Whether something that was lent belongs to the token.
    pub(super) fn need(&self, token: &Arc<VaultToken>) -> bool {
        let held = lock(&self.held);
        held.iter().any(|lease| Arc::ptr_eq(&lease.token, token))
    }

    /// Renews leases from now on. Returns false if there are none.
    pub(super) fn keep(&self) -> bool {
        if lock(&self.held).is_empty() {
            return false;
        }
        let mut keeper = lock(&self.keeper);
        keeper.get_or_insert_with(|| {
            let keeping = renew_all(self.client.clone(), Arc::clone(&self.renewals));
            AbortOnDropHandle::new(tokio::spawn(keeping))
        });
        true
    }

    pub(super) fn stop(&self) {
        lock(&self.keeper).take();
    }

    /// Revokes leases of tokens that live on. Those of the run's own tokens end with their token.
    pub(super) async fn revoke_those_of_others(&self) {
        let held = std::mem::take(&mut *lock(&self.held));
        for lease in held.iter().filter(|lease| !lease.token.is_ours) {
            let document = json!({ "lease_id": lease.id });
            let request = self.client.request(
                Method::PUT,
                "sys/leases/revoke",
                &lease.namespace,
                Some(&lease.token.token),
            );
            let revoked = match request {
                Ok(request) => self.client.send(&request.json(&document)).await,
                Err(error) => Err(error),
            };
            match revoked {
                Ok(answer) if answer.is_success() => {}
                Ok(answer) => warn!(
                    status = answer.status,
                    "Vault did not revoke a lease of the run"
                ),
                Err(error) => warn!(%error, "a lease of the run could not be revoked"),
            }
        }
    }
}

/// Renews each when it is due, until it ends.
async fn renew_all(client: Client, renewals: Arc<Renewals>) {
    loop {
        let next = {
            let list = lock(&renewals.list);
            list.iter()
                .enumerate()
                .min_by_key(|(_, renewal)| renewal.due)
                .map(|(at, renewal)| (at, renewal.clone()))
        };
        let Some((at, mut renewal)) = next else {
            renewals.added.notified().await;
            continue;
        };
        tokio::select! {
            () = sleep_until(renewal.due) => {}
            () = renewals.added.notified() => continue,
        }
        let left = match renewal.renew(&client).await {
            Ok(seconds) if seconds > 0 => {
                renewal.extend(seconds);
                true
            }
            Ok(_) => false,
            Err(error) => {
                let now = Instant::now();
                let rest = renewal.ends.saturating_duration_since(now);
                warn!(%error, seconds_left = rest.as_secs(), "what Vault has lent could not be renewed");
                renewal.due = now + (rest / 3).max(MIN_PAUSE);
                renewal.due < renewal.ends
            }
        };
        let mut list = lock(&renewals.list);
        // Entries are only added while this waits, at the end.
        if left {
            list[at] = renewal;
        } else {
            list.remove(at);
        }
    }
}
