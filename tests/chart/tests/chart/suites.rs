//! The chart's own suites.

use std::thread;

use test_chart::suite::{Kitchen, Suite};
use test_chart::{chart, files};

fn suites() -> Vec<Suite> {
    let found = files(&chart().join("tests"), "_test.yaml");
    assert!(!found.is_empty());
    let read = |file: &std::path::PathBuf| {
        Suite::read(&chart(), file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    };
    found.iter().map(read).collect()
}

/// Does something with every suite, two at a time.
fn each(work: impl Fn(&Suite) -> Vec<String> + Sync) -> Vec<String> {
    let all = suites();
    let work = &work;
    thread::scope(|scope| {
        let half = all.len().div_ceil(2);
        let workers: Vec<_> = all
            .chunks(half)
            .map(|suites| scope.spawn(move || suites.iter().flat_map(work).collect::<Vec<_>>()))
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    })
}

/// In one test, since both need the same charts rendered.
#[test]
fn every_suite_of_the_chart_holds_and_every_assertion_of_it_can_fail() {
    let kitchen = Kitchen::default();
    let wrong = each(|suite| {
        let file = suite.file.file_name().unwrap().to_string_lossy();
        let failures = suite.failures(&kitchen).into_iter();
        let failures = failures.map(|failure| format!("{file}: {failure}"));
        let spoilt = suite
            .spoilt()
            .into_iter()
            .filter(|spoilt| !spoilt.fails(&kitchen));
        let spoilt = spoilt.map(|spoilt| format!("{file}: passes all the same: {spoilt}"));
        failures.chain(spoilt).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn every_template_has_a_suite() {
    let all: String = files(&chart().join("tests"), "_test.yaml")
        .iter()
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    for folder in ["templates", "templates/tests"] {
        for file in files(&chart().join(folder), ".yaml") {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            assert!(all.contains(&name), "no suite looks at {folder}/{name}");
        }
    }
}
