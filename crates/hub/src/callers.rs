//! Authenticates callers: an agent by a pool token or an access token, an executor by the job token of its lease. The
//! version of the protocol is checked before, so that an old client learns that it is old.

use std::time::SystemTime;

use axum::http::{HeaderMap, header};
use http_service::bearer;
use pool_protocol::id::{LeaseId, PoolName, TaskId};
use pool_protocol::lease::LeaseRef;
use pool_protocol::problem::Code;
use pool_protocol::token::{AccessGrant, PoolToken};
use pool_protocol::version;
use pool_store::{Refusal, TaskView};
use tracing::debug;

use crate::failure::Failure;
use crate::{HEARTBEAT, Hub};

/// The prefix of pool tokens.
const POOL_TOKEN: &str = "mfp_";

/// An authenticated agent.
#[derive(Debug)]
pub(super) enum Agent {
    Token(PoolToken),
    Access(AccessGrant),
}

impl Agent {
    pub(super) const fn pool(&self) -> &PoolName {
        match self {
            Self::Token(token) => token.pool(),
            Self::Access(grant) => &grant.pool,
        }
    }

    /// Returns the digest in the file of the pools that allows the token. Leases of the agent end when it is removed.
    pub(super) fn credential(&self) -> String {
        match self {
            Self::Token(token) => token.digest(),
            Self::Access(grant) => grant.trust.clone(),
        }
    }
}

pub(super) fn check_version(headers: &HeaderMap) -> Result<(), Failure> {
    let header = headers.get(version::HEADER);
    let header = header.map(|value| value.to_str().unwrap_or_default());
    Ok(version::check(header)?)
}

impl Hub {
    pub(super) fn agent(&self, headers: &HeaderMap) -> Result<Agent, Failure> {
        check_version(headers)?;
        let token = token_of(headers)?;
        let agent = if AccessGrant::is_token(token) {
            let grant = self.keys.current().verify_access(token);
            let unknown = || refused("this is no access token of this hub".to_owned());
            Agent::Access(grant.ok_or_else(unknown)?)
        } else {
            let token = PoolToken::parse(token).map_err(|error| refused(error.to_string()))?;
            Agent::Token(token)
        };
        self.check(&agent)?;
        Ok(agent)
    }

    pub(super) fn check(&self, agent: &Agent) -> Result<(), Failure> {
        let pools = self.pools.current();
        let now = SystemTime::now();
        let id = match agent {
            Agent::Token(token) => pools.token_id(token, now),
            Agent::Access(grant) => pools.trust(grant, now),
        };
        let id = id.map_err(|error| refused(error.to_string()))?;
        debug!(pool = %agent.pool(), token = id, "an agent calls");
        Ok(())
    }

    /// Waits until the token of an agent is no longer valid, and returns the reason.
    pub(super) async fn token_ends(&self, agent: &Agent) -> Failure {
        let mut file = self.pools.changes();
        let mut every = tokio::time::interval(HEARTBEAT);
        loop {
            tokio::select! {
                // A token can expire without a change of the file.
                _ = every.tick() => {}
                changed = file.changed() => if changed.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            if let Err(failure) = self.check(agent) {
                return failure;
            }
        }
    }

    /// Returns the rights of a job token. It must be for the lease in the path.
    pub(crate) fn holder(
        &self,
        headers: &HeaderMap,
        task: TaskId,
        lease: LeaseId,
    ) -> Result<LeaseRef, Failure> {
        let token = token_of(headers)?;
        let grant = self.keys.current().verify(token);
        let grant = grant.ok_or_else(|| refused("this is no job token of this hub".to_owned()))?;
        if (grant.task, grant.lease) == (task, lease) {
            Ok(grant)
        } else {
            let text = "the job token is for another lease";
            Err(Failure::new(Code::ExecutorPoolForbidden, text))
        }
    }

    /// Refuses a task whose agent has lost its token. Its lease ends soon.
    pub(super) async fn require_credential(&self, task: TaskId) -> Result<(), Failure> {
        let view = self.store.task(task).await?.ok_or(Refusal::TaskNotFound)?;
        let is_valid = |credential: &String| {
            let pools = self.pools.current();
            pools.has_credential(&view.pool, credential)
        };
        if view.credential.as_ref().is_none_or(is_valid) {
            Ok(())
        } else {
            Err(Refusal::LeaseExpired.into())
        }
    }

    /// Returns a task and its current lease for an agent. Tasks of other pools do not exist for it.
    pub(super) async fn lease_of_agent(
        &self,
        agent: &Agent,
        task: TaskId,
        lease: LeaseId,
    ) -> Result<(TaskView, LeaseRef), Failure> {
        let found = self.store.task_of(agent.pool(), task).await?;
        let found = found.ok_or(Refusal::TaskNotFound)?;
        if found.lease != Some(lease) {
            return Err(Refusal::LeaseSuperseded.into());
        }
        let fencing_token = found.fencing_token;
        let grant = LeaseRef {
            task,
            lease,
            fencing_token,
        };
        Ok((found, grant))
    }
}

pub(super) fn has_agent_token(headers: &HeaderMap) -> bool {
    token_of(headers)
        .is_ok_and(|token| token.starts_with(POOL_TOKEN) || AccessGrant::is_token(token))
}

fn token_of(headers: &HeaderMap) -> Result<&str, Failure> {
    let value = headers.get(header::AUTHORIZATION);
    let token = value.and_then(|value| bearer(value.as_bytes()));
    let missing = "the request has no bearer token in its `Authorization` header";
    token.ok_or_else(|| refused(missing.to_owned()))
}

fn refused(text: String) -> Failure {
    Failure::new(Code::ExecutorAuthenticationFailed, text)
}
