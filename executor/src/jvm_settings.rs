//! Settings that upstream's virtual machine and its image read, for installations that keep proxies and authorities there: the
//! proxy options in `JAVA_TOOL_OPTIONS`, and the bindings below `SERVICE_BINDING_ROOT`.
//!
//! They become the usual variables (`HTTPS_PROXY`, `SSL_CERT_FILE`, …), which the executor and everything it starts read. Usual
//! variables that are set win over options.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use artifact_store::Digest;
use job_contract::chain::with_causes;
use job_contract::env::{JAVA_TOOL_OPTIONS, SERVICE_BINDING_ROOT};
use job_contract::java_options::words;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use runtime::regular_file;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

/// Where distributions keep their authorities.
const SYSTEM_BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
];
/// The variables in which programs look for authorities.
pub(crate) const CA_VARIABLES: [&str; 5] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "REQUESTS_CA_BUNDLE",
];
const BINDING_TYPE: &str = "ca-certificates";
/// Files of a binding that describe it.
const BINDING_FACTS: [&str; 2] = ["type", "provider"];
const MAX_BUNDLE_BYTES: u64 = 16 << 20;
/// The virtual machine's own default.
const DIRECT_HOSTS: &str = "localhost|127.*|[::1]";

type Changes = BTreeMap<&'static str, OsString>;

/// The variables that these settings come to. `own` looks up the environment. After a restart with them there are none.
pub(crate) fn variables(own: impl Fn(&str) -> Option<OsString>) -> Result<Changes, String> {
    let own = |name: &str| own(name).filter(|value| !value.is_empty());
    let mut changes = match own(JAVA_TOOL_OPTIONS) {
        Some(options) => proxies(&options.to_string_lossy(), own)
            .map_err(|wrong| format!("`{JAVA_TOOL_OPTIONS}` has {wrong}"))?,
        None => Changes::new(),
    };
    if let Some(root) = own(SERVICE_BINDING_ROOT) {
        let authorities = bound_authorities(Path::new(&root))
            .map_err(|wrong| format!("`{SERVICE_BINDING_ROOT}`: {wrong}"))?;
        if !authorities.is_empty() {
            trust(authorities, own, &mut changes)?;
        }
    }
    Ok(changes)
}

fn proxies(options: &str, own: impl Fn(&str) -> Option<OsString>) -> Result<Changes, String> {
    // The last of equal options counts.
    let words = words(options);
    let options: BTreeMap<&str, &str> = words
        .iter()
        .filter_map(|word| word.strip_prefix("-D")?.split_once('='))
        .collect();
    let mut changes = Changes::new();
    let is_set = |names: &[&str]| names.iter().any(|name| own(name).is_some());
    for (scheme, upper, lower, port) in [
        ("http", "HTTP_PROXY", "http_proxy", "80"),
        ("https", "HTTPS_PROXY", "https_proxy", "443"),
    ] {
        let option = |name: &str| {
            let value = options.get(format!("{scheme}.{name}").as_str());
            value.copied().filter(|value| !value.is_empty())
        };
        let Some(host) = option("proxyHost") else {
            continue;
        };
        if is_set(&[upper, lower, "ALL_PROXY", "all_proxy"]) {
            continue;
        }
        let host = match host
            .strip_prefix('[')
            .map_or(host, |host| host.trim_end_matches(']'))
        {
            address if address.contains(':') && address.parse::<std::net::Ipv6Addr>().is_ok() => {
                format!("[{address}]")
            }
            name if url::Host::parse(name).is_ok() => name.to_owned(),
            _ => {
                return Err(format!(
                    "`{scheme}.proxyHost`, which is no host name or address"
                ));
            }
        };
        let port = option("proxyPort").unwrap_or(port);
        let port: u16 = port
            .parse()
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| format!("`{scheme}.proxyPort`, which is no port"))?;
        // The password may be wrong, and is a secret, so it is never shown.
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let login = match (option("proxyUser"), option("proxyPassword")) {
            (Some(user), Some(password)) => format!("{}:{}@", encoded(user), encoded(password)),
            (Some(user), None) => format!("{}@", encoded(user)),
            (None, Some(_)) => {
                return Err(format!(
                    "`{scheme}.proxyPassword` without `{scheme}.proxyUser`"
                ));
            }
            (None, None) => String::new(),
        };
        let address = OsString::from(format!("http://{login}{host}:{port}"));
        changes.insert(upper, address.clone());
        changes.insert(lower, address);
    }
    if !changes.is_empty() && !is_set(&["NO_PROXY", "no_proxy"]) {
        let hosts = options.get("http.nonProxyHosts").unwrap_or(&DIRECT_HOSTS);
        let direct: Vec<String> = hosts
            .split('|')
            .map(str::trim)
            .filter(|host| !host.is_empty())
            .map(direct_host)
            .collect::<Result<_, _>>()?;
        let direct = OsString::from(direct.join(","));
        changes.insert("NO_PROXY", direct.clone());
        changes.insert("no_proxy", direct);
    }
    Ok(changes)
}

/// One pattern of hosts without a proxy, as `NO_PROXY` writes it: a name, `.domain`, an address or a network.
fn direct_host(pattern: &str) -> Result<String, String> {
    let wrong = || {
        format!(
            "`{pattern}` in `http.nonProxyHosts`, which `NO_PROXY` cannot express: write a name, `*.domain`, or the beginning of \
             an address such as `10.*`"
        )
    };
    if pattern.contains(',') || pattern.contains(char::is_whitespace) {
        return Err(wrong());
    }
    let bare = pattern.trim_matches(['[', ']']);
    if !pattern.contains('*') {
        return Ok(bare.to_owned());
    }
    if pattern == "*" {
        return Ok("*".to_owned());
    }
    if let Some(domain) = pattern.strip_prefix('*') {
        return match domain.strip_prefix('.') {
            Some(rest) if !rest.is_empty() && !rest.contains('*') => Ok(domain.to_owned()),
            _ => Err(wrong()),
        };
    }
    let parts: Vec<u8> = pattern
        .strip_suffix(".*")
        .ok_or_else(wrong)?
        .trim_end_matches(".*")
        .split('.')
        .map(|part| part.parse().map_err(|_| wrong()))
        .collect::<Result<_, _>>()?;
    if parts.len() > 3 {
        return Err(wrong());
    }
    let bits = parts.len() * 8;
    let mut address = [0; 4];
    address[..parts.len()].copy_from_slice(&parts);
    Ok(format!("{}/{bits}", std::net::Ipv4Addr::from(address)))
}

/// The certificates of all bindings of the type. A root that does not exist has none: images name it in any case.
fn bound_authorities(root: &Path) -> Result<Vec<u8>, String> {
    let mut found = Vec::new();
    for binding in entries(root)? {
        let kind = binding.join(BINDING_FACTS[0]);
        let is_one = match regular_file::read(&kind, MAX_BUNDLE_BYTES) {
            Ok(text) => text
                .trim_ascii()
                .eq_ignore_ascii_case(BINDING_TYPE.as_bytes()),
            Err(_) => false,
        };
        if !is_one {
            continue;
        }
        let files = entries(&binding)?.into_iter();
        let files = files.filter(|file| {
            !BINDING_FACTS
                .iter()
                .any(|fact| file.file_name().is_some_and(|name| name == *fact))
        });
        let before = found.len();
        for file in files {
            add_certificates(&file, &mut found)?;
        }
        if found.len() == before {
            let binding = binding.display();
            return Err(format!(
                "`{binding}` has the type `{BINDING_TYPE}` and no certificate"
            ));
        }
    }
    Ok(found)
}

/// What is in the folder, in order, without what Kubernetes hides there.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
        entries.collect()
    };
    let mut entries = match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(|error| unreadable(folder, &error))?,
    };
    entries.retain(|path| {
        let name = path.file_name().unwrap_or_default();
        !name.as_encoded_bytes().starts_with(b".")
    });
    entries.sort();
    Ok(entries)
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    with_causes(format!("could not read `{}`", path.display()), Some(error))
}

/// Adds a PEM file with one or more certificates.
fn add_certificates(file: &Path, bundle: &mut Vec<u8>) -> Result<(), String> {
    let text =
        regular_file::read(file, MAX_BUNDLE_BYTES).map_err(|error| unreadable(file, &error))?;
    let mut certificates = CertificateDer::pem_slice_iter(&text).peekable();
    if certificates.peek().is_none() || certificates.any(|certificate| certificate.is_err()) {
        return Err(format!(
            "`{}` does not consist of certificates in PEM",
            file.display()
        ));
    }
    bundle.extend(text);
    bundle.push(b'\n');
    Ok(())
}

/// Refuses a file that does not hold certificates alone.
pub(crate) fn check_authorities(file: &Path) -> Result<(), String> {
    add_certificates(file, &mut Vec::new())
}

/// Puts the authorities beside those that are trusted already, and names the file in all variables.
fn trust(
    authorities: Vec<u8>,
    own: impl Fn(&str) -> Option<OsString>,
    changes: &mut Changes,
) -> Result<(), String> {
    let set = own(CA_VARIABLES[0]).map(PathBuf::from);
    let known = match &set {
        Some(file) => regular_file::read(file, MAX_BUNDLE_BYTES)
            .map_err(|error| format!("`{}`: {}", CA_VARIABLES[0], unreadable(file, &error)))?,
        None => SYSTEM_BUNDLES
            .iter()
            .find_map(|file| regular_file::read(Path::new(file), MAX_BUNDLE_BYTES).ok())
            .unwrap_or_default(),
    };
    if known.ends_with(&authorities) {
        return Ok(());
    }
    let bundle = [known, b"\n".to_vec(), authorities].concat();
    let file = write_bundle(&bundle).map_err(|error| {
        with_causes(
            "could not write the bundle of authorities".to_owned(),
            Some(&error),
        )
    })?;
    for name in CA_VARIABLES {
        // What the operator has set for one kind of program stays, unless it is the file that was read.
        if own(name).is_none_or(|value| set.as_ref().is_some_and(|set| value == **set)) {
            changes.insert(name, file.clone().into());
        }
    }
    Ok(())
}

/// Writes a file whose name says its content, so that runs of one machine share it.
fn write_bundle(bundle: &[u8]) -> io::Result<PathBuf> {
    let digest = Digest::of_rest(&mut &*bundle)?;
    let file =
        std::env::temp_dir().join(format!("mayfly-authorities-{}.pem", &digest.sha256[..32]));
    let mut made = tempfile::NamedTempFile::new()?;
    made.write_all(bundle)?;
    made.as_file()
        .set_permissions(Permissions::from_mode(0o444))?;
    // It replaces whatever has this name. A file of another user in a shared folder cannot be replaced, and fails here.
    made.persist(&file)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn changed(own: &[(&str, &str)]) -> Result<BTreeMap<&'static str, String>, String> {
        let own = |name: &str| {
            let found = own.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        let text = |(name, value): (_, OsString)| (name, value.into_string().unwrap());
        variables(own).map(|changes| changes.into_iter().map(text).collect())
    }

    #[test]
    fn proxies_of_the_virtual_machine_become_variables_in_both_spellings() {
        let options = "-Xmx1g -Dhttp.proxyHost=old -Dhttp.proxyHost=proxy.corp -Dhttp.proxyPort=3128 -Dhttps.proxyHost=::1 \
                       '-Dhttp.nonProxyHosts=localhost|*.corp|10.*|192.168.*|[::1]' -Dhttp.proxyUser=me -Dhttp.proxyPassword=p@ss";
        let found = changed(&[(JAVA_TOOL_OPTIONS, options)]).unwrap();
        let direct = "localhost,.corp,10.0.0.0/8,192.168.0.0/16,::1";
        for (upper, value) in [
            ("HTTP_PROXY", "http://me:p%40ss@proxy.corp:3128"),
            ("HTTPS_PROXY", "http://[::1]:443"),
            ("NO_PROXY", direct),
        ] {
            assert_eq!(found[upper], value);
            assert_eq!(found[upper.to_lowercase().as_str()], value);
        }
        assert_eq!(found.len(), 6);
    }

    #[test]
    fn variables_that_are_set_win() {
        let options = "-Dhttp.proxyHost=a -Dhttps.proxyHost=a";
        let both = changed(&[
            (JAVA_TOOL_OPTIONS, options),
            ("https_proxy", "http://b"),
            ("NO_PROXY", "c"),
        ]);
        assert_eq!(
            both.unwrap().into_keys().collect::<Vec<_>>(),
            ["HTTP_PROXY", "http_proxy"]
        );
        let all = changed(&[(JAVA_TOOL_OPTIONS, options), ("ALL_PROXY", "http://b")]);
        assert_eq!(all, Ok(BTreeMap::new()));
        assert_eq!(
            changed(&[(JAVA_TOOL_OPTIONS, "-Xmx1g -Dhttp.proxyPort=1")]),
            Ok(BTreeMap::new())
        );
    }

    #[rstest]
    #[case("-Dhttp.proxyHost=http://p", "`http.proxyHost`")]
    #[case("-Dhttps.proxyHost=p -Dhttps.proxyPort=0", "`https.proxyPort`")]
    #[case("-Dhttps.proxyHost=p -Dhttps.proxyPort=hunter2", "`https.proxyPort`")]
    #[case(
        "-Dhttp.proxyHost=p -Dhttp.proxyPassword=hunter2",
        "`http.proxyPassword` without `http.proxyUser`"
    )]
    #[case(
        "-Dhttp.proxyHost=p -Dhttp.nonProxyHosts=a*b",
        "`a*b` in `http.nonProxyHosts`"
    )]
    #[case("-Dhttp.proxyHost=p -Dhttp.nonProxyHosts=*corp", "`*corp` in")]
    #[case("-Dhttp.proxyHost=p -Dhttp.nonProxyHosts=300.*", "`300.*` in")]
    #[case("-Dhttp.proxyHost=p -Dhttp.nonProxyHosts=a,b", "`a,b` in")]
    fn wrong_options_are_named_without_their_secrets(#[case] options: &str, #[case] text: &str) {
        let error = changed(&[(JAVA_TOOL_OPTIONS, options)]).unwrap_err();
        assert!(
            error.contains(text) && !error.contains("hunter2"),
            "{error}"
        );
    }

    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";

    fn binding(root: &Path, name: &str, files: &[(&str, &str)]) {
        let folder = root.join(name);
        fs::create_dir(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn bound_authorities_are_trusted_beside_the_known_ones() {
        let root = tempfile::tempdir().unwrap();
        binding(
            root.path(),
            "a",
            &[
                ("type", "ca-certificates\n"),
                ("one.pem", CERTIFICATE),
                ("two.pem", CERTIFICATE),
            ],
        );
        binding(
            root.path(),
            "b",
            &[
                ("type", "ca-certificates"),
                ("provider", "me"),
                ("three.crt", CERTIFICATE),
            ],
        );
        binding(
            root.path(),
            "c",
            &[("type", "postgresql"), ("password", "x")],
        );
        let known = root.path().join("known.pem");
        fs::write(&known, "# known\n").unwrap();
        let known = known.to_str().unwrap();
        let bindings = root.path().to_str().unwrap();
        let own = [
            (SERVICE_BINDING_ROOT, bindings),
            ("SSL_CERT_FILE", known),
            ("CURL_CA_BUNDLE", "/other"),
        ];
        let found = changed(&own).unwrap();
        let names: Vec<_> = found.keys().copied().collect();
        assert_eq!(
            names,
            [
                "GIT_SSL_CAINFO",
                "NODE_EXTRA_CA_CERTS",
                "REQUESTS_CA_BUNDLE",
                "SSL_CERT_FILE"
            ]
        );
        let file = &found["SSL_CERT_FILE"];
        let bundle = fs::read_to_string(file).unwrap();
        assert!(bundle.starts_with("# known\n"));
        assert_eq!(bundle.matches("BEGIN CERTIFICATE").count(), 3);
        // Nothing more is to be done after the restart.
        assert_eq!(
            changed(&[(SERVICE_BINDING_ROOT, bindings), ("SSL_CERT_FILE", file)]),
            Ok(BTreeMap::new())
        );
        fs::remove_file(file).unwrap();
        assert_eq!(
            changed(&[(SERVICE_BINDING_ROOT, "/nonexistent")]),
            Ok(BTreeMap::new())
        );
    }

    #[test]
    fn what_is_no_certificate_is_refused() {
        let root = tempfile::tempdir().unwrap();
        binding(root.path(), "a", &[("type", "ca-certificates")]);
        let own = [(SERVICE_BINDING_ROOT, root.path().to_str().unwrap())];
        assert!(
            changed(&own)
                .unwrap_err()
                .ends_with("has the type `ca-certificates` and no certificate")
        );
        fs::write(root.path().join("a/x.jks"), "no pem").unwrap();
        assert!(
            changed(&own)
                .unwrap_err()
                .ends_with("x.jks` does not consist of certificates in PEM")
        );
    }
}
