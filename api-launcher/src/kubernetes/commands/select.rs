//! Finds the runs that an argument names.

use cluster::{Cluster, RunView};
use job_contract::Exit;

use crate::failure::Failure;

/// Returns the run that the argument names.
pub(super) async fn find(cluster: &Cluster, word: &str) -> Result<RunView, Failure> {
    choose(word, cluster.list().await?, cluster.namespace())
}

/// Returns all runs that the argument names, newest first. The id of a job names all of its steps.
pub(super) async fn find_all(cluster: &Cluster, word: &str) -> Result<Vec<RunView>, Failure> {
    Ok(choose_all(word, cluster.list().await?))
}

pub(super) fn not_found(word: &str, namespace: &str) -> Failure {
    let text = format!(
        "no run `{word}` in the namespace `{namespace}`: looked for a job id, `job/step`, and the name of a Job"
    );
    Failure::new(Exit::BadConfiguration, text)
        .with_hint("`api-launcher list` shows the runs; --namespace looks elsewhere")
}

fn choose_all(word: &str, runs: Vec<RunView>) -> Vec<RunView> {
    let mut meant: Vec<RunView> = runs
        .into_iter()
        .filter(|run| run.key.is_meant_by(word))
        .collect();
    if let Some(at) = meant.iter().position(|run| run.key.name == word) {
        return vec![meant.swap_remove(at)];
    }
    meant.reverse();
    meant
}

/// A name or `job/step` names one run. The id of a job with several steps is ambiguous.
fn choose(word: &str, runs: Vec<RunView>, namespace: &str) -> Result<RunView, Failure> {
    let mut meant = choose_all(word, runs);
    match meant.pop() {
        None => Err(not_found(word, namespace)),
        Some(run) if meant.is_empty() => Ok(run),
        Some(oldest) => {
            let all = std::iter::once(oldest).chain(meant.into_iter().rev());
            let jobs: Vec<String> = all.map(|run| run.key.name).collect();
            let (count, jobs) = (jobs.len(), jobs.join(", "));
            let text = format!("`{word}` may mean any of {count}: {jobs}");
            Err(Failure::new(Exit::BadConfiguration, text)
                .with_hint("name one of these Jobs, or `job/step`"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::list::run;
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
        assert_eq!(error.exit, Exit::BadConfiguration);
    }

    #[test]
    fn the_id_of_a_job_means_its_steps_with_the_newest_first() {
        let names = |word| -> Vec<String> {
            choose_all(word, runs())
                .into_iter()
                .map(|run| run.key.name)
                .collect()
        };
        assert_eq!(names("1"), ["job-1-apply", "job-1-plan"]);
        assert_eq!(names("1/plan"), ["job-1-plan"]);
        assert_eq!(names("job-1-plan"), ["job-1-plan"]);
        assert!(choose_all("9", runs()).is_empty());
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
