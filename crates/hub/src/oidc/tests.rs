//! Tests of which tokens of a provider a pool accepts, and of each refusal.

use jsonwebtoken::{EncodingKey, Header};
use rstest::rstest;
use serde_json::json;
use test_peers::oidc::{SigningKey, now, rsa_key};

use super::*;

const ISSUER: &str = "https://issuer.test";
const SUBJECT: &str = "system:serviceaccount:mayfly:agent";

fn trust() -> Trust {
    let claims = json!({"kubernetes.io": {"namespace": "mayfly"}, "groups": "agents"});
    Trust {
        digest: "d".to_owned(),
        issuer: ISSUER.to_owned(),
        audiences: vec!["hub".to_owned(), "other".to_owned()],
        subjects: vec![
            "exact".to_owned(),
            "system:serviceaccount:mayfly:*".to_owned(),
        ],
        claims: claims.as_object().unwrap().clone(),
        jwks_file: None,
    }
}

fn claims() -> Value {
    json!({
        "iss": ISSUER, "aud": ["hub"], "sub": SUBJECT,
        "iat": now(), "nbf": now(), "exp": now() + 3600,
        "kubernetes.io": {"namespace": "mayfly", "pod": {"name": "a"}}, "groups": ["agents", "others"],
    })
}

/// Returns the result for a token with the given keys.
fn check(token: &str, keys: &[&SigningKey]) -> Result<String, Refusal> {
    let jwks: Vec<&Value> = keys.iter().map(|key| &key.jwk).collect();
    let keys = keys::parse(json!({"keys": jwks}));
    let token = IdToken::parse(token)?;
    assert_eq!(token.issuer, ISSUER);
    let key = keys.get(&token.key_id);
    let key = key.ok_or_else(|| Refusal::UnknownKey(quote(&token.key_id)))?;
    token.check(&trust(), key, SystemTime::now())
}

#[rstest]
#[case(Algorithm::RS256)]
#[case(Algorithm::ES256)]
#[case(Algorithm::EdDSA)]
fn a_valid_token_of_each_algorithm_is_accepted(#[case] algorithm: Algorithm) {
    let key = SigningKey::new("one", algorithm);
    let token = key.sign(&claims());
    assert_eq!(check(&token, &[&key]), Ok(SUBJECT.to_owned()));
    // The first character of a signature has no unused bits.
    let (signed, signature) = token.rsplit_once('.').unwrap();
    let other = if signature.starts_with('A') { 'B' } else { 'A' };
    let forged = format!("{signed}.{other}{}", &signature[1..]);
    assert_eq!(check(&forged, &[&key]), Err(Refusal::Signature));
    let another = SigningKey::new("one", Algorithm::EdDSA);
    assert_eq!(check(&token, &[&another]), Err(Refusal::Signature));
}

#[rstest]
#[case(json!({"exp": now() - 61}), Refusal::Expired)]
#[case(json!({"exp": null}), Refusal::Missing("exp".to_owned()))]
#[case(json!({"nbf": now() + 90}), Refusal::Early)]
#[case(json!({"iat": now() + 90}), Refusal::Early)]
#[case(json!({"iat": now() - 24 * 3600 - 90}), Refusal::Old)]
#[case(json!({"iat": null}), Refusal::Missing("iat".to_owned()))]
#[case(json!({"aud": "elsewhere"}), Refusal::Audience)]
#[case(json!({"aud": null}), Refusal::Missing("aud".to_owned()))]
#[case(json!({"sub": "exactly"}), Refusal::Subject("\"exactly\"".to_owned()))]
#[case(json!({"sub": "system:serviceaccount:may"}), Refusal::Subject("\"system:serviceaccount:may\"".to_owned()))]
#[case(json!({"sub": null}), Refusal::Missing("sub".to_owned()))]
#[case(json!({"groups": ["others"]}), Refusal::Claim("groups".to_owned()))]
#[case(json!({"groups": null}), Refusal::Claim("groups".to_owned()))]
#[case(json!({"kubernetes.io": {"namespace": "mayfly2"}}), Refusal::Claim("kubernetes.io".to_owned()))]
fn each_wrong_claim_has_its_own_refusal(#[case] change: Value, #[case] expected: Refusal) {
    let key = SigningKey::new("one", Algorithm::ES256);
    let mut claims = claims();
    for (name, value) in change.as_object().unwrap() {
        match value {
            Value::Null => drop(claims.as_object_mut().unwrap().remove(name)),
            value => claims[name] = value.clone(),
        }
    }
    assert_eq!(check(&key.sign(&claims), &[&key]), Err(expected));
}

#[rstest]
#[case(json!({"exp": now() - 50}))]
#[case(json!({"nbf": now() + 50, "iat": now() + 50}))]
#[case(json!({"iat": now() - 24 * 3600 + 60}))]
#[case(json!({"aud": "other"}))]
#[case(json!({"sub": "exact"}))]
#[case(json!({"groups": "agents"}))]
fn a_token_within_the_limits_is_accepted(#[case] change: Value) {
    let key = SigningKey::new("one", Algorithm::EdDSA);
    let mut claims = claims();
    for (name, value) in change.as_object().unwrap() {
        claims[name] = value.clone();
    }
    check(&key.sign(&claims), &[&key]).unwrap();
}

/// Returns a token with any header and any signature.
fn with_header(header: &Value, signature: &str) -> String {
    let [header, claims] =
        [header, &claims()].map(|part| BASE64_URL_SAFE_NO_PAD.encode(part.to_string()));
    format!("{header}.{claims}.{signature}")
}

#[rstest]
#[case(json!({"alg": "none", "kid": "one"}), "", Refusal::Unsigned)]
#[case(json!({"alg": "None", "kid": "one"}), "", Refusal::Algorithm("\"None\"".to_owned()))]
#[case(json!({"alg": "RS512", "kid": "one"}), "AAAA", Refusal::Algorithm("\"RS512\"".to_owned()))]
#[case(json!({"alg": "ES256"}), "AAAA", Refusal::NoKeyId)]
#[case(json!({"alg": "ES256", "kid": "two"}), "AAAA", Refusal::UnknownKey("\"two\"".to_owned()))]
#[case(json!({"alg": "ES256", "kid": "one", "crit": ["b64"]}), "AAAA", Refusal::Critical)]
#[case(json!({"alg": "ES256", "kid": "one"}), "", Refusal::Signature)]
#[case(json!({"alg": "ES256", "kid": "one"}), "AAAA", Refusal::Signature)]
#[case(json!({"alg": "ES256", "kid": 1}), "AAAA", Refusal::Form)]
#[case(json!([]), "AAAA", Refusal::Form)]
fn an_invalid_header_is_refused(
    #[case] header: Value,
    #[case] signature: &str,
    #[case] expected: Refusal,
) {
    let key = SigningKey::new("one", Algorithm::ES256);
    assert_eq!(
        check(&with_header(&header, signature), &[&key]),
        Err(expected)
    );
}

#[rstest]
#[case("")]
#[case("a.b")]
#[case("a.b.c.d")]
#[case("!.!.!")]
#[case("e30.e30.e30")]
fn an_invalid_token_is_refused(#[case] text: &str) {
    assert_eq!(IdToken::parse(text).map(|_| ()), Err(Refusal::Form));
    let long = format!("{}.e30.e30", "A".repeat(MAX_TOKEN_BYTES));
    assert_eq!(IdToken::parse(&long).map(|_| ()), Err(Refusal::Form));
}

#[test]
fn a_public_key_is_not_accepted_as_hmac_key() {
    let key = SigningKey::new("one", Algorithm::EdDSA);
    let public = BASE64_URL_SAFE_NO_PAD
        .decode(key.jwk["x"].as_str().unwrap())
        .unwrap();
    let mut header = Header::new(Algorithm::HS256);
    header.kid = Some("one".to_owned());
    let forged =
        jsonwebtoken::encode(&header, &claims(), &EncodingKey::from_secret(&public)).unwrap();
    assert_eq!(
        check(&forged, &[&key]),
        Err(Refusal::Algorithm("\"HS256\"".to_owned()))
    );
}

#[test]
fn weak_keys_and_keys_for_other_uses_are_ignored() {
    let good = SigningKey::new("good", Algorithm::ES256);
    let ed = SigningKey::new("ed", Algorithm::EdDSA).jwk;
    let (_, mut short) = rsa_key(1024);
    short["kid"] = "rsa".into();
    let changed = |name: &str, value: Value| {
        let mut jwk = ed.clone();
        jwk[name] = value;
        jwk
    };
    let set = json!({"keys": [
        short,
        changed("x", "AAAA".into()),
        changed("use", "enc".into()),
        changed("alg", "RS256".into()),
        changed("kid", Value::Null),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "hmac"},
        {"kty": "EC", "crv": "P-384", "x": "AA", "y": "AA", "kid": "p384"},
        {"kty": "unheard-of", "kid": "new"},
        "nonsense",
        good.jwk,
    ]});
    let keys = keys::parse(set);
    assert_eq!(keys.keys().collect::<Vec<_>>(), ["good"]);
}
