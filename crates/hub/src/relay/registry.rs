//! The platform's registry of modules and providers, as the tool of a run asks it. The paths are those of Terrakube's registry.
//! Pure.

use url::Url;

use super::calls::{Call, is_plain};

/// The paths of the registry on its host.
pub(super) const ROOT: &str = "terraform";

/// Returns the organization whose module or provider a path below [`ROOT`] is about.
pub(super) fn namespace<'p>(path: &[&'p str]) -> Option<(Call, &'p str)> {
    match path {
        ["modules", "v1", namespace, _, _, "versions"]
        | ["modules", "v1", namespace, _, _, _, "download"]
        | ["providers", "v1", namespace, _, "versions"]
        | ["providers", "v1", namespace, _, _, "download", _, _] => {
            Some((Call::ReadRegistry, namespace))
        }
        [
            "modules",
            "v1",
            "download",
            namespace,
            _,
            _,
            _,
            "module.zip",
        ] => Some((Call::ReadModule, namespace)),
        _ => None,
    }
}

/// Returns where the tool finds a module. An archive of the registry itself is found relative to the path that names it
/// (`modules/v1/{organization}/{module}/{provider}/{version}/download`), so that it passes the relay too.
pub(super) fn location(named: &str, registry: &Url) -> String {
    let archive = Url::parse(named).ok().filter(|url| {
        url.origin() == registry.origin() && url.query().is_none() && url.fragment().is_none()
    });
    let path = archive.as_ref().and_then(|url| {
        let path = url.path().strip_prefix('/')?.strip_prefix(ROOT)?;
        let parts: Vec<_> = path.strip_prefix('/')?.split('/').collect();
        let is_archive = matches!(namespace(&parts), Some((Call::ReadModule, _)));
        (is_archive && parts.iter().all(|part| is_plain(part))).then(|| parts[2..].join("/"))
    });
    path.map_or_else(|| named.to_owned(), |path| format!("../../../../{path}"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(
        "https://registry.example.test/terraform/modules/v1/download/acme/net/aws/1.2.0/module.zip",
        "../../../../download/acme/net/aws/1.2.0/module.zip"
    )]
    #[case::another_host(
        "https://other.example.test/terraform/modules/v1/download/acme/net/aws/1.2.0/module.zip",
        "https://other.example.test/terraform/modules/v1/download/acme/net/aws/1.2.0/module.zip"
    )]
    #[case::another_port(
        "https://registry.example.test:8443/terraform/modules/v1/download/a/b/c/1.0.0/module.zip",
        "https://registry.example.test:8443/terraform/modules/v1/download/a/b/c/1.0.0/module.zip"
    )]
    #[case::another_path(
        "https://registry.example.test/modules/net.zip",
        "https://registry.example.test/modules/net.zip"
    )]
    #[case::git(
        "git::https://git.example.test/net.git?ref=v1",
        "git::https://git.example.test/net.git?ref=v1"
    )]
    fn an_archive_of_the_registry_is_found_through_the_relay(
        #[case] named: &str,
        #[case] expected: &str,
    ) {
        let registry = Url::parse("https://registry.example.test/").unwrap();
        let found = location(named, &registry);
        assert_eq!(found, expected);
        if found.starts_with("..") {
            // As the tool resolves it.
            let asked = "http://127.0.0.1:1/p/registry/modules/v1/acme/net/aws/1.2.0/download";
            let resolved = Url::parse(asked).unwrap().join(&found).unwrap();
            assert_eq!(
                resolved.path(),
                "/p/registry/modules/v1/download/acme/net/aws/1.2.0/module.zip"
            );
        }
    }
}
