//! Checks a tool in a cache, for people: a program by the digest that was noted when it was downloaded, and archives of a release by
//! their publisher's signed list. Runs do not use this.

use std::io::{self, Read as _};
use std::path::Path;

use artifact_store::Digest;
use job_contract::chain;
use job_contract::job::Tool;
use provider_store::ProviderStore;

use super::cache::{Slot, noted_digest_name};
use super::shared::{LIST, SIGNATURE, archive_name};
use super::verify::{self, Keyring, MAX_SMALL_FILE};

/// What is known of a tool in a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CachedTool {
    /// It is what was downloaded.
    Verified,
    /// It is something else.
    Altered,
    /// Nothing says what it must be: the reason.
    Unknown(String),
}

/// Checks the version of a tool in a folder of the cache, as its listing has it. `extra_keys` is a file with keys that are trusted
/// beside the publisher's.
pub fn check_cached_tool(
    cache: &ProviderStore,
    program: &str,
    folder: &str,
    extra_keys: Option<&Path>,
) -> io::Result<CachedTool> {
    let mut tools = [Tool::Terraform, Tool::OpenTofu].into_iter();
    let tool = tools.find(|tool| tool.binary() == program);
    let Some((tool, version)) = tool.and_then(|tool| Some((tool, Slot::version(tool, folder)?)))
    else {
        return Ok(CachedTool::Unknown("it is no version of a tool".to_owned()));
    };
    let mut keyring = Keyring::publisher(tool).map_err(io::Error::other)?;
    if let Some(path) = extra_keys {
        keyring.add_file(path).map_err(io::Error::other)?;
    }
    let files = Files {
        cache,
        program,
        folder,
    };
    let found = [
        files.program(),
        files.release(&keyring, &archive_name(tool, &version)),
    ];
    // Something that is no file may be in the place of one.
    let found = found.map(|checked| checked.unwrap_or(Some(CachedTool::Altered)));
    let mut found: Vec<_> = found.into_iter().flatten().collect();
    found.sort_by_key(|one| match one {
        CachedTool::Altered => 0,
        CachedTool::Unknown(_) => 1,
        CachedTool::Verified => 2,
    });
    let nothing = || CachedTool::Unknown("it has neither a program nor an archive".to_owned());
    Ok(found.into_iter().next().unwrap_or_else(nothing))
}

/// The files of a version.
struct Files<'c> {
    cache: &'c ProviderStore,
    program: &'c str,
    folder: &'c str,
}

impl Files<'_> {
    fn digest(&self, name: &str) -> io::Result<Option<String>> {
        let opened = self.cache.open_tool_file(self.program, self.folder, name)?;
        let digest = opened
            .map(|mut file| Digest::of_rest(&mut file))
            .transpose()?;
        Ok(digest.map(|digest| digest.sha256))
    }

    fn small(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.cache.open_tool_file(self.program, self.folder, name)? else {
            return Ok(None);
        };
        let mut content = Vec::new();
        file.take(MAX_SMALL_FILE).read_to_end(&mut content)?;
        Ok(Some(content))
    }

    fn program(&self) -> io::Result<Option<CachedTool>> {
        let Some(digest) = self.digest(self.program)? else {
            return Ok(None);
        };
        let note = self.small(&noted_digest_name(self.program))?;
        let note = note.as_deref().map(String::from_utf8_lossy);
        Ok(Some(match note {
            None => CachedTool::Unknown("no digest was noted beside its program".to_owned()),
            Some(note) => same(verify::listed_digest(&note, self.program), &digest),
        }))
    }

    /// All archives that the list names and that are there, whatever their platform.
    fn release(&self, keyring: &Keyring, own: &str) -> io::Result<Option<CachedTool>> {
        let (Some(list), Some(signature)) = (self.small(LIST)?, self.small(SIGNATURE)?) else {
            let is_there = self.digest(own)?.is_some();
            let text = "its archive has no signed list of digests".to_owned();
            return Ok(is_there.then_some(CachedTool::Unknown(text)));
        };
        match keyring.check(&list, &signature) {
            Ok(()) => {}
            Err(error) if error.is_by_unknown_signer() => {
                let why = format!("the signature of its list: {}", chain(&error));
                return Ok(Some(CachedTool::Unknown(why)));
            }
            Err(_) => return Ok(Some(CachedTool::Altered)),
        }
        let list = String::from_utf8_lossy(&list);
        let names = list
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1));
        let mut found = None;
        for name in names.map(|name| name.trim_start_matches('*')) {
            if name.contains('/') {
                continue;
            }
            let Some(digest) = self.digest(name)? else {
                continue;
            };
            let checked = same(verify::listed_digest(&list, name), &digest);
            if checked == CachedTool::Altered {
                return Ok(Some(checked));
            }
            found = Some(checked);
        }
        // A signed list of another version names none of what is here.
        let is_other = found.is_none() && self.digest(own)?.is_some();
        Ok(found.or_else(|| is_other.then_some(CachedTool::Altered)))
    }
}

fn same(expected: Option<String>, actual: &str) -> CachedTool {
    match expected {
        Some(expected) if expected == actual => CachedTool::Verified,
        _ => CachedTool::Altered,
    }
}
