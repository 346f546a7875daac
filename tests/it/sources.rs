//! Where content comes from: git over ssh and http with credentials, and tarballs nobody vouches for.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use integration_tests::{Repository, Site, job};
use job_contract::job::REMOTE_CONTENT;
use job_contract::{JobData, StepType, env};
use test_peers::git_http::{GitHttpOptions, serve};
use test_peers::sshd::Sshd;

use crate::site;

fn tar(archive: &Path, args: &[&str], folder: &Path) {
    let status = Command::new("tar")
        .arg("-czf")
        .arg(archive)
        .arg("-C")
        .arg(folder)
        .args(args)
        .status()
        .unwrap();
    assert!(status.success(), "tar {args:?}");
}

fn content(site: &Site) -> PathBuf {
    let folder = site.scratch("content");
    fs::create_dir(&folder).unwrap();
    folder
}

fn from_tarball(step_type: StepType, archive: &Path) -> JobData {
    JobData {
        source: Some(format!("file://{}", archive.display())),
        branch: REMOTE_CONTENT.to_owned(),
        show_header: false,
        ..job::step(step_type, &Repository::with(&[("unused", "")]))
    }
}

#[test]
fn a_repository_is_fetched_over_ssh_with_the_runs_key() {
    let (site, repository) = (site(), Repository::fixture());
    let server = Sshd::start().unwrap();
    let known_hosts = site.scratch("known_hosts");
    fs::write(&known_hosts, server.known_hosts_line().unwrap()).unwrap();
    let plan = JobData {
        source: Some(server.url(repository.path())),
        vcs_type: Some("SSH~id_ed25519".into()),
        access_token: Some(server.client_key().unwrap()),
        ..job::plan(&repository)
    };
    site.queue(&[&plan]);
    let outcome = site
        .executor(&plan)
        .env(env::SSH_KNOWN_HOSTS, &known_hosts)
        .run();
    assert_eq!(outcome.code(), 0, "{outcome}\n{}", server.log());
    assert_eq!(site.record(&plan).commit_id, Some(repository.head()));
    assert!(outcome.left_behind.is_empty(), "{outcome}");
}

#[test]
fn a_server_that_is_not_the_known_one_gets_no_login() {
    let (site, repository) = (site(), Repository::fixture());
    let (server, other) = (Sshd::start().unwrap(), Sshd::start().unwrap());
    let known_hosts = site.scratch("known_hosts");
    let port = |line: &str| line.split(' ').next().unwrap().to_owned();
    let line = server.known_hosts_line().unwrap();
    let wrong = other.known_hosts_line().unwrap();
    fs::write(&known_hosts, wrong.replace(&port(&wrong), &port(&line))).unwrap();
    let plan = JobData {
        source: Some(server.url(repository.path())),
        vcs_type: Some("SSH~id_ed25519".into()),
        access_token: Some(server.client_key().unwrap()),
        ..job::plan(&repository)
    };
    site.queue(&[&plan]);
    let outcome = site
        .executor(&plan)
        .env(env::SSH_KNOWN_HOSTS, &known_hosts)
        .run();
    assert_ne!(outcome.code(), 0, "{outcome}");
    assert!(
        !outcome.to_string().contains("OPENSSH PRIVATE KEY"),
        "{outcome}"
    );
}

#[test]
fn a_token_opens_a_repository_over_http_and_a_wrong_one_is_named_without_being_shown() {
    let repository = Repository::fixture();
    let options = GitHttpOptions {
        credentials: Some("x-access-token:ghs_right".into()),
        ..GitHttpOptions::default()
    };
    let server = serve(repository.path().parent().unwrap(), options).unwrap();
    let name = repository.path().file_name().unwrap().to_str().unwrap();
    for (token, works) in [("ghs_right", true), ("ghs_wrong_and_secret", false)] {
        let site = site();
        let plan = JobData {
            source: Some(format!("{}/{name}/.git", server.url())),
            vcs_type: Some("GITHUB".into()),
            connection_type: Some("STANDALONE".into()),
            access_token: Some(token.into()),
            ..job::plan(&repository)
        };
        site.queue(&[&plan]);
        let outcome = site.run(&plan);
        assert_eq!(outcome.code() == 0, works, "{outcome}");
        assert!(!outcome.to_string().contains(token), "{outcome}");
        if works {
            assert_eq!(site.record(&plan).commit_id, Some(repository.head()));
        }
    }
}

#[test]
fn a_tarball_keeps_executable_bits_and_inner_links() {
    let site = site();
    let folder = content(&site);
    fs::write(
        folder.join("main.tf"),
        "output \"linked\" {\n  value = file(\"link\")\n}\n",
    )
    .unwrap();
    fs::create_dir(folder.join("sub")).unwrap();
    fs::write(folder.join("sub/target"), "through the link").unwrap();
    symlink("sub/target", folder.join("link")).unwrap();
    fs::write(folder.join("run.sh"), "#!/bin/sh\necho executable\n").unwrap();
    fs::set_permissions(folder.join("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    let archive = site.scratch("content.tar.gz");
    tar(&archive, &["."], &folder);
    let apply = JobData {
        command_list: vec![job::before(job::bash(1, "./run.sh"))],
        ..from_tarball(StepType::Apply, &archive)
    };
    site.queue(&[&apply]);
    let outcome = site.run(&apply).expect_code(0);
    assert!(outcome.log().contains("executable"), "{outcome}");
    assert_eq!(site.output(&apply, "linked"), "through the link");
    assert_eq!(site.record(&apply).commit_id.as_deref(), Some("000000000"));
}

#[test]
fn a_tarball_that_reaches_outside_is_refused_whole() {
    type Case = (&'static str, fn(&Path) -> Vec<String>);
    let cases: [Case; 3] = [
        ("parent", |folder| {
            fs::write(folder.join("evil"), "planted").unwrap();
            vec![
                "--transform=s,^evil$,../../evil,".into(),
                "-P".into(),
                "evil".into(),
            ]
        }),
        ("absolute", |folder| {
            let target = folder.parent().unwrap().join("absolute-evil");
            fs::write(folder.join("evil"), "planted").unwrap();
            vec![
                format!("--transform=s,^evil$,{},", target.display()),
                "-P".into(),
                "evil".into(),
            ]
        }),
        ("link", |folder| {
            symlink("/etc", folder.join("way-out")).unwrap();
            vec!["way-out".into()]
        }),
    ];
    for (name, prepare) in cases {
        let site = site();
        let folder = content(&site);
        fs::write(folder.join("main.tf"), "").unwrap();
        let args = prepare(&folder);
        let archive = site.scratch("content.tar.gz");
        let args: Vec<_> = ["main.tf"]
            .into_iter()
            .chain(args.iter().map(String::as_str))
            .collect();
        tar(&archive, &args, &folder);
        let plan = from_tarball(StepType::Plan, &archive);
        site.queue(&[&plan]);
        let outcome = site.run(&plan);
        assert_ne!(outcome.code(), 0, "{name}: {outcome}");
        assert!(!site.scratch("absolute-evil").exists(), "{name}");
        let planted = integration_tests::site::files_below(site.folder())
            .into_iter()
            .any(|path| {
                path.file_name().is_some_and(|file| file == "evil") && !path.starts_with(&folder)
            });
        assert!(!planted, "{name}: {outcome}");
        assert_eq!(site.statuses(&plan).0, "failed", "{name}: {outcome}");
    }
}
