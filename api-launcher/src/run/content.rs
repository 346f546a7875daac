//! What of a folder's surroundings a run needs, and how it travels: as a tarball, like the content of a
//! CLI-driven workspace. Knows file trees and where a configuration refers to its neighbours; not jobs.

mod archive;
mod ignores;
mod modules;
mod tree;

use std::io;
use std::path::{Component, Path, PathBuf};

use job_contract::Exit;

pub(crate) use archive::{Extra, write};
pub(crate) use tree::{Entry, Kind};

use self::tree::Walk;

/// A snapshot to be taken: which files below which root, and where in it the root module lies.
#[derive(Debug)]
pub(crate) struct Content {
    /// The folder the archive's paths are relative to.
    pub(crate) root: PathBuf,
    /// The root module, relative to `root`; empty when they are the same.
    pub(crate) folder: PathBuf,
    /// What is packed, parents before children.
    pub(crate) entries: Vec<Entry>,
    /// What was left out although a user may expect it.
    pub(crate) notes: Vec<String>,
}

impl Content {
    /// The root module as job data name it: `/`, or `/envs/dev`.
    pub(crate) fn job_folder(&self) -> String {
        format!("/{}", self.folder.display())
    }
}

/// Why a folder cannot be packed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContentError {
    #[error("there is no folder `{}`", path.display())]
    Missing { path: PathBuf },
    #[error("`{}` is not a folder", path.display())]
    NotAFolder { path: PathBuf },
    #[error("`{}` holds no .tf, .tf.json, .tofu or .tofu.json file", path.display())]
    NoConfiguration { path: PathBuf },
    #[error("`{}` does not lie below the root `{}`", dir.display(), root.display())]
    OutsideRoot { dir: PathBuf, root: PathBuf },
    #[error("the path of `{}` cannot be written into job data", path.display())]
    UnusablePath { path: PathBuf },
    #[error("the variable file `{}` is no readable file", path.display())]
    VariableFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not read `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("`{}` cannot be used as ignore rules", path.display())]
    Ignore {
        path: PathBuf,
        #[source]
        source: ignore::Error,
    },
    #[error("`{}` changed while it was packed", path.display())]
    Changed { path: PathBuf },
    #[error("`{}` holds more than {limit}", root.display())]
    TooLarge { root: PathBuf, limit: String },
    #[error("could not write `{}`", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl ContentError {
    /// Whose fault it is.
    pub(crate) const fn exit(&self) -> Exit {
        match self {
            Self::Missing { .. }
            | Self::NotAFolder { .. }
            | Self::OutsideRoot { .. }
            | Self::VariableFile { .. } => Exit::BadConfiguration,
            Self::NoConfiguration { .. }
            | Self::UnusablePath { .. }
            | Self::Read { .. }
            | Self::Ignore { .. }
            | Self::TooLarge { .. } => Exit::BadJobData,
            Self::Changed { .. } | Self::Write { .. } => Exit::Infrastructure,
        }
    }

    /// What to do about it.
    pub(crate) const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoConfiguration { .. } => Some("name the folder that holds the root module"),
            Self::TooLarge { .. } => {
                Some("leave out what the run does not need, in a .terraformignore file")
            }
            Self::Changed { .. } => Some("run it again once nothing writes there"),
            _ => None,
        }
    }
}

/// The folder as the file system knows it, if it is one that can be planned.
pub(crate) fn root_module(dir: &Path) -> Result<PathBuf, ContentError> {
    let canonical = canonical_folder(dir)?;
    if modules::has_configuration(&canonical)? {
        Ok(canonical)
    } else {
        Err(ContentError::NoConfiguration {
            path: dir.to_owned(),
        })
    }
}

/// Whether the root module is written for OpenTofu alone.
pub(crate) fn is_for_opentofu(dir: &Path) -> Result<bool, ContentError> {
    modules::has_opentofu_files(dir)
}

fn canonical_folder(dir: &Path) -> Result<PathBuf, ContentError> {
    let canonical = dir.canonicalize().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ContentError::Missing {
            path: dir.to_owned(),
        },
        io::ErrorKind::NotADirectory => ContentError::NotAFolder {
            path: dir.to_owned(),
        },
        _ => ContentError::Read {
            path: dir.to_owned(),
            source,
        },
    })?;
    if canonical.is_dir() {
        Ok(canonical)
    } else {
        Err(ContentError::NotAFolder {
            path: dir.to_owned(),
        })
    }
}

/// Finds what a run of the root module `dir` (as [`root_module`] returned it) needs: everything below `root`
/// when that is given, else `dir` and the folders its local modules and links refer to. `left_out` is never
/// packed.
pub(crate) fn survey(
    dir: &Path,
    root: Option<&Path>,
    left_out: &[PathBuf],
) -> Result<Content, ContentError> {
    let mut walk = Walk::new(dir, left_out);
    let root = if let Some(root) = root {
        let root = canonical_folder(root)?;
        if !dir.starts_with(&root) {
            return Err(ContentError::OutsideRoot {
                dir: dir.to_owned(),
                root,
            });
        }
        walk.add_fixed(&root)?;
        root
    } else {
        walk.add(dir)?;
        for module in modules::closure(dir)? {
            walk.add(&module)?;
        }
        walk.follow_links()?;
        walk.common_ancestor()
    };
    let (entries, notes) = walk.finish(&root)?;
    let folder = dir
        .strip_prefix(&root)
        .expect("the root is an ancestor of the root module")
        .to_owned();
    // Job data are text, and a folder ends at its first comma (contract 1.2).
    let is_usable = |path: &str| !path.contains(',') && path.trim() == path;
    if !folder.to_str().is_some_and(is_usable) {
        return Err(ContentError::UnusablePath { path: folder });
    }
    Ok(Content {
        root,
        folder,
        entries,
        notes,
    })
}

/// `path` without `.` and `..`, by its text alone, as the tool resolves module sources.
fn lexical(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Files by relative path, below a canonical temporary folder.
    pub(super) fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap();
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (temp, root)
    }

    fn names(content: &Content) -> Vec<String> {
        content
            .entries
            .iter()
            .filter(|entry| !matches!(entry.kind, Kind::Folder))
            .map(|entry| entry.name.display().to_string())
            .collect()
    }

    fn survey_of(dir: &Path) -> Content {
        survey(&root_module(dir).unwrap(), None, &[]).unwrap()
    }

    #[test]
    fn a_folder_that_needs_nothing_else_is_its_own_root() {
        let (_temp, root) = folder(&[
            ("main.tf", ""),
            ("terraform.tfvars", ""),
            (".gitignore", "*.tfvars"),
            ("modules/a/main.tf", ""),
        ]);
        let content = survey_of(&root);
        assert_eq!(content.root, root);
        assert_eq!(content.job_folder(), "/");
        assert_eq!(
            names(&content),
            [
                ".gitignore",
                "main.tf",
                "modules/a/main.tf",
                "terraform.tfvars"
            ]
        );
    }

    #[test]
    fn local_state_caches_and_crash_logs_stay_behind() {
        let (_temp, root) = folder(&[
            ("main.tf", ""),
            (".terraform.lock.hcl", ""),
            (".git/config", ""),
            (".terraform/providers/x", ""),
            ("sub/.terraform/x", ""),
            ("terraform.tfstate", "{}"),
            ("terraform.tfstate.backup", "{}"),
            ("terraform.tfstate.d/a/terraform.tfstate", "{}"),
            (".terraform.tfstate.lock.info", "{}"),
            ("crash.log", ""),
            ("crash.2026-01-01.log", ""),
        ]);
        assert_eq!(names(&survey_of(&root)), [".terraform.lock.hcl", "main.tf"]);
    }

    #[test]
    fn terraformignore_leaves_out_and_takes_back_in() {
        let (_temp, root) = folder(&[
            ("main.tf", ""),
            (
                ".terraformignore",
                "# big\n*.zip\n!keep.zip\n/docs/\nnode_modules/\n",
            ),
            ("a.zip", ""),
            ("keep.zip", ""),
            ("docs/x.md", ""),
            ("sub/docs/x.md", ""),
            ("sub/node_modules/y", ""),
        ]);
        assert_eq!(
            names(&survey_of(&root)),
            [".terraformignore", "keep.zip", "main.tf", "sub/docs/x.md"]
        );
    }

    #[test]
    fn modules_outside_widen_the_root_and_bring_only_themselves() {
        let (_temp, root) = folder(&[
            (
                "envs/dev/main.tf",
                r#"module "a" { source = "../../modules/a" }"#,
            ),
            ("envs/prod/main.tf", ""),
            (
                "modules/a/main.tf",
                r#"module "b" { source = "../b" }
                   module "r" { source = "registry.example.test/x/y" }"#,
            ),
            (
                "modules/b/main.tf.json",
                r#"{"module":{"c":{"source":"../../shared/c"}}}"#,
            ),
            ("modules/unused/main.tf", ""),
            (
                "shared/c/main.tf",
                r#"module "a" { source = "../../modules/a" }"#,
            ),
        ]);
        let content = survey_of(&root.join("envs/dev"));
        assert_eq!(content.root, root);
        assert_eq!(content.job_folder(), "/envs/dev");
        assert_eq!(
            names(&content),
            [
                "envs/dev/main.tf",
                "modules/a/main.tf",
                "modules/b/main.tf.json",
                "shared/c/main.tf"
            ]
        );
    }

    #[test]
    fn links_inside_are_kept_and_links_outside_bring_their_target() {
        let (_temp, root) = folder(&[
            ("stack/main.tf", ""),
            ("stack/files/a.txt", "a"),
            ("common/versions.tf", ""),
            ("common/other.tf", ""),
            ("data/deep/x", ""),
        ]);
        let stack = root.join("stack");
        symlink("files/a.txt", stack.join("inside")).unwrap();
        symlink(stack.join("files"), stack.join("absolute")).unwrap();
        symlink("../common/versions.tf", stack.join("versions.tf")).unwrap();
        symlink("../data", stack.join("data")).unwrap();
        symlink("../nowhere", stack.join("dangling")).unwrap();
        let content = survey_of(&stack);
        assert_eq!(content.root, root);
        let links: Vec<String> = content
            .entries
            .iter()
            .filter_map(|entry| match &entry.kind {
                Kind::Link(target) => {
                    Some(format!("{} -> {}", entry.name.display(), target.display()))
                }
                _ => None,
            })
            .collect();
        assert_eq!(
            links,
            [
                "stack/absolute -> files",
                "stack/data -> ../data",
                "stack/inside -> files/a.txt",
                "stack/versions.tf -> ../common/versions.tf",
            ]
        );
        let names = names(&content);
        assert!(names.contains(&"common/versions.tf".to_owned()));
        assert!(names.contains(&"data/deep/x".to_owned()));
        assert!(!names.contains(&"common/other.tf".to_owned()));
        assert!(content.notes.iter().any(|note| note.contains("dangling")));
    }

    #[test]
    fn an_explicit_root_brings_everything_below_it_and_nothing_else() {
        let (_temp, root) = folder(&[
            (
                "repo/stack/main.tf",
                r#"module "o" { source = "../../out" }"#,
            ),
            ("repo/neighbour/x", ""),
            ("out/main.tf", ""),
        ]);
        symlink("../../out", root.join("repo/stack/out")).unwrap();
        let dir = root_module(&root.join("repo/stack")).unwrap();
        let content = survey(&dir, Some(&root.join("repo")), &[]).unwrap();
        assert_eq!(content.job_folder(), "/stack");
        assert_eq!(names(&content), ["neighbour/x", "stack/main.tf"]);
        assert_eq!(content.notes.len(), 1, "{:?}", content.notes);
        assert!(matches!(
            survey(&dir, Some(&root.join("out")), &[]),
            Err(ContentError::OutsideRoot { .. })
        ));
    }

    #[test]
    fn the_data_directory_is_never_packed() {
        let (_temp, root) = folder(&[("main.tf", ""), ("data/local/state/x", "")]);
        let content = survey(&root, None, &[root.join("data")]).unwrap();
        assert_eq!(names(&content), ["main.tf"]);
    }

    #[test]
    fn folders_that_cannot_be_planned_are_named() {
        let (_temp, root) = folder(&[("empty/readme.md", ""), ("file.tf", "")]);
        for (path, expected) in [
            ("absent", "there is no folder"),
            ("file.tf", "is not a folder"),
            ("file.tf/x", "is not a folder"),
            ("empty", "holds no .tf"),
        ] {
            let error = root_module(&root.join(path)).unwrap_err().to_string();
            assert!(error.contains(expected), "{path}: {error}");
        }
    }
}
