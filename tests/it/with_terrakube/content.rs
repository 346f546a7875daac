//! Runs with content that a command line has uploaded to the platform.

use flate2::Compression;
use flate2::write::GzEncoder;
use integration_tests::Repository;
use integration_tests::repository::ROOT_MODULE;
use test_peers::http::{Response, Server};
use test_platform::{Flow, NewJob, Release, Status, Workspace};

use super::Stage;

fn archive() -> Vec<u8> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut head = tar::Header::new_gnu();
    head.set_size(ROOT_MODULE.len() as u64);
    head.set_mode(0o644);
    archive
        .append_data(&mut head, "main.tf", ROOT_MODULE.as_bytes())
        .unwrap();
    archive.into_inner().unwrap().finish().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn uploaded_content_is_fetched_with_a_token_and_applied() {
    for release in Release::ALL {
        let stage = Stage::under(release).await;
        let _launcher = stage.serve();
        let platform = &stage.platform;
        let workspace = platform.workspace(Workspace::new("https://git.example.test/none.git"));
        let upload = platform.upload(archive());
        let job =
            platform.start_job(NewJob::new(&workspace, Flow::plan_apply()).from_upload(&upload));
        let job = platform.until_job(job, Status::Completed).await;
        assert_eq!(job.commit_id.as_deref(), Some("000000000"));
        assert_eq!(stage.resources(job.id), ["greeting"]);
        let ledger = platform.ledger();
        let fetched = ledger.of("GET", "terraformContent.tar.gz");
        assert!(
            fetched.len() >= 2 && fetched.iter().all(|request| request.status == 200),
            "{ledger}"
        );
        platform.assert_kept().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_serves_content_without_seeing_a_token() {
    let stage = Stage::on_this_machine().await;
    let _launcher = stage.serve();
    let platform = &stage.platform;
    let elsewhere = Server::start(|_| Response::new(200, archive())).unwrap();
    let workspace = platform.workspace(Workspace::new(&Repository::fixture().url()));
    let url = format!("{}/terraformContent.tar.gz", elsewhere.url());
    let job =
        platform.start_job(NewJob::new(&workspace, Flow::only("terraformPlan")).from_upload(&url));
    platform.until_job(job, Status::Completed).await;
    let requests = elsewhere.requests();
    assert!(!requests.is_empty());
    assert!(
        requests
            .iter()
            .all(|request| request.header("authorization").is_none()),
        "{requests:?}"
    );
    platform.assert_kept().await;
}
