//! `terrakube_job ARCHIVE`: a platform with its Redis and an S3 service, for benchmarks. A job waits there for an executor; it plans
//! the content of the archive. Prints the job data and the settings of the executor. When its input ends, it prints what has
//! arrived, and ends.

use std::error::Error;
use std::fs;
use std::io::{self, Read as _, Write as _};

use serde_json::{Value, json};
use test_peers::redis::RedisServer;
use test_peers::s3::{self, S3};
use test_platform::{Flow, NewJob, Platform, Status, Workspace, java};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [archive] = &arguments[..] else {
        return Err("usage: terrakube_job ARCHIVE".into());
    };
    let (redis, store) = (RedisServer::start()?, S3::start()?);
    let platform = Platform::builder().redis(&format!("redis://{}", redis.address()));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let platform = runtime.block_on(platform.start())?;
    let content = platform.upload(fs::read(archive)?);
    let workspace = platform.workspace(Workspace::new("https://git.example.test/none.git"));
    let new = NewJob::new(&workspace, Flow::only("terraformPlan")).from_upload(&content);
    // The scheduler leaves it alone, so its live log stays.
    let job = platform.store_job(new, |job| {
        job.status = Status::Queue;
        job.dispatched = Some(job.steps[0].id.clone());
    });
    let settings = settings(&platform, &redis, &store);
    let known = json!({"job": platform.job_data(job), "settings": settings});
    writeln!(io::stdout(), "{known}")?;

    io::stdin().read_to_end(&mut Vec::new())?;
    let live_lines: u64 = redis::cmd("XLEN")
        .arg(java::encode(&job.to_string()))
        .query(&mut redis.connect()?)?;
    let objects = store.objects()?;
    let outputs = objects.iter().filter(|(key, _)| key.ends_with(".tfoutput"));
    let stored_bytes: usize = outputs.map(|(_, content)| content.len()).sum();
    let arrived = json!({"liveLines": live_lines, "storedBytes": stored_bytes});
    writeln!(io::stdout(), "{arrived}")?;
    Ok(())
}

/// The settings of executors in a stock installation.
fn settings(platform: &Platform, redis: &RedisServer, store: &S3) -> Value {
    json!({
        "AzBuilderApiUrl": platform.url(),
        "TerrakubeApiUrl": platform.url(),
        "InternalSecret": platform.secret(),
        "TerrakubeRedisHostname": "127.0.0.1",
        "TerrakubeRedisPort": redis.port().to_string(),
        "TerraformStateType": "AwsTerraformStateImpl",
        "AwsTerraformStateBucketName": s3::BUCKET,
        "AwsTerraformStateRegion": s3::REGION,
        "AwsEndpoint": store.url(),
        "AwsTerraformStateAccessKey": store.access_key(),
        "AwsTerraformStateSecretKey": store.secret_key(),
    })
}
