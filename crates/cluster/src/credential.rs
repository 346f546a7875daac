//! Why there is no credential, in words that do not contain it. The library's own errors hold what a plugin printed, its
//! command with its variables, and pieces of both. They do not leave this module.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use http::Request;
use job_contract::Exit;
use kube::Client;
use kube::client::{AuthError, Body};
use tower::{BoxError, service_fn};

/// A credential that was not there when it was needed, at the start or when an earlier one ran out.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// In the middle of a header it would begin another one; the library panics on some.
    #[error(
        "the token of the kubeconfig holds a line break or another character that no request can carry"
    )]
    Token,
    #[error("could not read the kubeconfig's token file `{}`", path.display())]
    TokenFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not start the kubeconfig's credential plugin")]
    PluginStart(#[source] io::Error),
    /// What a plugin prints is the credential.
    #[error(
        "the kubeconfig's credential plugin failed, {status}; what it printed may be secret and is not shown"
    )]
    Plugin { status: ExitStatus },
    #[error(
        "what the kubeconfig's credential plugin printed is no `ExecCredential` with a token and a time it ends; \
         it may be secret and is not shown"
    )]
    PluginAnswer,
    /// An `exec` that lacks something, or an `auth-provider` that is not supported or fails.
    #[error("the way the kubeconfig's user authenticates is not complete or not supported")]
    Method,
}

impl CredentialError {
    /// What a kubeconfig says is configuration; what a plugin does is not.
    pub const fn exit(&self) -> Exit {
        match self {
            Self::Plugin { .. } | Self::PluginAnswer => Exit::Infrastructure,
            Self::Token | Self::TokenFile { .. } | Self::PluginStart(_) | Self::Method => {
                Exit::BadConfiguration
            }
        }
    }

    /// What to do about it.
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Plugin { .. } | Self::PluginAnswer => {
                "run the command of the kubeconfig's `exec` by itself to see its output"
            }
            Self::PluginStart(_) => {
                "install the command that the kubeconfig's `exec` names, or name it by its whole path"
            }
            Self::Token => "write the token on one line, without a line break at its end",
            Self::TokenFile { .. } => {
                "`tokenFile` names a file that holds the token and can be read"
            }
            Self::Method => "use a token, a client certificate, or `exec`",
        }
    }

    pub(super) fn of(error: &AuthError) -> Self {
        match error {
            AuthError::InvalidBasicAuth(_) | AuthError::InvalidBearerToken(_) => Self::Token,
            AuthError::ReadTokenFile(source, path) => Self::TokenFile {
                path: path.clone(),
                source: again(source),
            },
            AuthError::AuthExecStart(source) => Self::PluginStart(again(source)),
            AuthError::AuthExecRun { out, .. } => Self::Plugin { status: out.status },
            AuthError::AuthExecParse(_)
            | AuthError::ParseTokenKey(_)
            | AuthError::MalformedTokenExpirationDate(_)
            | AuthError::ExecPluginFailed
            | AuthError::UnrefreshableTokenResponse => Self::PluginAnswer,
            _ => Self::Method,
        }
    }

    /// What a request failed for, if it never was one for want of a credential.
    pub(super) fn within(error: kube::Error) -> Result<Self, kube::Error> {
        match error {
            kube::Error::Service(source) => match source.downcast() {
                Ok(this) => Ok(*this),
                Err(source) => Err(kube::Error::Service(source)),
            },
            error => Err(error),
        }
    }
}

/// The error once more: it cannot be copied.
pub(super) fn again(error: &io::Error) -> io::Error {
    let code = error.raw_os_error().map(io::Error::from_raw_os_error);
    code.unwrap_or_else(|| error.kind().into())
}

/// A client whose errors contain no credential, wherever they are shown.
pub(super) fn discreet(client: Client, namespace: &str) -> Client {
    let service = service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move { client.send(request).await.map_err(without_credential) }
    });
    Client::new(service, namespace)
}

fn without_credential(error: kube::Error) -> BoxError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(link) = cause {
        if let Some(auth) = link.downcast_ref() {
            return CredentialError::of(auth).into();
        }
        cause = link.source();
    }
    error.into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use axum::Router;
    use http::header::CONTENT_TYPE;
    use job_contract::chain;
    use kube::api::ListParams;
    use tokio::net::TcpListener;

    use super::super::{Access, Cluster, ClusterError, RetryPolicy};
    use super::*;

    const SECRET: &str = "hunter2";

    /// Address of an API server without any Jobs.
    async fn api_server() -> String {
        let empty = r#"{"kind":"JobList","apiVersion":"batch/v1","metadata":{},"items":[]}"#;
        let router = Router::new()
            .fallback(move || async move { ([(CONTENT_TYPE, "application/json")], empty) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    }

    async fn connected_as(user: &str, folder: &Path) -> Cluster {
        let path = folder.join("config");
        let config = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
             clusters: [{{name: a, cluster: {{server: '{}'}}}}]\n\
             contexts: [{{name: a, context: {{cluster: a, user: a}}}}]\n\
             users: [{{name: a, user: {{{user}}}}}]\n",
            api_server().await
        );
        fs::write(&path, config).unwrap();
        // Another test may have installed it before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let access = Access {
            kubeconfig: Some(path),
            ..Access::default()
        };
        let cluster = Cluster::connect_with(access).await.unwrap();
        cluster.with_retry_policy(RetryPolicy {
            attempts: 1,
            ..RetryPolicy::default()
        })
    }

    async fn read(cluster: &Cluster) -> Result<(), ClusterError> {
        let (jobs, params) = (cluster.jobs(), ListParams::default());
        let listed = cluster
            .request_with_retries("list Jobs", || jobs.list(&params))
            .await;
        listed.map(drop)
    }

    /// Everything that could be shown of a request that has no credential, and what becomes of the command.
    async fn refused(cluster: &Cluster) -> (String, Exit) {
        let library = cluster.jobs().list(&ListParams::default()).await;
        let library = library.unwrap_err();
        let error = read(cluster).await.unwrap_err();
        let told = format!("{} {error:?} {library} {library:?}", chain(&error));
        assert!(!told.contains(SECRET), "{told}");
        let ClusterError::Credential { source, .. } = error else {
            panic!("{told}");
        };
        (told, source.exit())
    }

    #[tokio::test]
    async fn the_error_of_a_plugin_that_cannot_renew_a_credential_leaves_out_its_output() {
        let folder = tempfile::tempdir().unwrap();
        let (shell, script) = (folder.path().join("shell"), folder.path().join("script"));
        std::os::unix::fs::symlink("/bin/sh", &shell).unwrap();
        let (command, argument) = (shell.display(), script.display());
        let exec = format!(
            "exec: {{apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: '{command}', \
             args: ['{argument}'], env: [{{name: KEY, value: {SECRET}}}]}}"
        );
        let provider = format!(
            "auth-provider: {{name: gcp, config: {{cmd-path: '{command}', cmd-args: '{argument}', \
             token-key: '{{.status.token}}', expiry-key: '{{.status.expirationTimestamp}}'}}}}"
        );
        let answer = |status: &str| {
            let answer = format!(
                r#"{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential"{status}}}"#
            );
            format!("echo '{answer}'")
        };
        let credential = |token: &str, ends: &str| {
            answer(&format!(
                r#","status":{{"token":"{token}","expirationTimestamp":"{ends}"}}"#
            ))
        };
        let ended = "2020-01-01T00:00:00Z";
        let works = credential(SECRET, ended);
        let line_break = credential(&format!("{SECRET}\\\\n"), ended);
        let untimely = credential("x", SECRET);
        let endless = answer(&format!(r#","status":{{"token":"{SECRET}"}}"#));
        let fails = format!("echo {SECRET}; echo {SECRET} >&2; exit 3");
        let (failed, misread) = ("exit status: 3", "no `ExecCredential`");
        for (user, later, words, exit) in [
            (&exec, fails.clone(), failed, Exit::Infrastructure),
            (
                &exec,
                format!("echo {SECRET}"),
                misread,
                Exit::Infrastructure,
            ),
            (
                &exec,
                format!("echo '{SECRET}: ['"),
                misread,
                Exit::Infrastructure,
            ),
            (&exec, answer(""), misread, Exit::Infrastructure),
            (&exec, untimely.clone(), misread, Exit::Infrastructure),
            (&exec, endless, misread, Exit::Infrastructure),
            (&exec, line_break, "line break", Exit::BadConfiguration),
            (&provider, fails, failed, Exit::Infrastructure),
            (
                &provider,
                format!("echo {SECRET}"),
                misread,
                Exit::Infrastructure,
            ),
            (&provider, untimely, misread, Exit::Infrastructure),
            (
                &provider,
                format!("echo '{{\"status\": {{\"token\": [\"{SECRET}\"]}}}}'"),
                "not complete or not supported",
                Exit::BadConfiguration,
            ),
        ] {
            fs::write(&script, &works).unwrap();
            let cluster = connected_as(user, folder.path()).await;
            read(&cluster).await.unwrap();
            fs::write(&script, &later).unwrap();
            let (told, ended_with) = refused(&cluster).await;
            assert!(told.contains(words), "{later}: {told}");
            assert_eq!(ended_with, exit, "{told}");
            fs::write(&script, &works).unwrap();
            read(&cluster).await.unwrap();
        }
        let cluster = connected_as(&exec, folder.path()).await;
        fs::remove_file(&shell).unwrap();
        let (told, exit) = refused(&cluster).await;
        assert!(
            told.contains("could not start the kubeconfig's credential plugin"),
            "{told}"
        );
        assert_eq!(exit, Exit::BadConfiguration);
    }

    #[tokio::test]
    async fn the_error_of_an_unusable_token_file_names_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, format!("{SECRET}\n{SECRET}")).unwrap();
        let user = format!("tokenFile: '{}'", path.display());
        let (told, exit) = refused(&connected_as(&user, folder.path()).await).await;
        assert!(told.contains("line break"), "{told}");
        assert_eq!(exit, Exit::BadConfiguration);

        fs::remove_file(&path).unwrap();
        let access = Access {
            kubeconfig: Some(folder.path().join("config")),
            ..Access::default()
        };
        let error = Cluster::connect_with(access).await.unwrap_err();
        let place = format!("token file `{}`: No such file", path.display());
        assert!(chain(&error).contains(&place), "{}", chain(&error));
        assert_eq!(error.exit(), Exit::BadConfiguration);
    }
}
