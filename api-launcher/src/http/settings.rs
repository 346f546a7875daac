//! The settings of the HTTP service: where it listens and who may send dispatches.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;
use job_contract::env;
use runtime::setting::present;

use super::auth::InternalSecret;
use crate::settings::SettingsReader;

/// Port of a stock executor.
const PORT: u16 = 8090;

/// The options of the HTTP service.
#[derive(Args, Clone, Debug, Default)]
pub struct HttpArgs {
    /// Address to listen on; port 0 takes a free one, which the first line of the log tells
    /// [default: 0.0.0.0:8090, without authentication 127.0.0.1:8090]
    #[arg(long, value_name = "ADDRESS:PORT", env = env::LISTEN)]
    pub listen: Option<String>,

    /// Accept dispatches without a token: `true` on a loopback address only, `everywhere` on any address
    /// [default: false]
    #[arg(long, value_name = "WHERE", env = env::ALLOW_UNAUTHENTICATED, num_args = 0..=1, default_missing_value = "true")]
    pub allow_unauthenticated: Option<String>,
}

/// The settings of the HTTP service.
#[derive(Debug)]
pub(crate) struct HttpSettings {
    pub(crate) listen: SocketAddr,
    /// If it is `None`, the service accepts requests without a token.
    pub(crate) secret: Option<InternalSecret>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unauthenticated {
    No,
    Loopback,
    Everywhere,
}

impl HttpArgs {
    /// Returns the settings. `secret` is the text of `InternalSecret`.
    pub(crate) fn resolve(
        &self,
        reader: &mut SettingsReader,
        secret: Option<&str>,
    ) -> HttpSettings {
        let open = reader.choose(
            env::ALLOW_UNAUTHENTICATED,
            self.allow_unauthenticated.as_deref(),
            &[
                ("false", Unauthenticated::No),
                ("true", Unauthenticated::Loopback),
                ("everywhere", Unauthenticated::Everywhere),
            ],
        );
        HttpSettings {
            secret: resolve_secret(reader, secret, open),
            listen: self.resolve_listen(reader, open),
        }
    }

    fn resolve_listen(&self, reader: &mut SettingsReader, open: Unauthenticated) -> SocketAddr {
        let ip = match open {
            Unauthenticated::Loopback => Ipv4Addr::LOCALHOST,
            _ => Ipv4Addr::UNSPECIFIED,
        };
        let listen = reader
            .parse(
                env::LISTEN,
                self.listen.as_deref(),
                "an IP address and a port such as `0.0.0.0:8090`",
            )
            .unwrap_or(SocketAddr::new(IpAddr::V4(ip), PORT));
        if open == Unauthenticated::Loopback && !listen.ip().is_loopback() {
            reader.reject(
                env::ALLOW_UNAUTHENTICATED,
                format!(
                    "is `true`, which is for loopback addresses, but {} is `{listen}`; \
                     `everywhere` lets anybody who reaches it run commands",
                    env::LISTEN
                ),
            );
        }
        listen
    }
}

fn resolve_secret(
    reader: &mut SettingsReader,
    secret: Option<&str>,
    open: Unauthenticated,
) -> Option<InternalSecret> {
    if open != Unauthenticated::No {
        return None;
    }
    match present(secret).map(InternalSecret::parse) {
        Some(Ok(secret)) => return Some(secret),
        Some(Err(error)) => reader.reject(env::INTERNAL_SECRET, error.to_string()),
        None => reader.reject(
            env::INTERNAL_SECRET,
            format!(
                "is not set; it is the secret shared with the platform (without one, {}=true is for trying out)",
                env::ALLOW_UNAUTHENTICATED
            ),
        ),
    }
    None
}
