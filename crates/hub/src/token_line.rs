//! The line of a token in the file of the pools.

use std::time::SystemTime;

use serde_json::json;

/// Returns the line for the file of the pools. JSON is valid YAML.
///
/// It is added to the tokens of a pool, or of the operators.
#[must_use]
pub fn token_line(digest: &str, description: Option<&str>, now: SystemTime) -> String {
    let created = humantime::format_rfc3339_seconds(now).to_string();
    let id = format!("{}-{}", &created[..10], &digest[..6]);
    let mut entry = json!({"id": id, "sha256": digest, "created": created});
    if let Some(description) = description {
        entry["description"] = description.into();
    }
    format!("- {entry}")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use pool_protocol::token::PoolToken;

    use super::*;
    use crate::pools;

    #[test]
    fn the_token_is_valid_with_the_line() {
        let now = UNIX_EPOCH + Duration::from_hours(500_000);
        let token = PoolToken::new("eu".parse().unwrap());
        let line = token_line(&token.digest(), Some("Frankfurt: \"one\""), now);
        assert!(line.starts_with(r#"- {"id":"2027-01-15-"#), "{line}");
        let file = format!("pools:\n  eu:\n    organizations: [a]\n    tokens:\n      {line}\n");
        let pools = pools::parse(&file).unwrap();
        assert!(pools.token_id(&token, now).is_ok());
        assert!(!line.contains(token.reveal()));
    }
}
