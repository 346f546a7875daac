//! The values shown in the documents are values of the chart.

use std::fs;
use std::io::Write as _;

use tempfile::NamedTempFile;
use test_chart::{Release, root};

/// The blocks of YAML in a text.
fn blocks(text: &str) -> Vec<&str> {
    let fences = text.split("```yaml\n").skip(1);
    fences
        .map(|rest| rest.split_once("```").expect("a block has an end").0)
        .collect()
}

#[test]
fn what_the_installation_shows_can_be_installed() {
    let text = fs::read_to_string(root().join("docs/install.md")).unwrap();
    let blocks = blocks(&text);
    assert!(blocks.len() >= 2, "{blocks:?}");
    // The first is a whole file; what follows is laid over it.
    let files = blocks.iter().map(|block| {
        let mut file = NamedTempFile::with_suffix(".yaml").unwrap();
        file.write_all(block.as_bytes()).unwrap();
        file
    });
    let files: Vec<NamedTempFile> = files.collect();
    for file in &files {
        let release = Release::new().with(files[0].path()).with(file.path());
        let documents = release.documents();
        assert!(
            documents
                .iter()
                .any(|document| document.kind() == "Deployment")
        );
    }
}
