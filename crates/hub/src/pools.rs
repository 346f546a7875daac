//! The pools of a hub: the organizations, the tokens and the boundary of each pool. They are in one YAML file. The pool of the
//! agent that runs beside the hub in one process is in none.

mod file;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use pool_protocol::id::{LeaseId, PoolName};
use pool_protocol::token::{AccessGrant, PoolToken};

pub(crate) use self::file::parse;
use super::oidc::Trust;

/// All pools by name, and the operators.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    pools: BTreeMap<PoolName, Pool>,
    operators: Operators,
}

/// The operators, who see all pools on the status page.
#[derive(Debug, Default)]
struct Operators {
    tokens: Vec<KnownToken>,
    proxy: Option<Proxy>,
}

/// The trusted proxy that authenticates users.
#[derive(Debug)]
struct Proxy {
    /// The header that names the user.
    header: String,
    /// The addresses from which the proxy connects.
    addresses: Vec<IpNet>,
}

/// One pool.
#[derive(Debug)]
pub(crate) struct Pool {
    organizations: Organizations,
    pub(crate) boundary: Boundary,
    pub(crate) scripts: ScriptAccess,
    pub(crate) script_state: StateAccess,
    tokens: Vec<KnownToken>,
    /// The accepted tokens of OpenID providers.
    pub(crate) oidc: Vec<Trust>,
    /// The token is new in each process, and leases outlive it.
    has_passing_token: bool,
}

/// The pool of the agent that runs beside the hub in one process.
#[derive(Clone, Debug)]
pub struct OwnPool {
    pub boundary: Boundary,
    pub token: PoolToken,
    pub logs: RunLogs,
}

/// Where the executors of this machine keep the logs of their runs.
#[derive(Clone, Debug)]
pub struct RunLogs {
    /// The data directory.
    pub data: PathBuf,
    /// The log of a lease in it.
    pub of_lease: fn(&Path, LeaseId) -> PathBuf,
}

/// The organizations whose runs a pool takes.
#[derive(Debug, PartialEq, Eq)]
enum Organizations {
    All,
    These(BTreeSet<String>),
}

/// How executors of a pool reach the platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// Through the hub. They have no secret of the platform.
    Relay,
    /// Directly, with the platform's secret.
    Direct,
}

/// What scripts may ask the platform through the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScriptAccess {
    /// For the context of their job.
    Context,
    /// Also its API, about their workspace.
    Workspace,
}

/// What scripts may do with the state of their workspace, in steps that do not change it themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateAccess {
    Read,
    Write,
}

impl Pool {
    /// Returns whether the file of the pools has the pool, so that agents can be added.
    pub(crate) const fn takes_agents(&self) -> bool {
        !self.has_passing_token
    }
}

/// A token in the file.
#[derive(Debug)]
struct KnownToken {
    id: String,
    /// SHA-256 of the token, in lower-case hexadecimal digits.
    sha256: String,
    expires: Option<SystemTime>,
}

/// Why the token of an agent is refused. Clients see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TokenRefusal {
    #[error("the pool token is unknown, or was removed")]
    Unknown,
    #[error("the pool token has expired")]
    Expired,
    #[error("the access token has expired: exchange a new one")]
    AccessExpired,
    #[error("the trust that the access token relies on has changed: exchange a new one")]
    Untrusted,
}

impl Pools {
    /// Adds the pool of the agent beside the hub. It takes the runs of all organizations.
    pub(crate) fn with_own(mut self, own: &OwnPool) -> Result<Self, Vec<String>> {
        let pool = Pool {
            organizations: Organizations::All,
            boundary: own.boundary,
            // Without the relay, they use the API themselves.
            scripts: ScriptAccess::Context,
            // They run as the user to whom the folder of the states belongs.
            script_state: StateAccess::Write,
            tokens: vec![KnownToken {
                id: "this-process".to_owned(),
                sha256: own.token.digest(),
                expires: None,
            }],
            oidc: Vec::new(),
            has_passing_token: true,
        };
        let name = own.token.pool();
        match self.pools.insert(name.clone(), pool) {
            None => Ok(self),
            Some(_) => Err(vec![format!(
                "pools.{name} is the pool of this machine: rename it"
            )]),
        }
    }

    /// Returns whether a pool accepts tokens of an OpenID provider.
    pub(crate) fn has_oidc(&self) -> bool {
        self.pools.values().any(|pool| !pool.oidc.is_empty())
    }

    pub(crate) fn get(&self, name: &PoolName) -> Option<&Pool> {
        self.pools.get(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &PoolName> {
        self.pools.keys()
    }

    /// Returns the id of a token that is valid now.
    pub(crate) fn token_id(
        &self,
        token: &PoolToken,
        now: SystemTime,
    ) -> Result<&str, TokenRefusal> {
        let pool = self.pools.get(token.pool()).ok_or(TokenRefusal::Unknown)?;
        let mut tokens = pool.tokens.iter();
        let known = tokens
            .find(|known| token.has_digest(&known.sha256))
            .ok_or(TokenRefusal::Unknown)?;
        if known.expires.is_some_and(|end| end <= now) {
            return Err(TokenRefusal::Expired);
        }
        Ok(&known.id)
    }

    /// Returns whether the pool still has the token or the trust with this digest. A token that has expired is not revoked:
    /// it takes no more runs, and those that it has taken end by themselves. Nor is that of an earlier process.
    pub(crate) fn has_credential(&self, pool: &PoolName, digest: &str) -> bool {
        self.pools.get(pool).is_some_and(|pool| {
            pool.has_passing_token
                || pool.tokens.iter().any(|token| token.sha256 == digest)
                || pool.oidc.iter().any(|trust| trust.digest == digest)
        })
    }

    /// Returns whether a token of the pool, or of an operator, has this digest and is valid now.
    pub(crate) fn has_digest(
        &self,
        pool: Option<&PoolName>,
        digest: &str,
        now: SystemTime,
    ) -> bool {
        let tokens = match pool {
            Some(pool) => self.pools.get(pool).map_or(&[][..], |pool| &pool.tokens),
            None => &self.operators.tokens,
        };
        let is_valid = |token: &KnownToken| token.expires.is_none_or(|end| end > now);
        tokens
            .iter()
            .any(|token| token.sha256 == digest && is_valid(token))
    }

    /// Returns the header that names an operator, if the trusted proxy has this address.
    pub(crate) fn trusted_header(&self, peer: IpAddr) -> Option<&str> {
        let proxy = self.operators.proxy.as_ref()?;
        let mut addresses = proxy.addresses.iter();
        let is_trusted = addresses.any(|net| net.contains(&peer.to_canonical()));
        is_trusted.then_some(&*proxy.header)
    }

    /// Returns the issuer behind an access token that is valid now.
    pub(crate) fn trust(&self, grant: &AccessGrant, now: SystemTime) -> Result<&str, TokenRefusal> {
        let pool = self.pools.get(&grant.pool).ok_or(TokenRefusal::Untrusted)?;
        let mut trusts = pool.oidc.iter();
        let trust = trusts
            .find(|trust| trust.digest == grant.trust)
            .ok_or(TokenRefusal::Untrusted)?;
        if now.duration_since(UNIX_EPOCH).unwrap_or_default() >= Duration::from_secs(grant.expires)
        {
            return Err(TokenRefusal::AccessExpired);
        }
        Ok(&trust.issuer)
    }
}

impl Pool {
    pub(crate) fn takes(&self, organization: &str) -> bool {
        match &self.organizations {
            Organizations::All => true,
            Organizations::These(ids) => ids.contains(organization),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn pools(tokens: &[(&PoolToken, Option<u64>)]) -> Pools {
        let known =
            |(at_index, (token, expires)): (usize, &(&PoolToken, Option<u64>))| KnownToken {
                id: at_index.to_string(),
                sha256: token.digest(),
                expires: expires.map(at),
            };
        let pool = Pool {
            organizations: Organizations::These(["a".to_owned()].into()),
            boundary: Boundary::Relay,
            scripts: ScriptAccess::Context,
            script_state: StateAccess::Read,
            tokens: tokens.iter().enumerate().map(known).collect(),
            oidc: Vec::new(),
            has_passing_token: false,
        };
        Pools {
            pools: [("eu".parse().unwrap(), pool)].into(),
            operators: Operators::default(),
        }
    }

    #[test]
    fn a_token_is_valid_while_it_is_in_the_file_and_not_expired() {
        let [old, new, other] = [(); 3].map(|()| PoolToken::new("eu".parse().unwrap()));
        let pools = pools(&[(&old, Some(100)), (&new, None)]);
        assert_eq!(pools.token_id(&old, at(99)), Ok("0"));
        assert_eq!(pools.token_id(&old, at(100)), Err(TokenRefusal::Expired));
        assert_eq!(pools.token_id(&new, at(100)), Ok("1"));
        assert_eq!(pools.token_id(&other, at(0)), Err(TokenRefusal::Unknown));
        let elsewhere = PoolToken::new("us".parse().unwrap());
        assert_eq!(
            pools.token_id(&elsewhere, at(0)),
            Err(TokenRefusal::Unknown)
        );
    }

    #[test]
    fn the_own_pool_joins_those_of_the_file_and_keeps_leases_of_earlier_processes() {
        let own = |name: &str| OwnPool {
            boundary: Boundary::Relay,
            token: PoolToken::new(name.parse().unwrap()),
            logs: RunLogs {
                data: "/data".into(),
                of_lease: |data, _| data.to_owned(),
            },
        };
        let local = own("local");
        let pools = pools(&[]).with_own(&local).unwrap();
        let names: Vec<_> = pools.names().map(PoolName::as_str).collect();
        assert_eq!(names, ["eu", "local"]);
        assert!(pools.token_id(&local.token, at(0)).is_ok());
        let earlier = own("local").token;
        let unknown = Err(TokenRefusal::Unknown);
        assert_eq!(pools.token_id(&earlier, at(0)), unknown);
        assert!(pools.has_credential(local.token.pool(), &earlier.digest()));
        let of_eu = own("eu");
        assert!(!pools.has_credential(of_eu.token.pool(), &of_eu.token.digest()));
        let errors = pools.with_own(&of_eu).unwrap_err();
        assert!(errors[0].starts_with("pools.eu is the pool"), "{errors:?}");
    }

    #[test]
    fn a_pool_takes_the_runs_of_its_organizations() {
        let pools = pools(&[]);
        let pool = pools.get(&"eu".parse().unwrap()).unwrap();
        assert!(pool.takes("a") && !pool.takes("b") && !pool.takes("*"));
    }
}
