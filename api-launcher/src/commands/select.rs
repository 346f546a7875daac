//! Which run a word means. Pure but for the list it asks for.

use super::problem::CommandError;
use crate::cluster::{Cluster, RunView};

/// The run the user means.
pub(super) async fn find(cluster: &Cluster, word: &str) -> Result<RunView, CommandError> {
    choose(word, cluster.list().await?, cluster.namespace())
}

/// A name or `job/step` means one run; the id of a job with several steps means none of them for sure.
fn choose(word: &str, runs: Vec<RunView>, namespace: &str) -> Result<RunView, CommandError> {
    let mut meant: Vec<RunView> = runs
        .into_iter()
        .filter(|run| run.key.is_meant_by(word))
        .collect();
    if let Some(at) = meant.iter().position(|run| run.key.name == word) {
        return Ok(meant.swap_remove(at));
    }
    match (meant.pop(), meant.is_empty()) {
        (Some(run), true) => Ok(run),
        (Some(last), false) => Err(CommandError::Ambiguous {
            word: word.to_owned(),
            candidates: meant
                .into_iter()
                .chain([last])
                .map(|run| run.key.name)
                .collect(),
        }),
        (None, _) => Err(CommandError::NotFound {
            word: word.to_owned(),
            namespace: namespace.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::list::tests::run;
    use super::*;

    fn runs() -> Vec<RunView> {
        vec![
            run("1", "plan"),
            run("1", "apply"),
            run("2", "plan"),
            run("12", "plan"),
        ]
    }

    #[test]
    fn a_run_is_found_by_each_of_its_names() {
        for word in ["2", "2/plan", "job-2-plan"] {
            let found = choose(word, runs(), "ns").unwrap();
            assert_eq!(found.key.name, "job-2-plan", "{word}");
        }
        assert_eq!(
            choose("1/apply", runs(), "ns").unwrap().key.name,
            "job-1-apply"
        );
    }

    #[test]
    fn a_job_with_several_steps_is_asked_about() {
        let error = choose("1", runs(), "ns").unwrap_err();
        assert_eq!(
            error.to_string(),
            "`1` may mean any of 2: job-1-plan, job-1-apply"
        );
        assert_eq!(error.exit(), job_contract::Exit::BadConfiguration);
    }

    #[test]
    fn a_stranger_is_answered_with_what_was_looked_for() {
        let error = choose("9", runs(), "ns").unwrap_err();
        assert_eq!(
            error.to_string(),
            "no run `9` in the namespace `ns`: looked for a job id, `job/step`, and the name of a Job"
        );
    }
}
