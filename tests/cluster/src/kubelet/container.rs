//! One container of a pod: image, configuration, process, end.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{Client, ResourceExt};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::environment::{expand, resolve};
use super::events::emit_of;
use super::pod::Report;
use super::process::{Process, Start};
use super::volumes::Mounts;
use super::{Image, Runner};
use crate::clock::now;
use crate::front::logs::plain_text;

const RETRY: Duration = Duration::from_millis(100);
/// What a kubelet keeps of a termination message.
const MESSAGE: usize = 4096;

/// Why containers are to end before they do by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// SIGTERM, and SIGKILL after this time.
    Terminate(Duration),
    OomKill,
    /// It was at work when its node went, and is found to be gone.
    Lost,
    /// SIGKILL for all.
    Kill,
}

/// What a container needs to run.
pub(crate) struct Running<'a> {
    pub(crate) client: &'a Client,
    pub(crate) runner: &'a Arc<Runner>,
    pub(crate) pod: &'a Pod,
    pub(crate) container: &'a Container,
    pub(crate) volumes: &'a [(String, PathBuf)],
    pub(crate) report: &'a Report,
    pub(crate) end: watch::Receiver<Option<End>>,
}

impl Running<'_> {
    async fn event(&self, kind: &str, reason: &str, message: &str) {
        let spec = self.pod.spec.as_ref();
        let mut init = spec
            .into_iter()
            .flat_map(|spec| spec.init_containers.iter().flatten());
        let name = &self.container.name;
        let list = if init.any(|init| init.name == *name) {
            "initContainers"
        } else {
            "containers"
        };
        emit_of(
            self.client,
            self.pod,
            Some(&format!("spec.{list}{{{name}}}")),
            (kind, reason, message),
        )
        .await;
    }

    async fn waiting(&self, reason: &str, message: &str) {
        self.report.container(
            &self.container.name,
            json!({"waiting": {"reason": reason, "message": message}}),
        );
        self.report.push().await;
    }

    /// Runs the container, again where the pod says so. Returns the last exit code; nothing when it never started.
    pub(crate) async fn run(mut self) -> Option<i32> {
        let policy = self
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.restart_policy.clone());
        let mut restarts = 0;
        loop {
            let image = self.pull().await?;
            let start = self.configure(&image).await?;
            let code = self.once(&start).await;
            let again = match policy.as_deref() {
                Some("OnFailure") => code != 0,
                Some("Always") => true,
                _ => false,
            };
            let ordered = matches!(*self.end.borrow(), Some(End::Terminate(_) | End::Kill));
            if !again || ordered {
                return Some(code);
            }
            self.report.restarted(&self.container.name);
            restarts += 1;
            self.waiting(
                "CrashLoopBackOff",
                &format!(
                    "back-off restarting failed container={}",
                    self.container.name
                ),
            )
            .await;
            self.pause(RETRY * 2_u32.saturating_pow(restarts.min(5)))
                .await?;
        }
    }

    /// Waits; nothing when the pod is to end meanwhile.
    async fn pause(&mut self, time: Duration) -> Option<()> {
        let over = self
            .end
            .wait_for(|end| matches!(end, Some(End::Terminate(_) | End::Kill)));
        tokio::time::timeout(time, over)
            .await
            .is_err()
            .then_some(())
    }

    async fn pull(&mut self) -> Option<Image> {
        let name = self.container.image.clone().unwrap_or_default();
        let mut tries = 0;
        loop {
            if let Some(image) = self.runner.image(&name) {
                let message = format!("Container image \"{name}\" already present on machine");
                self.event("Normal", "Pulled", &message).await;
                return Some(image);
            }
            let why = format!("failed to pull and unpack image \"{name}\": not found");
            match tries {
                0 => {
                    self.event("Normal", "Pulling", &format!("Pulling image \"{name}\""))
                        .await;
                    self.event(
                        "Warning",
                        "Failed",
                        &format!("Failed to pull image \"{name}\": {why}"),
                    )
                    .await;
                    self.event("Warning", "Failed", "Error: ErrImagePull").await;
                    self.waiting("ErrImagePull", &why).await;
                }
                1 => {
                    let back_off = format!("Back-off pulling image \"{name}\"");
                    self.event("Normal", "BackOff", &back_off).await;
                    self.event("Warning", "Failed", "Error: ImagePullBackOff")
                        .await;
                    self.waiting(
                        "ImagePullBackOff",
                        &format!("{back_off}: ErrImagePull: {why}"),
                    )
                    .await;
                }
                _ => {}
            }
            tries += 1;
            self.pause(RETRY).await?;
        }
    }

    fn termination_file(&self) -> PathBuf {
        let dir = self.runner.pod_dir(&self.pod.uid().unwrap_or_default());
        dir.join(format!("{}.termination", self.container.name))
    }

    /// What to start, once everything it names is there.
    async fn configure(&mut self, image: &Image) -> Option<Start> {
        let mut told = String::new();
        loop {
            match resolve(self.client, self.pod, self.container, image.env.clone()).await {
                Ok(env) => return Some(self.start(image, env)),
                Err(why) if why != told => {
                    self.event("Warning", "Failed", &format!("Error: {why}"))
                        .await;
                    self.waiting("CreateContainerConfigError", &why).await;
                    told = why;
                }
                Err(_) => {}
            }
            self.pause(RETRY).await?;
        }
    }

    fn start(&self, image: &Image, mut env: Vec<(String, String)>) -> Start {
        let mounts = Mounts::of(self.container, self.volumes, &self.termination_file());
        let given = |list: &Option<Vec<String>>| -> Vec<String> {
            list.iter()
                .flatten()
                .map(|text| mounts.real_in(&expand(text, &env)))
                .collect()
        };
        let mut command = given(&self.container.command);
        let args = given(&self.container.args);
        let (program, args) = if command.is_empty() {
            (image.program.clone(), args)
        } else {
            let program = PathBuf::from(command.remove(0));
            command.extend(args);
            (program, command)
        };
        for (_, value) in &mut env {
            *value = mounts.real(value);
        }
        if !env.iter().any(|(name, _)| name == "MAYFLY_TERMINATION_LOG") {
            let file = self.termination_file().display().to_string();
            env.push(("MAYFLY_TERMINATION_LOG".to_owned(), file));
        }
        let pod_dir = self.runner.pod_dir(&self.pod.uid().unwrap_or_default());
        let dir = self
            .container
            .working_dir
            .as_deref()
            .map(|dir| PathBuf::from(mounts.real(dir)));
        let dir = dir
            .filter(|dir| dir.is_dir())
            .unwrap_or_else(|| pod_dir.clone());
        Start {
            program,
            args,
            env,
            dir,
            log: pod_dir.join(format!("{}.log", self.container.name)),
        }
    }

    async fn once(&mut self, start: &Start) -> i32 {
        let uid = self.pod.uid().unwrap_or_default();
        let name = self.container.name.clone();
        let termination = self.termination_file();
        // Made empty, as a runtime mounts it.
        let _ = fs::write(&termination, "");
        self.runner.logs.begin(&uid, &name, &start.log);
        self.event("Normal", "Created", &format!("Created container: {name}"))
            .await;
        let started = now();
        let (code, reason) = match Process::start(&self.runner.groups, start) {
            Ok(process) => {
                self.report
                    .container(&name, json!({"running": {"startedAt": started}}));
                self.report.push().await;
                self.event("Normal", "Started", &format!("Started container {name}"))
                    .await;
                self.follow(process).await
            }
            Err(error) => {
                let why = format!("failed to start container \"{name}\": {error}");
                self.event("Warning", "Failed", &format!("Error: {why}"))
                    .await;
                (128, "StartError")
            }
        };
        self.runner.logs.complete(&uid, &name);
        self.report
            .container(&name, self.terminated(code, reason, &started, start));
        code
    }

    fn terminated(&self, code: i32, reason: &str, started: &str, start: &Start) -> Value {
        let mut message = fs::read(self.termination_file()).unwrap_or_default();
        let fallback =
            self.container.termination_message_policy.as_deref() == Some("FallbackToLogsOnError");
        if message.is_empty() && fallback && code != 0 {
            let log = plain_text(&start.log);
            message = log[log.len().saturating_sub(2048)..].to_vec();
        }
        message.truncate(MESSAGE);
        let mut state = json!({
            "exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now(),
            "containerID": format!("containerd://{}", self.pod.uid().unwrap_or_default().replace('-', "")),
        });
        if !message.is_empty() {
            state["message"] = String::from_utf8_lossy(&message).into_owned().into();
        }
        json!({"terminated": state})
    }

    /// Waits for the end of a process, by itself or as ordered.
    async fn follow(&mut self, mut process: Process) -> (i32, &'static str) {
        let groups = Arc::clone(&self.runner.groups);
        let mut end = self.end.clone();
        let ordered = async {
            let order = end.wait_for(Option::is_some).await.map(|order| *order);
            match order {
                Ok(order) => order,
                Err(_) => std::future::pending().await,
            }
        };
        let order = tokio::select! {
            code = process.wait(&groups) => return (code, reason(code)),
            order = ordered => order,
        };
        match order {
            Some(End::Terminate(grace)) => {
                self.event(
                    "Normal",
                    "Killing",
                    &format!("Stopping container {}", self.container.name),
                )
                .await;
                process.signal(Signal::SIGTERM);
                let mut end = self.end.clone();
                let killed = end.wait_for(|end| *end == Some(End::Kill));
                let waited = tokio::select! {
                    code = process.wait(&groups) => Some(code),
                    () = tokio::time::sleep(grace) => None,
                    _ = killed => None,
                };
                let code = if let Some(code) = waited {
                    code
                } else {
                    process.kill();
                    process.wait(&groups).await
                };
                (code, reason(code))
            }
            Some(End::OomKill) => {
                process.kill();
                process.wait(&groups).await;
                (137, "OOMKilled")
            }
            // As containerd has it when it comes back.
            Some(End::Lost) => {
                process.kill();
                process.wait(&groups).await;
                (255, "Unknown")
            }
            _ => {
                process.kill();
                let code = process.wait(&groups).await;
                (code, reason(code))
            }
        }
    }
}

fn reason(code: i32) -> &'static str {
    if code == 0 { "Completed" } else { "Error" }
}
