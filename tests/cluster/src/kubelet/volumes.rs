//! Volumes as folders of the pod, and where mount paths lead.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, KeyToPath, Pod, Volume};
use kube::{Client, ResourceExt};

use super::Runner;
use super::environment::{Missing, data};

/// Mount paths of a container and the folders in their place, longest first.
#[derive(Debug, Default)]
pub(crate) struct Mounts(Vec<(String, PathBuf)>);

impl Mounts {
    pub(crate) fn of(
        container: &Container,
        volumes: &[(String, PathBuf)],
        termination: &Path,
    ) -> Self {
        let mut mounts: Vec<(String, PathBuf)> = container
            .volume_mounts
            .iter()
            .flatten()
            .filter_map(|mount| {
                let (_, dir) = volumes.iter().find(|(name, _)| *name == mount.name)?;
                let dir = dir.join(mount.sub_path.as_deref().unwrap_or(""));
                Some((mount.mount_path.trim_end_matches('/').to_owned(), dir))
            })
            .collect();
        let path = container
            .termination_message_path
            .as_deref()
            .unwrap_or("/dev/termination-log");
        mounts.push((path.to_owned(), termination.to_owned()));
        mounts.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        Self(mounts)
    }

    /// A value whose beginning is a mount path, with the folder in its place.
    pub(crate) fn real(&self, value: &str) -> String {
        for (path, dir) in &self.0 {
            if let Some(rest) = value.strip_prefix(path.as_str())
                && (rest.is_empty() || rest.starts_with('/'))
            {
                return format!("{}{rest}", dir.display());
            }
        }
        value.to_owned()
    }
}

/// Whether a path may go on with this character.
fn of_a_path(char: char) -> bool {
    char.is_ascii_alphanumeric() || "._-/".contains(char)
}

impl Mounts {
    /// A text, such as a script, in which every mount path has its folder in its place.
    pub(crate) fn real_in(&self, text: &str) -> String {
        let (mut out, mut rest) = (String::with_capacity(text.len()), text);
        while let Some(char) = rest.chars().next() {
            let starts = char == '/' && !out.ends_with(of_a_path);
            let end = rest.find(|c| !of_a_path(c)).unwrap_or(rest.len());
            let end = if starts { end } else { char.len_utf8() };
            let (part, after) = rest.split_at(end);
            out.push_str(&if starts {
                self.real(part)
            } else {
                part.to_owned()
            });
            rest = after;
        }
        out
    }
}

fn write_all(
    dir: &Path,
    files: &[(String, Vec<u8>)],
    items: Option<&[KeyToPath]>,
    mode: i32,
) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for (key, value) in files {
        let path = match items {
            None => key.clone(),
            Some(items) => match items.iter().find(|item| item.key == *key) {
                Some(item) => item.path.clone(),
                None => continue,
            },
        };
        let path = dir.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, value)?;
        fs::set_permissions(
            &path,
            fs::Permissions::from_mode(u32::try_from(mode).unwrap_or(0o644)),
        )?;
    }
    Ok(())
}

async fn mount(
    client: &Client,
    runner: &Runner,
    pod: &Pod,
    volume: &Volume,
) -> Result<PathBuf, Missing> {
    let namespace = pod.namespace().unwrap_or_default();
    let dir = runner
        .pod_dir(&pod.uid().unwrap_or_default())
        .join("volumes")
        .join(&volume.name);
    let made = if let Some(claim) = &volume.persistent_volume_claim {
        let dir = runner.claim_dir(&namespace, &claim.claim_name);
        return fs::create_dir_all(&dir)
            .map(|()| dir)
            .map_err(|error| error.to_string());
    } else if let Some(host) = &volume.host_path {
        return Ok(PathBuf::from(&host.path));
    } else if let Some(source) = &volume.secret {
        let name = source.secret_name.as_deref().unwrap_or("");
        let files = data(
            client,
            &namespace,
            "secret",
            name,
            source.optional == Some(true),
        )
        .await?;
        let mode = source.default_mode.unwrap_or(0o644);
        write_all(
            &dir,
            &files.unwrap_or_default(),
            source.items.as_deref(),
            mode,
        )
    } else if let Some(source) = &volume.config_map {
        let files = data(
            client,
            &namespace,
            "configmap",
            &source.name,
            source.optional == Some(true),
        )
        .await?;
        let mode = source.default_mode.unwrap_or(0o644);
        write_all(
            &dir,
            &files.unwrap_or_default(),
            source.items.as_deref(),
            mode,
        )
    } else {
        fs::create_dir_all(&dir)
    };
    made.map(|()| dir).map_err(|error| error.to_string())
}

/// Makes all volumes of a pod. Fails with the words of a kubelet where something is missing.
pub(crate) async fn mount_all(
    client: &Client,
    runner: &Runner,
    pod: &Pod,
) -> Result<Vec<(String, PathBuf)>, Missing> {
    let mut mounted = Vec::new();
    let volumes = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.volumes.as_deref())
        .unwrap_or_default();
    for volume in volumes {
        let dir = mount(client, runner, pod, volume).await.map_err(|why| {
            format!(
                "MountVolume.SetUp failed for volume \"{}\" : {why}",
                volume.name
            )
        })?;
        mounted.push((volume.name.clone(), dir));
    }
    Ok(mounted)
}

#[cfg(test)]
mod tests {
    use super::Mounts;

    #[test]
    fn mount_paths_in_a_script_lead_to_their_folders() {
        let mounts = [("/etc/a", "/tmp/1"), ("/tmp", "/tmp/2")];
        let mounts = Mounts(mounts.map(|(path, dir)| (path.into(), dir.into())).into());
        let script = "x=$(</etc/a/job) >/tmp/out; /bin/true /etc/ab \"/tmp\" a/tmp é";
        let real = "x=$(</tmp/1/job) >/tmp/2/out; /bin/true /etc/ab \"/tmp/2\" a/tmp é";
        assert_eq!(mounts.real_in(script), real);
    }
}
