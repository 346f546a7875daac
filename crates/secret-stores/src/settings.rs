//! The settings of the operator: which stores there are, how to log in, and which secrets runs may name. A run changes none of
//! them.

use std::path::{Path, PathBuf};

use job_contract::env;
use reqwest::Url;
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};

use crate::allow::{AllowList, RunIds};
use crate::aws::credentials::{AwsLogin, Source};
use crate::aws::request::service_url;
use crate::aws::sign::Keys;
use crate::aws::sts::RoleSession;
use crate::azure::{AzureLogin, AzureSettings};
use crate::gcp::{GcpSettings, GoogleLogin};
use crate::http::TlsSettings;
use crate::lookup::{Lookup, MAX_FILE_BYTES};
use crate::reference::StoreKind;
use crate::vault::{VaultLogin, VaultSettings};

const DEFAULT_REGION: &str = "us-east-1";
const KEY_VAULTS: &str = "vault.azure.net";
const POD_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// All settings of one run.
#[derive(Debug, Default)]
pub struct Settings {
    pub allow: AllowList,
    /// Whether sensitive values that are no references end a run.
    pub only_references: bool,
    pub(crate) aws: Option<AwsLogin>,
    pub(crate) gcp: Option<GcpSettings>,
    pub(crate) azure: Option<AzureSettings>,
    pub(crate) vault: Option<VaultSettings>,
    /// What the logins consist of, for the redaction of logs.
    pub(crate) secrets: Vec<SecretString>,
}

/// What the settings are for.
#[derive(Clone, Copy, Debug)]
pub struct Purpose<'a> {
    pub run: RunIds<'a>,
    /// Names the run in the logs of the clouds.
    pub session_name: &'a str,
}

/// Reads settings, and remembers the secrets among them and the errors.
struct Reader<'r, 'l> {
    lookup: &'r Lookup<'l>,
    secrets: Vec<SecretString>,
    errors: Vec<String>,
}

impl Reader<'_, '_> {
    fn text(&mut self, name: &str) -> Option<String> {
        let found = self.lookup.text_or_file(name);
        self.or_error(found).flatten()
    }

    /// Whether it is set, or the name of a file with it.
    fn is_set(&self, name: &str) -> bool {
        let file = format!("{name}{}", env::FILE_SUFFIX);
        let text = self.lookup.text(name);
        text.or_else(|| self.lookup.text(&file)).is_some()
    }

    fn secret(&mut self, name: &str) -> Option<SecretString> {
        let secret = SecretString::from(self.text(name)?);
        self.secrets.push(secret.clone());
        Some(secret)
    }

    fn flag(&mut self, name: &str) -> bool {
        let found = self.lookup.flag(name);
        self.or_error(found).unwrap_or_default()
    }

    fn or_error<T>(&mut self, found: Result<T, String>) -> Option<T> {
        found.map_err(|error| self.errors.push(error)).ok()
    }

    fn error<T>(&mut self, text: impl Into<String>) -> Option<T> {
        self.errors.push(text.into());
        None
    }
}

impl Settings {
    /// The settings of one run. `None` if references are off: then nothing is scanned.
    ///
    /// # Errors
    /// Lists everything that is wrong. No text quotes a secret.
    pub fn read(
        own: &dyn Fn(&str) -> Option<String>,
        purpose: Purpose<'_>,
    ) -> Result<Option<Self>, Vec<String>> {
        let lookup = Lookup::new(own);
        let mode = lookup.text_or_file(env::SECRET_REFERENCES);
        let mode = mode.map_err(|error| vec![error])?;
        let is_on = match mode.as_deref() {
            Some("off") => return Ok(None),
            Some("on") => true,
            None | Some("auto") => false,
            Some(_) => {
                let name = env::SECRET_REFERENCES;
                return Err(vec![format!("`{name}` is none of `auto`, `on` and `off`")]);
            }
        };
        let lookup = lookup.of_run(purpose.run).map_err(|error| vec![error])?;
        let mut reader = Reader {
            lookup: &lookup,
            secrets: Vec::new(),
            errors: Vec::new(),
        };
        let mut settings = Self::default();
        let rules = lookup.text_or_file(env::SECRET_REFERENCES_ALLOW);
        let rules = reader.or_error(rules).flatten().unwrap_or_default();
        let file = format!("{}{}", env::SECRET_REFERENCES_ALLOW, env::FILE_SUFFIX);
        let is_set = [env::SECRET_REFERENCES_ALLOW, &file]
            .into_iter()
            .any(|name| lookup.text(name).is_some());
        match AllowList::parse(&rules) {
            // Without a pattern, runs could read everything.
            Ok(allow) if allow.is_empty() && is_set => {
                let name = env::SECRET_REFERENCES_ALLOW;
                reader.errors.push(format!("`{name}` has no pattern"));
            }
            Ok(allow) => settings.allow = allow,
            Err(error) => {
                let name = env::SECRET_REFERENCES_ALLOW;
                reader.errors.push(format!("`{name}`: {error}"));
            }
        }
        settings.only_references = reader.flag(env::ONLY_SECRET_REFERENCES);
        let enabled = enabled_stores(&mut reader);
        for store in enabled {
            match store {
                StoreKind::Aws => settings.aws = aws(&mut reader, purpose.session_name),
                StoreKind::Gcp => settings.gcp = gcp(&mut reader),
                StoreKind::Azure => settings.azure = azure(&mut reader),
                StoreKind::Vault => settings.vault = vault(&mut reader, purpose.session_name),
            }
        }
        settings.secrets = reader.secrets;
        if !reader.errors.is_empty() {
            return Err(reader.errors);
        }
        let is_used = is_on || settings.only_references || settings.has_stores();
        Ok(is_used.then_some(settings))
    }

    const fn has_stores(&self) -> bool {
        self.aws.is_some() || self.gcp.is_some() || self.azure.is_some() || self.vault.is_some()
    }
}

/// The stores that the operator names, or those with settings.
fn enabled_stores(reader: &mut Reader<'_, '_>) -> Vec<StoreKind> {
    if let Some(list) = reader.text(env::SECRET_STORES) {
        let names = list
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let kinds = names.map(|name| {
            StoreKind::of_prefix(name).ok_or_else(|| {
                format!(
                    "`{}` names `{name}`, which is none of `ssm`, `gcp`, `azure` and `vault`",
                    env::SECRET_STORES
                )
            })
        });
        let kinds: Result<Vec<_>, String> = kinds.collect();
        return reader.or_error(kinds).unwrap_or_default();
    }
    let by_store: [(StoreKind, &[&str]); 4] = [
        (
            StoreKind::Aws,
            &[
                env::CUSTOMER_AWS_ACCESS_KEY_ID,
                env::AWS_SECRETS_REGION,
                env::USE_OIDC_FOR_AWS_SSM,
            ],
        ),
        (
            StoreKind::Gcp,
            &[
                env::CUSTOMER_GOOGLE_PROJECT,
                env::CUSTOMER_GOOGLE_CREDENTIALS,
            ],
        ),
        (StoreKind::Azure, &[env::CUSTOMER_AZURE_CLIENT_ID]),
        (StoreKind::Vault, &[env::CUSTOMER_VAULT_ADDRESS]),
    ];
    let set = by_store
        .into_iter()
        .filter(|(_, names)| names.iter().any(|name| reader.is_set(name)));
    set.map(|(kind, _)| kind).collect()
}

fn aws(reader: &mut Reader<'_, '_>, session_name: &str) -> Option<AwsLogin> {
    let region = reader.text(env::AWS_SECRETS_REGION);
    let region = region.unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let source = aws_source(reader, session_name)?;
    let assume = reader
        .text(env::AWS_SECRETS_ROLE_ARN)
        .map(|arn| RoleSession {
            external_id: reader.text(env::AWS_SECRETS_EXTERNAL_ID),
            ..RoleSession::new(arn, session_name)
        });
    if service_url("sts", &region).is_err() {
        return reader.error(format!(
            "`{}` is no name of a region",
            env::AWS_SECRETS_REGION
        ));
    }
    Some(AwsLogin {
        source,
        assume,
        region,
    })
}

fn aws_source(reader: &mut Reader<'_, '_>, session_name: &str) -> Option<Source> {
    let id = reader.secret(env::CUSTOMER_AWS_ACCESS_KEY_ID);
    let secret = reader.secret(env::CUSTOMER_AWS_SECRET_ACCESS_KEY);
    match (id, secret) {
        (Some(id), Some(secret)) => {
            return Some(Source::Keys(Keys {
                access_key_id: id.expose_secret().to_owned(),
                secret_access_key: secret,
                session_token: None,
            }));
        }
        (None, None) => {}
        _ => {
            return reader.error(format!(
                "of `{}` and `{}`, only one is set",
                env::CUSTOMER_AWS_ACCESS_KEY_ID,
                env::CUSTOMER_AWS_SECRET_ACCESS_KEY
            ));
        }
    }
    if reader.flag(env::USE_OIDC_FOR_AWS_SSM) {
        let names = [
            env::CUSTOM_ROLE_FOR_OIDC_AWS_SSM,
            "AWS_WEB_IDENTITY_TOKEN_FILE",
        ];
        let [Some(role), Some(file)] = names.map(|name| reader.text(name)) else {
            let [role, file] = names;
            return reader.error(format!(
                "`{}` needs `{role}` and `{file}`",
                env::USE_OIDC_FOR_AWS_SSM
            ));
        };
        let duration = reader.text(env::CUSTOM_DURATION_FOR_OIDC_AWS_SSM);
        let duration_seconds = duration.map(|text| {
            text.parse().map_err(|_| {
                format!(
                    "`{}` is no number of seconds",
                    env::CUSTOM_DURATION_FOR_OIDC_AWS_SSM
                )
            })
        });
        let duration_seconds = reader.or_error(duration_seconds.transpose())?;
        return Some(Source::WebIdentity {
            role: RoleSession {
                duration_seconds,
                ..RoleSession::new(role, session_name)
            },
            token_file: file.into(),
        });
    }
    let allow_node = reader.flag(env::SECRETS_NODE_IDENTITY);
    let source = Source::of_pod(reader.lookup, session_name, allow_node);
    reader.or_error(source)
}

fn gcp(reader: &mut Reader<'_, '_>) -> Option<GcpSettings> {
    let document = match reader.secret(env::CUSTOMER_GOOGLE_CREDENTIALS) {
        Some(document) => Some(document),
        None => match reader.text("GOOGLE_APPLICATION_CREDENTIALS") {
            None => None,
            Some(path) => {
                let text = regular_file::read_text(Path::new(&path), MAX_FILE_BYTES)
                    .map_err(|error| format!("`GOOGLE_APPLICATION_CREDENTIALS` names `{path}`, which cannot be read: {error}"));
                Some(reader.or_error(text)?.into())
            }
        },
    };
    let login = match document {
        Some(document) => GoogleLogin::of_document(&document),
        None => GoogleLogin::of_metadata(reader.text("GCE_METADATA_HOST").as_deref()),
    };
    let login = reader.or_error(login)?;
    if let GoogleLogin::Key(key) = &login {
        reader.secrets.push(key.private_key.clone());
    }
    let project = reader
        .text(env::CUSTOMER_GOOGLE_PROJECT)
        .or_else(|| login.project());
    Some(GcpSettings { login, project })
}

fn azure(reader: &mut Reader<'_, '_>) -> Option<AzureSettings> {
    let suffix = reader.text(env::AZURE_SECRETS_SUFFIX);
    let suffix = suffix.unwrap_or_else(|| KEY_VAULTS.to_owned());
    let authority = reader.text("AZURE_AUTHORITY_HOST");
    let authority = authority
        .as_deref()
        .unwrap_or("https://login.microsoftonline.com");
    let authority =
        Url::parse(authority).map_err(|_| "`AZURE_AUTHORITY_HOST` is no address".to_owned());
    let authority = reader.or_error(authority)?;
    let own = [
        reader.text(env::CUSTOMER_AZURE_TENANT_ID),
        reader.text(env::CUSTOMER_AZURE_CLIENT_ID),
    ];
    let secret = reader.secret(env::CUSTOMER_AZURE_CLIENT_SECRET);
    let of_pod = [
        reader.text("AZURE_TENANT_ID"),
        reader.text("AZURE_CLIENT_ID"),
    ];
    let token_file = reader.text("AZURE_FEDERATED_TOKEN_FILE").map(PathBuf::from);
    let login = match (own, secret, of_pod, token_file) {
        ([Some(tenant), Some(client)], Some(secret), ..) => AzureLogin::Secret {
            tenant,
            client,
            secret,
        },
        (_, Some(_), ..) => {
            return reader.error(format!(
                "`{}` needs `{}` and `{}`",
                env::CUSTOMER_AZURE_CLIENT_SECRET,
                env::CUSTOMER_AZURE_CLIENT_ID,
                env::CUSTOMER_AZURE_TENANT_ID
            ));
        }
        ([tenant, client], None, [pod_tenant, pod_client], Some(token_file))
            if (tenant.is_some() || pod_tenant.is_some())
                && (client.is_some() || pod_client.is_some()) =>
        {
            AzureLogin::Federated {
                tenant: tenant.or(pod_tenant).unwrap_or_default(),
                client: client.or(pod_client).unwrap_or_default(),
                token_file,
            }
        }
        ([_, client], None, ..) if reader.flag(env::SECRETS_NODE_IDENTITY) => {
            let base = reader.text("AZURE_POD_IDENTITY_AUTHORITY_HOST");
            let base = Url::parse(base.as_deref().unwrap_or("http://169.254.169.254"));
            let base =
                base.map_err(|_| "`AZURE_POD_IDENTITY_AUTHORITY_HOST` is no address".to_owned());
            AzureLogin::Managed {
                base: reader.or_error(base)?,
                client,
            }
        }
        _ => {
            return reader.error(
                "Azure has no login: there is no client secret and no workload identity, and the identity of the node is not allowed",
            );
        }
    };
    Some(AzureSettings {
        login,
        authority,
        suffix,
    })
}

fn vault(reader: &mut Reader<'_, '_>, session_name: &str) -> Option<VaultSettings> {
    let address = reader.text(env::CUSTOMER_VAULT_ADDRESS);
    let address = address.and_then(|address| Url::parse(&address).ok());
    let Some(address) = address.filter(Url::has_host) else {
        return reader.error(format!(
            "`{}` is not set to an address",
            env::CUSTOMER_VAULT_ADDRESS
        ));
    };
    let (login, mount) = vault_login(reader, session_name)?;
    let authorities = reader.text(env::VAULT_CA_FILE).map(|path| {
        regular_file::read_text(Path::new(&path), MAX_FILE_BYTES).map_err(|error| {
            format!(
                "`{}` names `{path}`, which cannot be read: {error}",
                env::VAULT_CA_FILE
            )
        })
    });
    let authorities = reader.or_error(authorities.transpose())?;
    let identity = match login {
        VaultLogin::Certificate { .. } => {
            let [certificate, key] =
                [env::VAULT_CLIENT_CERT, env::VAULT_CLIENT_KEY].map(|name| reader.secret(name));
            let (Some(certificate), Some(key)) = (certificate, key) else {
                return reader.error(format!(
                    "the login by certificate needs `{}` and `{}`",
                    env::VAULT_CLIENT_CERT,
                    env::VAULT_CLIENT_KEY
                ));
            };
            Some(format!("{}\n{}\n", certificate.expose_secret(), key.expose_secret()).into())
        }
        _ => None,
    };
    let version = match reader.text(env::VAULT_KV_VERSION).as_deref() {
        None | Some("auto") => None,
        Some("1") => Some(1),
        Some("2") => Some(2),
        Some(_) => {
            return reader.error(format!(
                "`{}` is none of `auto`, `1` and `2`",
                env::VAULT_KV_VERSION
            ));
        }
    };
    Some(VaultSettings {
        address,
        namespace: reader.text(env::VAULT_NAMESPACE),
        login_namespace: reader.text(env::VAULT_LOGIN_NAMESPACE),
        login,
        mount: reader.text(env::CUSTOMER_VAULT_LOGIN_PATH).unwrap_or(mount),
        kv_version: version,
        kv_mount: reader.text(env::VAULT_KV_MOUNT),
        tls: TlsSettings {
            authorities,
            identity,
        },
    })
}

/// The login and its usual mount. Without a named method, what is set decides.
fn vault_login(reader: &mut Reader<'_, '_>, session_name: &str) -> Option<(VaultLogin, String)> {
    let role = reader.text(env::CUSTOMER_VAULT_ROLE_NAME);
    let method = reader.text(env::VAULT_METHOD).unwrap_or_else(|| {
        let by_setting = [
            (env::CUSTOMER_VAULT_TOKEN, "token"),
            (env::CUSTOMER_VAULT_USERNAME, "password"),
            (env::VAULT_ROLE_ID, "approle"),
            (env::VAULT_CLIENT_CERT, "certificate"),
        ];
        let found = by_setting.into_iter().find(|(name, _)| reader.is_set(name));
        found.map_or("kubernetes", |(_, method)| method).to_owned()
    });
    let missing = |names: &str| format!("the login `{method}` at Vault needs {names}");
    let (login, mount) = match method.as_str() {
        "token" => match reader.secret(env::CUSTOMER_VAULT_TOKEN) {
            Some(token) => (VaultLogin::Token(token), "token"),
            None => return reader.error(missing(&format!("`{}`", env::CUSTOMER_VAULT_TOKEN))),
        },
        "password" | "userpass" => {
            let user = reader.text(env::CUSTOMER_VAULT_USERNAME);
            let password = reader.secret(env::CUSTOMER_VAULT_PASSWORD);
            let (Some(user), Some(password)) = (user, password) else {
                let names = [env::CUSTOMER_VAULT_USERNAME, env::CUSTOMER_VAULT_PASSWORD];
                return reader.error(missing(&format!("`{}`", names.join("` and `"))));
            };
            (VaultLogin::Password { user, password }, "userpass")
        }
        "certificate" | "cert" => (VaultLogin::Certificate { name: role }, "cert"),
        "kubernetes" | "service_account" | "jwt" => {
            let Some(role) = role else {
                return reader.error(missing(&format!("`{}`", env::CUSTOMER_VAULT_ROLE_NAME)));
            };
            let file = reader.text(env::VAULT_JWT_FILE);
            let token_file = PathBuf::from(file.unwrap_or_else(|| POD_TOKEN.to_owned()));
            let mount = if method == "jwt" { "jwt" } else { "kubernetes" };
            (VaultLogin::Jwt { role, token_file }, mount)
        }
        "approle" => {
            let ids = [env::VAULT_ROLE_ID, env::VAULT_SECRET_ID].map(|name| reader.secret(name));
            let [Some(role_id), Some(secret_id)] = ids else {
                let names = format!("`{}` and `{}`", env::VAULT_ROLE_ID, env::VAULT_SECRET_ID);
                return reader.error(missing(&names));
            };
            (VaultLogin::AppRole { role_id, secret_id }, "approle")
        }
        "aws" => {
            let source = aws_source(reader, session_name)?;
            let login = Box::new(AwsLogin {
                source,
                assume: None,
                region: reader
                    .text(env::AWS_SECRETS_REGION)
                    .unwrap_or_else(|| DEFAULT_REGION.to_owned()),
            });
            let server_id = reader.text(env::VAULT_AWS_SERVER_ID);
            (
                VaultLogin::Aws {
                    role,
                    login,
                    server_id,
                },
                "aws",
            )
        }
        _ => {
            return reader.error(format!(
                "`{}` is none of `token`, `password`, `certificate`, `kubernetes`, `jwt`, `approle` and `aws`",
                env::VAULT_METHOD
            ));
        }
    };
    Some((login, mount.to_owned()))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::reference::SecretId;

    fn read_for(
        run: (&str, &str),
        pairs: &[(&str, &str)],
    ) -> Result<Option<Settings>, Vec<String>> {
        let own = |name: &str| {
            let found = pairs.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let purpose = Purpose {
            run: RunIds {
                organization: run.0,
                workspace: run.1,
            },
            session_name: "mayfly-1",
        };
        Settings::read(&own, purpose)
    }

    fn read(pairs: &[(&str, &str)]) -> Result<Option<Settings>, Vec<String>> {
        read_for(("org", "ws"), pairs)
    }

    #[test]
    fn each_setting_may_be_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, format!("{text}\n")).unwrap();
            path.display().to_string()
        };
        let address = file("address", "https://vault.example.test");
        let token = file("token", "hvs.of-all");
        let (allow, only) = (file("allow", "vault:own/**"), file("only", "true"));
        let pairs = [
            ("CUSTOMER_VAULT_ADDRESS_FILE", &*address),
            ("CUSTOMER_VAULT_TOKEN_FILE", &*token),
            ("MAYFLY_SECRET_REFERENCES_ALLOW_FILE", &*allow),
            ("MAYFLY_ONLY_SECRET_REFERENCES_FILE", &*only),
        ];
        let settings = read(&pairs).unwrap().unwrap();
        assert!(settings.vault.is_some() && settings.only_references);
        let secret = SecretId::Vault {
            path: "others/app".to_owned(),
            namespace: None,
            version: None,
        };
        let run = RunIds {
            organization: "org",
            workspace: "ws",
        };
        assert!(!settings.allow.allows(&secret, run));
    }

    #[test]
    fn blanks_are_not_set_and_without_a_store_nothing_is_scanned() {
        let blank = [
            (env::CUSTOMER_AWS_ACCESS_KEY_ID, " "),
            (env::CUSTOMER_VAULT_ADDRESS, ""),
        ];
        assert!(read(&blank).unwrap().is_none());
        assert!(read(&[(env::SECRET_REFERENCES, "on")]).unwrap().is_some());
        let off = [
            (env::SECRET_REFERENCES, "off"),
            (env::CUSTOMER_VAULT_ADDRESS, "nonsense"),
        ];
        assert!(read(&off).unwrap().is_none());
    }

    #[rstest]
    #[case(&[(env::CUSTOMER_AWS_ACCESS_KEY_ID, "AKIA1")], env::CUSTOMER_AWS_SECRET_ACCESS_KEY)]
    #[case(&[(env::AWS_SECRETS_REGION, "eu-west-1")], "AWS has no login")]
    #[case(&[(env::USE_OIDC_FOR_AWS_SSM, "true")], env::CUSTOM_ROLE_FOR_OIDC_AWS_SSM)]
    #[case(&[(env::CUSTOMER_GOOGLE_CREDENTIALS, "{}")], env::CUSTOMER_GOOGLE_CREDENTIALS)]
    #[case(&[(env::CUSTOMER_AZURE_CLIENT_ID, "c")], "Azure has no login")]
    #[case(&[(env::CUSTOMER_VAULT_ADDRESS, "vault")], env::CUSTOMER_VAULT_ADDRESS)]
    #[case(&[(env::CUSTOMER_VAULT_ADDRESS, "https://vault"), (env::VAULT_METHOD, "ldap")], env::VAULT_METHOD)]
    #[case(&[(env::SECRET_STORES, "ssm,s3")], "`s3`")]
    #[case(&[(env::SECRET_REFERENCES_ALLOW, "prod/*")], "`prod/*`")]
    #[case(&[(env::SECRET_REFERENCES_ALLOW, ", ,")], "has no pattern")]
    #[case(&[("MAYFLY_SECRET_REFERENCES_ALLOW_FILE", "/nonexistent")], "MAYFLY_SECRET_REFERENCES_ALLOW_FILE")]
    #[case(&[("MAYFLY_SECRET_REFERENCES_ALLOW_FILE", "/dev/null")], "MAYFLY_SECRET_REFERENCES_ALLOW")]
    #[case(&[(env::ONLY_SECRET_REFERENCES, "yes")], env::ONLY_SECRET_REFERENCES)]
    #[case(&[(env::SECRET_LOGINS, "{}")], env::SECRET_LOGINS)]
    #[case(&[(env::SECRET_LOGINS, r#"[{"organizations":["a"],"settings":{"CUSTOMER_VAULT_TOKEN":"x"}}]"#)], "is a secret")]
    #[case(&[(env::SECRET_LOGINS, r#"[{"organizations":["a"],"settings":{"PATH":"x"}}]"#)], "`PATH`")]
    #[case(&[(env::SECRET_LOGINS, r#"[{"settings":{}}]"#)], "no organization")]
    #[case(
        &[(env::CUSTOMER_VAULT_TOKEN, "usual"), (env::SECRET_LOGINS, r#"[{"organizations":["org"],"variables":{"CUSTOMER_VAULT_TOKEN":"ORG_TOKEN"}}]"#)],
        "takes `CUSTOMER_VAULT_TOKEN` from `ORG_TOKEN`, which is not set"
    )]
    fn what_is_wrong_is_said(#[case] pairs: &[(&str, &str)], #[case] expected: &str) {
        let errors = read(pairs).unwrap_err().join("; ");
        assert!(errors.contains(expected), "{errors}");
    }

    #[test]
    fn a_workspace_has_its_own_login_and_others_the_usual_one() {
        let logins = r#"[
            {"organizations": ["org"], "variables": {"CUSTOMER_VAULT_TOKEN": "ORG_TOKEN"}},
            {"workspaces": ["ws"], "settings": {"MAYFLY_VAULT_NAMESPACE": "ws-ns"},
             "variables": {"CUSTOMER_VAULT_TOKEN": "WS_TOKEN"}}
        ]"#;
        let pairs = [
            (env::SECRET_LOGINS, logins),
            (env::CUSTOMER_VAULT_ADDRESS, "https://vault.example.test"),
            (env::CUSTOMER_VAULT_TOKEN, "usual"),
            ("ORG_TOKEN", "of-org"),
            ("WS_TOKEN", "of-ws"),
        ];
        for (run, token, namespace) in [
            (("org", "ws"), "of-ws", Some("ws-ns")),
            (("org", "other"), "of-org", None),
            (("other", "other"), "usual", None),
        ] {
            let settings = read_for(run, &pairs).unwrap().unwrap();
            let vault = settings.vault.unwrap();
            assert_eq!(vault.namespace.as_deref(), namespace);
            assert!(
                matches!(vault.login, VaultLogin::Token(found) if found.expose_secret() == token)
            );
        }
    }

    #[test]
    fn a_secret_may_be_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "of-file\n").unwrap();
        let pairs = [
            (env::CUSTOMER_VAULT_ADDRESS, "https://vault.example.test"),
            ("CUSTOMER_VAULT_TOKEN_FILE", file.to_str().unwrap()),
        ];
        let settings = read(&pairs).unwrap().unwrap();
        let secrets: Vec<_> = settings
            .secrets
            .iter()
            .map(|secret| secret.expose_secret().to_owned())
            .collect();
        assert_eq!(secrets, ["of-file"]);
    }
}
