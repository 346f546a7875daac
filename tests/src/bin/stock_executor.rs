//! An executor with the manners of the stock one: job data from the environment, parsed strictly, the reports in their
//! order, the output in its home, a heartbeat, and exit code 0 whatever came of it. It runs nothing: a variable
//! `fail` decides how its step ends.

use std::env::VarError;
use std::fs;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

/// The properties it knows; one more, and it idles for ever.
const PROPERTIES: [&str; 23] = [
    "commandList",
    "onFailureList",
    "type",
    "organizationId",
    "workspaceId",
    "jobId",
    "stepId",
    "terraformVersion",
    "source",
    "branch",
    "folder",
    "vcsType",
    "connectionType",
    "refresh",
    "refreshOnly",
    "showHeader",
    "ignoreError",
    "accessToken",
    "moduleSshKey",
    "commitId",
    "tofu",
    "environmentVariables",
    "variables",
];

#[tokio::main]
async fn main() -> ExitCode {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Ok(settings) = Settings::from_env() else {
        // A setting that is missing ends it before it has started.
        return ExitCode::FAILURE;
    };
    match job_data() {
        Ok(data) => {
            // An error is logged at most.
            let _ = settings.run(&data).await;
            ExitCode::SUCCESS
        }
        Err(_) => std::future::pending().await,
    }
}

fn job_data() -> Result<Value> {
    ensure!(std::env::var("EphemeralFlagBatch")? == "true");
    let text = STANDARD.decode(std::env::var("EphemeralJobData")?)?;
    let data: Value = serde_json::from_slice(&text)?;
    for (name, _) in data.as_object().context("an object")? {
        ensure!(
            PROPERTIES.contains(&name.as_str()),
            "unknown property {name}"
        );
    }
    Ok(data)
}

struct Settings {
    api: String,
    public: String,
    secret: Vec<u8>,
    redis: String,
    home: String,
    client: reqwest::Client,
}

impl Settings {
    fn from_env() -> Result<Self> {
        let get = |name: &str| -> Result<String, VarError> { std::env::var(name) };
        for required in [
            "TerraformStateType",
            "TerrakubeEnableSecurity",
            "TerrakubeRegistryDomain",
        ] {
            get(required)?;
        }
        let redis = format!(
            "redis://{}:{}",
            get("TerrakubeRedisHostname")?,
            get("TerrakubeRedisPort")?
        );
        let secret = get("InternalSecret")?;
        Ok(Self {
            api: get("AzBuilderApiUrl")?,
            public: get("TerrakubeApiUrl")?,
            secret: URL_SAFE_NO_PAD.decode(secret.trim_end_matches('='))?,
            redis,
            home: get("USER_HOME")?,
            client: reqwest::Client::builder().no_proxy().build()?,
        })
    }

    async fn run(&self, data: &Value) -> Result<()> {
        let text = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
        let (organization, job, step) = (text("organizationId"), text("jobId"), text("stepId"));
        let path = format!("/api/v1/organization/{organization}/job/{job}");
        let output = format!(
            "{}/tfoutput/v1/organization/{organization}/job/{job}/step/{step}",
            self.public
        );
        let beat = test_platform::java::encode(&format!("executor-job-heartbeat:{job}"));
        let mut redis = redis::Client::open(self.redis.as_str())?
            .get_multiplexed_async_connection()
            .await?;
        let mut set = redis::cmd("SET");
        let value = test_platform::java::encode("1");
        set.arg(&beat).arg(value).arg("EX").arg(45);
        set.exec_async(&mut redis).await?;

        self.until_queued(&path).await?;
        self.patch(
            &path,
            "job",
            &job,
            json!({"status": "running", "commitId": "9f1c"}),
        )
        .await?;
        let step_path = format!("{path}/step/{step}");
        self.patch(
            &step_path,
            "step",
            &step,
            json!({"status": "running", "output": output}),
        )
        .await?;

        let failed = data["variables"].get("fail").is_some();
        let folder = format!(
            "{}/.terraform-spring-boot/local/output/{organization}/{job}",
            self.home
        );
        fs::create_dir_all(&folder)?;
        let log = if failed {
            "it failed\n"
        } else {
            "it is done\n"
        };
        fs::write(format!("{folder}/{step}.tfoutput"), log)?;
        let (step_end, job_end) = if failed {
            ("failed", "failed")
        } else {
            ("completed", "pending")
        };
        self.patch(
            &step_path,
            "step",
            &step,
            json!({"status": step_end, "output": output}),
        )
        .await?;
        let end = json!({"status": job_end, "planChanges": true, "output": ""});
        self.patch(&path, "job", &job, end).await?;
        redis::cmd("DEL").arg(&beat).exec_async(&mut redis).await?;
        Ok(())
    }

    /// The stock one need not wait: its start takes longer than a dispatch.
    async fn until_queued(&self, path: &str) -> Result<()> {
        loop {
            let url = format!("{}{path}?include=step", self.api);
            let answer = self
                .client
                .get(url)
                .bearer_auth(self.token()?)
                .send()
                .await?;
            let document: Value = answer.error_for_status()?.json().await?;
            match document["data"]["attributes"]["status"].as_str() {
                Some("queue" | "running") => return Ok(()),
                Some("pending" | "approved") => {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                other => bail!("the job is {other:?}"),
            }
        }
    }

    async fn patch(&self, path: &str, kind: &str, id: &str, attributes: Value) -> Result<()> {
        let document = json!({"data": {"type": kind, "id": id, "attributes": attributes}});
        let request = self
            .client
            .patch(format!("{}{path}", self.api))
            .bearer_auth(self.token()?)
            .header("content-type", "application/vnd.api+json")
            .body(document.to_string());
        request.send().await?.error_for_status()?;
        Ok(())
    }

    fn token(&self) -> Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let claims = json!({
            "iss": "TerrakubeInternal", "sub": "TerrakubeInternal (TOKEN)", "aud": "TerrakubeInternal",
            "iat": now, "exp": now + 300,
        });
        let key = EncodingKey::from_secret(&self.secret);
        Ok(jsonwebtoken::encode(
            &Header::new(Algorithm::HS256),
            &claims,
            &key,
        )?)
    }
}
