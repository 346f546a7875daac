//! Which values of a job are secret. Pure.
//!
//! The platform does not say which variables are sensitive, so their names and shapes decide. Two errors are
//! possible, and both matter: a secret that is shown, and a log in which every `true` and `prod` is masked.
//! Words that name nothing but secrets (`TOKEN`, `PASSWORD`) make any value secret that is not a plain word or a
//! small number; words with other uses (`KEY`, `AUTH`) only values that look as if a generator made them.

use job_contract::JobData;
use serde_json::Value;

/// Shorter values are part of ordinary words.
const MIN_CHARS: usize = 4;
/// Below this, a value must mix letters with something else to be more than a word.
const MIN_WORD_CHARS: usize = 6;
/// Below this, digits alone are a number.
const MIN_DIGITS: usize = 8;

/// Found in a name with separators and case removed, they make it secret.
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
/// The same, but only as whole words: they are parts of others.
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
/// As the last word they say that the value only tells where or what the secret is.
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
/// Secret in spite of their last word: contract 1.4 puts the documents themselves into the first two, the next is
/// half of a login at Vault, the last is no secret but worth nothing to a reader and much to an attacker.
const SECRET_DESPITE_QUALIFIER: &[&str] = &[
    "TERRAKUBEAWSCREDENTIALSFILE",
    "TERRAKUBEGCPCREDENTIALSFILE",
    "SECRETID",
    "ACCESSKEYID",
];
/// Names of ordinary things that hold a secret word.
const NEVER_SECRET: &[&str] = &["PWD", "OLDPWD"];
/// Members of credential documents that are the same for everybody.
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
/// How the tokens of well-known issuers begin.
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

/// Every secret in the job data: credentials of the source, keys, and variables that speak of secrets. Scripts may
/// hold secrets too, but nothing says where.
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

/// The secrets in one variable, for those that become known during the run.
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
    match speaks_of_secret(name) {
        Speaks::Clearly => true,
        Speaks::Perhaps => looks_generated(value),
        Speaks::Not => false,
    }
}

/// JSON objects and arrays; HCL expressions are opaque.
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
                    _ => is_secret || speaks_of_secret(name) == Speaks::Clearly,
                };
                add_members(value, is_secret, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Secrets that show by their shape: known tokens and keys, logins in URLs, and members of connection strings and
/// queries.
fn add_parts(value: &str, found: &mut Vec<String>) {
    let text = value.trim();
    if is_token(text) || (text.contains("-----BEGIN ") && text.contains("PRIVATE KEY-----")) {
        add(text, found);
        return;
    }
    if let Some(login) = url_login(text) {
        // A login without a password is a token, unless it is the user name every git server has.
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
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = text
            .get(at + 1..at + 3)
            .filter(|_| bytes[at] == b'%')
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        decoded.push(escaped.unwrap_or(bytes[at]));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&decoded).into_owned()
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

/// Not a word, a path, an address or a list.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaks {
    Clearly,
    Perhaps,
    Not,
}

fn speaks_of_secret(name: &str) -> Speaks {
    let words = words(name);
    let compact = words.concat();
    if NEVER_SECRET.contains(&compact.as_str()) {
        return Speaks::Not;
    }
    if SECRET_DESPITE_QUALIFIER
        .iter()
        .any(|ending| compact.ends_with(ending))
    {
        return Speaks::Clearly;
    }
    let is_qualified = words
        .last()
        .is_some_and(|last| QUALIFIERS.contains(&last.as_str()));
    if is_qualified || words.iter().any(|word| word == "PUBLIC") {
        return Speaks::Not;
    }
    let any = |list: &[&str]| words.iter().any(|word| list.contains(&word.as_str()));
    if SECRET_WORDS.iter().any(|word| compact.contains(word)) || any(SECRET_WHOLE_WORDS) {
        Speaks::Clearly
    } else if any(DOUBTFUL_WORDS) {
        Speaks::Perhaps
    } else {
        Speaks::Not
    }
}

/// `dbPassword`, `db-password` and `DB_PASSWORD` are the same two words.
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
