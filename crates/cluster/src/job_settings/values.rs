//! The types of the settings of Jobs, and how their values are spelt.

use job_contract::Records;
use job_contract::provider_cache::CacheMode;
use manifest::{check, image};
use runtime::setting::{SettingValue, choice, unexpected};

macro_rules! checked_text {
    ($($(#[$doc:meta])* $name:ident: $check:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name(pub String);

        impl SettingValue for $name {
            fn parse(text: &str) -> Result<Self, String> {
                $check(text).map_err(|rule| rule.to_string())?;
                Ok(Self(text.to_owned()))
            }
        }
    )*};
}

checked_text! {
    /// A namespace.
    Namespace: check::dns_label;
    /// The name of an object.
    ObjectName: check::object_name;
    /// A reference to an image.
    ImageReference: image::check;
    /// A registry, or a registry and a path in it.
    ImageRegistry: image::check_registry;
}

/// A whole number from `LEAST` to the largest that Kubernetes accepts.
#[derive(Clone, Copy, Debug)]
pub struct Whole<const LEAST: i64>(pub i64);

impl<const LEAST: i64> SettingValue for Whole<LEAST> {
    fn parse(text: &str) -> Result<Self, String> {
        let most = i64::from(i32::MAX);
        let number = text.parse().ok();
        number
            .filter(|number| (LEAST..=most).contains(number))
            .map(Self)
            .ok_or_else(|| unexpected(text, &format!("a whole number from {LEAST} to {most}")))
    }
}

/// When a node pulls an image.
#[derive(Clone, Copy, Debug)]
pub struct PullPolicy(pub &'static str);

impl SettingValue for PullPolicy {
    fn parse(text: &str) -> Result<Self, String> {
        let policies = ["Always", "IfNotPresent", "Never"].map(|word| (word, Self(word)));
        choice(text, &policies)
    }
}

/// Where executors keep their records. `None` follows from their settings.
#[derive(Clone, Copy, Debug)]
pub struct RecordsSetting(pub Option<Records>);

impl SettingValue for RecordsSetting {
    fn parse(text: &str) -> Result<Self, String> {
        let all = [Records::Platform, Records::Shared, Records::Pod];
        let all = all.map(|records| (records.name(), Self(Some(records))));
        choice(text, &[[("auto", Self(None))].as_slice(), &all].concat())
    }
}

/// Who fills the store of providers.
#[derive(Clone, Copy, Debug)]
pub struct CacheModeSetting(pub CacheMode);

impl SettingValue for CacheModeSetting {
    fn parse(text: &str) -> Result<Self, String> {
        let modes = [CacheMode::Runs, CacheMode::Fill];
        choice(text, &modes.map(|mode| (mode.name(), Self(mode))))
    }
}
