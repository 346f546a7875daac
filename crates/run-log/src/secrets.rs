//! Finds the secret values of a job. Pure.
//!
//! The platform does not say which variables are sensitive, so this module decides by name and format. Two errors are
//! possible, and both matter: a visible secret, and a log in which every `true` and `prod` is masked.
//!
//! - Words that are used only for secrets (`TOKEN`, `PASSWORD`) make every value secret, except plain words and small
//!   numbers.
//! - Words with other uses (`KEY`, `AUTH`) make only values secret that look generated.

use job_contract::JobData;
use serde_json::Value;

/// Shorter values are part of ordinary words.
const MIN_CHARS: usize = 4;
/// A shorter value counts as a word if it has only letters.
const MIN_WORD_CHARS: usize = 6;
/// A shorter value of digits counts as a number.
const MIN_DIGITS: usize = 8;

/// A name is secret if it contains one of these, without separators and in upper case.
const SECRET_WORDS: &[&str] = &[
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "PRIVATEKEY",
    "APIKEY",
    "ACCESSKEY",
    "ACCOUNTKEY",
    "STORAGEKEY",
    "MASTERKEY",
    "SIGNINGKEY",
    "ENCRYPTIONKEY",
    "SERVICEKEY",
    "LICENSEKEY",
    "SHAREDKEY",
    "CONNECTIONSTRING",
];
/// A name is secret if it has one of these as a whole word. They are parts of other words.
const SECRET_WHOLE_WORDS: &[&str] = &["PASS", "PWD", "SAS", "JWT", "PAT", "AUTHORIZATION"];
/// Whole words that make a name secret if the value looks generated.
const DOUBTFUL_WORDS: &[&str] = &[
    "KEY",
    "KEYS",
    "AUTH",
    "PRIVATE",
    "SIG",
    "SIGNATURE",
    "COOKIE",
];
/// As the last word of a name, these mean that the value only names or locates the secret.
const QUALIFIERS: &[&str] = &[
    "FILE",
    "PATH",
    "DIR",
    "NAME",
    "ID",
    "URL",
    "URI",
    "TYPE",
    "MODE",
    "METHOD",
    "ENABLED",
    "TTL",
    "EXPIRY",
    "EXPIRATION",
    "DURATION",
    "LENGTH",
    "VERSION",
    "REGION",
    "ARN",
    "ENDPOINT",
    "ISSUER",
    "AUDIENCE",
    "ROLE",
    "POLICY",
    "ALGORITHM",
    "COUNT",
    "ROTATION",
];
/// Names that are secret in spite of their last word. The first two have whole documents as values (contract 1.4). The next is
/// half of a login at Vault. The last is no secret, but only attackers can use it.
const SECRET_DESPITE_QUALIFIER: &[&str] = &[
    "TERRAKUBEAWSCREDENTIALSFILE",
    "TERRAKUBEGCPCREDENTIALSFILE",
    "SECRETID",
    "ACCESSKEYID",
];
/// Names that contain a secret word but are not secret.
const NEVER_SECRET: &[&str] = &["PWD", "OLDPWD"];
/// Public members of credential documents.
const PUBLIC_MEMBERS: &[&str] = &[
    "type",
    "project_id",
    "universe_domain",
    "auth_uri",
    "token_uri",
    "token_url",
    "audience",
    "auth_provider_x509_cert_url",
    "client_x509_cert_url",
    "subject_token_type",
    "service_account_impersonation_url",
];
const PLAIN_WORDS: &[&str] = &[
    "true",
    "false",
    "none",
    "null",
    "undefined",
    "default",
    "enabled",
    "disabled",
    "required",
    "optional",
    "changeme",
    "secret",
    "password",
    "passwd",
    "token",
    "terraform",
    "terrakube",
    "kubernetes",
    "production",
    "staging",
    "development",
    "master",
    "admin",
    "administrator",
];
/// The prefixes of tokens of well-known issuers.
const TOKEN_PREFIXES: &[&str] = &[
    "ghp_",
    "gho_",
    "ghs_",
    "ghu_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "hvs.",
    "hvb.",
    "xoxb-",
    "xoxp-",
    "npm_",
    "dckr_pat_",
    "sk_live_",
    "AKIA",
    "ASIA",
];

/// All secrets in the job data: credentials of the source, keys, and secret variables. Secrets inside scripts cannot be
/// recognised.
pub fn secrets_of(job: &JobData) -> Vec<String> {
    let mut found = Vec::new();
    for secret in [&job.access_token, &job.module_ssh_key]
        .into_iter()
        .flatten()
    {
        add(secret, &mut found);
    }
    if let Some(source) = &job.source {
        add_parts(source, &mut found);
    }
    for (name, value) in &job.environment_variables {
        add_variable(name, value, &mut found);
    }
    for (name, variable) in &job.variables {
        add_variable(name, &variable.value, &mut found);
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// The secrets in one variable, for variables that become known during the run.
pub fn secrets_in(name: &str, value: &str) -> Vec<String> {
    let mut found = Vec::new();
    add_variable(name, value, &mut found);
    found
}

fn add_variable(name: &str, value: &str, found: &mut Vec<String>) {
    let is_secret = is_secret(name, value);
    if is_secret {
        add(value, found);
    }
    match document(value) {
        Some(document) => add_members(&document, is_secret, found),
        None => add_parts(value, found),
    }
}

fn is_secret(name: &str, value: &str) -> bool {
    match name_hint(name) {
        NameHint::Secret => true,
        NameHint::MaybeSecret => looks_generated(value),
        NameHint::NotSecret => false,
    }
}

/// Parses JSON objects and arrays. HCL expressions are not parsed.
fn document(value: &str) -> Option<Value> {
    let value = value.trim();
    if !value.starts_with(['{', '[']) {
        return None;
    }
    serde_json::from_str(value).ok()
}

fn add_members(value: &Value, is_secret: bool, found: &mut Vec<String>) {
    match value {
        Value::String(text) if is_secret => {
            add(text, found);
            add_parts(text, found);
        }
        Value::String(text) => add_parts(text, found),
        Value::Array(items) => items
            .iter()
            .for_each(|item| add_members(item, is_secret, found)),
        Value::Object(members) => {
            for (name, value) in members {
                let is_secret = match value {
                    Value::String(text) => {
                        (is_secret || self::is_secret(name, text))
                            && !PUBLIC_MEMBERS.contains(&name.as_str())
                    }
                    _ => is_secret || name_hint(name) == NameHint::Secret,
                };
                add_members(value, is_secret, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Finds secrets by their format: known tokens and keys, logins in URLs, and parameters of connection strings and queries.
fn add_parts(value: &str, found: &mut Vec<String>) {
    let text = value.trim();
    if is_token(text) || (text.contains("-----BEGIN ") && text.contains("PRIVATE KEY-----")) {
        add(text, found);
        return;
    }
    if let Some(login) = url_login(text) {
        // A login without a password is a token, unless it is the common user name of git servers.
        let secret =
            login.split_once(':').map_or(
                login,
                |(user, password)| {
                    if password.is_empty() { user } else { password }
                },
            );
        if secret != "git" {
            add(secret, found);
            add(&url_decoded(secret), found);
        }
    }
    for member in text.split([';', '&', '?']) {
        if let Some((name, secret)) = member.split_once('=')
            && !secret.contains(char::is_whitespace)
            && is_secret(name.trim(), secret)
        {
            add(secret, found);
            add(&url_decoded(secret), found);
        }
    }
}

fn is_token(text: &str) -> bool {
    let is_one_word = text.len() >= 16 && !text.contains(char::is_whitespace);
    let is_jwt = || text.starts_with("eyJ") && text.matches('.').count() >= 2;
    is_one_word
        && (is_jwt()
            || text.contains(".atlasv1.")
            || TOKEN_PREFIXES.iter().any(|prefix| text.starts_with(prefix)))
}

/// `user:password` of a URL.
fn url_login(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    authority.rsplit_once('@').map(|(login, _)| login)
}

fn url_decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

fn add(value: &str, found: &mut Vec<String>) {
    let value = value.trim();
    if is_worth_masking(value) {
        found.push(value.to_owned());
    }
}

fn is_worth_masking(value: &str) -> bool {
    let length = value.chars().count();
    let only_digits = value
        .chars()
        .all(|c| c.is_ascii_digit() || "+-.,_".contains(c));
    let only_letters = value.chars().all(char::is_alphabetic);
    let mut chars = value.chars();
    let first = chars.next();
    let repeats_one = chars.all(|c| Some(c) == first);
    !(length < MIN_CHARS
        || (only_digits && length < MIN_DIGITS)
        || (only_letters && length < MIN_WORD_CHARS)
        || repeats_one
        || PLAIN_WORDS.contains(&value.to_ascii_lowercase().as_str()))
}

/// Whether a value is not a word, path, address or list.
fn looks_generated(value: &str) -> bool {
    let value = value.trim();
    value.len() >= 8
        && !value.contains("://")
        && !value.starts_with(['/', '.', '~', '[', '{'])
        && !value.starts_with("arn:")
        && !value.starts_with("ssh-")
        && !value.contains(char::is_whitespace)
        && value.chars().any(|c| c.is_ascii_digit())
        && value.chars().any(char::is_alphabetic)
}

/// What a name shows about its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameHint {
    Secret,
    /// It depends on the value.
    MaybeSecret,
    NotSecret,
}

fn name_hint(name: &str) -> NameHint {
    let words = words(name);
    let compact = words.concat();
    if NEVER_SECRET.contains(&compact.as_str()) {
        return NameHint::NotSecret;
    }
    if SECRET_DESPITE_QUALIFIER
        .iter()
        .any(|ending| compact.ends_with(ending))
    {
        return NameHint::Secret;
    }
    let is_qualified = words
        .last()
        .is_some_and(|last| QUALIFIERS.contains(&last.as_str()));
    if is_qualified || words.iter().any(|word| word == "PUBLIC") {
        return NameHint::NotSecret;
    }
    let any = |list: &[&str]| words.iter().any(|word| list.contains(&word.as_str()));
    if SECRET_WORDS.iter().any(|word| compact.contains(word)) || any(SECRET_WHOLE_WORDS) {
        NameHint::Secret
    } else if any(DOUBTFUL_WORDS) {
        NameHint::MaybeSecret
    } else {
        NameHint::NotSecret
    }
}

/// Splits a name into words. `dbPassword`, `db-password` and `DB_PASSWORD` have the same two words.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut after_lower = false;
    for c in name.chars() {
        let starts_word = c.is_uppercase() && after_lower;
        after_lower = c.is_lowercase() || c.is_ascii_digit();
        if !c.is_alphanumeric() || starts_word {
            words.push(String::new());
        }
        if c.is_alphanumeric()
            && let Some(word) = words.last_mut()
        {
            word.extend(c.to_uppercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("TF_VAR_db_password", "hunter2")]
    #[case("dbPassword", "correcthorse")]
    #[case("GITHUB_TOKEN", "abc123def")]
    #[case("ARM_CLIENT_SECRET", "x~y.z-1234")]
    #[case("AWS_ACCESS_KEY_ID", "EXAMPLEID0000000")]
    #[case("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")]
    #[case("VAULT_SECRET_ID", "0b1f6c1e-9d51-4c1f")]
    #[case("TERRAKUBE_AWS_CREDENTIALS_FILE", "eyJh.eyJz.sig")]
    #[case("ARM_ACCESS_KEY", "longlettersonly")]
    #[case("DB_PASS", "s3cr")]
    #[case("PIN_TOKEN", "12345678")]
    #[case("state_encryption_key", "correcthorsebattery")]
    #[case("wireguard_key", "cGFzc3dvcmQ1MjM0NQ==")]
    #[case("basic_auth", "user:pa55word")]
    #[case("storage_sas", "?sv=2020&sig=abcDEF%3D")]
    fn values_with_names_of_secrets_are_secret(#[case] name: &str, #[case] value: &str) {
        assert!(
            secrets_in(name, value).iter().any(|found| found == value),
            "{name}"
        );
    }

    #[rstest]
    #[case("region", "eu-west-1")]
    #[case("PWD", "/workspace/root")]
    #[case("ENABLE_TOKEN", "true")]
    #[case("use_password", "False")]
    #[case("secret_count", "12")]
    #[case("token_ttl_seconds_secret", "3600")]
    #[case("admin_password_length", "24chars")]
    #[case("TOKEN_FILE", "/var/run/token")]
    #[case("secret_name", "prod/database")]
    #[case("ssh_public_key", "AAAAC3NzaC1lZDI1")]
    #[case("private_subnets", r#"["10.0.1.0/24","10.0.2.0/24"]"#)]
    #[case("hash_key", "LockID")]
    #[case("key", "network/terraform.tfstate")]
    #[case("kms_key", "arn:aws:kms:eu-west-1:1234:key/abcd1234")]
    #[case("auth_method", "kubernetes1")]
    #[case("AUTH", "kubernetes")]
    #[case("password", "********")]
    #[case("DB_PASS", "prod")]
    #[case("TOKEN_URL", "https://login.example.test/oauth2/token")]
    #[case("keyboard", "qwerty123")]
    #[case("author", "jane1234doe")]
    #[case("repository", "ssh://git@git.example.test/acme/network.git")]
    fn masking_ordinary_values_would_destroy_the_log(#[case] name: &str, #[case] value: &str) {
        assert_eq!(secrets_in(name, value), Vec::<String>::new(), "{name}");
    }

    #[rstest]
    #[case("https://user:p%40ss%2Fword@git.example.test/x.git", &["p%40ss%2Fword", "p@ss/word"])]
    #[case("https://ghs_EXAMPLE12345678@git.example.test/x.git", &["ghs_EXAMPLE12345678"])]
    #[case("https://store.example.test/x.tar.gz?v=1&access_token=abc%2B123", &["abc%2B123", "abc+123"])]
    #[case("git@git.example.test:acme/network.git", &[])]
    #[case("https://git.example.test/acme/network.git", &[])]
    #[case("Server=db;User=sa;Password=hunter22!;Encrypt=true", &["hunter22!"])]
    #[case("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", &["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"])]
    fn secrets_under_ordinary_names_are_found_by_their_shape(
        #[case] value: &str,
        #[case] secrets: &[&str],
    ) {
        let mut found = secrets_in("ordinary", value);
        found.dedup();
        assert_eq!(found, secrets);
    }

    #[test]
    fn strings_in_credential_documents_are_secret_except_public_ones() {
        let document = r#"{"type":"service_account","private_key":"-----BEGIN PRIVATE KEY-----\nMIIE\n",
            "client_email":"ci@acme.example.test","auth_uri":"https://accounts.example.test/auth","n":1}"#;
        let found = secrets_in("GOOGLE_CREDENTIALS", document);
        assert!(found.contains(&document.to_owned()));
        assert!(found.contains(&"ci@acme.example.test".to_owned()));
        assert!(found.iter().any(|secret| secret.ends_with("MIIE")));
        assert!(!found.contains(&"service_account".to_owned()));
        assert!(!found.iter().any(|secret| secret.starts_with("https")));
    }

    #[test]
    fn secret_members_of_ordinary_documents_are_found() {
        let document =
            r#"{"host":"db.example.test","login":{"password":"hunter22","user":"terraform"}}"#;
        assert_eq!(secrets_in("database", document), ["hunter22"]);
    }

    #[test]
    fn a_job_gives_up_its_keys_tokens_source_and_variables() {
        let job = JobData {
            access_token: Some("ghs_hunter22\n".into()),
            module_ssh_key: Some("-----BEGIN KEY-----\nabc\n".into()),
            source: Some("https://u:sourcepw1@git.example.test/x.git".into()),
            environment_variables: [
                ("DB_PASSWORD".to_owned(), "envpw123".to_owned()),
                ("TF_IN_AUTOMATION".to_owned(), "1".to_owned()),
            ]
            .into(),
            variables: [("api_token".to_owned(), "varpw123".into())].into(),
            ..JobData::default()
        };
        let mut found = secrets_of(&job);
        found.sort_unstable();
        assert_eq!(
            found,
            [
                "-----BEGIN KEY-----\nabc",
                "envpw123",
                "ghs_hunter22",
                "sourcepw1",
                "varpw123"
            ]
        );
    }
}
