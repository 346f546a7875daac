//! Release indexes: which versions are published, and where their files are (contract 9.1).
//!
//! This module does no I/O: it parses bytes into releases.

use std::{collections::HashMap, env::consts, fmt};

use job_contract::job::Tool;
use semver::Version;
use serde::Deserialize;
use url::Url;

use super::verify::HASHICORP_SHORT_ID;

/// Operating system and architecture, as the release indexes name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OsArch {
    os: &'static str,
    arch: &'static str,
}

impl OsArch {
    pub(crate) const fn of(os: &'static str, arch: &'static str) -> Self {
        Self { os, arch }
    }

    /// That of this executor's build.
    pub(crate) fn current() -> Self {
        let os = match consts::OS {
            "macos" => "darwin",
            // The names of `linux` and `windows` are the same.
            os => os,
        };
        let arch = match consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            arch => arch,
        };
        Self::of(os, arch)
    }
}

impl fmt::Display for OsArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.os, self.arch)
    }
}

/// One published version.
#[derive(Debug, Clone)]
pub(crate) struct Release {
    pub(crate) version: Version,
    /// Absent if it is not published for the requested system.
    pub(crate) files: Option<Files>,
}

/// The addresses of the files of one release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Files {
    pub(crate) archive: Url,
    pub(crate) checksums: Url,
    /// In the order in which they are tried. Some of them may not exist.
    pub(crate) signatures: Vec<Url>,
}

impl Files {
    /// The same files on a mirror: the mirror's scheme, host, port, credentials and path prefix, then the old path.
    pub(crate) fn on(self, mirror: &Url) -> Self {
        let moved = |url: Url| {
            let mut moved = mirror.clone();
            moved.set_path(&format!(
                "{}{}",
                mirror.path().trim_end_matches('/'),
                url.path()
            ));
            moved.set_query(url.query());
            moved
        };
        Self {
            archive: moved(self.archive),
            checksums: moved(self.checksums),
            signatures: self.signatures.into_iter().map(moved).collect(),
        }
    }
}

/// The last part of an address's path.
pub(crate) fn file_name(url: &Url) -> &str {
    url.path().rsplit('/').next().unwrap_or_default()
}

/// Parses an index from `base`. Entries without a semantic version are left out.
pub(crate) fn parse(
    tool: Tool,
    bytes: &[u8],
    base: &Url,
    os_arch: OsArch,
) -> Result<Vec<Release>, serde_json::Error> {
    Ok(match tool {
        Tool::Terraform => terraform(serde_json::from_slice(bytes)?, base, os_arch),
        Tool::OpenTofu => tofu(serde_json::from_slice(bytes)?, base, os_arch),
    })
}

#[derive(Deserialize)]
struct TerraformIndex {
    versions: HashMap<String, TerraformRelease>,
}

#[derive(Deserialize)]
struct TerraformRelease {
    #[serde(default)]
    builds: Vec<TerraformBuild>,
    #[serde(default)]
    shasums: Option<String>,
    #[serde(default)]
    shasums_signature: Option<String>,
    #[serde(default)]
    shasums_signatures: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct TerraformBuild {
    os: String,
    arch: String,
    #[serde(default)]
    filename: String,
    #[serde(default)]
    url: String,
}

fn terraform(index: TerraformIndex, base: &Url, os_arch: OsArch) -> Vec<Release> {
    index
        .versions
        .into_iter()
        .filter_map(|(version, release)| {
            let version = Version::parse(&version).ok()?;
            let files = terraform_files(&version, &release, base, os_arch);
            Some(Release { version, files })
        })
        .collect()
}

fn terraform_files(
    version: &Version,
    release: &TerraformRelease,
    base: &Url,
    os_arch: OsArch,
) -> Option<Files> {
    let build = release
        .builds
        .iter()
        .find(|build| build.os == os_arch.os && build.arch == os_arch.arch)?;
    let archive = if build.url.is_empty() {
        base.join(&format!("{version}/{}", build.filename))
    } else {
        base.join(&build.url)
    };
    let archive = archive.ok().filter(is_http)?;
    let checksums = match release.shasums.as_deref().filter(|name| is_plain(name)) {
        Some(name) => beside(&archive, name),
        None => beside(&archive, &format!("terraform_{version}_SHA256SUMS")),
    };
    let sums = file_name(&checksums);
    // HashiCorp offers the signature of its present key under that key's id. The plain name comes second: for a release
    // under an older key, it may hold that key's signature.
    let mut names = vec![
        format!("{sums}.{HASHICORP_SHORT_ID}.sig"),
        format!("{sums}.sig"),
    ];
    let offered = release.shasums_signatures.iter().flatten();
    for name in offered.chain(&release.shasums_signature) {
        if is_plain(name) && !names.contains(name) {
            names.push(name.clone());
        }
    }
    Some(Files {
        signatures: names.iter().map(|name| beside(&archive, name)).collect(),
        archive,
        checksums,
    })
}

#[derive(Deserialize)]
struct TofuRelease {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tag_name: Option<String>,
    #[serde(default)]
    draft: bool,
    #[serde(default)]
    assets: Vec<TofuAsset>,
}

#[derive(Deserialize)]
struct TofuAsset {
    name: String,
    browser_download_url: String,
}

fn tofu(releases: Vec<TofuRelease>, base: &Url, os_arch: OsArch) -> Vec<Release> {
    releases
        .into_iter()
        .filter(|release| !release.draft)
        .filter_map(|release| {
            let version = [&release.name, &release.tag_name]
                .into_iter()
                .flatten()
                .find_map(|name| {
                    let name = name.trim();
                    Version::parse(name.strip_prefix('v').unwrap_or(name)).ok()
                })?;
            let files = tofu_files(&version, &release.assets, base, os_arch);
            Some(Release { version, files })
        })
        .collect()
}

fn tofu_files(
    version: &Version,
    assets: &[TofuAsset],
    base: &Url,
    os_arch: OsArch,
) -> Option<Files> {
    let asset = |name: &str| {
        let asset = assets.iter().find(|asset| asset.name == name)?;
        base.join(&asset.browser_download_url).ok().filter(is_http)
    };
    let archive = asset(&format!("tofu_{version}_{os_arch}.zip"))?;
    let sums = format!("tofu_{version}_SHA256SUMS");
    // The `.sig` file is a cosign signature, which is not used here.
    let signature = format!("{sums}.gpgsig");
    Some(Files {
        checksums: asset(&sums).unwrap_or_else(|| beside(&archive, &sums)),
        signatures: vec![asset(&signature).unwrap_or_else(|| beside(&archive, &signature))],
        archive,
    })
}

fn beside(url: &Url, name: &str) -> Url {
    let mut sibling = url.clone();
    let directory = url.path().rsplit_once('/').map_or("", |(dir, _)| dir);
    sibling.set_path(&format!("{directory}/{name}"));
    sibling
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\', '?', '#']) && !name.starts_with('.')
}

fn is_http(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINUX: OsArch = OsArch::of("linux", "amd64");

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    fn only(tool: Tool, json: &str, base: &str, os_arch: OsArch) -> Release {
        let mut releases = parse(tool, json.as_bytes(), &url(base), os_arch).unwrap();
        assert_eq!(releases.len(), 1, "{releases:?}");
        releases.remove(0)
    }

    const TERRAFORM: &str = r#"{"name":"terraform","versions":{
        "1.9.8":{"name":"terraform","version":"1.9.8",
            "shasums":"terraform_1.9.8_SHA256SUMS",
            "shasums_signature":"terraform_1.9.8_SHA256SUMS.sig",
            "shasums_signatures":["terraform_1.9.8_SHA256SUMS.72D7468F.sig","terraform_1.9.8_SHA256SUMS.sig",
                "../../evil.sig"],
            "builds":[
                {"name":"terraform","version":"1.9.8","os":"darwin","arch":"arm64",
                 "filename":"terraform_1.9.8_darwin_arm64.zip",
                 "url":"https://releases.test/terraform/1.9.8/terraform_1.9.8_darwin_arm64.zip"},
                {"name":"terraform","version":"1.9.8","os":"linux","arch":"amd64",
                 "filename":"terraform_1.9.8_linux_amd64.zip",
                 "url":"https://releases.test/terraform/1.9.8/terraform_1.9.8_linux_amd64.zip"}]},
        "not-a-version":{"builds":[]}}}"#;

    #[test]
    fn terraform_files_are_in_the_folder_of_the_archive() {
        let release = only(
            Tool::Terraform,
            TERRAFORM,
            "https://index.test/index.json",
            LINUX,
        );
        assert_eq!(release.version, Version::new(1, 9, 8));
        let at = |name: &str| url(&format!("https://releases.test/terraform/1.9.8/{name}"));
        assert_eq!(
            release.files,
            Some(Files {
                archive: at("terraform_1.9.8_linux_amd64.zip"),
                checksums: at("terraform_1.9.8_SHA256SUMS"),
                signatures: vec![
                    at("terraform_1.9.8_SHA256SUMS.72D7468F.sig"),
                    at("terraform_1.9.8_SHA256SUMS.sig"),
                ],
            })
        );
    }

    #[test]
    fn a_version_without_a_build_for_the_system_is_still_listed() {
        let os_arch = OsArch::of("plan9", "amd64");
        let release = only(Tool::Terraform, TERRAFORM, "https://index.test/", os_arch);
        assert_eq!(release.files, None);
    }

    #[test]
    fn the_index_of_a_mirror_may_omit_addresses() {
        let json = r#"{"versions":{"1.9.8":{"builds":[
            {"os":"linux","arch":"amd64","filename":"terraform_1.9.8_linux_amd64.zip"}]}}}"#;
        let base = "https://mirror.test/hashicorp/terraform/index.json";
        let files = only(Tool::Terraform, json, base, LINUX).files.unwrap();
        assert_eq!(
            files.archive.as_str(),
            "https://mirror.test/hashicorp/terraform/1.9.8/terraform_1.9.8_linux_amd64.zip"
        );
        assert_eq!(file_name(&files.checksums), "terraform_1.9.8_SHA256SUMS");
    }

    #[test]
    fn tofu_releases_are_found_among_other_assets() {
        let json = r#"[
            {"name":"Nightly","tag_name":"nightly","assets":[]},
            {"name":"v9.9.9","draft":true,"assets":[]},
            {"name":"v1.8.0-rc1","tag_name":"v1.8.0-rc1","prerelease":true,"assets":[
                {"name":"tofu_1.8.0-rc1_linux_amd64.tar.gz","browser_download_url":"https://git.test/d/a.tar.gz"},
                {"name":"tofu_1.8.0-rc1_linux_amd64.zip.sbom.json","browser_download_url":"https://git.test/d/b"},
                {"name":"tofu_1.8.0-rc1_amd64.deb","browser_download_url":"https://git.test/d/c"},
                {"name":"tofu_1.8.0-rc1_SHA256SUMS","browser_download_url":"https://git.test/d/sums"},
                {"name":"tofu_1.8.0-rc1_SHA256SUMS.sig","browser_download_url":"https://git.test/d/cosign"},
                {"name":"tofu_1.8.0-rc1_SHA256SUMS.gpgsig","browser_download_url":"https://git.test/d/gpg"},
                {"name":"tofu_1.8.0-rc1_linux_amd64.zip","browser_download_url":"https://git.test/d/zip"}]}]"#;
        let release = only(
            Tool::OpenTofu,
            json,
            "https://api.test/tofu/index.json",
            LINUX,
        );
        assert_eq!(release.version.to_string(), "1.8.0-rc1");
        let at = |name: &str| url(&format!("https://git.test/d/{name}"));
        assert_eq!(
            release.files,
            Some(Files {
                archive: at("zip"),
                checksums: at("sums"),
                signatures: vec![at("gpg")],
            })
        );
    }

    #[test]
    fn a_mirror_replaces_host_and_prefix_and_keeps_the_path() {
        let file = |host: &str| Files {
            archive: url(&format!("{host}/terraform/1.9.8/a.zip")),
            checksums: url(&format!("{host}/terraform/1.9.8/sums")),
            signatures: vec![url(&format!("{host}/terraform/1.9.8/sums.sig"))],
        };
        assert_eq!(
            file("https://releases.test").on(&url("http://bob:pw@mirror.test:81/hc/")),
            file("http://bob:pw@mirror.test:81/hc")
        );
    }

    #[test]
    fn other_documents_are_an_error() {
        for (tool, text) in [
            (Tool::Terraform, "<html>log in</html>"),
            (Tool::Terraform, "[]"),
            (Tool::Terraform, "{}"),
            (Tool::OpenTofu, r#"{"message":"API rate limit exceeded"}"#),
        ] {
            assert!(
                parse(tool, text.as_bytes(), &url("https://index.test/"), LINUX).is_err(),
                "{text}"
            );
        }
    }

    #[test]
    fn only_web_addresses_are_followed() {
        let json = r#"[{"name":"v1.8.0","assets":[
            {"name":"tofu_1.8.0_linux_amd64.zip","browser_download_url":"file:///etc/passwd"}]}]"#;
        let release = only(Tool::OpenTofu, json, "https://api.test/", LINUX);
        assert_eq!(release.files, None);
    }
}
