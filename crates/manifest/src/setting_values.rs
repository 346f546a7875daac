//! How an operator spells the settings of Jobs.

use runtime::setting::{SettingValue, choice};

use crate::deployment::PluginCache;
use crate::error::quote;
use crate::executor_kind::{ExecutorKind, ExecutorKindSetting};
use crate::job_data::Mode;
use crate::quantity::Amount;

impl SettingValue for Amount {
    fn parse(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| format!("is {}, a quantity that {error}", quote(text)))
    }
}

impl SettingValue for ExecutorKindSetting {
    fn parse(text: &str) -> Result<Self, String> {
        let kinds = [
            ("auto", Self::Auto),
            ("mayfly", Self::Always(ExecutorKind::Mayfly)),
            ("stock", Self::Always(ExecutorKind::Stock)),
        ];
        choice(text, &kinds)
    }
}

impl SettingValue for Mode {
    fn parse(text: &str) -> Result<Self, String> {
        choice(text, &[("secret", Self::Secret), ("env", Self::Env)])
    }
}

impl SettingValue for PluginCache {
    fn parse(text: &str) -> Result<Self, String> {
        choice(
            text,
            &[("claim", Self::Claim), ("empty-dir", Self::EmptyDir)],
        )
    }
}
