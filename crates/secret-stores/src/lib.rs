//! References to secrets, such as `${vault:kv/team/app.password}`, and the stores that they name.
//!
//! [`Template`] scans a text, [`AllowList`] says which secrets a run may name, [`Settings`] are those of the operator, and
//! [`SecretReader`] reads. [`aws`] has credentials and signatures that need no secret.
//!
//! This crate knows neither job documents nor the executor, and does not decide where references may be.

mod allow;
pub mod aws;
mod azure;
mod error;
mod gcp;
pub mod http;
pub mod login;
mod lookup;
mod reader;
mod reference;
mod settings;
mod template;
mod token_file;
mod value;
mod vault;

pub use self::allow::{AllowList, RuleError, RunIds};
pub use self::error::{ErrorClass, ReadError};
pub use self::gcp::signed_token;
pub use self::lookup::Lookup;
pub use self::reader::{Found, SecretReader};
pub use self::reference::{Reference, SecretId, StoreKind};
pub use self::settings::{Purpose, Settings};
pub use self::template::{EmbedError, Input, SyntaxError, Template};
pub use self::value::SecretValue;
