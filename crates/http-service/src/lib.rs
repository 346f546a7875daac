//! What each HTTP server of Mayfly needs, whatever it serves.
//!
//! - [`serve`] accepts connections within [`Limits`]: their number, their share for each client, and the time of heads, pauses
//!   and unread responses.
//! - [`body`] reads bodies up to a length and a time.
//! - [`bearer`] finds the token of a request.
//! - [`Shutdown`] is the order to stop, in the steps that endpoints need to follow.
//! - [`Readiness`] is what a health check answers, [`MetricsRegistry`] what a scraper gets, and [`Fresh`] keeps both cheap.
//! - [`diagnostics`] has the options of the log on stderr.
//!
//! This crate must not know what a dispatch, a pool or a run is.

pub mod body;
pub mod diagnostics;
mod fresh;
mod metrics;
mod readiness;
mod server;
mod shutdown;

pub use self::fresh::{FRESH, Fresh};
pub use self::metrics::{CONTENT_TYPE, MetricsRegistry};
pub use self::readiness::Readiness;
pub use self::server::{Limits, serve, serve_health};
pub use self::shutdown::Shutdown;

/// Returns the token of an `Authorization` header.
pub fn bearer(authorization: &[u8]) -> Option<&str> {
    let (scheme, token) = std::str::from_utf8(authorization).ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}
