//! What is checked out, and the errors if it cannot be.

use std::fs;

use job_contract::Exit;
use rstest::rstest;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::{Response, Server};
use test_peers::port::Port;

use super::super::git::GitFailure;
use super::super::*;
use super::support::*;

#[rstest]
#[case("main", "# two")]
#[case("v1", "# one")]
#[case("both", "# two")]
#[case("", "# two")]
#[tokio::test]
async fn branches_win_over_tags_and_come_without_history(
    #[case] branch: &str,
    #[case] content: &str,
) {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let source = format!("file://{}", repository.bare().display());
    let workspace = fixture.prepare(&job(&source, branch)).await.unwrap();
    assert_eq!(fixture.main_tf(), content);
    assert_eq!(fixture.commit_count(), "1");
    let commit = if content == "# one" {
        &repository.first
    } else {
        &repository.last
    };
    assert_eq!(&workspace.commit_id, commit);
    let recorded = fs::read_to_string(workspace.root.join("commitHash.info")).unwrap();
    assert_eq!(&recorded, commit);
    assert_eq!(workspace.init_ssh_command, None);
}

#[tokio::test]
async fn a_plain_path_is_a_source_and_the_clone_stays_usable() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let source = repository.bare().display().to_string();
    fixture.prepare(&job(&source, "main")).await.unwrap();
    assert_eq!(fixture.commit_count(), "1");
    let branch = git(
        fixture.layout.checkout(),
        &["rev-parse", "--abbrev-ref", "HEAD"],
    );
    assert_eq!(branch, "main");
    git(fixture.layout.checkout(), &["fetch", "-q", "--unshallow"]);
    assert_eq!(fixture.commit_count(), "3");
}

#[tokio::test]
async fn repositories_of_other_users_can_be_cloned() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    if nix::unistd::geteuid().is_root() {
        let other_user = Some(nix::unistd::Uid::from_raw(54321));
        nix::unistd::chown(&repository.bare(), other_user, None).unwrap();
    }
    let source = repository.bare().display().to_string();
    fixture.prepare(&job(&source, "main")).await.unwrap();
}

#[rstest]
#[case::newer_servers_give_out_any_commit(false, "1")]
#[case::older_ones_need_the_history(true, "2")]
#[tokio::test]
async fn a_pinned_commit_is_checked_out(#[case] old_protocol: bool, #[case] count: &str) {
    let repository = Repository::new();
    let options = GitHttpOptions {
        old_protocol,
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.served(), options).unwrap();
    let fixture = Fixture::new();
    let mut job = job(&format!("{}/repo.git", server.url()), "main");
    job.commit_id = Some(repository.between.clone());
    let workspace = fixture.prepare(&job).await.unwrap();
    assert_eq!(workspace.commit_id, repository.between);
    assert_eq!(fixture.main_tf(), "# between");
    assert_eq!(fixture.commit_count(), count);
    let deepened = !fixture.layout.checkout().join(".git/shallow").exists();
    assert_eq!(deepened, old_protocol);
}

#[rstest]
#[case("v1", "# one")]
#[case("main", "# two")]
#[tokio::test]
async fn any_other_commit_text_is_a_name(#[case] name: &str, #[case] content: &str) {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let mut job = job(&repository.bare().display().to_string(), "main");
    job.commit_id = Some(name.to_owned());
    let workspace = fixture.prepare(&job).await.unwrap();
    assert_eq!(workspace.commit_id, name);
    assert_eq!(fixture.main_tf(), content);
}

#[tokio::test]
async fn an_abbreviated_commit_is_found_in_the_history() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let mut job = job(&repository.bare().display().to_string(), "main");
    job.commit_id = Some(repository.first[..10].to_owned());
    fixture.prepare(&job).await.unwrap();
    assert_eq!(fixture.main_tf(), "# one");
}

#[rstest]
#[case("0123456789012345678901234567890123456789")]
#[case("no-such-name")]
#[case("--upload-pack=x")]
#[tokio::test]
async fn an_unreachable_commit_is_named(#[case] commit: &str) {
    let repository = Repository::new();
    for old_protocol in [false, true] {
        let options = GitHttpOptions {
            old_protocol,
            ..GitHttpOptions::default()
        };
        let server = git_http::serve(repository.served(), options).unwrap();
        let fixture = Fixture::new();
        let mut job = job(&format!("{}/repo.git", server.url()), "main");
        job.commit_id = Some(commit.to_owned());
        let error = fixture.prepare(&job).await.unwrap_err();
        let expected = format!("the commit `{commit}` was not found in");
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert_eq!(error.exit(), Exit::BadJobData);
        assert!(error.hint().is_some());
    }
}

#[rstest]
#[case::newer_servers_give_out_any_commit(false)]
#[case::older_ones_need_the_history(true)]
#[tokio::test]
async fn an_apply_takes_the_commit_of_its_plan(#[case] old_protocol: bool) {
    let repository = Repository::new();
    let options = GitHttpOptions {
        old_protocol,
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.served(), options).unwrap();
    let job = job(&format!("{}/repo.git", server.url()), "main");
    let planned = &repository.between;

    let fixture = Fixture::new();
    let workspace = fixture.prepare_apply(&job, planned).await.unwrap();
    assert_eq!(fixture.main_tf(), "# between");
    assert_eq!((&workspace.head, &workspace.commit_id), (planned, planned));
    assert_eq!(workspace.branch_head.as_ref(), Some(&repository.last));

    let fixture = Fixture::new();
    let workspace = fixture.prepare_apply(&job, &repository.last).await.unwrap();
    assert_eq!(workspace.head, repository.last);
    assert_eq!(workspace.branch_head.as_ref(), Some(&repository.last));
    let checkout = fixture.layout.checkout();
    let branch = git(checkout, &["rev-parse", "--abbrev-ref", "HEAD"]);
    assert_eq!(branch, "main");
}

#[tokio::test]
async fn an_apply_without_the_commit_of_its_plan_is_refused() {
    let repository = Repository::new();
    let tree = repository.tree();
    git(&tree, &["branch", "--quiet", "--force", "both", "v1"]);
    git(&tree, &["reset", "--quiet", "--hard", "v1"]);
    commit_file(&tree, "main.tf", "# forced");
    repository.publish();
    let options = GitHttpOptions {
        old_protocol: true,
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.served(), options).unwrap();
    let job = job(&format!("{}/repo.git", server.url()), "main");
    let fixture = Fixture::new();
    let error = fixture.prepare_apply(&job, &repository.last);
    let error = error.await.unwrap_err();
    let text = error.to_string();
    for part in [repository.last.as_str(), "`main`", "the reviewed plan"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(error.exit(), Exit::StepFailed);
    assert!(error.hint().unwrap().contains("plan again"));
}

#[tokio::test]
async fn the_commit_of_a_plan_is_taken_after_its_branch_was_removed() {
    let repository = Repository::new();
    let tree = repository.tree();
    git(&tree, &["checkout", "--quiet", "-b", "other", "v1"]);
    git(&tree, &["branch", "--quiet", "-D", "main"]);
    repository.publish();
    let fixture = Fixture::new();
    let job = job(&repository.bare().display().to_string(), "main");
    let workspace = fixture.prepare_apply(&job, &repository.last).await;
    let workspace = workspace.unwrap();
    assert_eq!(fixture.main_tf(), "# two");
    assert_eq!(workspace.head, repository.last);
    assert_eq!(workspace.branch_head, None);
}

#[tokio::test]
async fn an_apply_whose_document_names_another_commit_than_its_plan_is_refused() {
    let repository = Repository::new();
    let (first, last) = (repository.first.as_str(), repository.last.as_str());
    let source = repository.bare().display().to_string();
    for (named, planned, is_taken) in [
        (last, last, true),
        (&first[..10], first, true),
        ("v1", first, true),
        // Earlier versions recorded the text of the document.
        ("v1", "v1", true),
        (first, last, false),
        ("v1", last, false),
        ("main", first, false),
    ] {
        let fixture = Fixture::new();
        let job = JobData {
            commit_id: Some(named.to_owned()),
            ..job(&source, "main")
        };
        match fixture.prepare_apply(&job, planned).await {
            Ok(workspace) => {
                assert!(is_taken, "{named}");
                assert_eq!(workspace.commit_id, named);
            }
            Err(error) => {
                assert!(!is_taken, "{named}: {error}");
                let text = error.to_string();
                assert!(text.contains(named) && text.contains(planned), "{text}");
                assert_eq!(error.exit(), Exit::StepFailed);
            }
        }
    }
}

#[tokio::test]
async fn the_commit_of_the_tree_is_known_by_whatever_name_it_was_requested() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let job = JobData {
        commit_id: Some("v1".to_owned()),
        ..job(&repository.bare().display().to_string(), "main")
    };
    let workspace = fixture.prepare(&job).await.unwrap();
    assert_eq!(workspace.commit_id, "v1");
    assert_eq!(workspace.head, repository.first);
}

#[tokio::test]
async fn a_missing_branch_is_named() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let source = format!("file://{}", repository.bare().display());
    let error = fixture.prepare(&job(&source, "nowhere")).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("`{source}` has no branch or tag `nowhere`")
    );
    assert_eq!(error.exit(), Exit::BadJobData);
}

#[tokio::test]
async fn a_missing_repository_differs_from_an_unreachable_server() {
    let repository = Repository::new();
    let server = git_http::serve(repository.served(), GitHttpOptions::default()).unwrap();
    let fixture = Fixture::new();
    for source in [
        format!("{}/other.git", server.url()),
        repository.served().join("other.git").display().to_string(),
    ] {
        let error = fixture.prepare(&job(&source, "main")).await.unwrap_err();
        assert_failure(&error, GitFailure::NoRepository);
        assert_eq!(error.exit(), Exit::BadJobData);
    }
    let closed_port = Port::take().unwrap();
    let source = format!("http://{}/repo.git", closed_port.address());
    let error = fixture.prepare(&job(&source, "main")).await.unwrap_err();
    assert_failure(&error, GitFailure::Unreachable);
    assert_eq!(error.exit(), Exit::Infrastructure);
}

#[tokio::test]
async fn a_busy_server_permits_another_start() {
    let server = Server::start(|_| Response::new(503, "")).unwrap();
    let error = Fixture::new()
        .prepare(&job(&format!("{}/r", server.url()), "main"))
        .await
        .unwrap_err();
    assert_eq!(error.exit(), Exit::Infrastructure, "{error}");
}

#[tokio::test]
async fn a_missing_git_is_named_in_the_error() {
    let repository = Repository::new();
    let mut fixture = Fixture::new();
    fixture.config.path = "/nowhere".into();
    let source = repository.bare().display().to_string();
    let error = fixture.prepare(&job(&source, "main")).await.unwrap_err();
    assert_eq!(error.to_string(), "`git` is not installed or not on PATH");
}

#[tokio::test]
async fn hooks_and_configuration_of_the_machine_have_no_effect() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let hooks = fixture.config.home.join("templates/hooks");
    fs::create_dir_all(&hooks).unwrap();
    let marker = fixture.work.path().join("marker");
    let hook = hooks.join("post-checkout");
    fs::write(&hook, format!("#!/bin/sh\ntouch {}\n", marker.display())).unwrap();
    fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(
        fixture.config.home.join(".gitconfig"),
        format!(
            "[core]\n\thooksPath = {0}\n[url \"file:///nowhere/\"]\n\tinsteadOf = file:///\n",
            hooks.display()
        ),
    )
    .unwrap();
    let source = repository.bare().display().to_string();
    fixture.prepare(&job(&source, "main")).await.unwrap();
    assert!(!marker.exists());
}

#[tokio::test]
async fn the_commit_file_is_not_written_through_a_link_of_the_repository() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let victim = fixture.work.path().join("victim");
    fs::write(&victim, "untouched").unwrap();
    std::os::unix::fs::symlink(&victim, repository.tree().join("commitHash.info")).unwrap();
    let commit = commit_all(&repository.tree());
    repository.publish();
    let source = repository.bare().display().to_string();
    let workspace = fixture.prepare(&job(&source, "main")).await.unwrap();
    assert_eq!(fs::read_to_string(victim).unwrap(), "untouched");
    let recorded = fs::read_to_string(workspace.root.join("commitHash.info")).unwrap();
    assert_eq!(recorded, commit);
}

#[rstest]
#[case(false)]
#[case(true)]
#[tokio::test]
async fn submodules_are_fetched_from_servers_that_refuse_single_commits(
    #[case] old_protocol: bool,
) {
    let inner = Repository::new();
    let outer = Repository::new();
    fs::rename(inner.bare(), outer.served().join("inner.git")).unwrap();
    add_submodule(&outer, &inner, "../inner.git");
    let options = GitHttpOptions {
        old_protocol,
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(outer.served(), options).unwrap();
    let fixture = Fixture::new();
    fixture
        .prepare(&job(&format!("{}/repo.git", server.url()), "main"))
        .await
        .unwrap();
    let content = fs::read_to_string(fixture.layout.checkout().join("sub/main.tf")).unwrap();
    // No reference of the submodule points to this commit.
    assert_eq!(content, "# between");
}

#[tokio::test]
async fn remote_repositories_cannot_read_files_of_this_machine() {
    let inner = Repository::new();
    let outer = Repository::new();
    let address = format!("file://{}", inner.bare().display());
    add_submodule(&outer, &inner, &address);
    let fixture = Fixture::new();
    let local = outer.bare().display().to_string();
    fixture.prepare(&job(&local, "main")).await.unwrap();

    let server = git_http::serve(outer.served(), GitHttpOptions::default()).unwrap();
    let remote = format!("{}/repo.git", server.url());
    let error = Fixture::new()
        .prepare(&job(&remote, "main"))
        .await
        .unwrap_err();
    assert_failure(&error, GitFailure::BadAddress);
}

/// Commits a submodule `sub` at a commit of `inner` that no reference points to.
fn add_submodule(outer: &Repository, inner: &Repository, address: &str) {
    let tree = outer.tree();
    let link = format!("160000,{},sub", inner.between);
    git(&tree, &["update-index", "--add", "--cacheinfo", &link]);
    let text = format!("[submodule \"sub\"]\n\tpath = sub\n\turl = {address}\n");
    fs::write(tree.join(".gitmodules"), text).unwrap();
    git(&tree, &["add", ".gitmodules"]);
    git(&tree, &["commit", "-q", "-m", "submodule"]);
    outer.publish();
}

#[tokio::test]
async fn the_tools_repository_is_cloned_anew_each_time() {
    let repository = Repository::new();
    let options = GitHttpOptions {
        credentials: Some("oauth2:t00lt0k".to_owned()),
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.served(), options).unwrap();
    let fixture = Fixture::new();
    let target = fixture.layout.checkout().join(".terrakube/toolsRepository");
    let environment = [
        ("TERRAKUBE_PRIVATE_EXTENSION_REPO_TYPE", "GITLAB"),
        ("TERRAKUBE_PRIVATE_EXTENSION_REPO_TOKEN", "t00lt0k"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    let address = format!("{}/repo.git", server.url());
    for _ in 0..2 {
        clone_tools_repository(
            &address,
            "main",
            &target,
            &environment,
            &fixture.layout,
            &fixture.config,
        )
        .await
        .unwrap();
        assert_eq!(fs::read_to_string(target.join("main.tf")).unwrap(), "# two");
        fs::write(target.join("left-behind"), "x").unwrap();
    }
    assert!(fixture.leaks("t00lt0k").is_empty());
}

#[tokio::test]
async fn the_tools_repository_is_not_cloned_through_a_link() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let outside = fixture.work.path().join("outside");
    fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, fixture.layout.checkout().join(".terrakube")).unwrap();
    let error = clone_tools_repository(
        &repository.bare().display().to_string(),
        "main",
        &fixture.layout.checkout().join(".terrakube/toolsRepository"),
        &BTreeMap::new(),
        &fixture.layout,
        &fixture.config,
    )
    .await
    .unwrap_err();
    assert!(error.to_string().ends_with("is outside the source"));
    assert_eq!(fs::read_dir(outside).unwrap().count(), 0);
}
