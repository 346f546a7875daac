//! Parses the file of the pools, and reports all its errors at once.

mod trust;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use ipnet::IpNet;
use pool_protocol::id::PoolName;
use runtime::setting::nearest;
use serde_json::{Map, Value};

use super::{
    Boundary, KnownToken, Operators, Organizations, Pool, Pools, Proxy, ScriptAccess, StateAccess,
};

/// Means all organizations.
const ALL: &str = "*";

pub(crate) fn parse(text: &str) -> Result<Pools, Vec<String>> {
    let file: Value = serde_saphyr::from_str(text)
        .map_err(|error| vec![format!("is no YAML: {}", first_line(&error.to_string()))])?;
    let mut reader = Reader::default();
    let pools = reader.pools(&file);
    if reader.errors.is_empty() {
        Ok(pools)
    } else {
        Err(reader.errors)
    }
}

/// Returns the first line of an error. The other lines quote the file.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// Collects errors. A place is the path to a value: `pools.eu.tokens[0]`.
#[derive(Default)]
struct Reader {
    errors: Vec<String>,
}

impl Reader {
    fn pools(&mut self, file: &Value) -> Pools {
        let Some(file) = self.object("", file, &["pools", "operators"]) else {
            return Pools::default();
        };
        let Some(Value::Object(pools)) = file.get("pools") else {
            self.report("pools", "must have the pools by their names");
            return Pools::default();
        };
        let mut known = BTreeMap::new();
        for (name, value) in pools {
            let place = format!("pools.{name}");
            match name.parse::<PoolName>() {
                Ok(name) => known.extend(self.pool(&place, value).map(|pool| (name, pool))),
                Err(error) => self.report("pools", &error.to_string()),
            }
        }
        let operators = file
            .get("operators")
            .and_then(|value| self.operators(value));
        Pools {
            pools: known,
            operators: operators.unwrap_or_default(),
        }
    }

    fn operators(&mut self, value: &Value) -> Option<Operators> {
        let fields = self.object("operators", value, &["tokens", "proxy"])?;
        let tokens = self.tokens("operators.tokens", fields);
        let proxy = fields.get("proxy").and_then(|value| self.proxy(value));
        Some(Operators { tokens, proxy })
    }

    fn proxy(&mut self, value: &Value) -> Option<Proxy> {
        let place = "operators.proxy";
        let fields = self.object(place, value, &["header", "addresses"])?;
        let header = self.text(place, fields, "header");
        let is_name = |name: &&str| {
            name.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        };
        let header = header.filter(is_name).map(str::to_owned);
        if header.is_none() {
            self.report(
                "operators.proxy.header",
                "must be the name of the header that names the user",
            );
        }
        let listed = fields.get("addresses").and_then(Value::as_array);
        let network = |value: &Value| {
            let text = value.as_str()?;
            let address = text.parse().map(IpAddr::into).ok();
            address.or_else(|| text.parse().ok())
        };
        let addresses: Option<Vec<IpNet>> =
            listed.and_then(|all| all.iter().map(network).collect());
        let addresses = addresses.filter(|all| !all.is_empty());
        if addresses.is_none() {
            self.report(
                "operators.proxy.addresses",
                "must be a list of the addresses or networks that the proxy connects from, as `10.0.0.0/24`",
            );
        }
        Some(Proxy {
            header: header?,
            addresses: addresses?,
        })
    }

    fn pool(&mut self, place: &str, value: &Value) -> Option<Pool> {
        let fields = self.object(
            place,
            value,
            &[
                "organizations",
                "boundary",
                "scripts",
                "scriptState",
                "tokens",
                "oidc",
            ],
        )?;
        let organizations = self.organizations(&format!("{place}.organizations"), fields);
        let boundary = self.boundary(&format!("{place}.boundary"), fields);
        let scripts = self.scripts(&format!("{place}.scripts"), fields);
        let script_state = self.script_state(&format!("{place}.scriptState"), fields);
        let tokens = self.tokens(&format!("{place}.tokens"), fields);
        let oidc = self.trusts(&format!("{place}.oidc"), fields);
        Some(Pool {
            organizations: organizations?,
            boundary: boundary?,
            scripts: scripts?,
            script_state: script_state?,
            tokens,
            oidc,
            has_passing_token: false,
        })
    }

    fn organizations(&mut self, place: &str, fields: &Map<String, Value>) -> Option<Organizations> {
        let listed = fields.get("organizations").and_then(Value::as_array);
        let ids: Option<Vec<&str>> = listed.and_then(|all| all.iter().map(Value::as_str).collect());
        match ids.as_deref() {
            Some([ALL]) => Some(Organizations::All),
            Some(ids) if !ids.contains(&ALL) => Some(Organizations::These(
                ids.iter().map(|id| (*id).to_owned()).collect(),
            )),
            _ => {
                self.report(
                    place,
                    "must be a list of the ids of organizations, or [\"*\"] for all of them",
                );
                None
            }
        }
    }

    fn boundary(&mut self, place: &str, fields: &Map<String, Value>) -> Option<Boundary> {
        match fields.get("boundary").map(Value::as_str) {
            None | Some(Some("relay")) => Some(Boundary::Relay),
            Some(Some("direct")) => Some(Boundary::Direct),
            Some(_) => {
                self.report(place, "must be `relay` or `direct`");
                None
            }
        }
    }

    fn scripts(&mut self, place: &str, fields: &Map<String, Value>) -> Option<ScriptAccess> {
        match fields.get("scripts").map(Value::as_str) {
            None | Some(Some("context")) => Some(ScriptAccess::Context),
            Some(Some("workspace")) => Some(ScriptAccess::Workspace),
            Some(_) => {
                self.report(place, "must be `context` or `workspace`");
                None
            }
        }
    }

    fn script_state(&mut self, place: &str, fields: &Map<String, Value>) -> Option<StateAccess> {
        match fields.get("scriptState").map(Value::as_str) {
            None | Some(Some("read")) => Some(StateAccess::Read),
            Some(Some("write")) => Some(StateAccess::Write),
            Some(_) => {
                self.report(place, "must be `read` or `write`");
                None
            }
        }
    }

    fn tokens(&mut self, place: &str, fields: &Map<String, Value>) -> Vec<KnownToken> {
        let Some(listed) = fields.get("tokens") else {
            return Vec::new();
        };
        let Some(listed) = listed.as_array() else {
            self.report(place, "must be a list");
            return Vec::new();
        };
        let mut tokens: Vec<KnownToken> = Vec::new();
        for (index, value) in listed.iter().enumerate() {
            let place = format!("{place}[{index}]");
            let Some(token) = self.token(&place, value) else {
                continue;
            };
            if tokens.iter().any(|known| known.id == token.id) {
                self.report(
                    &place,
                    &format!("has the id `{}` of another token", token.id),
                );
            }
            tokens.push(token);
        }
        tokens
    }

    fn token(&mut self, place: &str, value: &Value) -> Option<KnownToken> {
        let known = ["id", "sha256", "created", "expires", "description"];
        let fields = self.object(place, value, &known)?;
        let id = self.text(place, fields, "id");
        if id.is_none() {
            self.report(place, "has no `id`");
        }
        let digest = self
            .text(place, fields, "sha256")
            .map(str::to_ascii_lowercase);
        let is_digest =
            |text: &String| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let digest = digest.filter(is_digest);
        if digest.is_none() {
            self.report(
                place,
                "must have a `sha256` of 64 hexadecimal digits, as `api-launcher pool token new` prints it",
            );
        }
        // These fields are for people. They are checked so that errors are reported.
        self.time(place, fields, "created");
        self.text(place, fields, "description");
        let expires = self.time(place, fields, "expires");
        Some(KnownToken {
            id: id?.to_owned(),
            sha256: digest?,
            expires,
        })
    }

    fn text<'v>(
        &mut self,
        place: &str,
        fields: &'v Map<String, Value>,
        name: &str,
    ) -> Option<&'v str> {
        let value = fields.get(name)?;
        let text = value.as_str().filter(|text| !text.is_empty());
        if text.is_none() {
            self.report(&format!("{place}.{name}"), "must be a text");
        }
        text
    }

    fn time(&mut self, place: &str, fields: &Map<String, Value>, name: &str) -> Option<SystemTime> {
        let text = self.text(place, fields, name)?;
        let time = humantime::parse_rfc3339(text).ok();
        if time.is_none() {
            let expected = "must be a time such as `2027-01-31T00:00:00Z`";
            self.report(&format!("{place}.{name}"), expected);
        }
        time
    }

    /// Returns the fields of an object, and reports unknown ones.
    fn object<'v>(
        &mut self,
        place: &str,
        value: &'v Value,
        known: &[&str],
    ) -> Option<&'v Map<String, Value>> {
        let Value::Object(fields) = value else {
            let names = known.join("`, `");
            self.report(place, &format!("must have the keys `{names}`"));
            return None;
        };
        for name in fields.keys().filter(|name| !known.contains(&name.as_str())) {
            let text = match nearest(name, known) {
                Some(meant) => format!("has the unknown key `{name}`: did you mean `{meant}`?"),
                None => format!(
                    "has the unknown key `{name}`, expected `{}`",
                    known.join("`, `")
                ),
            };
            self.report(place, &text);
        }
        Some(fields)
    }

    fn report(&mut self, place: &str, text: &str) {
        let place = if place.is_empty() { "the file" } else { place };
        self.errors.push(format!("{place} {text}"));
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const DIGEST: &str = "0123456789abcdef0123456789abcdef0123456789ABCDEF0123456789abcdef";

    #[test]
    fn a_file_with_all_keys_is_parsed() {
        let pools = parse(&format!(
            r#"
pools:
  eu:
    organizations: [a, b]
    boundary: direct
    tokens:
      - {{id: one, sha256: "{DIGEST}", created: "2026-11-23T09:00:00Z", expires: "2027-11-23T09:00:00Z", description: Frankfurt}}
      - {{id: two, sha256: "{DIGEST}"}}
  us-1:
    organizations: ["*"]
    scripts: workspace
    scriptState: write
"#
        ))
        .unwrap();
        let names: Vec<_> = pools.names().map(PoolName::as_str).collect();
        assert_eq!(names, ["eu", "us-1"]);
        let eu = pools.get(&"eu".parse().unwrap()).unwrap();
        assert_eq!(eu.boundary, Boundary::Direct);
        assert!(eu.takes("b") && !eu.takes("c"));
        assert_eq!(eu.tokens.len(), 2);
        assert_eq!(eu.tokens[0].sha256, DIGEST.to_ascii_lowercase());
        assert!(eu.tokens[0].expires.is_some() && eu.tokens[1].expires.is_none());
        let us = pools.get(&"us-1".parse().unwrap()).unwrap();
        assert_eq!(us.boundary, Boundary::Relay);
        assert_eq!(eu.scripts, ScriptAccess::Context);
        assert_eq!(us.scripts, ScriptAccess::Workspace);
        assert_eq!(eu.script_state, StateAccess::Read);
        assert_eq!(us.script_state, StateAccess::Write);
        assert!(us.takes("anything"));
    }

    #[test]
    fn all_errors_are_reported_at_once() {
        let errors = parse(
            r#"
pool: {}
operators:
  token: x
  proxy: {header: "X User", addresses: [10.0.0.0/99]}
pools:
  EU: {organizations: [a]}
  eu:
    organisations: [a]
    boundary: relais
    scripts: all
    scriptState: true
    tokens:
      - {id: one, sha256: "12", expires: tomorrow}
      - {sha: x, colour: red}
  us: {organizations: ["*", a], tokens: secret}
  ap: {organizations: [a], executor: stock}
  asia: none
"#,
        )
        .unwrap_err();
        for expected in [
            "the file has the unknown key `pool`: did you mean `pools`?",
            "operators has the unknown key `token`: did you mean `tokens`?",
            "operators.proxy.header must be the name of the header",
            "operators.proxy.addresses must be a list of the addresses or networks",
            "pools `EU` is not a valid name",
            "pools.eu has the unknown key `organisations`: did you mean `organizations`?",
            "pools.eu.organizations must be a list",
            "pools.eu.boundary must be `relay` or `direct`",
            "pools.eu.scripts must be `context` or `workspace`",
            "pools.eu.scriptState must be `read` or `write`",
            "pools.eu.tokens[0] must have a `sha256` of 64 hexadecimal digits",
            "pools.eu.tokens[0].expires must be a time",
            "pools.eu.tokens[1] has the unknown key `sha`: did you mean",
            "pools.eu.tokens[1] has the unknown key `colour`, expected `id`",
            "pools.eu.tokens[1] has no `id`",
            "pools.us.organizations must be a list",
            "pools.us.tokens must be a list",
            "pools.ap has the unknown key `executor`, expected `organizations`",
            "pools.asia must have the keys",
        ] {
            assert!(
                errors.iter().any(|problem| problem.starts_with(expected)),
                "{expected}\n{errors:#?}"
            );
        }
    }

    #[rstest]
    #[case("")]
    #[case("[]")]
    #[case("pools: [")]
    #[case("pools: {}\npools: {}")]
    #[case("pools: 3")]
    fn an_invalid_file_is_refused(#[case] text: &str) {
        assert!(parse(text).is_err(), "{text}");
    }

    #[test]
    fn two_tokens_with_one_id_are_refused() {
        let errors = parse(&format!(
            "pools: {{eu: {{organizations: [a], tokens: [{{id: a, sha256: {DIGEST}}}, {{id: a, sha256: {DIGEST}}}]}}}}"
        ))
        .unwrap_err();
        assert_eq!(
            errors,
            ["pools.eu.tokens[1] has the id `a` of another token"]
        );
    }
}
