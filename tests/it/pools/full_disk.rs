//! A hub whose disk is full accepts nothing, and keeps what it has accepted.

use std::fs;
use std::process::Command;

use job_contract::env;
use reqwest::StatusCode;
use serde_json::json;
use test_peers::skips::needed;

use super::fixture::{Fixture, Hub};
use crate::in_cluster::Launcher;

/// Bytes of the disk.
const DISK: usize = 1 << 20;
/// Characters in a variable of each run.
const LARGE: usize = 100_000;

impl Fixture {
    /// Starts a hub whose store is on a small disk of its own. Only root can make one.
    fn serve_on_a_small_disk(&self) -> Hub {
        let command = self.command();
        fs::create_dir_all(self.path("store")).unwrap();
        let script = format!("mount -t tmpfs -o size={DISK} tmpfs \"$0\" && exec \"$@\"");
        let mut on_a_disk = Command::new("unshare");
        on_a_disk
            .args(["--mount", "sh", "-c", &script])
            .arg(self.path("store"))
            .arg(command.get_program())
            .args(command.get_args())
            .env_clear()
            .envs(
                command
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            );
        Hub(Launcher::start(&mut on_a_disk))
    }
}

fn may_mount() -> Result<(), String> {
    let output = Command::new("unshare")
        .args(["--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_answers_503_and_what_was_accepted_is_there() {
    let Some(()) = needed(may_mount()) else {
        return;
    };
    // Without an answer of the platform, runs wait for their confirmation.
    let fixture = Fixture::new()
        .await
        .with(env::API_URL, "http://127.0.0.1:1");
    let hub = fixture.serve_on_a_small_disk();
    let token = fixture.platform.dispatch_token();
    let http = reqwest::Client::new();
    let dispatch = async |job: usize| {
        let document = json!({
            "type": "terraformPlan",
            "organizationId": fixture.platform.organization(),
            "workspaceId": "w",
            "jobId": job.to_string(),
            "stepId": "s",
            "variables": {"large": "x".repeat(LARGE)},
        });
        let url = format!("{}/pools/eu/api/v1/terraform-rs", hub.url());
        let request = http
            .post(url)
            .bearer_auth(&token)
            .body(document.to_string());
        request.send().await.unwrap().status()
    };
    let mut accepted = 0;
    let refused = loop {
        match dispatch(accepted).await {
            StatusCode::ACCEPTED => accepted += 1,
            other => break other,
        }
        assert!(accepted * LARGE < DISK, "the disk is never full");
    };
    assert_eq!(refused, StatusCode::SERVICE_UNAVAILABLE);
    assert_ne!(accepted, 0);
    assert_eq!(dispatch(accepted).await, StatusCode::SERVICE_UNAVAILABLE);
    // A run that is there is a duplicate, and needs no room.
    for job in 0..accepted {
        assert_eq!(dispatch(job).await, StatusCode::ACCEPTED, "job {job}");
    }
}
