//! The grammar of one reference: which secret of which store it names. Checks everything before any request. Pure.

use std::fmt;

use percent_encoding::percent_decode_str;

/// The longest text between the braces.
const MAX_BYTES: usize = 2048;

/// A store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StoreKind {
    Aws,
    Gcp,
    Azure,
    Vault,
}

impl StoreKind {
    pub const ALL: [Self; 4] = [Self::Aws, Self::Gcp, Self::Azure, Self::Vault];

    /// The word in references.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Aws => "ssm",
            Self::Gcp => "gcp",
            Self::Azure => "azure",
            Self::Vault => "vault",
        }
    }

    /// The store with this word in references.
    pub fn of_prefix(prefix: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|kind| kind.prefix() == prefix)
    }
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aws => "AWS Secrets Manager",
            Self::Gcp => "Google Secret Manager",
            Self::Azure => "Azure Key Vault",
            Self::Vault => "Vault",
        })
    }
}

/// Which secret a reference names. Two references with the same id are one read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SecretId {
    Aws {
        /// A name or an ARN.
        id: String,
        region: Option<String>,
        stage: Option<String>,
        version: Option<String>,
    },
    Gcp {
        /// `None`: the configured project.
        project: Option<String>,
        location: Option<String>,
        secret: String,
        /// `None`: the latest version.
        version: Option<String>,
    },
    Azure {
        vault: String,
        name: String,
        version: Option<String>,
    },
    Vault {
        path: String,
        /// `None`: the configured namespace.
        namespace: Option<String>,
        version: Option<u32>,
    },
}

impl SecretId {
    pub const fn store(&self) -> StoreKind {
        match self {
            Self::Aws { .. } => StoreKind::Aws,
            Self::Gcp { .. } => StoreKind::Gcp,
            Self::Azure { .. } => StoreKind::Azure,
            Self::Vault { .. } => StoreKind::Vault,
        }
    }

    /// What rules of the operator are compared with: the secret, without its versions and keys, and its namespace.
    pub fn rule_parts(&self) -> (String, Option<&str>) {
        match self {
            Self::Aws { id, region, .. } => match region {
                Some(region) if !id.starts_with("arn:") => {
                    (format!("ssm:{id}?region={region}"), None)
                }
                _ => (format!("ssm:{id}"), None),
            },
            Self::Gcp {
                project,
                location,
                secret,
                ..
            } => match (project, location) {
                (Some(project), Some(location)) => (
                    format!("gcp:projects/{project}/locations/{location}/secrets/{secret}"),
                    None,
                ),
                (Some(project), None) => (format!("gcp:projects/{project}/secrets/{secret}"), None),
                (None, _) => (format!("gcp:{secret}"), None),
            },
            Self::Azure { vault, name, .. } => (format!("azure:{name}@{vault}"), None),
            Self::Vault {
                path, namespace, ..
            } => (format!("vault:{path}"), namespace.as_deref()),
        }
    }
}

/// One reference.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    /// The text as it was written, with the braces. It has no control characters.
    pub text: String,
    pub id: SecretId,
    /// The member of the secret; `None`: its whole text.
    pub key: Option<String>,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Reference {
    /// Parses what is between `${` and `}`, behind the word and the colon. The error says what is wrong. It does not
    /// quote the text, which may be a pasted password.
    pub fn parse(kind: StoreKind, body: &str) -> Result<Self, &'static str> {
        if body.is_empty() {
            return Err("the reference names no secret");
        }
        if body.len() > MAX_BYTES {
            return Err("the reference is longer than 2048 bytes");
        }
        if body.contains(|c: char| c.is_control() || c.is_whitespace()) || body.contains("${") {
            return Err("a reference has no blanks, no control characters and no `${`");
        }
        let (id, key) = match kind {
            StoreKind::Aws => aws(body)?,
            StoreKind::Gcp => gcp(body)?,
            StoreKind::Azure => azure(body)?,
            StoreKind::Vault => vault(body)?,
        };
        Ok(Self {
            text: format!("${{{}:{body}}}", kind.prefix()),
            id,
            key,
        })
    }
}

type Parsed = (SecretId, Option<String>);

/// Splits off `#key`.
fn split_key(body: &str) -> Result<(&str, Option<String>), &'static str> {
    match body.split_once('#') {
        None => Ok((body, None)),
        Some((_, "")) => Err("the key after `#` is missing"),
        Some((rest, key)) => Ok((rest, Some(key.to_owned()))),
    }
}

fn is_made_of(text: &str, longest: usize, others: &[u8]) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    !text.is_empty() && text.len() <= longest && text.bytes().all(is_allowed)
}

/// Whether it can be part of a host name.
pub(crate) fn is_region(text: &str) -> bool {
    is_made_of(text, 63, b"-") && !text.starts_with('-') && !text.ends_with('-')
}

/// Whether it has the form of a region of AWS. Another word could make the host that of a customer, such as a bucket.
fn is_aws_region(text: &str) -> bool {
    let is_word = |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase());
    let parts: Vec<&str> = text.split('-').collect();
    matches!(&*parts, [words @ .., number]
        if words.len() >= 2 && words.iter().all(is_word) && number.parse::<u8>().is_ok())
}

fn aws(body: &str) -> Result<Parsed, &'static str> {
    let (rest, key) = split_key(body)?;
    let (name, options) = match rest.split_once('?') {
        Some((name, options)) => (name, Some(options)),
        None => (rest, None),
    };
    let (mut region, mut stage, mut version) = (None, None, None);
    for option in options.into_iter().flat_map(|options| options.split('&')) {
        let (place, value) = match option.split_once('=') {
            Some(("region", value)) if is_aws_region(value) => (&mut region, value),
            Some(("stage", value)) if is_made_of(value, 256, b"/_+=.@-") => (&mut stage, value),
            Some(("version", value)) if is_made_of(value, 64, b"-") => (&mut version, value),
            _ => return Err("the options are `stage=`, `version=` and `region=`"),
        };
        if place.replace(value.to_owned()).is_some() {
            return Err("an option is given twice");
        }
    }
    if name.starts_with("arn:") {
        let parts: Vec<&str> = name.splitn(7, ':').collect();
        let is_secret = matches!(*parts, ["arn", partition, "secretsmanager", of, account, "secret", name]
            if is_made_of(partition, 32, b"-") && is_aws_region(of) && is_made_of(account, 32, b"")
                && is_made_of(name, 512, b"/_+=.@-"));
        if !is_secret {
            return Err("the ARN is not that of a secret of Secrets Manager");
        }
        if region.is_some() {
            return Err("an ARN already names its region");
        }
        region = Some(parts[3].to_owned());
    } else if !is_made_of(name, 512, b"/_+=.@-") {
        return Err("a name of AWS has only letters, digits and `/_+=.@-`, 512 at most");
    }
    let id = SecretId::Aws {
        id: name.to_owned(),
        region,
        stage,
        version,
    };
    Ok((id, key))
}

fn gcp(body: &str) -> Result<Parsed, &'static str> {
    let (rest, key) = split_key(body)?;
    let parts: Vec<&str> = rest.split('/').collect();
    let (parts, version) = match *parts {
        [ref before @ .., "versions", version] if !before.is_empty() => (before, Some(version)),
        _ => (&*parts, None),
    };
    let (project, location, secret) = match *parts {
        [secret] => (None, None, secret),
        ["projects", project, "secrets", secret] => (Some(project), None, secret),
        [
            "projects",
            project,
            "locations",
            location,
            "secrets",
            secret,
        ] => (Some(project), Some(location), secret),
        _ => {
            return Err(
                "expected a name, or `projects/P/secrets/NAME`, with or without `/versions/V`",
            );
        }
    };
    let is_name = |text: &str| is_made_of(text, 255, b"_-");
    if !is_name(secret) || !version.is_none_or(is_name) {
        return Err("a name of Google has only letters, digits, `_` and `-`, 255 at most");
    }
    // Old projects have a domain in their name.
    let is_project = |text: &str| {
        is_made_of(text, 100, b"-.:") && text.starts_with(|c: char| c.is_ascii_alphanumeric())
    };
    if !project.is_none_or(is_project) || !location.is_none_or(is_region) {
        return Err("this is not the name of a project or of a location");
    }
    let id = SecretId::Gcp {
        project: project.map(str::to_owned),
        location: location.map(str::to_owned),
        secret: secret.to_owned(),
        version: version.map(str::to_owned),
    };
    Ok((id, key))
}

fn azure(body: &str) -> Result<Parsed, &'static str> {
    let (rest, key) = split_key(body)?;
    let (name, vault) = rest
        .split_once('@')
        .ok_or("the vault after `@` is missing")?;
    let (name, version) = match name.split_once('/') {
        Some((name, version)) => (name, Some(version)),
        None => (name, None),
    };
    if !is_made_of(name, 127, b"-") {
        return Err("a name of Azure has only letters, digits and `-`, 127 at most");
    }
    let is_version = |text: &str| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if !version.is_none_or(is_version) {
        return Err("a version of Azure has 32 hexadecimal digits");
    }
    let is_vault = vault.len() >= 3
        && is_made_of(vault, 24, b"-")
        && vault.starts_with(|c: char| c.is_ascii_alphabetic());
    if !is_vault {
        return Err(
            "the name of a vault has 3 to 24 letters, digits and `-`, and begins with a letter",
        );
    }
    // Azure compares both without regard to case, so rules must do so too.
    let id = SecretId::Azure {
        vault: vault.to_ascii_lowercase(),
        name: name.to_ascii_lowercase(),
        version: version.map(str::to_ascii_lowercase),
    };
    Ok((id, key))
}

fn vault(body: &str) -> Result<Parsed, &'static str> {
    let at_namespace = |text: &str| match text.rsplit_once('@') {
        Some((rest, namespace)) => (rest.to_owned(), Some(namespace.to_owned())),
        None => (text.to_owned(), None),
    };
    let (path, key, namespace, version);
    if let Some((before, after)) = body.split_once('#') {
        (key, namespace) = at_namespace(after);
        let (before, number) = match before.split_once('?') {
            Some((before, option)) => {
                let number = option.strip_prefix("version=");
                let number = number.and_then(|number| number.parse().ok());
                let number = number.filter(|number: &u32| *number > 0);
                (
                    before,
                    Some(number.ok_or("the option is `version=` with a number")?),
                )
            }
            None => (before, None),
        };
        (path, version) = (before.to_owned(), number);
    } else {
        let (rest, found) = at_namespace(body);
        let (before, last) = rest
            .rsplit_once('.')
            .ok_or("the key after the last `.` is missing")?;
        if before.contains('?') {
            return Err("with an option, the key follows `#`");
        }
        (path, key, namespace, version) = (before.to_owned(), last.to_owned(), found, None);
    }
    let path = segments(path.strip_prefix('/').unwrap_or(&path))?;
    if ["sys", "auth"].contains(&path.split('/').next().unwrap_or_default()) {
        return Err("there are no secrets below `sys/` and `auth/`");
    }
    let key = decoded(&key)?;
    if key.is_empty() {
        return Err("the key is empty");
    }
    let namespace = namespace
        .map(|namespace| segments(namespace.trim_matches('/')))
        .transpose()?;
    let id = SecretId::Vault {
        path,
        namespace,
        version,
    };
    Ok((id, Some(key)))
}

/// Decodes `%XX` once.
fn decoded(text: &str) -> Result<String, &'static str> {
    let text = percent_decode_str(text).decode_utf8();
    let text = text.map_err(|_| "the decoded text is not UTF-8")?;
    if text.contains(|c: char| c.is_control()) {
        return Err("the decoded text has control characters");
    }
    Ok(text.into_owned())
}

/// A path whose parts are plain, with each part decoded.
fn segments(path: &str) -> Result<String, &'static str> {
    let mut plain = Vec::new();
    for segment in path.split('/') {
        let segment = decoded(segment)?;
        if ["", ".", ".."].contains(&&*segment) || segment.contains('/') {
            return Err("a path has no empty parts, no `.` and no `..`");
        }
        plain.push(segment);
    }
    Ok(plain.join("/"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn rule_text(id: &SecretId) -> String {
        match id.rule_parts() {
            (text, Some(namespace)) => format!("{text}@{namespace}"),
            (text, None) => text,
        }
    }

    fn parse(text: &str) -> Result<Reference, &'static str> {
        let (prefix, body) = text.split_once(':').unwrap();
        Reference::parse(StoreKind::of_prefix(prefix).unwrap(), body)
    }

    #[rstest]
    #[case("ssm:prod/db", "ssm:prod/db", None)]
    #[case(
        "ssm:prod/db?stage=AWSPREVIOUS#password",
        "ssm:prod/db",
        Some("password")
    )]
    #[case(
        "ssm:prod/db?region=eu-west-1&version=1-2",
        "ssm:prod/db?region=eu-west-1",
        None
    )]
    #[case(
        "ssm:arn:aws:secretsmanager:eu-west-1:123456789012:secret:prod/db-AbCdEf#/a/b",
        "ssm:arn:aws:secretsmanager:eu-west-1:123456789012:secret:prod/db-AbCdEf",
        Some("/a/b")
    )]
    #[case("gcp:db", "gcp:db", None)]
    #[case("gcp:db/versions/7#user", "gcp:db", Some("user"))]
    #[case(
        "gcp:projects/p-1/secrets/db/versions/latest",
        "gcp:projects/p-1/secrets/db",
        None
    )]
    #[case(
        "gcp:projects/example.com:p/locations/europe-west3/secrets/db",
        "gcp:projects/example.com:p/locations/europe-west3/secrets/db",
        None
    )]
    #[case("azure:Db@Vault-1", "azure:db@vault-1", None)]
    #[case(
        "azure:db/0123456789abcdef0123456789ABCDEF@vault#k",
        "azure:db@vault",
        Some("k")
    )]
    #[case("vault:kv/team/app.password", "vault:kv/team/app", Some("password"))]
    #[case(
        "vault:/kv/team.v2/app.password@ns/sub/",
        "vault:kv/team.v2/app@ns/sub",
        Some("password")
    )]
    #[case("vault:kv/a@b?version=3#x.y@ns", "vault:kv/a@b@ns", Some("x.y"))]
    #[case("vault:kv/a%40b%23.key%2e", "vault:kv/a@b#", Some("key."))]
    #[case("vault:kv/%2570.key", "vault:kv/%70", Some("key"))]
    fn what_names_a_secret_is_parsed(
        #[case] text: &str,
        #[case] rule: &str,
        #[case] key: Option<&str>,
    ) {
        let reference = parse(text).unwrap();
        assert_eq!(rule_text(&reference.id), rule);
        assert_eq!(reference.key.as_deref(), key);
        assert_eq!(reference.to_string(), format!("${{{text}}}"));
    }

    #[rstest]
    #[case("ssm:")]
    #[case("ssm:a\nb")]
    #[case("ssm:a b")]
    #[case("ssm:a?region=evil.com")]
    #[case("ssm:a?region=s3")]
    #[case("ssm:a?region=s3-us-west-2")]
    #[case("ssm:arn:aws:secretsmanager:s3-us-west-2:1:secret:x")]
    #[case("ssm:a?region=x&region=y")]
    #[case("ssm:a#")]
    #[case("ssm:arn:aws:s3:eu-west-1:1:secret:x")]
    #[case("ssm:arn:aws:secretsmanager:evil.com/:1:secret:x")]
    #[case("gcp:../../x")]
    #[case("gcp:projects/p/x")]
    #[case("gcp:projects/../secrets/x")]
    #[case("gcp:db/versions/")]
    #[case("azure:x")]
    #[case("azure:x@evil.com/")]
    #[case("azure:x@v")]
    #[case("azure:x/y@vault")]
    #[case("vault:nodot")]
    #[case("vault:../sys/raw.k")]
    #[case("vault:sys/raw.k")]
    #[case("vault:%73ys/raw.k")]
    #[case("vault:p%2e%2e/x.k@a//b")]
    #[case("vault:p/%2e%2e/x.k")]
    #[case("vault:p%2fx.k")]
    #[case("vault:p/x.k%0a")]
    #[case("vault:p/x.k%ff")]
    #[case("vault:p?version=0#k")]
    #[case("vault:p?version=1.k")]
    #[case("vault:p.k@")]
    fn what_does_not_name_a_secret_is_refused(#[case] text: &str) {
        assert!(parse(text).is_err(), "{text}: {:?}", parse(text));
    }

    #[test]
    fn a_key_after_a_vault_is_never_a_second_vault() {
        let reference = parse("azure:x@vault#@evil").unwrap();
        assert_eq!(rule_text(&reference.id), "azure:x@vault");
        assert_eq!(reference.key.as_deref(), Some("@evil"));
    }

    proptest! {
        /// What a parsed reference puts into addresses cannot leave its place there.
        #[test]
        fn no_text_leaves_its_place_in_an_address(body in "[ -~é%/.@#?]{0,60}") {
            for kind in StoreKind::ALL {
                let Ok(reference) = Reference::parse(kind, &body) else { continue };
                match reference.id {
                    SecretId::Aws { region, .. } => {
                        prop_assert!(region.is_none_or(|region| !region.contains(['.', '/'])));
                    }
                    SecretId::Azure { vault, .. } => prop_assert!(!vault.contains(['.', '/', ':'])),
                    SecretId::Gcp { secret, .. } => prop_assert!(!secret.contains(['.', '/'])),
                    SecretId::Vault { path, .. } => {
                        prop_assert!(path.split('/').all(|part| !["", ".", ".."].contains(&part)));
                        prop_assert!(!path.starts_with("sys/"));
                    }
                }
            }
        }
    }
}
