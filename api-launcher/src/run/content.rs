//! What of a folder's surroundings a run needs, and how it travels: as a tarball, like the content of a
//! CLI-driven workspace. Knows file trees and where a configuration refers to its neighbours; not jobs.

mod archive;
mod ignores;
mod modules;
mod tree;

use std::io;
use std::path::{Path, PathBuf};

use job_contract::Exit;

pub(crate) use archive::{Extra, write};
pub(crate) use modules::{has_opentofu_files, own_backend};
pub(crate) use tree::{Entry, Kind};

use self::tree::Walk;
use crate::failure::Failure;

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

/// The folder as the file system knows it, if it is one that can be planned.
pub(crate) fn root_module(dir: &Path) -> Result<PathBuf, Failure> {
    let canonical = canonical_folder(dir)?;
    if modules::has_configuration(&canonical)? {
        Ok(canonical)
    } else {
        let path = dir.display();
        let text = format!("`{path}` holds no .tf, .tf.json, .tofu or .tofu.json file");
        let failure = Failure::new(Exit::BadJobData, text);
        Err(failure.with_hint("name the folder that holds the root module"))
    }
}

fn canonical_folder(dir: &Path) -> Result<PathBuf, Failure> {
    let path = dir.display();
    let wrong = |text| Failure::new(Exit::BadConfiguration, text);
    match dir.canonicalize() {
        Ok(canonical) if canonical.is_dir() => Ok(canonical),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(wrong(format!("there is no folder `{path}`")))
        }
        Err(error) if error.kind() != io::ErrorKind::NotADirectory => {
            Err(Failure::unreadable(dir)(error))
        }
        _ => Err(wrong(format!("`{path}` is not a folder"))),
    }
}

/// Finds what a run of the root module `dir` (as [`root_module`] returned it) needs: everything below `root`
/// when that is given, else `dir` and the folders its local modules and links refer to. `left_out` is never
/// packed.
pub(crate) fn survey(
    dir: &Path,
    root: Option<&Path>,
    left_out: &[PathBuf],
) -> Result<Content, Failure> {
    let mut walk = Walk::new(dir, left_out);
    let root = if let Some(root) = root {
        let root = canonical_folder(root)?;
        if !dir.starts_with(&root) {
            let (dir, root) = (dir.display(), root.display());
            let text = format!("`{dir}` does not lie below the root `{root}`");
            return Err(Failure::new(Exit::BadConfiguration, text));
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
        let path = folder.display();
        let text = format!("the path of `{path}` cannot be written into job data");
        return Err(Failure::new(Exit::BadJobData, text));
    }
    Ok(Content {
        root,
        folder,
        entries,
        notes,
    })
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
        let outside = survey(&dir, Some(&root.join("out")), &[]).unwrap_err();
        assert!(outside.to_string().contains("below the root"), "{outside}");
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
