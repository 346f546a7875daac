//! Checks names, labels, names of variables, and paths by the rules of Kubernetes. Each function returns the broken
//! rule as a phrase that follows the name of the checked thing: "`x` must …".

/// Longest label value, label name and DNS label.
const LABEL: usize = 63;
/// Longest DNS subdomain.
const SUBDOMAIN: usize = 253;

fn is_alphanumeric(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
}

/// Letters, digits, `-`, `_`, `.`, beginning and ending with a letter or digit.
fn is_label_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() <= LABEL
        && bytes.first().copied().is_some_and(is_alphanumeric)
        && bytes.last().copied().is_some_and(is_alphanumeric)
        && bytes
            .iter()
            .all(|b| is_alphanumeric(*b) || b"-_.".contains(b))
}

/// Lower-case letters, digits and `-`, beginning and ending with a letter or digit. Of any length.
fn is_dns_text(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !text.is_empty() && text.bytes().all(plain) && !text.starts_with('-') && !text.ends_with('-')
}

/// Kubernetes limits the whole name only, not its parts.
fn is_subdomain(text: &str) -> bool {
    text.len() <= SUBDOMAIN && text.split('.').all(is_dns_text)
}

/// A key of a label, an annotation, a node selector or a taint.
pub fn qualified_name(key: &str) -> Result<(), &'static str> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if !prefix.is_none_or(is_subdomain) {
        return Err(
            "must have a DNS subdomain (lower case, 253 characters at most) before its `/`",
        );
    }
    if !is_label_text(name) {
        return Err(
            "must be 1 to 63 letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
        );
    }
    Ok(())
}

/// A value of a label, a node selector or a taint.
pub fn label_value(value: &str) -> Result<(), &'static str> {
    if value.is_empty() || is_label_text(value) {
        Ok(())
    } else {
        Err(
            "must have a value of at most 63 letters, digits, `-`, `_` or `.`, with a letter or digit at both ends",
        )
    }
}

/// The name of a namespace.
pub fn dns_label(name: &str) -> Result<(), &'static str> {
    if name.len() <= LABEL && is_dns_text(name) {
        Ok(())
    } else {
        Err(
            "must be 1 to 63 lower-case letters, digits or `-`, with a letter or digit at both ends",
        )
    }
}

/// The name of any other object.
pub fn object_name(name: &str) -> Result<(), &'static str> {
    if is_subdomain(name) {
        Ok(())
    } else {
        Err(
            "must be an object name: lower-case letters, digits, `-` and `.`, with a letter or digit at both ends, \
             253 characters at most",
        )
    }
}

/// The name of an environment variable, as every supported Kubernetes accepts it.
pub fn env_name(name: &str) -> Result<(), &'static str> {
    let mut bytes = name.bytes();
    let first = bytes
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b"-_.".contains(&b));
    let rest = bytes.all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if first && rest && name != "." && !name.starts_with("..") {
        Ok(())
    } else {
        Err("must be letters, digits, `_`, `-` or `.`, not starting with a digit")
    }
}

/// Folders at, in, or around which nothing may be mounted, whatever the policy allows: those of the system and of both
/// executors. If `/usr` is merged, all names of a folder are listed.
const RESERVED_PATHS: &[&str] = &[
    "/bin",
    "/boot",
    "/cnb",
    "/dev",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/ld.so.conf.d",
    "/etc/pam.d",
    "/etc/pki",
    "/etc/security",
    "/etc/ssh",
    "/etc/ssl",
    "/home/cnb/.terraform-spring-boot",
    "/home/mayfly/.terraform-spring-boot",
    "/home/mayfly/work",
    "/layers",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/proc",
    "/root",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var/lib/dpkg",
    "/var/lib/mayfly",
    "/var/lock",
    "/var/run",
    "/workspace",
];

/// Returns the shortest form of a mount path. Each folder has one such form, so two paths can be compared.
pub fn mount_path(path: &str) -> Result<String, &'static str> {
    if !path.starts_with('/') || path.contains([':', '\0', '\n']) {
        return Err("must be an absolute path without `:`");
    }
    let parts: Vec<&str> = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    if parts.contains(&"..") {
        return Err("must not contain `..`");
    }
    let plain = format!("/{}", parts.join("/"));
    let is_reserved = RESERVED_PATHS.iter().any(|path| meet(&plain, path));
    if parts.is_empty() || plain == "/tmp" || is_reserved {
        return Err("must not be a folder of the system or of the executor itself");
    }
    Ok(plain)
}

/// Whether one of two paths is the other, or is below it.
pub fn meet(one: &str, other: &str) -> bool {
    let parts = |path: &str| -> Vec<String> {
        let parts = path.split('/').filter(|p| !p.is_empty() && *p != ".");
        parts.map(str::to_owned).collect()
    };
    let (one, other) = (parts(one), parts(other));
    one.iter().zip(&other).all(|(a, b)| a == b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("team", true)]
    #[case("kubernetes.io/os", true)]
    #[case("a_b.c-D", true)]
    #[case("", false)]
    #[case("/x", false)]
    #[case("a/b/c", false)]
    #[case("-a", false)]
    #[case("a.", false)]
    #[case("Upper.example/x", false)]
    #[case("sp ace", false)]
    #[case("é", false)]
    fn keys_are_qualified_names(#[case] key: &str, #[case] valid: bool) {
        assert_eq!(qualified_name(key).is_ok(), valid, "{key}");
    }

    #[test]
    fn lengths_are_those_of_kubernetes() {
        let long = |n: usize| "a".repeat(n);
        assert!(label_value(&long(63)).is_ok());
        assert!(label_value(&long(64)).is_err());
        assert!(qualified_name(&format!("example.com/{}", long(63))).is_ok());
        assert!(qualified_name(&long(64)).is_err());
        assert!(qualified_name(&format!("{}/x", long(253))).is_ok());
        assert!(qualified_name(&format!("{}/x", long(254))).is_err());
        assert!(object_name(&long(253)).is_ok());
        assert!(object_name(&long(254)).is_err());
        assert!(dns_label(&long(64)).is_err());
    }

    #[rstest]
    #[case("", true)]
    #[case("x=y", false)]
    #[case("true", true)]
    #[case("a b", false)]
    #[case("-a", false)]
    fn label_values_are_short_and_plain(#[case] value: &str, #[case] valid: bool) {
        assert_eq!(label_value(value).is_ok(), valid, "{value}");
    }

    #[rstest]
    #[case("terraform-runner", true)]
    #[case("a.b", true)]
    #[case("a..b", false)]
    #[case("A", false)]
    #[case("a/b", false)]
    #[case("", false)]
    #[case(" a", false)]
    fn object_names_are_subdomains(#[case] name: &str, #[case] valid: bool) {
        assert_eq!(object_name(name).is_ok(), valid, "{name}");
    }

    #[rstest]
    #[case("TF_LOG", true)]
    #[case("my.env-name", true)]
    #[case("1A", false)]
    #[case("", false)]
    #[case("A B", false)]
    #[case("..", false)]
    fn environment_names_are_those_every_cluster_takes(#[case] name: &str, #[case] valid: bool) {
        assert_eq!(env_name(name).is_ok(), valid, "{name}");
    }

    #[rstest]
    #[case("/data", "/data")]
    #[case("/data/", "/data")]
    #[case("//var/./cache//tf/.", "/var/cache/tf")]
    #[case("/home/mayfly/.terraform.d", "/home/mayfly/.terraform.d")]
    #[case("/tmp/cache", "/tmp/cache")]
    #[case("/libexec-of-ours", "/libexec-of-ours")]
    fn a_mount_path_has_one_spelling(#[case] path: &str, #[case] plain: &str) {
        assert_eq!(mount_path(path).as_deref(), Ok(plain));
    }

    #[rstest]
    #[case("data")]
    #[case("/")]
    #[case("//")]
    #[case("/.")]
    #[case("/a/../etc")]
    #[case("/a:ro")]
    #[case("/tmp")]
    #[case("/tmp/")]
    #[case("/etc")]
    #[case("/home")]
    #[case("/home/mayfly")]
    #[case("/home/cnb")]
    #[case("/var")]
    #[case("/var/lib")]
    #[case("/var/run/secrets/kubernetes.io")]
    #[case("/run/secrets")]
    #[case("/run/mayfly/x")]
    #[case("/bin/./x")]
    #[case("//lib64/")]
    #[case("/usr/lib/x86_64-linux-gnu")]
    #[case("/etc/ssh/ssh_config.d")]
    #[case("/proc/1")]
    fn mounts_stay_out_of_reserved_folders(#[case] path: &str) {
        assert!(mount_path(path).is_err(), "{path}");
    }

    /// A mount lands where a link leads, so a second name of a reserved folder is as good as the first.
    #[test]
    fn every_other_name_this_system_has_for_a_reserved_folder_is_reserved() {
        let mut seen = Vec::new();
        for folder in ["/", "/var", "/etc"] {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let (true, Ok(target)) = (path.is_symlink(), path.canonicalize()) else {
                    continue;
                };
                let (path, target) = (path.to_str().unwrap(), target.to_str().unwrap());
                if target != "/" && target_is_reserved(target) {
                    assert!(mount_path(path).is_err(), "{path} is {target}");
                    seen.push(path.to_owned());
                }
            }
        }
        assert!(seen.contains(&"/bin".to_owned()), "{seen:?}");
    }

    /// Whether it is a reserved folder or below one. A folder that contains a reserved one matters only for mounts.
    fn target_is_reserved(target: &str) -> bool {
        let target = std::path::Path::new(target);
        target.is_dir() && RESERVED_PATHS.iter().any(|path| target.starts_with(path))
    }
}
