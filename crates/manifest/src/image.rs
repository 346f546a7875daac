//! Parses image references, and replaces their registry.

/// The registry of images that name none.
const DEFAULT_REGISTRY: &str = "docker.io";

/// The parts of `[registry/]repository[:tag][@digest]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference<'a> {
    registry: Option<&'a str>,
    repository: &'a str,
    /// `:tag`, `@digest`, both or neither, as written.
    version: &'a str,
}

impl<'a> Reference<'a> {
    /// Parses a reference. The error is the broken rule.
    pub fn parse(text: &'a str) -> Result<Self, &'static str> {
        const RULE: &str = "must be an image reference: `[registry[:port]/]path[:tag][@sha256:digest]`, path in lower case";
        let (registry, rest) = match text.split_once('/') {
            Some((first, rest)) if is_registry(first) => (Some(first), rest),
            _ => (None, text),
        };
        let path_end = rest.find([':', '@']).unwrap_or(rest.len());
        let (repository, version) = rest.split_at(path_end);
        let reference = Self {
            registry,
            repository,
            version,
        };
        if registry.is_none_or(is_host) && is_repository(repository) && is_version(version) {
            Ok(reference)
        } else {
            Err(RULE)
        }
    }

    /// The registry and the full repository below it, as a policy names them.
    pub fn origin(&self) -> (&'a str, String) {
        let registry = self.registry.unwrap_or(DEFAULT_REGISTRY);
        let library = if registry == DEFAULT_REGISTRY && !self.repository.contains('/') {
            "library/"
        } else {
            ""
        };
        (registry, format!("{registry}/{library}{}", self.repository))
    }

    /// Returns the last part of the repository.
    pub fn name(&self) -> &'a str {
        self.repository
            .rsplit_once('/')
            .map_or(self.repository, |(_, name)| name)
    }

    /// Returns the same repository, tag and digest in another registry, or below a path of it.
    pub fn in_registry(&self, registry: &str) -> String {
        format!(
            "{}/{}{}",
            registry.trim_end_matches('/'),
            self.repository,
            self.version
        )
    }
}

/// Whether a text is a valid image reference.
pub fn check(text: &str) -> Result<(), &'static str> {
    Reference::parse(text).map(|_| ())
}

/// Whether a text can precede a repository: a registry, optionally with a path.
pub fn check_registry(text: &str) -> Result<(), &'static str> {
    const RULE: &str = "must be a registry, `host[:port][/path]`, without a scheme; the host has a dot or a port, or is `localhost`";
    let text = text.trim_end_matches('/');
    let (host, path) = match text.split_once('/') {
        Some((host, path)) => (host, Some(path)),
        None => (text, None),
    };
    // Any other word would be the first part of a path on the default registry.
    if is_registry(host) && is_host(host) && path.is_none_or(is_repository) {
        Ok(())
    } else {
        Err(RULE)
    }
}

/// Container runtimes use this rule to distinguish a registry from the first part of a path.
fn is_registry(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost"
}

fn is_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (host, None),
    };
    let label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.split('.').all(label)
        && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn is_repository(path: &str) -> bool {
    let component = |part: &str| {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        part.bytes().next().is_some_and(plain)
            && part.bytes().next_back().is_some_and(plain)
            && part.bytes().all(|b| plain(b) || b"._-".contains(&b))
    };
    path.len() <= 255 && path.split('/').all(component)
}

fn is_version(version: &str) -> bool {
    let (tag, digest) = match version.split_once('@') {
        Some((tag, digest)) => (tag, Some(digest)),
        None => (version, None),
    };
    let tag_valid = tag.is_empty()
        || tag.strip_prefix(':').is_some_and(|tag| {
            (1..=128).contains(&tag.len())
                && !tag.starts_with(['.', '-'])
                && tag
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        });
    let digest_valid = digest.is_none_or(|digest| {
        digest.strip_prefix("sha256:").is_some_and(|hex| {
            hex.len() == 64
                && hex
                    .bytes()
                    .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        })
    });
    tag_valid && digest_valid
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const DIGEST: &str = "@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[rstest]
    #[case("executor:1", "mirror.example/executor:1")]
    #[case(
        "azbuilder/executor:2.33.0",
        "mirror.example/azbuilder/executor:2.33.0"
    )]
    #[case("ghcr.io/acme/executor:1", "mirror.example/acme/executor:1")]
    #[case("localhost/executor", "mirror.example/executor")]
    #[case("registry:5000/acme/executor:1", "mirror.example/acme/executor:1")]
    fn another_registry_takes_the_place_of_the_images_own(
        #[case] image: &str,
        #[case] expected: &str,
    ) {
        let reference = Reference::parse(image).unwrap();
        assert_eq!(reference.in_registry("mirror.example"), expected);
        assert_eq!(
            Reference::parse(&format!("{image}{DIGEST}"))
                .unwrap()
                .in_registry("mirror.example"),
            format!("{expected}{DIGEST}")
        );
    }

    #[test]
    fn a_registry_may_have_a_port_and_a_path() {
        let image = format!("quay.io:443/acme/executor{DIGEST}");
        let reference = Reference::parse(&image).unwrap();
        assert_eq!(
            reference.in_registry("r:5000/mirrors/quay/"),
            format!("r:5000/mirrors/quay/acme/executor{DIGEST}")
        );
        for registry in ["r.example", "r:5000", "r.example/a/b", "localhost/"] {
            assert!(check_registry(registry).is_ok(), "{registry}");
        }
        for registry in [
            "",
            "/",
            "https://r",
            "r:port",
            "r:1/A",
            "r:1//a",
            "r:0",
            "a b",
        ] {
            assert!(check_registry(registry).is_err(), "{registry}");
        }
    }

    #[test]
    fn a_name_that_the_runtime_reads_as_a_path_is_no_registry() {
        for word in ["mirror", "mirror/", "mirror/team"] {
            let moved = Reference::parse("app").unwrap().in_registry(word);
            assert_eq!(Reference::parse(&moved).unwrap().origin().0, "docker.io");
            assert!(check_registry(word).is_err(), "{word}");
        }
    }

    #[rstest]
    #[case("executor", "docker.io", "docker.io/library/executor")]
    #[case("acme/executor:1", "docker.io", "docker.io/acme/executor")]
    #[case("ghcr.io/acme/executor:1", "ghcr.io", "ghcr.io/acme/executor")]
    #[case("r:5000/executor", "r:5000", "r:5000/executor")]
    fn the_registry_of_an_image_is_found(
        #[case] image: &str,
        #[case] registry: &str,
        #[case] repository: &str,
    ) {
        let (from, path) = Reference::parse(image).unwrap().origin();
        assert_eq!((from, path.as_str()), (registry, repository));
    }

    #[rstest]
    #[case("")]
    #[case("Executor")]
    #[case("a//b")]
    #[case("/a")]
    #[case("a/")]
    #[case("a:")]
    #[case("a: 1")]
    #[case("a@sha256:12")]
    #[case("a@md5:00")]
    #[case("https://ghcr.io/a")]
    #[case("ghcr.io:/a")]
    #[case("a b")]
    fn what_no_runtime_could_pull_is_refused(#[case] image: &str) {
        assert!(check(image).is_err(), "{image}");
    }

    proptest! {
        #[test]
        fn an_image_can_be_moved_to_any_registry(
            image in "[a-z0]{0,3}[.:/@A-]{0,2}[a-z0]{1,4}[.:/@A-]{0,2}[a-z0]{0,6}",
            registry in "[a-z]{0,3}[.:/A]{0,2}[a-z0-9]{1,3}/?",
        ) {
            let reference = Reference::parse(&image);
            prop_assert_eq!(check(&image).is_ok(), reference.is_ok());
            if let Ok(reference) = reference {
                let (host, path) = reference.origin();
                prop_assert!(path.starts_with(&format!("{host}/")), "{} {}", image, path);
                if check_registry(&registry).is_ok() {
                    let moved = reference.in_registry(&registry);
                    let moved_to = Reference::parse(&moved).map(|moved| moved.origin().1);
                    let within = registry.trim_end_matches('/');
                    prop_assert!(
                        moved_to.is_ok_and(|path| path.starts_with(within)),
                        "{} {} {}", image, registry, moved
                    );
                }
            }
        }
    }
}
