//! Finds the runs that an argument names.

use cluster::{Cluster, RunView};

use super::error::CommandError;

/// Returns the run that the argument names.
pub(super) async fn find(cluster: &Cluster, word: &str) -> Result<RunView, CommandError> {
    choose(word, cluster.list().await?, cluster.namespace())
}

/// Returns all runs that the argument names, newest first. The id of a job names all of its steps.
pub(super) async fn find_all(cluster: &Cluster, word: &str) -> Result<Vec<RunView>, CommandError> {
    choose_all(word, cluster.list().await?, cluster.namespace())
}

fn choose_all(
    word: &str,
    runs: Vec<RunView>,
    namespace: &str,
) -> Result<Vec<RunView>, CommandError> {
    let mut meant: Vec<RunView> = runs
        .into_iter()
        .filter(|run| run.key.is_meant_by(word))
        .collect();
    if let Some(at) = meant.iter().position(|run| run.key.name == word) {
        return Ok(vec![meant.swap_remove(at)]);
    }
    if meant.is_empty() {
        return Err(CommandError::NotFound {
            word: word.to_owned(),
            namespace: namespace.to_owned(),
        });
    }
    meant.reverse();
    Ok(meant)
}

/// A name or `job/step` names one run. The id of a job with several steps is ambiguous.
fn choose(word: &str, runs: Vec<RunView>, namespace: &str) -> Result<RunView, CommandError> {
    let mut meant = choose_all(word, runs, namespace)?;
    match meant.pop() {
        Some(run) if meant.is_empty() => Ok(run),
        last => Err(CommandError::Ambiguous {
            word: word.to_owned(),
            candidates: last
                .into_iter()
                .chain(meant.into_iter().rev())
                .map(|run| run.key.name)
                .collect(),
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
    fn the_id_of_a_job_means_its_steps_with_the_newest_first() {
        let names = |word| -> Vec<String> {
            let found = choose_all(word, runs(), "ns").unwrap();
            found.into_iter().map(|run| run.key.name).collect()
        };
        assert_eq!(names("1"), ["job-1-apply", "job-1-plan"]);
        assert_eq!(names("1/plan"), ["job-1-plan"]);
        assert_eq!(names("job-1-plan"), ["job-1-plan"]);
        assert!(choose_all("9", runs(), "ns").is_err());
    }

    #[test]
    fn the_error_for_an_unknown_run_names_what_was_searched() {
        let error = choose("9", runs(), "ns").unwrap_err();
        assert_eq!(
            error.to_string(),
            "no run `9` in the namespace `ns`: looked for a job id, `job/step`, and the name of a Job"
        );
    }
}
