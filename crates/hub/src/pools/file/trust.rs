//! Parses the entries under `oidc` in the file of the pools.

use std::path::PathBuf;

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use url::Url;

use super::Reader;
use crate::oidc::Trust;

/// Length in bytes of the digest that is the id of an entry.
const DIGEST: usize = 8;

impl Reader {
    pub(super) fn trusts(&mut self, place: &str, fields: &Map<String, Value>) -> Vec<Trust> {
        let Some(listed) = fields.get("oidc") else {
            return Vec::new();
        };
        let Some(listed) = listed.as_array() else {
            self.report(place, "must be a list");
            return Vec::new();
        };
        let entries = listed.iter().enumerate();
        entries
            .filter_map(|(index, value)| self.trust(&format!("{place}[{index}]"), value))
            .collect()
    }

    fn trust(&mut self, place: &str, value: &Value) -> Option<Trust> {
        let known = ["issuer", "audiences", "subjects", "claims", "jwks_file"];
        let fields = self.object(place, value, &known)?;
        let issuer = self.text(place, fields, "issuer");
        if !issuer.is_some_and(is_issuer) {
            let text = "must be an `https` URL without login, query and fragment, as in `iss` of the tokens";
            self.report(&format!("{place}.issuer"), text);
        }
        let audiences = self.texts(&format!("{place}.audiences"), fields.get("audiences"));
        let subjects = self.texts(&format!("{place}.subjects"), fields.get("subjects"));
        let is_pattern = |text: &String| match text.split_once('*') {
            Some((start, rest)) => !start.is_empty() && rest.is_empty(),
            None => true,
        };
        if !subjects.iter().flatten().all(is_pattern) {
            let text = "may have `*` at the end of a text alone, and not as the whole text";
            self.report(&format!("{place}.subjects"), text);
        }
        let claims = match fields.get("claims") {
            None => Map::new(),
            Some(Value::Object(claims)) => claims.clone(),
            Some(_) => {
                self.report(
                    &format!("{place}.claims"),
                    "must have values by the names of claims",
                );
                Map::new()
            }
        };
        let jwks_file = self.text(place, fields, "jwks_file").map(PathBuf::from);
        if jwks_file.as_ref().is_some_and(|file| !file.is_absolute()) {
            self.report(&format!("{place}.jwks_file"), "must be an absolute path");
        }
        let digest = Sha256::digest(value.to_string());
        let hex = |byte: &u8| format!("{byte:02x}");
        Some(Trust {
            digest: digest.iter().take(DIGEST).map(hex).collect(),
            issuer: issuer?.to_owned(),
            audiences: audiences?,
            subjects: subjects?,
            claims,
            jwks_file,
        })
    }

    /// Returns a list of at least one text.
    fn texts(&mut self, place: &str, value: Option<&Value>) -> Option<Vec<String>> {
        let text = |value: &Value| {
            value
                .as_str()
                .filter(|text| !text.is_empty())
                .map(str::to_owned)
        };
        let texts = value.and_then(Value::as_array);
        let texts: Option<Vec<String>> = texts.and_then(|all| all.iter().map(text).collect());
        let texts = texts.filter(|texts| !texts.is_empty());
        if texts.is_none() {
            self.report(place, "must be a list of texts, one at least");
        }
        texts
    }
}

fn is_issuer(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        url.scheme() == "https"
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
    })
}

#[cfg(test)]
mod tests {
    use crate::pools::parse;

    const POOL: &str = "pools: {eu: {organizations: [a], oidc: ";

    fn problems(oidc: &str) -> Vec<String> {
        parse(&format!("{POOL}{oidc}}}}}")).map(|_| ()).unwrap_err()
    }

    #[test]
    fn an_entry_is_parsed_and_each_change_changes_its_digest() {
        let read = |claims: &str| {
            let text = format!(
                "{POOL}[{{issuer: https://a.test/x, audiences: [hub], subjects: ['system:*', exact], \
                 claims: {claims}, jwks_file: /etc/jwks.json}}]}}}}"
            );
            let pools = parse(&text).unwrap();
            let pool = pools.get(&"eu".parse().unwrap()).unwrap();
            let trust = &pool.oidc[0];
            assert_eq!(trust.issuer, "https://a.test/x");
            assert_eq!(trust.audiences, ["hub"]);
            assert_eq!(trust.subjects, ["system:*", "exact"]);
            assert_eq!(trust.jwks_file.as_deref(), Some("/etc/jwks.json".as_ref()));
            trust.digest.clone()
        };
        let digest = read("{kubernetes.io: {namespace: mayfly}}");
        assert_eq!(digest, read("{kubernetes.io: {namespace: mayfly}}"));
        assert_ne!(digest, read("{kubernetes.io: {namespace: other}}"));
        assert_eq!(digest.len(), 16);
    }

    #[test]
    fn all_errors_of_an_entry_are_reported() {
        let problems = problems(
            "[{issuer: 'http://a.test', audiences: [], subjects: ['*'], claims: [a], jwks_file: keys.json}, \
             {issuer: 'https://me@a.test', audience: x, audiences: [1], subjects: ['a*b']}, 3]",
        );
        for expected in [
            "pools.eu.oidc[0].issuer must be an `https` URL",
            "pools.eu.oidc[0].audiences must be a list of texts",
            "pools.eu.oidc[0].subjects may have `*` at the end",
            "pools.eu.oidc[0].claims must have values",
            "pools.eu.oidc[0].jwks_file must be an absolute path",
            "pools.eu.oidc[1].issuer must be an `https` URL",
            "pools.eu.oidc[1] has the unknown key `audience`: did you mean `audiences`?",
            "pools.eu.oidc[1].audiences must be a list of texts",
            "pools.eu.oidc[1].subjects may have `*` at the end",
            "pools.eu.oidc[2] must have the keys",
        ] {
            let is_reported = problems.iter().any(|problem| problem.starts_with(expected));
            assert!(is_reported, "{expected}\n{problems:#?}");
        }
        assert_eq!(problems.len(), 10, "{problems:#?}");
    }
}
