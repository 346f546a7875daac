//! The check of executors' addresses. Newer releases refuse some of them before the dispatch.

use std::net::{IpAddr, Ipv4Addr};

use reqwest::Url;

/// Why the platform does not call this address. `private`: whether addresses of private networks are refused too. Names are not
/// resolved here.
pub(crate) fn refusal(url: &str, private: bool) -> Option<String> {
    let blocked = |why: &str| Some(format!("agent URL blocked: {why}"));
    let Ok(url) = Url::parse(url) else {
        return blocked("it is no URL");
    };
    if !["http", "https"].contains(&url.scheme()) {
        return blocked("it is neither http nor https");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return blocked("it has user info");
    }
    let host = url.host_str().unwrap_or_default();
    let address: IpAddr = match host.trim_matches(['[', ']']) {
        "localhost" => Ipv4Addr::LOCALHOST.into(),
        host => host.parse().ok()?,
    };
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    if link_local || address.is_multicast() {
        return blocked("its address is link-local or multicast");
    }
    if private && is_private(address) {
        return blocked("its address is private");
    }
    None
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let [first, second, ..] = address.octets();
            let is_shared = first == 100 && (64..128).contains(&second);
            address.is_loopback() || address.is_private() || is_shared
        }
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_refused_unless_a_setting_allows_them() {
        for url in [
            "http://127.0.0.1:8090/api",
            "http://localhost/",
            "http://10.1.2.3/",
            "https://192.168.0.1/",
            "http://100.64.0.1/",
            "http://[::1]/",
            "http://[fd00::1]/",
        ] {
            assert!(refusal(url, true).is_some(), "{url}");
            assert_eq!(refusal(url, false), None, "{url}");
        }
        for url in [
            "https://executor.example.test/api",
            "http://100.128.0.1/",
            "http://[2001:db8::1]/",
        ] {
            assert_eq!(refusal(url, true), None, "{url}");
        }
    }

    #[test]
    fn some_addresses_are_refused_by_every_platform() {
        for url in [
            "executor",
            "ftp://executor/",
            "http://me@executor/",
            "http://169.254.169.254/",
            "http://[fe80::1]/",
            "http://224.0.0.1/",
        ] {
            assert!(refusal(url, false).is_some(), "{url}");
        }
    }
}
