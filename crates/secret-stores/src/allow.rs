//! Which secrets and roles a run may name: rules of the operator. Logins belong to the deployment, and users of workspaces write
//! the names. Without a rule, every user may read whatever the login may read, and nobody may use a role. Pure.

use std::fmt;

use crate::reference::{SecretId, StoreKind};

/// The ids of a run, which rules can name as `{organizationId}` and `{workspaceId}`. Names are left out, because a workspace can
/// choose them.
#[derive(Clone, Copy, Debug)]
pub struct RunIds<'a> {
    pub organization: &'a str,
    pub workspace: &'a str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Organization,
    Workspace,
    /// Any text without `/`.
    Star,
    /// Any text.
    DoubleStar,
}

/// One pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    text: Vec<Part>,
    /// The pattern of a namespace of Vault. Tenants may have one each, so no pattern of a path reaches into it.
    namespace: Option<Vec<Part>>,
}

/// Patterns, of which one must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    rules: Vec<Rule>,
}

/// A rule that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    pub rule: String,
    pub problem: &'static str,
}

impl std::error::Error for RuleError {}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the rule `{}` cannot be used: {}",
            self.rule, self.problem
        )
    }
}

impl AllowList {
    /// Parses rules for secrets. They are separated by commas or blanks.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        Self::parse_by(text, |rule| {
            let store = store_of(rule)?;
            let (text, namespace) = match rule.rsplit_once('@') {
                Some((text, namespace)) if store == StoreKind::Vault => (text, Some(namespace)),
                _ => (rule, None),
            };
            let namespace = namespace.map(|namespace| parts(namespace, store));
            Ok(Rule {
                text: parts(text, store)?,
                namespace: namespace.transpose()?,
            })
        })
    }

    /// Parses rules for ARNs of roles.
    pub fn parse_roles(text: &str) -> Result<Self, RuleError> {
        Self::parse_by(text, |rule| {
            Ok(Rule {
                text: parts(rule, StoreKind::Aws)?,
                namespace: None,
            })
        })
    }

    fn parse_by(
        text: &str,
        parse: impl Fn(&str) -> Result<Rule, &'static str>,
    ) -> Result<Self, RuleError> {
        let rules = text.split(|c: char| c == ',' || c.is_whitespace());
        let rules = rules.filter(|rule| !rule.is_empty()).map(|rule| {
            parse(rule).map_err(|problem| RuleError {
                rule: rule.to_owned(),
                problem,
            })
        });
        Ok(Self {
            rules: rules.collect::<Result<_, _>>()?,
        })
    }

    /// Whether there is no rule.
    pub const fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether the run may use the role. Without a rule, it may use none.
    pub fn allows_role(&self, arn: &str, run: RunIds<'_>) -> bool {
        self.rules.iter().any(|rule| matches(&rule.text, arn, run))
    }

    /// Whether the run may read the secret. Without a rule, it may read all.
    pub fn allows(&self, id: &SecretId, run: RunIds<'_>) -> bool {
        if self.rules.is_empty() {
            return true;
        }
        let (text, namespace) = id.rule_parts();
        self.rules.iter().any(|rule| {
            let is_namespace = match (&rule.namespace, namespace) {
                (None, None) => true,
                (Some(rule), Some(namespace)) => matches(rule, namespace, run),
                _ => false,
            };
            is_namespace && matches(&rule.text, &text, run)
        })
    }
}

/// The store that the rule begins with.
fn store_of(rule: &str) -> Result<StoreKind, &'static str> {
    let store = rule.split_once(':').map(|(store, _)| store);
    store
        .and_then(StoreKind::of_prefix)
        .ok_or("it begins with `ssm:`, `gcp:`, `azure:` or `vault:`")
}

fn parts(rule: &str, store: StoreKind) -> Result<Vec<Part>, &'static str> {
    let mut parts = Vec::new();
    let mut rest = rule;
    while let Some(at) = rest.find(['*', '{', '}']) {
        if at > 0 {
            parts.push(text(&rest[..at], store));
        }
        rest = &rest[at..];
        let known = [
            ("**", Part::DoubleStar),
            ("*", Part::Star),
            ("{organizationId}", Part::Organization),
            ("{workspaceId}", Part::Workspace),
        ];
        let found = known
            .into_iter()
            .find_map(|(name, part)| Some((rest.strip_prefix(name)?, part)));
        let (after, part) = found.ok_or("braces hold `organizationId` or `workspaceId`")?;
        parts.push(part);
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(text(rest, store));
    }
    Ok(parts)
}

/// Names of Azure are compared without regard to case.
fn text(text: &str, store: StoreKind) -> Part {
    Part::Text(if store == StoreKind::Azure {
        text.to_ascii_lowercase()
    } else {
        text.to_owned()
    })
}

/// Time grows with the product of both lengths, whatever the pattern is.
fn matches(rule: &[Part], text: &str, run: RunIds<'_>) -> bool {
    // Ends of what the parts so far can match.
    let mut ends = vec![false; text.len() + 1];
    ends[0] = true;
    for part in rule {
        let mut next = vec![false; text.len() + 1];
        match part {
            Part::Star | Part::DoubleStar => {
                let mut is_reached = false;
                for at in 0..=text.len() {
                    if at > 0 && *part == Part::Star && text.as_bytes()[at - 1] == b'/' {
                        is_reached = false;
                    }
                    is_reached |= ends[at];
                    next[at] = is_reached;
                }
            }
            Part::Text(_) | Part::Organization | Part::Workspace => {
                let wanted = match part {
                    Part::Organization => run.organization,
                    Part::Workspace => run.workspace,
                    Part::Text(text) => text,
                    Part::Star | Part::DoubleStar => "",
                };
                for at in (0..=text.len()).filter(|at| ends[*at]) {
                    if text.as_bytes()[at..].starts_with(wanted.as_bytes()) {
                        next[at + wanted.len()] = true;
                    }
                }
            }
        }
        ends = next;
    }
    ends[text.len()]
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::Template;

    const RUN: RunIds<'_> = RunIds {
        organization: "org-1",
        workspace: "ws-1",
    };

    fn allows(rules: &str, reference: &str) -> bool {
        let template = Template::scan(reference).unwrap();
        let reference = template.references().next().unwrap();
        AllowList::parse(rules).unwrap().allows(&reference.id, RUN)
    }

    #[rstest]
    #[case("", "${ssm:anything}", true)]
    #[case("ssm:{organizationId}/*", "${ssm:org-1/db#k}", true)]
    #[case("ssm:{organizationId}/*", "${ssm:org-1/a/db}", false)]
    #[case("ssm:{organizationId}/**", "${ssm:org-1/a/db}", true)]
    #[case("ssm:{organizationId}/*", "${ssm:other-team/x}", false)]
    #[case("ssm:{organizationId}/*", "${ssm:org-1/db?region=us-east-2}", true)]
    #[case("ssm:team/db", "${ssm:team/db?region=us-east-2}", false)]
    #[case("ssm:team/db", "${ssm:team/db?stage=X}", true)]
    #[case(
        "ssm:team/*",
        "${ssm:arn:aws:secretsmanager:eu-west-1:1:secret:team/x}",
        false
    )]
    #[case("vault:kv/{workspaceId}/**@team", "${vault:kv/ws-1/a/b.k@team}", true)]
    #[case("vault:kv/{workspaceId}/**@team", "${vault:kv/ws-1/a/b.k}", false)]
    #[case("vault:kv/{workspaceId}/**", "${vault:kv/%77s-1/b.k}", true)]
    #[case("vault:kv/ws-2/**", "${vault:kv/ws-1/b.k}", false)]
    #[case("vault:kv/shared/*", "${vault:kv/shared/x.k}", true)]
    #[case("vault:kv/shared/*", "${vault:kv/shared/x.k@tenant-b}", false)]
    #[case("vault:**", "${vault:kv/x.k@tenant-b/child}", false)]
    #[case("vault:**@**", "${vault:kv/x.k@tenant-b/child}", true)]
    #[case("vault:kv/*@{organizationId}", "${vault:kv/x.k@org-1}", true)]
    #[case("vault:kv/*@{organizationId}", "${vault:kv/x@org-1#k}", false)]
    #[case("vault:kv/*", "${vault:kv/x@tenant-b#k}", true)]
    #[case("gcp:a, azure:*@Vault", "${azure:X@vault}", true)]
    #[case("gcp:a azure:*@Vault", "${gcp:b}", false)]
    #[case(
        "gcp:a*a*a*a*a*a*a*a*b",
        "${gcp:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}",
        false
    )]
    fn rules_decide_by_the_secret(
        #[case] rules: &str,
        #[case] reference: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(allows(rules, reference), expected);
    }

    #[test]
    fn an_id_is_no_pattern() {
        let list = AllowList::parse("ssm:{workspaceId}").unwrap();
        let id = Template::scan("${ssm:other}").unwrap();
        let id = &id.references().next().unwrap().id;
        let run = RunIds {
            organization: "*",
            workspace: "*",
        };
        assert!(!list.allows(id, run));
    }

    #[rstest]
    #[case("arn:aws:iam::123456789012:role/team/deploy", true)]
    #[case("arn:aws:iam::*:role/team/*", true)]
    #[case("arn:aws:iam::123456789012:role/**", true)]
    #[case("**", true)]
    #[case("arn:aws:iam::123456789012:role/*", false)]
    #[case("arn:aws:iam::123456789012:role/team", false)]
    #[case("arn:aws:iam::123456789012:role/{organizationId}/*", false)]
    #[case("", false)]
    fn rules_decide_by_the_role(#[case] rules: &str, #[case] expected: bool) {
        let list = AllowList::parse_roles(rules).unwrap();
        let role = "arn:aws:iam::123456789012:role/team/deploy";
        assert_eq!(list.allows_role(role, RUN), expected);
    }

    #[rstest]
    #[case("prod/*")]
    #[case("s3:x")]
    #[case("ssm:{workspaceName}/*")]
    #[case("ssm:x}")]
    fn a_rule_that_matches_nothing_is_refused(#[case] rule: &str) {
        let error = AllowList::parse(&format!("ssm:a {rule}")).unwrap_err();
        assert_eq!(error.rule, rule);
    }
}
