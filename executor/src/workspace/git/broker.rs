//! Answers git's questions during one piece of work: which credential a server gets, whether git may connect to an address, and
//! what is known of a repository before it is cloned.
//!
//! git asks over a Unix socket with its own client, `git credential-cache`, so that no credential is in a file, an argument or
//! a variable, and no program of ours stands between. Only processes that the executor started itself, and their descendants,
//! get an answer. What scripts left behind in the background gets none.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use git_address::{Address, AllowList};
use runtime::reaper;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use super::login::Login;
use super::module_objects::{CLONE, ModuleObjects};
use super::operator_logins::OperatorLogins;
use super::ssh_call;

/// The answer of a permitted connection.
pub(super) const PERMITTED: &str = "permitted";
/// The first field of a question about a connection.
pub(super) const CONNECTION: &str = "connection";

const SOCKET: &str = "ask";
/// Larger than any question: an address, and the settings of HTTP for it.
const MAX_QUESTION_BYTES: u64 = 64 * 1024;
const QUESTION_TIMEOUT: Duration = Duration::from_secs(10);
/// More than the processes of git that ask at a time.
const QUESTIONS_AT_ONCE: usize = 32;

/// What is answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    pub(super) allowed: Option<Arc<AllowList>>,
    /// The run's own login.
    pub(super) login: Option<Login>,
    pub(super) operators: Option<OperatorLogins>,
    /// Its owner removes its folder, whatever is being answered.
    pub(super) objects: Weak<ModuleObjects>,
}

/// The socket. It is closed on drop, and nothing is answered then.
#[derive(Debug)]
pub(super) struct Broker {
    socket: PathBuf,
    _serving: AbortOnDropHandle<()>,
}

impl Broker {
    /// Listens in `folder`, which is removed by its owner.
    pub(super) fn open(folder: &Path, answers: Answers) -> io::Result<Self> {
        // An address of a socket has 107 bytes. Paths of folders may be longer, and git knows that too.
        let opened = File::open(folder)?;
        let listener = StdListener::bind(format!("/proc/self/fd/{}/{SOCKET}", opened.as_raw_fd()))?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let serving = tokio::spawn(serve(listener, Arc::new(answers)));
        Ok(Self {
            socket: folder.join(SOCKET),
            _serving: AbortOnDropHandle::new(serving),
        })
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

async fn serve(listener: UnixListener, answers: Arc<Answers>) {
    let mut questions = JoinSet::new();
    loop {
        if questions.len() >= QUESTIONS_AT_ONCE {
            questions.join_next().await;
        }
        match listener.accept().await {
            Ok((stream, _)) => {
                let answers = Arc::clone(&answers);
                questions.spawn(async move {
                    if let Err(error) = answer(stream, &answers).await {
                        debug!(%error, "a question of git could not be answered");
                    }
                });
            }
            Err(error) => {
                warn!(%error, "git can ask for no credentials any more");
                return;
            }
        }
        while questions.try_join_next().is_some() {}
    }
}

async fn answer(mut stream: UnixStream, answers: &Answers) -> io::Result<()> {
    let peer = stream.peer_cred()?.pid();
    if !peer.is_some_and(reaper::is_below_own_child) {
        warn!(
            pid = peer,
            "a process that the executor did not start asked for a credential of git"
        );
        return Ok(());
    }
    let mut question = Vec::new();
    let mut limited = (&mut stream).take(MAX_QUESTION_BYTES);
    timeout(QUESTION_TIMEOUT, limited.read_to_end(&mut question)).await??;
    let text = answers.of(&question).await;
    stream.write_all(text.expose_secret().as_bytes()).await?;
    stream.shutdown().await
}

impl Answers {
    async fn of(&self, question: &[u8]) -> SecretString {
        let Ok(question) = str::from_utf8(question) else {
            return SecretString::default();
        };
        // The client writes two lines of its own.
        let Some((_, question)) = question
            .strip_prefix("action=get\n")
            .and_then(|rest| rest.split_once('\n'))
        else {
            return SecretString::default();
        };
        let of = |kind: &str| question.strip_prefix(kind)?.strip_prefix('\0');
        if let Some(connection) = of(CONNECTION) {
            self.judge(connection).into()
        } else if let Some(clone) = of(CLONE) {
            match self.objects.upgrade() {
                Some(objects) => objects.answer(clone).await.into(),
                None => SecretString::default(),
            }
        } else {
            self.credential(question).await.unwrap_or_default()
        }
    }

    /// Whether git may connect, else why not.
    fn judge(&self, connection: &str) -> String {
        let Some(allowed) = &self.allowed else {
            return PERMITTED.to_owned();
        };
        let Some((kind, rest)) = connection.split_once('\0') else {
            return "the question is not complete".to_owned();
        };
        let judged = match kind {
            "http" => {
                let (address, settings) = rest.split_once('\0').unwrap_or((rest, ""));
                if follows_redirects(settings) {
                    return "a setting of git follows redirects, which could lead to addresses that are not allowed: remove \
                            `http.followRedirects`"
                        .to_owned();
                }
                allowed.judge(address)
            }
            "ssh" => match ssh_call::address(rest) {
                Ok(address) => allowed.judge(&address),
                Err(problem) => return problem.to_owned(),
            },
            _ => return "the question has an unknown kind".to_owned(),
        };
        match judged {
            Ok(_) => PERMITTED.to_owned(),
            Err(refusal) => refusal.to_string(),
        }
    }

    /// The credential of a server, in git's form.
    async fn credential(&self, question: &str) -> Option<SecretString> {
        let value = |name: &str| {
            question.lines().find_map(|line| {
                let (key, value) = line.split_once('=')?;
                (key == name).then_some(value)
            })
        };
        let (protocol, host) = (value("protocol")?, value("host")?);
        let path = value("path").unwrap_or_default();
        let address = Address::parse(&format!("{protocol}://{host}/{path}")).ok()?;
        let own = self
            .login
            .as_ref()
            .filter(|login| login.base.contains(&address));
        let (username, password) = if let Some(login) = own {
            (login.username.clone(), login.password.clone())
        } else {
            let operators = self.operators.as_ref()?;
            let found = operators.credential(&address, self.allowed.as_deref());
            let found = found.await?;
            (found.username, found.password)
        };
        let (username, password) = (username.expose_secret(), password.expose_secret());
        Some(format!("username={username}\npassword={password}\n").into())
    }
}

/// Whether redirects are in force for the address, by what `git config --null --get-urlmatch http` prints. git follows the
/// first one of an address unless it is told otherwise.
fn follows_redirects(settings: &str) -> bool {
    const NO: [&str; 4] = ["false", "no", "off", "0"];
    let value = settings.split('\0').find_map(|setting| {
        let (name, value) = setting.split_once('\n')?;
        (name == "http.followredirects").then_some(value)
    });
    value.is_none_or(|value| !NO.contains(&value.to_ascii_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use git_address::Match;
    use rstest::rstest;

    use super::*;

    fn answers() -> Answers {
        Answers {
            allowed: Some(Arc::new(
                AllowList::new("(https|ssh)://(git@)?good.com/.*", Match::Full).unwrap(),
            )),
            login: Some(Login {
                base: Address::parse("https://good.com/prod").unwrap(),
                username: "oauth2".into(),
                password: "hunter2".into(),
            }),
            operators: None,
            objects: Weak::new(),
        }
    }

    async fn ask(question: &str) -> String {
        let question = format!("action=get\ntimeout=900\n{question}");
        let answer = answers().of(question.as_bytes()).await;
        answer.expose_secret().to_owned()
    }

    #[rstest]
    #[case("protocol=https\nhost=good.com\npath=prod/a.git\n", true)]
    #[case(
        "protocol=https\nhost=GOOD.com:443\npath=prod/a.git\nwwwauth[]=Basic\n",
        true
    )]
    #[case("protocol=https\nhost=good.com\npath=production/a.git\n", false)]
    #[case("protocol=https\nhost=good.com\n", false)]
    #[case("protocol=http\nhost=good.com\npath=prod/a.git\n", false)]
    #[case("protocol=https\nhost=good.com:8443\npath=prod/a.git\n", false)]
    #[case("protocol=https\nhost=\npath=prod/a.git\n", false)]
    #[case("protocol=https\nhost=evil.com@good.com\npath=prod/../x\n", false)]
    #[case("protocol=https\nhost=evil.com\rgood.com\npath=prod/x\n", false)]
    #[case("host=good.com\npath=prod/x\n", false)]
    #[tokio::test]
    async fn a_login_is_for_its_own_server(#[case] question: &str, #[case] answered: bool) {
        let expected = if answered {
            "username=oauth2\npassword=hunter2\n"
        } else {
            ""
        };
        assert_eq!(ask(question).await, expected);
    }

    #[tokio::test]
    async fn only_the_question_for_a_credential_is_answered() {
        let store = b"action=store\ntimeout=900\nprotocol=https\nhost=good.com\npath=prod/a\n";
        assert!(answers().of(store).await.expose_secret().is_empty());
        assert!(answers().of(b"\xff").await.expose_secret().is_empty());
    }

    const NO_REDIRECTS: &str = "http.followredirects\nfalse\0";

    #[rstest]
    #[case("http\0https://good.com/a\0http.followredirects\nfalse\0", PERMITTED)]
    #[case(
        "http\0https://good.com/a\0http.proxy\nx\0http.followredirects\nFALSE\0",
        PERMITTED
    )]
    #[case(
        "http\0https://good.com/a\0http.followredirects\ntrue\0",
        "follows redirects"
    )]
    #[case("http\0https://good.com/a\0", "follows redirects")]
    #[case(
        "http\0https://evil.com/a\0http.followredirects\nfalse\0",
        "`https://evil.com/a` is not allowed by"
    )]
    #[case(
        "http\0https://good.com/a\nb\0http.followredirects\nfalse\0",
        "is not allowed by"
    )]
    #[case("ssh\0git@good.com\0git-upload-pack '/a'\0", PERMITTED)]
    #[case("ssh\0git@evil.com\0git-upload-pack '/a'\0", "is not allowed by")]
    #[case("ssh\0git@good.com\0rm '/a'\0", "only")]
    #[case("ftp\0x\0", "unknown kind")]
    #[case("http", "not complete")]
    #[tokio::test]
    async fn each_connection_is_judged(#[case] connection: &str, #[case] expected: &str) {
        let answer = ask(&format!("{CONNECTION}\0{connection}")).await;
        assert!(answer.contains(expected), "{answer}");
        assert_eq!(answer == PERMITTED, expected == PERMITTED);
    }

    #[tokio::test]
    async fn without_a_rule_every_connection_is_permitted() {
        let answers = Answers::default();
        let question =
            format!("action=get\nx\n{CONNECTION}\0http\0https://any.com\0{NO_REDIRECTS}");
        let answer = answers.of(question.as_bytes()).await;
        assert_eq!(answer.expose_secret(), PERMITTED);
    }
}
