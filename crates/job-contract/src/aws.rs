//! Where services of AWS are.

/// The host of a service in a region.
pub fn service_host(service: &str, region: &str) -> String {
    let domain = if region.starts_with("cn-") {
        "amazonaws.com.cn"
    } else if region.starts_with("eusc-") {
        "amazonaws.eu"
    } else {
        "amazonaws.com"
    };
    format!("{service}.{region}.{domain}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_partition_has_its_domain() {
        for (region, expected) in [
            ("eu-west-1", "sts.eu-west-1.amazonaws.com"),
            ("cn-north-1", "sts.cn-north-1.amazonaws.com.cn"),
            ("eusc-de-east-1", "sts.eusc-de-east-1.amazonaws.eu"),
        ] {
            assert_eq!(service_host("sts", region), expected);
        }
    }
}
