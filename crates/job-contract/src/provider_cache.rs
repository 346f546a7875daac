//! The store of providers that runs share: who fills it, and how a run names what it lacked there. The name is in the final report
//! of the run and in the arguments of the Job that fetches it.

use std::fmt;
use std::str::FromStr;

/// The registries that a Job of the operator asks, if the operator names no others.
pub const DEFAULT_REGISTRIES: [&str; 2] = ["registry.terraform.io", "registry.opentofu.org"];
/// More packages are not fetched by one Job.
pub const MOST_WANTED: usize = 64;
/// The longest part of a name in a report.
const LONGEST_PART: usize = 128;
/// The longest part of any name.
const LONGEST: usize = 200;

/// Who fills the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// A run publishes what it has verified.
    #[default]
    Runs,
    /// A Job of the operator. Runs only read.
    Fill,
}

impl CacheMode {
    const ALL: [(&'static str, Self); 2] = [("runs", Self::Runs), ("fill", Self::Fill)];

    /// The name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

impl FromStr for CacheMode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut all = Self::ALL.into_iter();
        all.find(|(name, _)| name.eq_ignore_ascii_case(text.trim()))
            .map(|(_, mode)| mode)
            .ok_or("expected `runs` or `fill`")
    }
}

/// A package that a run did not find in the store: `registry.terraform.io/hashicorp/aws/5.0.0/linux_amd64`, as its folder is called in
/// a mirror.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedPackage {
    text: String,
}

impl WantedPackage {
    /// The host of its registry.
    #[must_use]
    pub fn host(&self) -> &str {
        self.parts().0
    }

    /// Its address, version and platform.
    #[must_use]
    pub fn coordinates(&self) -> (&str, &str, &str) {
        let (_, address, version, platform) = self.parts();
        (address, version, platform)
    }

    fn parts(&self) -> (&str, &str, &str, &str) {
        let (rest, platform) = self.text.rsplit_once('/').unwrap_or_default();
        let (address, version) = rest.rsplit_once('/').unwrap_or_default();
        let (host, _) = address.split_once('/').unwrap_or_default();
        (host, address, version, platform)
    }
}

impl FromStr for WantedPackage {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = text.split('/').collect();
        let is_short = parts.iter().all(|part| part.len() <= LONGEST_PART);
        match parts[..] {
            [host, namespace, name, version, platform]
                if is_short && is_package(host, namespace, name, version, platform) =>
            {
                let text = text.to_owned();
                Ok(Self { text })
            }
            _ => Err("expected HOST/NAMESPACE/TYPE/VERSION/OS_ARCH"),
        }
    }
}

/// Whether these texts name a package. Each has the letters that it has in registries and no others, because all of them become names of
/// folders and parts of addresses: `http:other.example` as a namespace would be another host.
#[must_use]
pub fn is_package(host: &str, namespace: &str, name: &str, version: &str, platform: &str) -> bool {
    let (host, port) = host.split_once(':').unwrap_or((host, "443"));
    let is_port = port.parse::<u16>().is_ok() && port.bytes().all(|byte| byte.is_ascii_digit());
    is_part(host, b".-_")
        && is_port
        && is_part(namespace, b"-")
        && is_part(name, b"-")
        && is_part(version, b".-+")
        && is_part(platform, b"_")
        && platform.contains('_')
}

/// Whether a text begins with a letter or a digit, and has only those and `others`.
fn is_part(text: &str, others: &[u8]) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    (1..=LONGEST).contains(&text.len())
        && text.as_bytes()[0].is_ascii_alphanumeric()
        && text.bytes().all(is_plain)
}

impl fmt::Display for WantedPackage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_have_names() {
        for mode in [CacheMode::Runs, CacheMode::Fill] {
            assert_eq!(mode.name().parse(), Ok(mode));
        }
        assert_eq!(" FILL".parse(), Ok(CacheMode::Fill));
        assert!("none".parse::<CacheMode>().is_err());
    }

    #[test]
    fn a_package_is_its_folder_in_a_mirror() {
        let text = "registry.terraform.io/hashicorp/aws/5.0.0+meta/linux_amd64";
        let wanted: WantedPackage = text.parse().unwrap();
        assert_eq!(wanted.to_string(), text);
        assert_eq!(wanted.host(), "registry.terraform.io");
        let address = "registry.terraform.io/hashicorp/aws";
        let expected = (address, "5.0.0+meta", "linux_amd64");
        assert_eq!(wanted.coordinates(), expected);
        let port = "localhost:8443/mayfly/null/1.0.0/linux_arm64";
        let wanted: WantedPackage = port.parse().unwrap();
        assert_eq!(wanted.host(), "localhost:8443");
    }

    #[test]
    fn what_a_hostile_run_may_name_is_no_path_and_no_option() {
        let long = format!("h/n/t/{}/linux_amd64", "1".repeat(129));
        for text in [
            "",
            "h/n/t/1.0.0",
            "h/n/t/1.0.0/linux",
            "h/n/t/1.0.0/linux_amd64/more",
            "h/n/../1.0.0/linux_amd64",
            "h/n//1.0.0/linux_amd64",
            "-h/n/t/1.0.0/linux_amd64",
            "h/--store=x/t/1.0.0/linux_amd64",
            "h/n/t/$(HOME)/linux_amd64",
            "h@other/n/t/1.0.0/linux_amd64",
            "registry.terraform.io/http:evil.example/aws/1.0.0/linux_amd64",
            "h/n/http:evil.example/1.0.0/linux_amd64",
            "h/n/t/http:evil/linux_amd64",
            "h/n/t/1.0.0/http:_evil",
            "h/n.example/t/1.0.0/linux_amd64",
            "h:/n/t/1.0.0/linux_amd64",
            "h:+80/n/t/1.0.0/linux_amd64",
            "h:80:80/n/t/1.0.0/linux_amd64",
            "h:99999/n/t/1.0.0/linux_amd64",
            "h/n/t/1.0.0/linux_amd64\n",
            long.as_str(),
        ] {
            assert!(text.parse::<WantedPackage>().is_err(), "{text:?}");
        }
    }
}
