//! Roles on AWS that workspaces name for their deployment: sessions of AWS's own interface (moto), for scripts with the real boto3 and
//! for the real tools.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime};

use integration_tests::machine::ExecutorRun;
use integration_tests::{Machine, Outcome, Repository, job};
use job_contract::{JobData, Tool, env};
use serde_json::json;
use test_peers::clouds::Clouds;
use test_peers::http::{Request, Response, Server, pass_on};
use test_peers::installed;
use test_peers::s3::{self, S3};

use crate::machine;

/// Asks the endpoint of the session, and prints the status.
const ASK: &str = "curl --silent --noproxy '*' --output /dev/null --write-out '%{http_code}' \
                   -H \"Authorization: $AWS_CONTAINER_AUTHORIZATION_TOKEN\" $AWS_CONTAINER_CREDENTIALS_FULL_URI";
const ROLE: &str = "arn:aws:iam::123456789012:role/deploy";
const WHO: &str = "$PYTHON -c \"import boto3; print('i-am=' + boto3.client('sts').get_caller_identity()['Arn'])\"";

with_both_tools!(the_tool_has_the_role_in_plan_and_apply);

/// The services of AWS, with what was asked.
struct Aws {
    server: Arc<S3>,
    tokens: Server,
    objects: Server,
    clouds: Clouds,
}

impl Aws {
    fn start() -> Self {
        Self::with(|_, response| response)
    }

    /// `change` changes what the token service answers.
    fn with(change: impl Fn(&Request, Response) -> Response + Send + Sync + 'static) -> Self {
        Self::of(shared_server(), change)
    }

    fn of(
        server: Arc<S3>,
        change: impl Fn(&Request, Response) -> Response + Send + Sync + 'static,
    ) -> Self {
        let hosts = [
            format!("sts.{}.amazonaws.com", s3::REGION),
            format!("{}.s3.{}.amazonaws.com", s3::BUCKET, s3::REGION),
        ];
        let pass = |server: SocketAddr, host: String| {
            move |request: &Request| {
                let passed = pass_on(request, server, &host);
                passed.unwrap_or_else(|error| Response::new(502, error.to_string()))
            }
        };
        let to_tokens = pass(server.security_tokens(), hosts[0].clone());
        let tokens = Server::start(move |request| change(request, to_tokens(request))).unwrap();
        let objects = Server::start(pass(server.address(), hosts[1].clone())).unwrap();
        let routes = [
            (&*hosts[0], tokens.address()),
            (&*hosts[1], objects.address()),
        ];
        Self {
            clouds: Clouds::start(&routes).unwrap(),
            server,
            tokens,
            objects,
        }
    }

    /// An executor of an operator who allows roles, and has no credentials.
    fn executor_alone<'m>(&self, machine: &'m Machine, job: &JobData) -> ExecutorRun<'m> {
        let [proxy, authorities] = self.clouds.environment();
        machine
            .executor(job)
            .env(proxy.0, proxy.1)
            .env(authorities.0, &authorities.1)
            .env("REQUESTS_CA_BUNDLE", authorities.1)
            .env("AWS_REGION", s3::REGION)
            .env("AWS_DEFAULT_REGION", s3::REGION)
            .env(
                env::ASSUMER_ALLOWED_ROLES,
                "arn:aws:iam::123456789012:role/*",
            )
            .env(env::ASSUMER_REGION, s3::REGION)
    }

    /// The same with keys.
    fn executor<'m>(&self, machine: &'m Machine, job: &JobData) -> ExecutorRun<'m> {
        self.executor_alone(machine, job)
            .env(env::ASSUMER_ACCESS_KEY_ID, self.server.access_key())
            .env(env::ASSUMER_SECRET_ACCESS_KEY, self.server.secret_key())
            .env(env::ASSUMER_EXTERNAL_ID, "{organizationId}")
    }

    /// The parameters of each call of an action.
    fn calls(&self, action: &str) -> Vec<String> {
        let requests = self.tokens.requests();
        let bodies = requests.iter().map(|request| text(&request.body));
        bodies
            .filter(|body| body.contains(&format!("Action={action}&")))
            .collect()
    }
}

/// The service of all tests that run at a time.
fn shared_server() -> Arc<S3> {
    static SHARED: Mutex<Weak<S3>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap();
    if let Some(server) = shared.upgrade() {
        return server;
    }
    let server = Arc::new(S3::start_open().unwrap());
    *shared = Arc::downgrade(&server);
    server
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The same session with another end.
fn ending(response: Response, end: SystemTime) -> Response {
    let body = text(&response.body);
    let Some((front, rest)) = body.split_once("<Expiration>") else {
        return response;
    };
    let (_, rest) = rest.split_once('<').unwrap();
    let end = humantime::format_rfc3339_seconds(end);
    Response {
        body: format!("{front}<Expiration>{end}<{rest}").into_bytes(),
        ..response
    }
}

/// The same session with only these seconds left.
fn shortened(response: Response, seconds: u64) -> Response {
    ending(response, SystemTime::now() + Duration::from_secs(seconds))
}

/// How the token service refuses something.
fn refusal(status: u16, code: &str) -> Response {
    let body = format!(
        "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>canary</Message></Error></ErrorResponse>"
    );
    Response::new(status, body)
        .with_header("Content-Type", "text/xml")
        .with_header("Retry-After", "0")
}

/// A step of one script, in a workspace with these variables beside the role.
fn scripts(repository: &Repository, script: &str, variables: &[(&str, &str)]) -> JobData {
    let mut job = job::scripts(repository, vec![job::bash(1, script)]);
    let python = installed("python/bin/python3");
    let own = [
        (env::DEPLOY_ROLE, ROLE),
        ("PYTHON", python.to_str().unwrap()),
    ];
    for (name, value) in own.iter().chain(variables) {
        let all = &mut job.environment_variables;
        all.insert((*name).to_owned(), (*value).to_owned());
    }
    job
}

/// What the script has printed as `name=`.
#[track_caller]
fn line<'l>(outcome: &'l Outcome, name: &str) -> &'l str {
    let prefix = format!("{name}=");
    let mut lines = outcome.log().lines();
    lines
        .find_map(|line| line.trim().strip_prefix(&prefix))
        .unwrap_or_else(|| panic!("no line {name}\n{outcome}"))
}

#[test]
fn keys_of_the_operator_give_scripts_a_session_in_variables() {
    let (machine, repository, aws) = (machine(), Repository::fixture(), Aws::start());
    let look = format!(
        "{WHO}; echo id=$AWS_ACCESS_KEY_ID; echo secret=$AWS_SECRET_ACCESS_KEY; echo token=$AWS_SESSION_TOKEN; \
         echo pod=$AWS_PROFILE.$AWS_CONTAINER_CREDENTIALS_FULL_URI.; env | grep ^ASSUMER_ || true"
    );
    let variables = [
        (env::DEPLOY_ROLE_SECONDS, "7200"),
        // No workspace may choose it.
        ("EPHEMERAL_AWS_ASSUME_ROLE_EXTERNAL_ID", "of-the-run"),
        (env::ASSUMER_EXTERNAL_ID, "of-the-run"),
    ];
    let job = scripts(&repository, &look, &variables);
    machine.queue(&[&job]);
    let outcome = aws
        .executor(&machine, &job)
        // Libraries would use these first.
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/")
        .env("AWS_PROFILE", "of-the-operator")
        .env(env::ENV_FORWARD, "AWS_PROFILE")
        .env(env::DEADLINE_SECONDS, "600")
        .run()
        .expect_code(0);
    let who = line(&outcome, "i-am");
    assert!(who.contains("assumed-role/deploy/mayfly-"), "{who}");
    assert!(line(&outcome, "id").starts_with("ASIA"), "{outcome}");
    assert_eq!(line(&outcome, "secret"), "***", "{outcome}");
    assert_eq!(line(&outcome, "token"), "***", "{outcome}");
    assert_eq!(line(&outcome, "pod"), "..", "{outcome}");
    let said = format!("the run has the role `{ROLE}`, by sessions of 7200 s, in variables");
    assert!(outcome.log().contains(&said), "{outcome}");
    let calls = aws.calls("AssumeRole");
    assert_eq!(calls.len(), 1, "{calls:?}");
    let external = format!("ExternalId={}", job.organization_id);
    let session = format!("RoleSessionName=mayfly-{}-", job.job_id);
    for part in ["DurationSeconds=7200", &external, &session] {
        assert!(calls[0].contains(part), "{part} in {calls:?}");
    }
    for secret in [aws.server.secret_key(), aws.server.access_key()] {
        assert!(!outcome.to_string().contains(secret), "{outcome}");
    }
}

/// The tool reads a state of others, once at plan and once at apply, with the credentials that it finds. Its own state is in the same
/// bucket, which the operator's keys open.
fn the_tool_has_the_role_in_plan_and_apply(tool: Tool) {
    let (machine, aws) = (
        machine(),
        Aws::of(S3::start_open().unwrap().into(), |_, response| response),
    );
    let others = json!({
        "version": 4, "terraform_version": "1.6.0", "serial": 1, "lineage": "l", "resources": [],
        "outputs": { "name": { "value": "name-of-others", "type": "string" } },
    });
    let others = others.to_string();
    aws.server.put("others", others.as_bytes()).unwrap();
    let read = |name: &str, more: &str| {
        format!(
            "data \"terraform_remote_state\" \"{name}\" {{\n  backend = \"s3\"\n  config = {{\n    bucket = \"{}\"\n    \
             key = \"others\"\n    region = \"{}\"\n    skip_credentials_validation = true\n    \
             skip_metadata_api_check = true\n    skip_requesting_account_id = true\n  }}\n{more}}}\n",
            s3::BUCKET,
            s3::REGION
        )
    };
    let module = read("at_plan", "")
        + &read("at_apply", "  depends_on = [terraform_data.first]\n")
        + "resource \"terraform_data\" \"first\" {}\n\
           output \"name\" {\n  value = data.terraform_remote_state.at_apply.outputs.name\n}\n";
    let repository = Repository::module(&module);
    let mut plan = job::plan_by(tool, &repository);
    let role = (env::DEPLOY_ROLE.to_owned(), ROLE.to_owned());
    plan.environment_variables.extend([role]);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let mut seen = 0;
    // The session lives longer than the plan step, and ends before the apply step must have ended.
    for (step, deadline) in [(&plan, "600"), (&apply, "36000")] {
        let outcome = aws
            .executor(&machine, step)
            .env(env::STATE_TYPE, "AwsTerraformStateImpl")
            .env(env::AWS_BUCKET, s3::BUCKET)
            .env(env::AWS_REGION, s3::REGION)
            .env(env::AWS_ACCESS_KEY, aws.server.access_key())
            .env(env::AWS_SECRET_KEY, aws.server.secret_key())
            .env(env::DEADLINE_SECONDS, deadline)
            .run()
            .expect_code(0);
        let requests = aws.objects.requests();
        // Both list the bucket too.
        let (of_others, of_store): (Vec<_>, Vec<_>) = requests[seen..]
            .iter()
            .filter(|request| request.path != "/")
            .partition(|request| request.path.ends_with("/others"));
        assert!(!of_others.is_empty() && !of_store.is_empty(), "{outcome}");
        let signed_by = |request: &Request, key: &str| {
            let signature = request.header("authorization").unwrap_or_default();
            signature.contains(&format!("Credential={key}"))
        };
        for request in of_others {
            let has_token = request.header("x-amz-security-token").is_some();
            assert!(has_token && signed_by(request, "ASIA"), "{request:?}");
        }
        for request in of_store {
            assert!(signed_by(request, aws.server.access_key()), "{request:?}");
        }
        seen = requests.len();
    }
    let mut written = aws.objects.requests().into_iter();
    assert!(written.any(|request| request.method == "PUT"
        && request.path.ends_with("terraform.tfstate")
        && text(&request.body).contains("name-of-others")));
}

/// What hands a session of the pod out, as EKS Pod Identity does.
pub(crate) fn agent() -> (Server, tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "token-of-the-pod").unwrap();
    let server = Server::start(|request| {
        match request.header("authorization") {
        Some("token-of-the-pod") => Response::new(
            200,
            json!({
                "AccessKeyId": "ASIAOFTHEPOD00000000", "SecretAccessKey": "secret-of-the-pod", "Token": "t",
                "Expiration": "2099-01-01T00:00:00Z",
            })
            .to_string(),
        ),
        _ => Response::new(403, ""),
    }
    });
    (server.unwrap(), folder, token)
}

#[test]
fn a_store_that_the_agent_of_the_pod_opens_is_never_opened_by_the_role() {
    const STORE_ROLE: &str = "arn:aws:iam::123456789012:role/store";
    let (machine, aws) = (machine(), Aws::start());
    let repository = Repository::fixture();
    let (agent, _folder, token) = agent();
    for (job, store_role, deadline, code) in [
        // The tool finds credentials itself, and would find those of the role.
        ("51", "", "600", 64),
        // The endpoint of the role is in the place of the agent.
        ("52", STORE_ROLE, "36000", 64),
        ("53", STORE_ROLE, "600", 0),
    ] {
        let mut plan = job::in_job(&job::plan(&repository), job);
        let role = (env::DEPLOY_ROLE.to_owned(), ROLE.to_owned());
        plan.environment_variables.extend([role]);
        machine.queue(&[&plan]);
        let outcome = aws
            .executor(&machine, &plan)
            .env(env::STATE_TYPE, "AwsTerraformStateImpl")
            .env(env::AWS_BUCKET, s3::BUCKET)
            .env(env::AWS_REGION, s3::REGION)
            .env(env::AWS_ENABLE_ROLE_AUTH, "true")
            .env(env::STORE_AWS_ROLE, store_role)
            .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent.url())
            .env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &token)
            .env(env::DEADLINE_SECONDS, deadline)
            .run()
            .expect_code(code);
        if code != 0 {
            let text = "the tool would open the store of its state as the role";
            assert!(outcome.error().contains(text), "{outcome}");
        }
    }
    let requests = aws.tokens.requests();
    let by_tool = requests.iter().filter(|request| {
        let agent = request.header("user-agent").unwrap_or_default();
        agent.contains("Terraform") && text(&request.body).contains("Action=AssumeRole&")
    });
    let by_tool: Vec<_> = by_tool.collect();
    assert!(!by_tool.is_empty(), "{requests:?}");
    for request in by_tool {
        let signature = request.header("authorization").unwrap_or_default();
        assert!(signature.contains("Credential=ASIAOFTHEPOD"), "{request:?}");
        assert!(text(&request.body).contains("role%2Fstore"), "{request:?}");
    }
}

#[test]
fn an_endpoint_renews_the_session_of_a_role_that_is_chained() {
    let count = AtomicUsize::new(0);
    let aws = Aws::with(
        move |_, response| match count.fetch_add(1, Ordering::SeqCst) {
            0 => shortened(response, 5),
            _ => response,
        },
    );
    let (machine, repository) = (machine(), Repository::fixture());
    let (agent, _folder, token) = agent();
    // The first session ends in seconds, the next one in an hour.
    let renewed = "$PYTHON -c \"import boto3, time; c = boto3.Session().get_credentials(); end = time.time() + 80\n\
                   while c.get_frozen_credentials() and c._seconds_remaining() < 60 and time.time() < end: time.sleep(0.1)\n\
                   print('renewed=' + str(c._seconds_remaining() >= 60))\"";
    let ask = "curl --silent --noproxy '*' --output /dev/null --write-out '%{http_code}'";
    let look = format!(
        "{renewed}\n{WHO}\necho url=$AWS_CONTAINER_CREDENTIALS_FULL_URI\necho key=$AWS_ACCESS_KEY_ID.\n\
         echo none=$({ask} $AWS_CONTAINER_CREDENTIALS_FULL_URI)\n\
         echo wrong=$({ask} -H 'Authorization: wrong' $AWS_CONTAINER_CREDENTIALS_FULL_URI)\n\
         echo right=$({ask} -H \"Authorization: $AWS_CONTAINER_AUTHORIZATION_TOKEN\" $AWS_CONTAINER_CREDENTIALS_FULL_URI)\n\
         echo password=$AWS_CONTAINER_AUTHORIZATION_TOKEN"
    );
    let job = scripts(&repository, &look, &[]);
    machine.queue(&[&job]);
    let outcome = aws
        .executor_alone(&machine, &job)
        .env(env::ASSUMER_POD_IDENTITY, "true")
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent.url())
        .env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token)
        .env(env::DEADLINE_SECONDS, "10800")
        .run()
        .expect_code(0);
    let who = line(&outcome, "i-am");
    assert!(who.contains("assumed-role/deploy/mayfly-"), "{who}");
    for (name, expected) in [
        ("renewed", "True"),
        ("key", "."),
        ("none", "401"),
        ("wrong", "401"),
        ("right", "200"),
        ("password", "***"),
    ] {
        assert_eq!(line(&outcome, name), expected, "{name}: {outcome}");
    }
    let calls = aws.calls("AssumeRole");
    assert!(calls.len() >= 2, "{calls:?}");
    assert!(
        calls
            .iter()
            .all(|call| call.contains("DurationSeconds=3600")),
        "{calls:?}"
    );
    let address = line(&outcome, "url").strip_prefix("http://").unwrap();
    let address: SocketAddr = address.split('/').next().unwrap().parse().unwrap();
    assert!(address.ip().is_loopback());
    TcpStream::connect(address).unwrap_err();
}

#[test]
fn a_clock_that_is_ahead_leads_to_no_flood_of_requests() {
    let hour = Duration::from_hours(1);
    let aws = Aws::with(move |_, response| ending(response, SystemTime::now() - hour));
    let (machine, repository) = (machine(), Repository::fixture());
    let job = scripts(&repository, &format!("sleep 1; echo over=$({ASK})"), &[]);
    machine.queue(&[&job]);
    let outcome = aws
        .executor(&machine, &job)
        .env(env::ASSUMER_DELIVERY, "endpoint")
        .run()
        .expect_code(0);
    assert_eq!(line(&outcome, "over"), "503", "{outcome}");
    // Two at once, and then one in each pause.
    let pauses = outcome.finished.elapsed.as_secs() / 30;
    let calls = aws.calls("AssumeRole").len() as u64;
    assert!((2..=2 + pauses).contains(&calls), "{calls}: {outcome}");
}

/// The renewal fails after half of the time. How long the run takes to come to its script is the machine's affair.
#[test]
fn a_session_that_cannot_be_renewed_is_used_until_its_end() {
    let in_time = [5, 10, 20, 40, 80].into_iter().any(|seconds| {
        let count = AtomicUsize::new(0);
        let aws = Aws::with(
            move |_, response| match count.fetch_add(1, Ordering::SeqCst) {
                0 => shortened(response, seconds),
                _ => refusal(403, "AccessDenied"),
            },
        );
        let (machine, repository) = (machine(), Repository::fixture());
        let look = format!(
            "while code=$({ASK}); echo at=$code; [ $code = 200 ]; do sleep 0.1; done; echo last=$code"
        );
        let job = scripts(&repository, &look, &[]);
        machine.queue(&[&job]);
        let outcome = aws
            .executor(&machine, &job)
            .env(env::ASSUMER_DELIVERY, "endpoint")
            .run()
            .expect_code(0);
        assert_eq!(line(&outcome, "last"), "503", "{outcome}");
        let mut parts = outcome.log().split("WARNING: AWS gives no session");
        let (_, after) = (parts.next(), parts.next());
        assert!(after.is_some() && parts.next().is_none(), "{outcome}");
        after.is_some_and(|after| after.contains("at=200\n"))
    });
    assert!(in_time, "no session was used after a renewal that failed");
}

/// Runs a script with these variables, which must not start. Returns the error.
fn expect_refusal(
    aws: &Aws,
    code: i32,
    variables: &[(&str, &str)],
    settings: &[(&str, &str)],
) -> String {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = scripts(&repository, "echo it-ran", variables);
    machine.queue(&[&job]);
    let run = aws.executor(&machine, &job);
    let run = settings
        .iter()
        .fold(run, |run, (name, value)| run.env(name, value));
    let outcome = run.run().expect_code(code);
    assert!(!outcome.log().contains("it-ran"), "{outcome}");
    assert!(!outcome.to_string().contains("canary"), "{outcome}");
    outcome.to_string()
}

#[test]
fn roles_that_the_operator_does_not_allow_are_not_asked_for() {
    let aws = Aws::start();
    let other = "arn:aws:iam::999999999999:role/admin";
    for (code, variables, allowed, named) in [
        (1, vec![(env::DEPLOY_ROLE, other)], "**:role/deploy", other),
        (1, vec![], "", env::ASSUMER_ALLOWED_ROLES),
        (1, vec![], "arn:aws:iam::*:role/{workspaceId}", ROLE),
        (
            64,
            vec![],
            "arn:aws:iam::*:role/{workspaceName}",
            "braces hold",
        ),
        (
            1,
            vec![(env::DEPLOY_ROLE, "arn:aws:iam::123456789012:role/x\ny")],
            "**",
            env::DEPLOY_ROLE,
        ),
    ] {
        let settings = [(env::ASSUMER_ALLOWED_ROLES, allowed)];
        let error = expect_refusal(&aws, code, &variables, &settings);
        assert!(error.contains(named), "{named}: {error}");
    }
    assert_eq!(aws.tokens.requests().len(), 0);
}

#[test]
fn other_credentials_and_wrong_durations_are_refused_before_anything_starts() {
    let aws = Aws::start();
    let keys = [("AWS_ACCESS_KEY_ID", "AKIAOFTHERUN")];
    let dynamic = [("TERRAKUBE_AWS_CREDENTIALS_FILE", "token-of-the-platform")];
    let (long, short) = (
        [(env::DEPLOY_ROLE_SECONDS, "50000")],
        [(env::DEPLOY_ROLE_SECONDS, "900")],
    );
    let no_keys = [
        (env::ASSUMER_ACCESS_KEY_ID, ""),
        (env::ASSUMER_SECRET_ACCESS_KEY, ""),
    ];
    // What the pod has is used only if the operator says so.
    let agent = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/")];
    let no_assumer = [&no_keys[..], &agent].concat();
    let pod = [&no_keys[..], &[(env::ASSUMER_POD_IDENTITY, "true")]].concat();
    let chained = [&pod[..], &agent].concat();
    let token = [&pod[..], &[("AWS_WEB_IDENTITY_TOKEN_FILE", "/absent")]].concat();
    for (code, variables, settings, named) in [
        (1, &keys[..], &[][..], "(`AWS_ACCESS_KEY_ID`)"),
        (1, &dynamic, &[], "(`AWS_WEB_IDENTITY_TOKEN_FILE`)"),
        (1, &long, &[], env::DEPLOY_ROLE_SECONDS),
        (
            1,
            &short,
            &[(env::ASSUMER_DELIVERY, "env")],
            "ends before the run must have ended",
        ),
        (
            1,
            &[(env::DEPLOY_ROLE_SECONDS, "7200")],
            &chained,
            "from another session to 3600 s",
        ),
        (
            64,
            &[],
            &[(env::ASSUMER_ACCESS_KEY_ID, "")],
            "are required together",
        ),
        (64, &[], &no_assumer, env::ASSUMER_POD_IDENTITY),
        (64, &[], &token, "needs a role of the pod"),
        (
            64,
            &[],
            &[(env::ASSUMER_DELIVERY, "file")],
            env::ASSUMER_DELIVERY,
        ),
    ] {
        let error = expect_refusal(&aws, code, variables, settings);
        assert!(error.contains(named), "{named}: {error}");
    }
    assert_eq!(aws.tokens.requests().len(), 0);
}

#[test]
fn what_aws_refuses_is_said_and_what_to_do() {
    for (code, status, refused, hint) in [
        (1, 403, "AccessDenied", "trust policy"),
        (1, 400, "ValidationError", "maximum session duration"),
        (75, 503, "ServiceUnavailable", "start the run again"),
    ] {
        let aws = Aws::with(move |_, _| refusal(status, refused));
        let error = expect_refusal(&aws, code, &[], &[]);
        for part in [ROLE, refused, hint] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

#[test]
fn a_token_of_the_pod_is_exchanged_for_the_role_itself() {
    let (machine, repository, aws) = (machine(), Repository::fixture(), Aws::start());
    let token = machine.scratch("aws-token");
    fs::write(&token, "token-of-the-pod").unwrap();
    let (token, folder) = (token.display().to_string(), machine.scratch(""));
    let folder = folder.display().to_string();
    let pod_role = "arn:aws:iam::123456789012:role/pod";
    let look = format!("{WHO}; echo file=$AWS_WEB_IDENTITY_TOKEN_FILE.");
    // What a webhook of the cloud injects, and what a launcher sets.
    for (job, settings) in [
        (
            "51",
            [
                ("AWS_WEB_IDENTITY_TOKEN_FILE", &*token),
                ("AWS_ROLE_ARN", pod_role),
            ],
        ),
        (
            "52",
            [
                (env::IDENTITY_DIR, &*folder),
                (env::IDENTITY_AWS_ROLE, pod_role),
            ],
        ),
    ] {
        let job = job::in_job(&scripts(&repository, &look, &[]), job);
        machine.queue(&[&job]);
        let run = aws
            .executor_alone(&machine, &job)
            .env(env::ASSUMER_POD_IDENTITY, "true");
        let run = settings
            .iter()
            .fold(run, |run, (name, value)| run.env(name, value));
        let outcome = run.env(env::DEADLINE_SECONDS, "600").run().expect_code(0);
        let who = line(&outcome, "i-am");
        assert!(who.contains("assumed-role/deploy/mayfly-"), "{who}");
        assert_eq!(line(&outcome, "file"), ".", "{outcome}");
    }
    let calls = aws.calls("AssumeRoleWithWebIdentity");
    assert_eq!(calls.len(), 2, "{calls:?}");
    let role = "RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Fdeploy";
    for call in calls {
        assert!(
            call.contains(role) && call.contains("DurationSeconds=18000"),
            "{call}"
        );
    }
    assert_eq!(aws.calls("AssumeRole"), Vec::<String>::new());
}
