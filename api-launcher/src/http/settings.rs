//! The settings of the HTTP service: where it listens and who may send dispatches.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;
use git_address::AllowList;
use job_contract::env;
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, choice, present};

use super::auth::InternalSecret;
use crate::allowed_urls::AllowedUrlArgs;

/// Port of a stock executor.
const PORT: u16 = 8090;

/// The options of the HTTP service.
#[derive(Args, Clone, Debug, Default)]
pub struct HttpArgs {
    /// Address to listen on; port 0 takes a free port, and the first line of the log names it
    /// [default: 0.0.0.0:8090, without authentication 127.0.0.1:8090]
    #[arg(long, value_name = "ADDRESS:PORT", env = env::LISTEN)]
    pub listen: Option<Setting<SocketAddr>>,

    /// Address of a port for health checks and metrics alone. It answers while the other port has no connection left, and
    /// /metrics is then only here [default: none]
    #[arg(long, value_name = "ADDRESS:PORT", env = env::HEALTH_LISTEN)]
    pub health_listen: Option<Setting<SocketAddr>>,

    /// Accept dispatches without a token: `true` on a loopback address only, `everywhere` on any address. Each also shows
    /// the status page to clients on this machine; `page` does that alone, and dispatches need their token
    /// [default: false]
    #[arg(long, value_name = "WHERE", env = env::ALLOW_UNAUTHENTICATED, num_args = 0..=1, default_missing_value = "true")]
    pub allow_unauthenticated: Option<Setting<Unauthenticated>>,

    #[command(flatten)]
    pub allowed_urls: AllowedUrlArgs,
}

#[derive(Debug)]
pub(crate) struct HttpSettings {
    pub(crate) listen: SocketAddr,
    pub(crate) health_listen: Option<SocketAddr>,
    /// If it is `None`, the service accepts requests without a token.
    pub(crate) secret: Option<InternalSecret>,
    /// Clients on this machine see the status page without a token.
    pub(crate) open_page: bool,
    /// The sources that are accepted; `None` is all of them.
    pub(crate) allowed: Option<AllowList>,
}

/// Where dispatches are accepted without a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unauthenticated {
    No,
    /// The status page alone, for clients on this machine.
    Page,
    Loopback,
    Everywhere,
}

impl SettingValue for Unauthenticated {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [
            ("false", Self::No),
            ("page", Self::Page),
            ("true", Self::Loopback),
            ("everywhere", Self::Everywhere),
        ];
        choice(text, &words)
    }
}

impl HttpArgs {
    /// Returns the settings. `secret` is the text of `InternalSecret`.
    pub(crate) fn resolve(
        &self,
        errors: &mut Vec<SettingError>,
        secret: Option<&str>,
    ) -> HttpSettings {
        let open = self.allow_unauthenticated.read(errors);
        let open = open.unwrap_or(Unauthenticated::No);
        HttpSettings {
            secret: resolve_secret(errors, secret, open),
            open_page: open != Unauthenticated::No,
            listen: self.resolve_listen(errors, open),
            health_listen: self.health_listen.read(errors),
            allowed: self.allowed_urls.resolve(errors),
        }
    }

    fn resolve_listen(&self, errors: &mut Vec<SettingError>, open: Unauthenticated) -> SocketAddr {
        let ip = match open {
            Unauthenticated::Loopback => Ipv4Addr::LOCALHOST,
            _ => Ipv4Addr::UNSPECIFIED,
        };
        let listen = self.listen.read(errors);
        let listen = listen.unwrap_or(SocketAddr::new(IpAddr::V4(ip), PORT));
        if open == Unauthenticated::Loopback && !listen.ip().is_loopback() {
            errors.push(SettingError::new(
                env::ALLOW_UNAUTHENTICATED,
                format!(
                    "is `true`, which is for loopback addresses, but {} is `{listen}`; \
                     `everywhere` lets anybody who reaches it run commands",
                    env::LISTEN
                ),
            ));
        }
        listen
    }
}

fn resolve_secret(
    errors: &mut Vec<SettingError>,
    secret: Option<&str>,
    open: Unauthenticated,
) -> Option<InternalSecret> {
    if !matches!(open, Unauthenticated::No | Unauthenticated::Page) {
        return None;
    }
    let text = match present(secret).map(InternalSecret::parse) {
        Some(Ok(secret)) => return Some(secret),
        Some(Err(error)) => error.to_string(),
        None => format!(
            "is not set; it is the secret shared with the platform (without one, {}=true is for trying out)",
            env::ALLOW_UNAUTHENTICATED
        ),
    };
    errors.push(SettingError::new(env::INTERNAL_SECRET, text));
    None
}
